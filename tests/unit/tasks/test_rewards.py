"""Rewards are other people's code: the run continues beside any fault of theirs, and failed is failed, never 0."""

import asyncio
import json
import math
import os
import resource
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import psutil
import pytest
import several_rewards
from msgspec import structs
from reward_case import FAULTY, TIMEOUT_S, faulty, one_function, processes, started, text, total
from several_rewards import length, no_opinion, per_token

from streamppo.config.reward import FunctionScorer, Limits, Reward
from streamppo.errors import Retryable, RewardFailed, TaskError
from streamppo.tasks import plugins
from streamppo.tasks.dataset_files import Row
from streamppo.tasks.rewards import guard as guards
from streamppo.tasks.rewards.guard import LONGEST_S
from streamppo.tasks.rewards.outcome import Outcome, check, check_batch, check_scored, failure_of
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.rewards.signature import LoadedReward, call, detect_signature
from streamppo.types import Prompt, ScoredText, decode, encode
from streamppo.types import Reward as Given

# --- the fault table -----------------------------------------------------------------------------------------

FAULTS = [
    ("raises", "ValueError: no such answer"),
    ("hangs", rf"no score after {TIMEOUT_S:g} s \(at faulty_rewards\.py:\d+\)"),
    ("holds the gil", rf"no score after {TIMEOUT_S:g} s \(at faulty_rewards\.py:25\)"),
    ("nan", "returned nan, not a finite number"),
    ("inf", "returned inf, not a finite number"),
    ("none", "returned None, not a finite number"),
    ("text", r"returned '1\.0', not a finite number"),
    ("wrong length", "returned 99 rewards for 12 tokens"),
    ("numbered", r"returned Reward\(.*, whose components are not numbers by name"),
    ("exits", "its process died: exit code 3"),
    ("crashes", "its process died: killed by SIGSEGV"),
    ("allocates", "MemoryError"),
    ("cancels", r"faulty_rewards\.py:\d+: CancelledError: something that it awaits was cancelled"),
    ("cannot be told", r"Untold: <str\(\) raised RuntimeError>"),
    ("cannot be shown", r"returned <repr\(\) raised RuntimeError>, not a finite number"),
]
IN_ACTOR = ("raises", "hangs", "nan", "none", "cancels", "cannot be told")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("function", ["sync", "awaiting"])
@pytest.mark.parametrize(("fault", "reason"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_the_next_call_is_scored_after_any_fault_of_a_reward(
    function: str, fault: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with started(faulty(function)) as rewards:
            assert await total(rewards, "fine") == 1.0
            async with asyncio.timeout(20 * TIMEOUT_S):
                with pytest.raises(RewardFailed, match=reason):
                    await total(rewards, fault)
                assert await total(rewards, "fine") == 1.0
            (report,) = rewards.report()
            assert (report.calls, report.failed) == (3, 1)
            assert report.respawns == (
                fault in ("holds the gil", "exits", "crashes") or (fault, function) == ("hangs", "sync")
            )
            assert any(line.startswith("reward failed: ") for line in caplog.messages)

    asyncio.run(story())


@pytest.mark.parametrize(("fault", "reason"), [row for row in FAULTS if row[0] in IN_ACTOR])
def test_an_async_reward_that_is_trusted_to_the_actor_fails_in_the_same_words(fault: str, reason: str) -> None:
    async def story() -> None:
        async with started(faulty("awaiting", where="actor")) as rewards:
            assert processes() == []
            with pytest.raises(RewardFailed, match=reason):
                await total(rewards, fault)
            assert await total(rewards, "fine") == 1.0

    asyncio.run(story())


@pytest.mark.parametrize("where", ["process", "actor"])
@pytest.mark.parametrize("fault", ["swallows", "blocks"])
def test_a_call_beyond_its_time_limit_is_never_scored(fault: str, where: str) -> None:
    async def story() -> None:
        async with started(faulty("awaiting", where=where)) as rewards:
            with pytest.raises(RewardFailed, match=f"no score after {TIMEOUT_S:g} s"):
                await total(rewards, fault)

    asyncio.run(story())


def test_a_call_in_the_actor_that_is_cancelled_itself_is_cancelled() -> None:
    async def story() -> None:
        async with started(faulty("awaiting", where="actor")) as rewards:
            call = asyncio.create_task(total(rewards, "hangs"))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    asyncio.run(story())


@pytest.mark.parametrize(("other", "retryable"), [(Retryable("the judge sleeps"), True), (ValueError("no"), False)])
def test_a_group_of_errors_is_told_by_them_and_tried_again_if_each_is_retryable(
    other: Exception, retryable: bool
) -> None:
    inner = ExceptionGroup("inner", [Retryable("the judge is busy"), other])
    failed = failure_of(ExceptionGroup("unhandled errors in a TaskGroup", [inner, Retryable("the judge is busy")]))
    assert failed.reason == f"Retryable: the judge is busy; {type(other).__name__}: {other}"
    assert failed.retryable is retryable


@pytest.mark.parametrize("function", ["sync", "awaiting"])
def test_an_actor_with_too_many_open_files_fails_single_trajectories(function: str) -> None:
    async def story() -> None:
        async with started(faulty(function)) as rewards:
            with pytest.raises(RewardFailed, match="exit code 3"):
                await total(rewards, "exits")
            free, before = os.dup(0), resource.getrlimit(resource.RLIMIT_NOFILE)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
            try:
                with pytest.raises(TaskError, match=f"^no process for '.*:{function}': .*Too many open files"):
                    await total(rewards, "fine")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, before)
            assert await total(rewards, "fine") == 1.0

    asyncio.run(story())


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize("function", ["sync", "awaiting"])
@pytest.mark.parametrize("value", [nested(100_000), object()], ids=["nested", "object"])
def test_a_row_that_cannot_be_sent_to_a_process_fails_its_trajectory_alone(function: str, value: Any) -> None:
    async def story() -> None:
        async with started(faulty(function)) as rewards:
            async with asyncio.timeout(20 * TIMEOUT_S):
                with pytest.raises(RewardFailed, match="its row cannot be sent to another process"):
                    await total(rewards, "fine", unsendable=value)
                assert await total(rewards, "fine") == 1.0
            (report,) = rewards.report()
            assert (report.failed, report.respawns) == (1, 0)

    asyncio.run(story())


def test_what_a_reward_prints_says_whose_it_is_also_with_half_a_pair_of_surrogates(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def story() -> None:
        async with started(faulty("sync")) as rewards:
            assert await total(rewards, "prints") == 1.0

    asyncio.run(story())
    shown = [line.partition(": ") for line in wait_for_lines(capfd, 3)]
    assert all(head.startswith("reward ") and head.endswith(":sync") for head, _, _ in shown)
    half = r"\ud83d is half of a pair"
    assert [text for _, _, text in shown] == [half, half, "rollout-0: forged"]


def wait_for_lines(capfd: pytest.CaptureFixture[str], count: int) -> list[str]:
    """Lines of a thread that may be behind."""
    printed, end = "", time.monotonic() + 10
    while printed.count("\n") < count and time.monotonic() < end:
        printed += capfd.readouterr().out
        time.sleep(0.01)
    return printed.splitlines()


@pytest.mark.parametrize("function", ["sync", "awaiting"])
def test_words_that_utf8_does_not_hold_cross_with_a_question_mark(function: str) -> None:
    async def story() -> None:
        async with started(faulty(function)) as rewards:
            said = await rewards.score(Prompt(text="1+2=", columns={}), text("explains"))
            assert (said.score, said.components, said.explanation) == (1.0, {"?": 1.0}, "? is half of a pair")
            with pytest.raises(RewardFailed, match=r"ValueError: \? is half of a pair"):
                await total(rewards, "complains")

    asyncio.run(story())


def test_a_call_that_hangs_or_dies_is_told_from_those_beside_it() -> None:
    async def story() -> None:
        async with started(faulty("awaiting")) as rewards:
            wanted = ["fine"] * 5 + ["exits"] + ["fine"] * 5 + ["holds the gil"] + ["fine"] * 5
            found = await asyncio.gather(*(total(rewards, completion) for completion in wanted), return_exceptions=True)
            for completion, value in zip(wanted, found, strict=True):
                if completion == "fine":
                    assert value == 1.0
                else:
                    assert isinstance(value, RewardFailed)
            assert "exit code 3" in str(found[5])
            assert "no score after" in str(found[11])

    asyncio.run(story())


def test_no_process_is_left_when_the_rewards_are_closed() -> None:
    async def story() -> None:
        async with started(faulty("sync")) as rewards:
            assert await total(rewards, "fine") == 1.0
            assert len(processes()) == 2

    asyncio.run(story())
    assert processes() == []


def test_an_actor_that_is_killed_takes_its_reward_processes_with_it() -> None:
    """Also a process that never looks at its socket, being stuck in a call, and all that the call has started."""
    program = (
        "import asyncio\n"
        "from streamppo.config.reward import FunctionScorer, Reward\n"
        "from streamppo.tasks.rewards.scoring import Rewards\n"
        "from streamppo.types import Prompt, ScoredText\n"
        "async def main():\n"
        f"    scorer = FunctionScorer(function={f'{FAULTY}:sync'!r}, processes=1)\n"
        "    rewards = Rewards(Reward(scorers={'reward': scorer}))\n"
        "    await rewards.start(set())\n"
        "    text = ScoredText(prompt='', completion='spawns', finish='stop', num_tokens=1)\n"
        "    print('started', flush=True)\n"
        "    await rewards.score(Prompt(text='', columns={}), text)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as actor:
        assert actor.stdout and actor.stdout.readline() == b"started\n"
        deadline = time.monotonic() + 30.0
        while len(children := psutil.Process(actor.pid).children(recursive=True)) < 3:
            assert time.monotonic() < deadline, children
            time.sleep(0.05)
        actor.kill()
        _, alive = psutil.wait_procs(children, timeout=30.0)
        assert alive == []


def test_a_batch_fails_alone_for_the_trajectory_that_breaks_it() -> None:
    async def story() -> None:
        async with started(faulty("batched", batch_size=8)) as rewards:
            wanted = ["fine", "raises", "fine", "nan", "fine"]
            found = await asyncio.gather(*(total(rewards, completion) for completion in wanted), return_exceptions=True)
            assert [value if isinstance(value, float) else str(value) for value in found] == [
                1.0,
                "faulty_rewards.py:23: ValueError: no such answer",
                1.0,
                "returned nan, not a finite number",
                1.0,
            ]
            with pytest.raises(RewardFailed, match=r"returned 2 values for 1 completion$"):
                await total(rewards, "short")
            with pytest.raises(RewardFailed, match="no reward applies"):
                await total(rewards, "none")

    asyncio.run(story())


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("mean", "returned 1 value for 8 completions"),
        ("nothing", "returned None, not a list of 8 numbers"),
        ("nan", "returned nan, not a finite number"),
    ],
)
def test_a_batch_whose_values_came_back_is_never_asked_again(tmp_path: Path, completion: str, reason: str) -> None:
    async def story() -> None:
        config = faulty("Paid", batch_size=8, arguments={"folder": str(tmp_path)})
        async with started(config) as rewards:
            calls = (total(rewards, one) for one in ["first", *[completion] * 8])
            first, *found = await asyncio.gather(*calls, return_exceptions=True)
        assert (first, {str(value) for value in found}) == (1.0, {reason})
        assert len(list(tmp_path.iterdir())) == 2

    asyncio.run(story())


def test_a_batch_for_a_busy_service_is_not_asked_again_one_by_one(tmp_path: Path) -> None:
    async def story() -> None:
        config = faulty("Paid", batch_size=8, attempts=1, arguments={"folder": str(tmp_path)})
        async with started(config) as rewards:
            calls = (total(rewards, one) for one in ["first", *["busy"] * 8])
            first, *found = await asyncio.gather(*calls, return_exceptions=True)
        assert first == 1.0
        assert all("Retryable: the judge is busy" in str(value) for value in found)
        assert len(list(tmp_path.iterdir())) == 2

    asyncio.run(story())


def test_calls_that_wait_go_together_in_batches_up_to_the_bound() -> None:
    async def story() -> None:
        async with started(faulty("crowd", batch_size=4)) as rewards:
            sizes = await asyncio.gather(*(total(rewards, "") for _ in range(9)))
            assert sorted(sizes) == [1.0, *[4.0] * 8]

    asyncio.run(story())


def test_sync_rewards_run_side_by_side_in_their_processes(tmp_path: Path) -> None:
    async def story() -> None:
        config = one_function(function=f"{FAULTY}:meeting", timeout_s=60.0, processes=4)
        async with started(config) as rewards:
            assert await asyncio.gather(*(total(rewards, str(tmp_path)) for _ in range(4))) == [1.0] * 4

    asyncio.run(story())


# --- loading -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_colon", "not of the form"),
        ("streamppo.nothing:score", "importing streamppo.nothing failed"),
        ("streamppo.tasks.library.arithmetic:scores", "has no 'scores'"),
        ("nowhere/mine.py:score", "no file nowhere/mine.py"),
        ("streamppo.tasks.library.arithmetic:ALPHABET", "neither a function nor a class"),
        ("streamppo.tasks.library.arithmetic:rows", r"takes \(first, second, held_out, seed\); it must be"),
        (f"{FAULTY}:Flaky", "needs the argument 'every'"),
    ],
)
def test_a_reward_that_cannot_be_loaded_says_why(name: str, message: str) -> None:
    async def story() -> None:
        async with started(one_function(function=name)):
            pass

    with pytest.raises(TaskError, match=message):
        asyncio.run(story())


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("Flaky", {"evry": 3}, r"Flaky' has no argument 'evry' \(it has every\); is 'every' meant\?"),
        ("scaled", {"fctor": 3.0}, r"scaled' has no argument 'fctor' \(it has answer, factor\); is 'factor' meant\?"),
        ("scaled", {"trajectory": "x"}, r"has no argument 'trajectory'"),
        ("sync", {"factor": 1.0}, r"sync' has no argument 'factor' \(it has none\)"),
        ("batched", {"completions": "x"}, r"'completions' is not an argument: it is the scored trajectory"),
    ],
)
def test_arguments_that_a_reward_does_not_take_are_refused_by_name(
    function: str, arguments: dict[str, Any], message: str
) -> None:
    async def story() -> None:
        async with started(faulty(function, arguments=arguments)):
            pass

    with pytest.raises(TaskError, match=message):
        asyncio.run(story())


