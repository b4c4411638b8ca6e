"""Processes may look for cycles rarely because trajectories make none; log lines go to standard output."""

import asyncio
import gc
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit

import msgspec
import pytest
from terminal import shown, terminal, written

from streamppo import process
from streamppo.commands import standalone
from streamppo.commands.models import weights
from streamppo.config.sections import Config
from streamppo.learner.model import tiny
from streamppo.rollout import build
from streamppo.rollout.player import Player
from streamppo.tasks import task as tasks
from streamppo.tasks.rewards.scoring import Rewards
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.telemetry.live.screen import Screen, ScreenRow
from streamppo.terminal import wrap
from streamppo.types import Identity, Trajectory, WireStruct

COUNT = 100


@pytest.fixture
def by_hand() -> Iterator[None]:
    """No automatic passes, and everything as it was afterwards."""
    thresholds = gc.get_threshold()
    gc.disable()
    yield
    gc.set_threshold(*thresholds)
    gc.unfreeze()
    gc.enable()


async def _unreachable(config: Config, model: str) -> int:
    """Objects in cycles after `COUNT` trajectories have been sampled and scored in a process.

    The fewer of two counts: what a process does once, or another test's thread, is no trajectory's.
    """
    tokenizer = Tokenizer(model)
    task = tasks.build(config.task, config.seed, tokenizer)
    rewards = Rewards(config.reward)
    await rewards.start(task.sources())

    async def one(player: Player, number: int) -> None:
        prompt = task.prompt(number)
        episode = await player.play(prompt, build.sampling(config))
        await rewards.score(prompt, episode.text(prompt, tokenizer))

    try:
        async with standalone.engine(
            config, "alone", model, 0, weights.model_weights(model, config.model.dtype)
        ) as engine:
            player = Player(engine, tokenizer, config.environment)
            await one(player, 0)
            counts: list[int] = []
            for begin in (1, COUNT + 1):
                gc.collect()
                await asyncio.gather(*(one(player, begin + number) for number in range(COUNT)))
                counts.append(gc.collect())
            return min(counts)
    finally:
        await rewards.close()


def test_a_trajectory_leaves_no_cycle_behind(math_config: Callable[..., Config], tmp_path: Path, by_hand: None) -> None:
    config = math_config("model.tiny.max_steps=1", "reward.where=process")
    tiny.make(config, tmp_path)
    assert asyncio.run(_unreachable(config, str(tmp_path))) < COUNT


def test_what_was_loaded_before_is_never_walked_again(by_hand: None) -> None:
    loaded = [[number] for number in range(1000)]
    process.freeze_gc()
    assert gc.get_freeze_count() > len(loaded) and gc.get_threshold()[0] == process.MORE_OBJECTS
    assert not any(one is loaded for one in gc.get_objects())


def test_what_crosses_a_process_is_not_walked_at_all() -> None:
    identity = Identity(task="test", prompt=1, sample=0)
    assert not gc.is_tracked(identity)
    assert not any(kind.__struct_config__.gc for kind in _kinds(WireStruct)) and Trajectory in _kinds(WireStruct)


def _kinds(kind: type[msgspec.Struct]) -> set[type[msgspec.Struct]]:
    return {kind}.union(*map(_kinds, kind.__subclasses__()))


def test_log_lines_go_to_standard_output_once_behind_who_says_them(capsys: pytest.CaptureFixture[str]) -> None:
    ours = logging.getLogger("streamppo")
    before = list(ours.handlers), ours.level, ours.propagate
    ours.handlers = []
    try:
        process.log_to_stdout("rollout")
        process.log_to_stdout("rollout-3")
        logging.getLogger("streamppo.rollout.actor").info("%d prompts are too long", 7)
        logging.getLogger("streamppo.rollout.actor").debug("not shown")
    finally:
        ours.handlers, ours.level, ours.propagate = before
    assert capsys.readouterr().out == "rollout-3: 7 prompts are too long\n"


LOSES_ITS_READER = """
import os, sys
from pathlib import Path
from streamppo import process

with process.lasting_output(Path(sys.argv[1]) / "logs" / "driver.log"):
    print("read", flush=True)
    sys.stdin.readline()
    print("a line that nobody reads")
    print("another", file=sys.stderr)
    process.log_to_stdout()
    import logging
    logging.getLogger("streamppo.x").info("a log line")
    os._exit(7)
"""


PRINTS = """
import logging, subprocess, sys, threading
from streamppo import process
process.log_to_stdout()
ours = logging.getLogger("streamppo.test")
with process.naming_prints():
    print("one\\x1b[2J\\rstreamppo: forged")
    ours.info("ours")
    sys.stderr.write("two\\nthree")
    sys.stdout.buffer.write(b"four \\xff\\n")
    thread = threading.Thread(target=lambda out=sys.stdout: print("seven", file=out) if ended.wait(20) else None)
    ended = threading.Event()
    thread.start()
    with process.naming_prints():
        print("five")
    sys.stderr.close()
    subprocess.run(["true"], stdout=sys.stdout, check=True)
    print("six", "w" * 20_000, end="")
print("of a command")
ended.set()
thread.join()
"""


