"""Agents of every kind behind the endpoint: their results, their sentences if they fail, and no process left."""

import asyncio
import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import agent_case
import psutil
import pytest
from agent_case import Speaks
from conftest import SUPPORT

from streamppo.config.task import AgentEnvironment
from streamppo.errors import EnvironmentFailed, TaskError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.episode import Episode
from streamppo.rollout.player import Player
from streamppo.tasks import agent
from streamppo.tasks.environments import Done
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Identity, Message, Prompt, Reward, floats

FILE = SUPPORT / "agents_of_every_kind.py"
PROMPT = Prompt(text="1+2", columns={"answer": "hi"})
T = TypeVar("T")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def played(tokenizer: Tokenizer) -> Callable[..., Any]:
    """Play with an agent, or with a program of these words."""

    def play(name: str, ask: Callable[[Player], Awaitable[T]], *words: str, scored: bool = False, **limits: Any) -> T:
        given = {"command": words} if words else {"agent": f"{FILE}:{name}"}
        engine = Speaks(tokenizer, limits.pop("say", lambda _: "hi"))

        async def main() -> T:
            config = AgentEnvironment(**{"timeout_s": 60.0, **given, **limits})  # pyright: ignore
            player = Player(engine, tokenizer, config, scored=scored)  # pyright: ignore
            player.engine = engine  # pyright: ignore
            try:
                return await ask(player)
            finally:
                assert player.agents is not None
                await player.agents.close()

        return asyncio.run(main())

    return play


async def once(player: Player) -> tuple[Episode, dict[str, int]]:
    assert player.agents is not None
    return await player.play(PROMPT, Sampling(32)), dict(player.agents.counts)


async def failing(player: Player) -> tuple[str, int, dict[str, int]]:
    with pytest.raises(EnvironmentFailed) as caught:
        await player.play(PROMPT, Sampling(32))
    assert player.agents is not None
    return str(caught.value), caught.value.tokens, dict(player.agents.counts)


def test_a_function_is_played_and_its_number_is_the_reward(played: Callable[..., Any], tokenizer: Tokenizer) -> None:
    episode, counts = played("one_turn", once)
    assert tokenizer.spell(episode.prompt_tokens.tolist()) == "[user]1+2<eos>[assistant]"
    assert tokenizer.spell(episode.tokens.tolist()) == "hi<eos>"
    assert (episode.turns, episode.turn_rewards, episode.finish) == (("hi",), (1.0,), "stop")
    assert counts == {"requests": 1, "runs": 1, "undelivered tokens": 0}
    text = episode.text(PROMPT, tokenizer)
    assert (text.completion, [one.text for one in text.messages]) == ("hi", ["1+2"])


def test_an_agent_of_areal_is_a_class_whose_run_gets_the_row(played: Callable[..., Any]) -> None:
    row = Prompt(text="1+2", columns={"answer": "hi", "messages": [{"role": "user", "content": "1+2"}]})

    async def play(player: Player) -> Episode:
        return await player.play(row, Sampling(32))

    assert played("OfAReaL", play).turn_rewards == (1.0,)


def test_turns_observations_and_the_end_are_those_of_an_environment(
    played: Callable[..., Any], tokenizer: Tokenizer
) -> None:
    episode, _ = played("two_turns", once)
    assert tokenizer.spell(episode.tokens.tolist()) == "hi<eos>[user]more<eos>[assistant]hi<eos>"
    assert tokenizer.spell(episode.tokens[episode.mask].tolist()) == "hi<eos>hi<eos>"
    assert episode.observations == ((Message(role="user", content="more"),),)
    assert episode.turn_rewards == (0.0, 2.0)
    reward = episode.reward(Reward(score=1.0))
    assert (reward.total, reward.components, reward.explanation) == (3.0, {"polite": 1.0}, "well done")
    made = episode.trajectory(Identity(task="t", prompt=0, sample=0), "a", reward)
    assert floats(made.token_rewards)[-1] == 3.0 and made.branches == b""


def test_answers_beside_each_other_are_branches_of_one_trajectory(played: Callable[..., Any]) -> None:
    from streamppo.queue.rules.validation import defect

    episode, _ = played("parallel", once)
    assert episode.turn_rewards == (1.0, 2.0, 4.5) and len(episode.branches) == 16
    made = episode.trajectory(Identity(task="t", prompt=0, sample=0), "a", episode.reward(Reward()))
    assert defect(made, None) is None and made.reward == 7.5
    assert episode.num_sampled == 9