def test_an_argument_is_not_replaced_by_a_column_of_its_name() -> None:
    def columns_too(trajectory: ScoredText, **columns: Any) -> float:
        return 0.0

    found = detect_signature(columns_too, "columns_too", {"level": 3})
    assert found.columns({"level": 1, "answer": "4"}) == {"answer": "4"}


@pytest.mark.parametrize("function", ["wants_answer", "wants_answer_async"])
def test_an_exception_is_told_with_its_file_and_line_and_an_exit_with_its_code(function: str) -> None:
    lines = FAULTY.read_text().splitlines()
    parts = ("row[", "sys.exit(7", "raise Panic")
    raises, exits, panics = (next(n for n, line in enumerate(lines, 1) if part in line) for part in parts)

    async def story() -> None:
        async with started(faulty(function)) as rewards:
            for completion, reason in (
                ("", f"faulty_rewards.py:{raises}: KeyError: 'answer'"),
                ("exits", f"faulty_rewards.py:{exits}: sys.exit(7)"),
                ("panics", f"faulty_rewards.py:{panics}: Panic: index out of bounds"),
            ):
                with pytest.raises(RewardFailed) as failure:
                    await total(rewards, completion)
                assert str(failure.value) == reason
            assert rewards.report()[0].respawns == 0

    asyncio.run(story())