def test_lines_of_other_peoples_code_are_named_and_those_of_the_log_and_of_a_command_are_not() -> None:
    ran = subprocess.run([sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True)
    long = [line for line in ran.stdout.splitlines() if "www" in line]
    assert [line for line in ran.stdout.splitlines() if line not in long] == [
        "prints: one·[2J·streamppo: forged",
        "ours",
        "prints: four \N{REPLACEMENT CHARACTER}",
        "prints: five",
        "of a command",
        "prints: seven",
    ]
    assert ran.stderr.splitlines() == ["prints: two", "prints: three"]
    assert len(long) == 3 and long[0].startswith("prints: six w") and all(one.startswith("prints: ") for one in long)


def test_output_that_has_lost_its_reader_goes_on_in_a_file(tmp_path: Path) -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", LOSES_ITS_READER, str(tmp_path)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdin and child.stdout and child.stderr
        assert child.stdout.readline() == "read\n"
        child.stdout.close()
        child.stderr.close()
        child.stdin.write("continue\n")
        child.stdin.close()
        assert child.wait() == 7
    assert (tmp_path / "logs" / "driver.log").read_text() == "a line that nobody reads\nanother\na log line\n"


@process.phase("counted")
def busy(rounds: int) -> int:
    return sum(n * n for n in range(rounds))


def test_a_phase_counts_calls_and_the_time_of_its_own_thread_also_when_it_fails() -> None:
    threads = [Thread(target=busy, args=(200_000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(ValueError, match="planted"), process.phase("counted"):
        raise ValueError("planted")
    counted, whole = process.phase_times()["counted"], process.phase_times()[process.WHOLE]
    assert counted.calls == 5
    # Each call waits for the others' turns, and its CPU time is its own alone.
    assert 0 < counted.cpu_s <= counted.wall_s
    assert counted.cpu_s < whole.cpu_s


def test_a_phase_that_waits_has_no_cpu_time() -> None:
    process.add("waited", 2.0)
    process.add("waited", 3.0)
    assert process.phase_times()["waited"] == (2, 5.0, 0.0)


FORK = """
import os, sys, time
from streamppo import process
process.add("parent's", 1.0)
begin = time.perf_counter()
if (child := os.fork()) == 0:
    spent = process.phase_times()
    os._exit("parent's" in spent or spent[process.WHOLE].wall_s > time.perf_counter() - begin)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or "parent's" not in process.phase_times())
"""


def test_a_fork_begins_to_count_its_phases_anew() -> None:
    """All of Ray's workers are forks of one process: with its age they would look like one process that never ended."""
    assert subprocess.run([sys.executable, "-c", FORK], check=False).returncode == 0


# --- log lines on a terminal and warnings --------------------------------------------------------------------


def test_a_warning_has_the_word_and_other_lines_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    process.log_to_stdout("rollout-3")
    log = logging.getLogger("streamppo.anywhere")
    log.info("begins")
    log.warning("%s is slow", "it")
    log.error("ends")
    expected = ["rollout-3: begins", "rollout-3: warning: it is slow", "rollout-3: error: ends"]
    assert capsys.readouterr().out.splitlines() == expected


@pytest.mark.parametrize(
    ("line", "rows"),
    [
        ("short", ["short"]),
        ("twenty cells, exactly", ["twenty cells,", "  exactly"]),
        ("one two three four five six seven", ["one two three four", "  five six seven"]),
        ("see /a/path/that/is/wider/than/a/row now", ["see", "  /a/path/that/is/wider/than/a/row", "  now"]),
        ("/a/path/that/is/wider/than/a/row", ["/a/path/that/is/wider/than/a/row"]),
        ("\033[36m(actor)\033[0m says one", ["\033[36m(actor)\033[0m says one"]),
        ("\033[36m(actor)\033[0m says one thing", ["\033[36m(actor)\033[0m says one", "  thing"]),
        ("大大大大大 大大大大大大", ["大大大大大", "  大大大大大大"]),
        ("  indented and long enough", ["  indented and long", "  enough"]),
        ("a picture of progress \r in a row", ["a picture of progress \r in a row"]),
    ],
)
def test_a_long_line_is_broken_between_words_and_no_word_is(line: str, rows: list[str]) -> None:
    assert wrap(line, 20).split("\n") == rows
    assert wrap(wrap(line, 20), 20).split("\n") == rows
    assert wrap(line, 0) == line


def test_lines_of_a_log_and_of_anybody_are_broken_between_words_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a line of a log that is longer than a row of forty columns"
    monkeypatch.setattr(logging.getLogger("streamppo"), "handlers", [])
    process.log_to_stdout()
    logging.getLogger("streamppo.loop").info(text)
    assert capsys.readouterr().out == f"{text}\n"
    with terminal() as reader:
        logging.getLogger("streamppo.loop").info(text)
        screen = Screen()
        screen.draw([ScreenRow("row", 3)])
        print(text)
        screen.leave()
        found = shown(written(reader), 40)
    broken = ["a line of a log that is longer than a", "  row of forty columns"]
    assert found == [*broken, *broken, "row", ""]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "fe80::1", "head.cluster"])
def test_an_address_is_read_back_from_a_url(host: str) -> None:
    parts = urlsplit(f"http://{process.netloc(host, 80)}/")
    assert (parts.hostname, parts.port) == (host, 80)