def test_rewards_are_posted_for_the_run_and_for_a_response(played: Callable[..., Any]) -> None:
    episode, counts = played("posts", once)
    assert episode.turn_rewards == (1.25,)
    assert (counts["reward that is not a number"], counts["reward for an unknown response"]) == (1, 1)


@pytest.mark.parametrize("limits", [{"max_turns": 3}, {"max_tokens": 100}])
def test_a_run_that_has_spent_its_budget_is_cut_off_and_scored(
    played: Callable[..., Any], limits: dict[str, int]
) -> None:
    episode, counts = played("until_refused", once, **limits)
    assert episode.finish == "length" and counts["over budget"] == 1
    assert len(episode.tokens) <= limits.get("max_tokens", 4096)
    assert episode.turn_rewards[-1] == len(episode.turns)


@pytest.mark.parametrize(("say", "max_tokens", "finish"), [("hi", 20, "stop"), ("x" * 500, 4096, "length")])
def test_a_run_is_cut_off_if_its_last_answer_is_and_not_if_that_had_little_room(
    say: str, max_tokens: int, finish: str, played: Callable[..., Any]
) -> None:
    episode, _ = played("one_turn", once, say=lambda _: say, max_tokens=max_tokens)
    assert episode.finish == finish


@pytest.mark.slow
def test_a_function_finds_the_endpoint_in_its_environment_too(played: Callable[..., Any]) -> None:
    assert played("reads_the_environment", once)[0].turn_rewards == (1.0,)
    assert played("leaves_a_task", once)[0].turn_rewards == (1.0,)


def test_messages_of_a_row_are_given_as_messages(played: Callable[..., Any]) -> None:
    prompt = Prompt(text="?", columns={}, messages=(Message(role="user", content="hello"),))

    async def ask(player: Player) -> Episode:
        return await player.play(prompt, Sampling(32))

    episode = played("two_turns", ask)
    assert episode.opening.messages == prompt.messages


def test_without_a_reward_of_the_agent_that_of_the_scorers_counts(played: Callable[..., Any]) -> None:
    episode, _ = played("gives_nothing", once, scored=True)
    assert episode.reward(Reward(score=0.75)).total == 0.75