def test_a_sync_reward_is_refused_in_the_actor() -> None:
    async def story() -> None:
        async with started(faulty("sync", where="actor")):
            pass

    with pytest.raises(TaskError, match="is sync: it would block the actor"):
        asyncio.run(story())


def test_the_builtin_reward_stays_in_the_actor_and_wants_the_exact_answer_and_its_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", logger="streamppo")

    async def story() -> None:
        async with started(one_function(function="streamppo.tasks.library.arithmetic:score")) as rewards:
            assert processes() == []
            prompt = Prompt(text="1+2=", columns={"answer": "3", "level": 1})
            for given, expected in ((text("3"), 1), (text("33"), 0), (text("3", "length"), 0), (text(""), 0)):
                assert (await rewards.score(prompt, given)).total == expected
        assert caplog.messages == [
            "reward is streamppo.tasks.library.arithmetic:score (async, trajectory signature), in the actor"
        ]

    asyncio.run(story())


def one(trajectory: ScoredText, answer: str, level: int = 0) -> float:
    return 0.0


async def annotated(t: ScoredText, **columns: Any) -> float:
    return 0.0


def trl(prompts: list[str], completions: list[str], answer: list[str], **kwargs: Any) -> list[float]:
    return []


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return 0.0


def gsm8k(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    return score if solution_str == ground_truth and method == "strict" else format_score


def informed(solution_str: str, ground_truth: str, extra_info: dict[str, int], level: int) -> float:
    return float(extra_info.get("turns", 0) + level)


ROWS = [
    {"answer": "3"},
    {"answer": "3", "score": 7.0},
    {"answer": "3", "method": "flexible", "format_score": "none"},
    {"answer": "3", "score": None, "data_source": "d", "reward_model": {"ground_truth": "3"}},
]


@pytest.mark.parametrize("row", ROWS)
def test_a_default_of_verls_signature_stays_though_a_column_has_its_name(row: dict[str, Any]) -> None:
    found = detect_signature(gsm8k, "gsm8k", {})
    assert found.columns(row) == {}
    assert call(LoadedReward(found, gsm8k), (text("3"),), (row,))[0].reward == Given(score=1.0)


@pytest.mark.parametrize(("extra", "total"), [({}, 2), ({"extra_info": None}, 2), ({"extra_info": {"turns": 3}}, 5)])
def test_verls_extra_info_is_a_dict_in_every_row(extra: dict[str, Any], total: float) -> None:
    found = detect_signature(informed, "informed", {})
    row = {"answer": "3", "level": 2, **extra}
    assert call(LoadedReward(found, informed), (text("3"),), (row,))[0].reward == Given(score=total)
    with pytest.raises(TaskError, match="asks for the column 'level'"):
        found.columns({"answer": "3"})


def test_a_row_without_the_ground_truth_that_a_verl_reward_takes_is_refused() -> None:
    for function in (compute_score, gsm8k, informed):
        found = detect_signature(function, "scores", {})
        with pytest.raises(TaskError, match=r"'answer'; columns are .*; its `ground_truth` is the row's answer: name"):
            found.columns({"gt": "3", "level": 2})
        assert "answer" not in found.columns({"answer": "3", "level": 2})

    def asks_for_none(solution_str: str, ground_truth: str = "") -> float:
        return 0.0

    assert detect_signature(asks_for_none, "scores", {}).columns({"gt": "3"}) == {}


def test_a_column_does_not_replace_an_argument_of_a_partial() -> None:
    def scaled(trajectory: ScoredText, answer: str, scale: float = 1.0, **columns: Any) -> float:
        return scale

    row, bound = {"answer": "3", "scale": 100.0}, partial(scaled, scale=2.0)
    for arguments, score in (({}, 2.0), ({"scale": 3.0}, 3.0)):
        found = detect_signature(bound, "scaled", arguments)
        assert found.columns(row) == {"answer": "3"}
        (outcome,) = call(LoadedReward(found, partial(bound, **arguments)), (text("3"),), (row,))
        assert outcome.reward == Given(score=score)


def test_a_prompt_that_a_reward_asks_for_as_a_column_is_told_by_its_name() -> None:
    def asking(trajectory: ScoredText, prompt: str) -> float:
        return 0.0

    with pytest.raises(TaskError, match=r"the column 'prompt'; columns are answer; the prompt is `trajectory\.prompt`"):
        detect_signature(asking, "asking", {}).columns({"answer": "3"})


def test_a_function_around_an_async_one_fails_with_what_to_do() -> None:
    @wraps(annotated)
    def around(*given: Any, **columns: Any) -> Any:
        return annotated(*given, **columns)

    found = detect_signature(around, "around", {})
    (outcome,) = call(LoadedReward(found, around), (text("3"),), ({"answer": "3"},))
    assert outcome.reason.startswith("returned a coroutine, but is no `async def`: call it in an `async def`")


class AlwaysOne:
    """An object that can be called."""

    def __call__(self, trajectory: ScoredText) -> float:
        return 1.0


def test_an_object_that_can_be_called_is_a_reward_and_so_is_its_class() -> None:
    for found in (AlwaysOne(), AlwaysOne):
        assert detect_signature(found, "mine", {}).style.name == "trajectory"
    with pytest.raises(TaskError, match="is neither a function nor a class but a object"):
        detect_signature(object(), "mine", {})


@pytest.mark.parametrize("found", [max, min])
def test_a_compiled_reward_without_a_signature_is_refused_in_a_sentence(found: object) -> None:
    with pytest.raises(TaskError, match=r"^reward\.function 'mine' has no signature to read: call it in a function"):
        detect_signature(found, "mine", {})
    with pytest.raises(TaskError, match="'mine' is a class without `__call__`"):
        detect_signature(dict, "mine", {})
    with pytest.raises(TaskError, match="is neither a function nor a class but a classmethod"):
        detect_signature(classmethod(max), "mine", {})


@pytest.mark.parametrize(
    ("line", "name", "module", "folder"),
    [
        ("from .helper import X", "pack/inner/r.py", "pack.inner.r", "."),
        ("from .helper import X", "loose/r.py", "loose.r", "."),
        ("from helper import X", "loose/r.py", "", "loose"),
        ("import beside", "loose/r.py", "", "loose"),
    ],
)
def test_an_import_of_a_neighbour_that_fails_says_how_it_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, name: str, module: str, folder: str
) -> None:
    for made in ("pack", "pack/inner", "loose", "loose/beside"):
        (tmp_path / made).mkdir()
    for file in ("pack/__init__.py", "pack/inner/__init__.py", "loose/helper.py", "pack/inner/helper.py"):
        (tmp_path / file).write_text("X = 1\n")
    (tmp_path / name).write_text(f"{line}\ndef score(trajectory):\n    return 1.0\n")
    with pytest.raises(TaskError) as raised:
        plugins.load(f"{tmp_path / name}:score", "reward.function")
    advised = f"name it as a module, {module}:score, with" if module else "it is beside r.py, and can be imported with"
    assert str(raised.value).endswith(f": {advised} PYTHONPATH={tmp_path / folder}")
    monkeypatch.syspath_prepend(tmp_path / folder)
    known = set(sys.modules)
    assert callable(plugins.load(f"{module or tmp_path / name}:score", "reward.function"))
    for imported in set(sys.modules) - known:
        del sys.modules[imported]


def test_an_import_of_what_is_nowhere_gets_no_advice(tmp_path: Path) -> None:
    (tmp_path / "r.py").write_text("import nowhere_at_all\n")
    with pytest.raises(TaskError, match=r"No module named 'nowhere_at_all'$"):
        plugins.load(f"{tmp_path / 'r.py'}:score", "reward.function")


def test_the_three_signatures_are_told_apart() -> None:
    found = {f: detect_signature(f, f.__name__, {}) for f in (one, annotated, trl, compute_score)}
    assert [s.style.name for s in found.values()] == ["trajectory", "trajectory", "batched", "verl"]
    assert [s.is_async for s in found.values()] == [False, True, False, False]
    assert (found[one].named_columns, found[one].required_columns) == ({"answer", "level"}, {"answer"})
    assert found[trl].required_columns == {"answer"}
    row = {"answer": "3", "level": 2, "other": 1}
    assert found[one].columns(row) == {"answer": "3", "level": 2}
    assert found[annotated].columns(row) == row
    assert found[compute_score].columns(row) == {}
    with pytest.raises(TaskError, match="asks for the column 'answer'; columns are level"):
        found[one].columns({"level": 2})


# --- values --------------------------------------------------------------------------------------------------


def test_numbers_of_all_kinds_are_scores() -> None:
    import numpy as np
    import torch

    for value in (1, 1.0, True, np.float32(1), np.int64(1), np.bool_(True), torch.tensor(1.0)):
        assert check(value, text("3")) == Outcome(reward=Given(score=1.0)), repr(value)
    for value in (None, "1", [1.0], math.nan, np.nan, torch.ones(2), 10**400, object()):
        assert check(value, text("3")).reward is None, repr(value)