NO_REWARD = "the agent gave no reward: return a number, POST one to /v1/reward, or name a scorer in [reward]"
FAILURES = {
    "never_calls": "the agent made no request; its output ends: 'no proxy is set'",
    "gives_nothing": NO_REWARD,
    "gives_a_text": "the agent returned 'good', with a value that is not a finite number",
    "gives_nan": "the agent returned nan, with a value that is not a finite number",
    "raises": "the agent: agents_of_every_kind.py:LINE: ValueError: no such tool; its output ends: 'about to fail'",
    "hangs": "the agent took longer than 0.5 s (environment.timeout_s), at agents_of_every_kind.py:LINE; its output "
    "ends: 'waiting for the browser'",
    "swallows": "the agent took longer than 0.5 s (environment.timeout_s)",
    "is_slow": "the agent took longer than 0.5 s (environment.timeout_s)",
    "cancels": "the agent: agents_of_every_kind.py:LINE: CancelledError: something that it awaits was cancelled",
    "dies": "the agent: its process died: exit code 3",
    "wants_a_column": "the agent asks for the column 'colour'; columns are answer",
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", FAILURES)
def test_a_run_that_fails_has_its_sentence_and_never_a_reward_of_0(name: str, played: Callable[..., Any]) -> None:
    reason, tokens, counts = played(name, failing, timeout_s=0.5 if "longer than" in FAILURES[name] else 60.0)
    awaits = {"cancels": "    await client", "hangs": "    await asyncio.sleep(600)"}
    fails = awaits.get(name, '    raise ValueError("no such tool")')
    line = FILE.read_text().splitlines().index(fails) + 1
    assert reason == FAILURES[name].replace("LINE", str(line))
    assert tokens == (3 if name.startswith(("gives", "raises")) else 0)
    assert counts.get("requests", 0) == (tokens > 0)
    assert counts["failed"] == 1 and "runs" not in counts


def test_a_run_that_holds_its_process_is_killed_and_the_next_one_is_played(
    played: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamppo.rollout.agents.GRACE_S", 0.2)
    reason, *_ = played("hangs_without_awaiting", failing, timeout_s=0.3)
    assert re.fullmatch(r"the agent took longer than 0\.3 s \(environment\.timeout_s\), at \w+\.py:\d+", reason)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["leaves_a_thread", "leaves_a_stubborn_task"])
def test_what_goes_on_after_a_run_does_not_reach_the_next_one(name: str, played: Callable[..., Any]) -> None:
    """It would find the next run's key in the environment, if that run had the same process."""

    async def ask(player: Player) -> list[Episode]:
        return [await player.play(Prompt(text=text, columns={}), Sampling(32)) for text in ("first", "second")]

    first, second = played(name, ask)
    assert second.turns == ("hi",) and first.turn_rewards != second.turn_rewards


def test_a_process_whose_threads_wait_for_work_plays_the_next_run(played: Callable[..., Any]) -> None:
    async def ask(player: Player) -> list[Episode]:
        return [await player.play(PROMPT, Sampling(32)) for _ in range(3)]

    assert len({one.turn_rewards for one in played("works_in_a_thread", ask)}) == 1


def test_a_library_that_a_function_imports_in_each_process_is_named_once(
    played: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    async def ask(player: Player) -> list[Episode]:
        return await asyncio.gather(*[player.play(PROMPT, Sampling(32)) for _ in range(2)])

    with caplog.at_level(logging.INFO, "streamppo"):
        assert len(played("imports_in_a_run", ask)) == 2
    (note,) = [one.message for one in caplog.records if "imports" in one.message]
    assert re.match(r"note: the agent's function imports sympy, .*\. Each of its processes repeats this; ", note)


def test_what_nobody_received_is_counted_and_not_trained_on(played: Callable[..., Any]) -> None:
    async def ask(player: Player) -> tuple[str, int, dict[str, int]]:
        player.engine.gate.clear()  # pyright: ignore

        async def later() -> None:
            assert player.agents is not None
            while not player.agents.counts["disconnected"]:
                await asyncio.sleep(0.01)
            player.engine.gate.set()  # pyright: ignore

        found, _ = await asyncio.gather(failing(player), later())
        return found

    reason, tokens, counts = played("hangs_up", ask)
    assert reason == "the agent received no answer: it hung up on each of its requests"
    # They are the failure's, and counted once.
    assert tokens == 3 and "undelivered tokens" not in counts


@pytest.mark.slow
def test_of_a_run_that_is_trained_what_nobody_received_is_counted_beside_it(played: Callable[..., Any]) -> None:
    async def ask(player: Player) -> tuple[Episode, dict[str, int]]:
        player.engine.pace_s = 0.4  # pyright: ignore
        return await once(player)

    episode, counts = played("hangs_up_once", ask)
    assert episode.num_sampled == 3 and counts["undelivered tokens"] == 3 and counts["requests"] == 2
    assert len(episode.tokens) - episode.num_sampled >= 3


@pytest.mark.slow
def test_many_runs_are_played_side_by_side_in_as_many_processes(played: Callable[..., Any]) -> None:
    async def ask(player: Player) -> list[Episode]:
        return await asyncio.gather(*(player.play(PROMPT, Sampling(32)) for _ in range(8)))

    assert [one.turn_rewards for one in played("one_turn", ask)] == [(1.0,)] * 8


def left(seconds: int) -> list[psutil.Process]:
    """Processes of agents that live on."""
    running = [one for one in psutil.process_iter(["cmdline", "status"]) if one.info["status"] != psutil.STATUS_ZOMBIE]
    return [one for one in running if one.info["cmdline"] == ["sleep", f"{seconds}"]]


def test_an_agent_leaves_no_process_behind(played: Callable[..., Any]) -> None:
    async def ask(player: Player) -> tuple[float, int]:
        episode = await player.play(PROMPT, Sampling(32))
        # They are killed, and gone a moment later, while the actor lives on.
        await asyncio.to_thread(wait_until, lambda: not left(611))
        return episode.turn_rewards[0], len(left(611))

    assert played("forks", ask) == (1.0, 0)


def test_an_agent_leaves_no_process_that_forks_and_exits(played: Callable[..., Any], tmp_path: Path) -> None:
    alive, sign = tmp_path / "forks", tmp_path / "forks.lives"
    alive.touch()

    async def ask(player: Player) -> tuple[str, str]:
        await player.play(Prompt(text="1+2", columns={"answer": str(alive)}), Sampling(32))
        last = sign.read_text()
        await asyncio.sleep(0.3)
        return last, sign.read_text()

    try:
        last, later = played("forks_away", ask)
        assert last == later
    finally:
        alive.unlink()


def test_an_agent_may_print_200_mb(played: Callable[..., Any]) -> None:
    assert played("prints_much", once)[0].turn_rewards == (1.0,)


# --- programs ------------------------------------------------------------------------------------------------


def words(last: str) -> tuple[str, ...]:
    return sys.executable, str(FILE), last


@pytest.mark.sampled(2)
@pytest.mark.parametrize("last", ['{"reward": 0.5, "components": {"kind": 1.0}}', "much", "fork"])
def test_a_program_is_an_agent_and_its_last_line_may_be_its_reward(last: str, played: Callable[..., Any]) -> None:
    episode, _ = played("", once, *words(last))
    assert episode.turn_rewards == (0.5 if "components" in last else 1.0,)
    assert dict(episode.end.components) == ({"kind": 1.0} if "components" in last else {})
    wait_until(lambda: not left(612))


@pytest.mark.parametrize("before", ["", "one\n", "one\r\n", "\r 50 %\r100 %\r"])
def test_the_reward_that_a_program_prints_may_have_every_separator_of_lines_in_its_texts(before: str) -> None:
    line = json.dumps({"reward": 1, "explanation": "a\x85b\u2028c"}, ensure_ascii=False)
    assert agent._last_line(f"{before}{line}\r\n") == Done(1, {}, "a\x85b\u2028c")


PROGRAMS = {
    "no reward": f"{NO_REWARD}; its output ends: 'no reward'",
    '{"reward": "much"}': "the agent returned Done(reward='much'",
    '{"reward": 1, "components": 5}': "the agent returned Done(reward=1, components=5, explanation=''), whose",
    "chatty": f"{NO_REWARD}; its output ends: 'xxxx",
    "fail": "the agent ended with exit code 3; its output ends: 'what went wrong'",
    "hang": "the agent took longer than 3 s (environment.timeout_s); its output ends: 'waiting'",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("last", PROGRAMS)
def test_a_program_that_fails_has_its_sentence(last: str, played: Callable[..., Any]) -> None:
    reason, tokens, _ = played("", failing, *words(last), timeout_s=3.0 if last == "hang" else 60.0)
    assert reason.startswith(PROGRAMS[last]) and tokens == 3


def test_a_program_that_is_not_there_is_named(played: Callable[..., Any]) -> None:
    reason, *_ = played("", failing, "no-such-program")
    assert reason.startswith("the agent 'no-such-program' cannot be started: ")


@pytest.mark.parametrize("name", ["nowhere:run", f"{FILE}:nobody", f"{FILE}:OfNobody", f"{Path(__file__)}:PROMPT"])
def test_an_agent_that_cannot_be_loaded_stops_the_run(name: str, tokenizer: Tokenizer) -> None:
    async def main() -> None:
        player = Player(Speaks(tokenizer, str), tokenizer, AgentEnvironment(agent=name))  # pyright: ignore
        assert player.agents is not None
        await player.agents.start()

    with pytest.raises(TaskError, match=r"environment\.agent"):
        asyncio.run(main())


ACTOR = """
import asyncio, sys
sys.path[:0] = {path!r}
import agent_case
from pathlib import Path
from streamppo.config.task import AgentEnvironment
from streamppo.rollout.engine import Sampling
from streamppo.rollout.player import Player
from streamppo.types import Prompt

async def main():
    tokenizer = agent_case.tokenizer(Path(sys.argv[1]))
    config = AgentEnvironment(command=("sh", "-c", "setsid sleep 613 & sleep 613"))
    player = Player(agent_case.Speaks(tokenizer, str), tokenizer, config)
    await asyncio.gather(*(player.play(Prompt(text="a", columns={{}}), Sampling(9)) for _ in range(2)))

asyncio.run(main())
"""


@pytest.mark.slow
def test_agents_and_all_that_they_started_end_with_their_actor(tmp_path: Path) -> None:
    code = ACTOR.format(path=[str(SUPPORT), str(SUPPORT.parent)])
    actor = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)])
    try:
        wait_until(lambda: len(left(613)) == 4)
    finally:
        actor.kill()
        actor.wait()
    wait_until(lambda: not left(613))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 50
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