def test_a_batch_needs_one_value_for_each_and_none_is_no_opinion() -> None:
    texts = (text("a"), text("b"))
    assert check_batch([1.0, None], texts) == (Outcome(reward=Given(score=1.0)), Outcome())
    for wrong in ([1.0], 1.0, "ab", {"a": 1, "b": 2}):
        assert all(outcome.reason for outcome in check_batch(wrong, texts))


def test_verls_dict_has_a_score_and_components() -> None:
    outcome = check_scored({"score": 0.5, "acc": True, "pred": "7"}, text("3"))
    assert outcome.reward == Given(score=0.5, components={"acc": 1.0})
    assert "without `score`" in check_scored({"acc": 1}, text("3")).reason
    assert "not a finite number" in check_scored({"score": None}, text("3")).reason


def test_a_name_with_half_a_pair_of_surrogates_crosses_a_process() -> None:
    """A service's JSON may have it, which no msgspec message holds."""
    outcome = check_scored(json.loads('{"score": 1, "\\ud83d": 2}'), text("3"))
    assert decode(encode(outcome), Outcome).reward == Given(score=1.0, components={"?": 2.0})


# --- several -------------------------------------------------------------------------------------------------


def scorer(function: Callable[..., Any], **more: Any) -> FunctionScorer:
    return FunctionScorer(function=f"{several_rewards.__file__}:{function.__name__}", **more)


def test_several_scores_are_weighted_summed_and_logged_by_name() -> None:
    async def story() -> None:
        config = Reward(
            scorers={
                "length": scorer(length, weight=2.0, where="actor"),
                "token": scorer(per_token, weight=0.5, where="actor"),
                "silent": scorer(no_opinion),
            }
        )
        async with started(config) as rewards:
            found = await rewards.score(Prompt(text="", columns={}), text("abc"))
        assert found.total == 2.0 * 3 + 0.5 * (0 + 1 + 2 + 10)
        assert (found.tokens, found.turns) == ((0.0, 0.5, 1.0), (5.0,))
        assert found.components == {"length": 3.0, "length/half": 0.5, "token": 13.0}
        assert found.explanation == "length: so long"

    asyncio.run(story())


def test_a_scorer_is_selected_by_data_source_and_every_source_needs_one() -> None:
    async def story() -> None:
        config = Reward(
            scorers={
                "math": scorer(length, sources=("gsm8k",), where="actor"),
                "chat": scorer(per_token, sources=("hh",), where="actor"),
            }
        )
        rewards = Rewards(config)
        with pytest.raises(TaskError, match="data source 'code'"):
            await rewards.start({"gsm8k", "code"})
        await rewards.start({"gsm8k", "hh"})
        assert (await rewards.score(Prompt(text="", columns={}, source="gsm8k"), text("ab"))).total == 2.0
        assert (await rewards.score(Prompt(text="", columns={}, source="hh"), text("ab"))).total == 11.0

    asyncio.run(story())


def test_one_failing_scorer_fails_the_trajectory_and_is_named() -> None:
    async def story() -> None:
        config = Reward(
            scorers={"good": scorer(length, where="actor"), "bad": FunctionScorer(function=f"{FAULTY}:awaiting")}
        )
        async with started(config) as rewards:
            with pytest.raises(RewardFailed, match=r"bad: faulty_rewards\.py:\d+: ValueError: no such answer"):
                await total(rewards, "raises")

    asyncio.run(story())


# --- bounds --------------------------------------------------------------------------------------------------


def guarded(limits: Limits, call: Callable[[int], Awaitable[Outcome]]) -> guards.Guard:
    numbers = iter(range(10_000))

    async def one_call(text: ScoredText, columns: Row) -> Outcome:
        return await call(next(numbers))

    return guards.Guard("judge", limits, one_call)


BUSY = Outcome(reason="busy", retryable=True)
FINE = Outcome(reward=Given(score=1.0))


def test_retryable_failures_are_tried_again_and_others_are_not() -> None:
    async def story() -> None:
        config = faulty("Flaky", arguments={"every": 3}, attempts=3, backoff_s=0.01)
        async with started(config) as rewards:
            assert [await total(rewards, "") for _ in range(2)] == [3.0, 6.0]
            (report,) = rewards.report()
            assert (report.calls, report.failed, report.retries) == (2, 0, 4)
        async with started(faulty("Flaky", arguments={"every": 3}, attempts=2, backoff_s=0.01)) as rewards:
            with pytest.raises(RewardFailed, match="Retryable: the judge is busy"):
                await total(rewards, "")
        async with started(faulty("awaiting")) as rewards:
            with pytest.raises(RewardFailed):
                await total(rewards, "raises")
            assert rewards.report()[0].retries == 0

    asyncio.run(story())


def test_no_more_calls_are_in_flight_than_the_bound() -> None:
    async def story() -> None:
        running, most = 0, 0

        async def call(number: int) -> Outcome:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.005)
            running -= 1
            return FINE

        guard = guarded(Limits(concurrency=7), call)
        await asyncio.gather(*(guard.score(text(""), {}) for _ in range(50)))
        assert most == 7

    asyncio.run(story())


def test_calls_begin_no_oftener_than_the_rate() -> None:
    async def story() -> None:
        begun: list[float] = []

        async def call(number: int) -> Outcome:
            begun.append(time.perf_counter())
            return FINE

        guard = guarded(Limits(calls_per_s=100), call)
        await asyncio.gather(*(guard.score(text(""), {}) for _ in range(20)))
        assert begun[-1] - begun[0] > 0.18

    asyncio.run(story())


def test_a_retry_waits_for_as_long_as_the_server_asks_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        waits: list[float] = []

        async def sleep(seconds: float) -> None:
            waits.append(seconds)

        async def call(number: int) -> Outcome:
            return [structs.replace(BUSY, after_s=20.0), structs.replace(BUSY, after_s=1e9), FINE][number]

        monkeypatch.setattr(asyncio, "sleep", sleep)
        assert await guarded(Limits(backoff_s=0.01), call).score(text(""), {}) == FINE
        assert waits == [20.0, LONGEST_S]

    asyncio.run(story())


def test_the_breaker_lets_one_call_at_a_time_try_until_one_succeeds(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        down_until = time.perf_counter() + 0.5
        tries = 0

        async def call(number: int) -> Outcome:
            nonlocal tries
            tries += 1
            await asyncio.sleep(0.001)
            return BUSY if time.perf_counter() < down_until else FINE

        guard = guarded(Limits(attempts=50, backoff_s=0.001, breaker_failures=5, breaker_s=0.1, concurrency=5), call)
        outcomes = await asyncio.gather(*(guard.score(text(""), {}) for _ in range(40)))
        assert all(outcome.reward for outcome in outcomes)
        # 40 calls, about 10 before the breaker opened, and a try every 0.1 s while it was open.
        assert tries < 40 + 10 + 10
        assert "calls wait: busy" in caplog.messages[0]

    asyncio.run(story())


def test_only_a_success_closes_the_breaker_and_begins_the_count_anew(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        late = Outcome(reason="no score after 1 s")
        outcomes = [BUSY, late, BUSY, FINE, BUSY, BUSY, late, BUSY, late, FINE, BUSY]

        async def call(number: int) -> Outcome:
            return outcomes[number]

        guard = guarded(Limits(attempts=1, breaker_failures=3, breaker_s=0.01), call)
        waiting: list[bool] = []
        for _ in outcomes:
            await guard.score(text(""), {})
            waiting.append(guard._is_open)
        assert waiting == [False] * 7 + [True, True, False, False]
        assert [line for line in caplog.messages if "calls wait" in line] == [
            "judge: 3 calls failed and none succeeded; calls wait: busy"
        ]

    asyncio.run(story())
