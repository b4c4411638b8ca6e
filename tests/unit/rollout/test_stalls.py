"""An environment that does not await: it is named, counted and bounded, and those beside it lose nothing."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from scripted import TEMPLATE, Scripted

from streamppo.config.task import Environment
from streamppo.errors import EnvironmentFailed
from streamppo.rollout.engine import Sampling
from streamppo.rollout.player import Player
from streamppo.tasks import stalls
from streamppo.tasks.environments import Done
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import Message, Prompt

HERE = str(Path(__file__))
HELD = 1 + Path(__file__).read_text().splitlines().index("    time.sleep(0.6)")
"""The line that holds the event loop."""


def hold() -> None:
    time.sleep(0.6)


class Holding:
    """Holds the event loop in its own step, or in a task of it, if it is told so."""

    async def reset(self, prompt: Prompt) -> list[Message]:
        return [Message(role="user", content=prompt.text)]

    async def step(self, text: str) -> Done:
        match text:
            case "hold":
                hold()
            case "task":
                await asyncio.gather(inner(), asyncio.sleep(0))
            case "wait":
                await asyncio.sleep(0.2)
            case "own":
                raise TimeoutError("of its own")
            case _:
                pass
        return Done(1.0)


async def inner() -> None:
    await asyncio.sleep(0)
    hold()


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stalls, "HELD_S", 0.1)
    monkeypatch.setattr(stalls, "CHECK_S", 0.02)


def played(folder: Path, *said: str, timeout_s: float) -> tuple[Player, Sequence[object]]:
    """The player of one environment for each line, all at once, and the results."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz[] ")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    engine = Scripted(Tokenizer(folder), *said)
    player = Player(engine, Tokenizer(folder), Environment(name=f"{HERE}:Holding", timeout_s=timeout_s))

    async def together() -> Sequence[object]:
        plays = (player.play(Prompt(text="hi", columns={}), Sampling(16)) for _ in said)
        return await asyncio.gather(*plays, return_exceptions=True)

    return player, asyncio.run(together())


@pytest.mark.parametrize("how", ["hold", "task"])
def test_an_environment_that_holds_the_event_loop_is_named_counted_and_late_alone(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    player, (beside, held) = played(tmp_path, "wait", how, timeout_s=0.4)
    assert isinstance(held, EnvironmentFailed)
    assert str(held) == f"step took more than 0.4 s: test_stalls.py:{HELD} does not await"
    assert not isinstance(beside, BaseException), "the time that another one took is not its own"
    assert player.stalls() == {f"test_stalls.py:{HELD}": 1}
    assert f"{HERE}:Holding: a step at test_stalls.py:{HELD} runs for more than 0.1 s without awaiting" in caplog.text


def test_within_its_time_a_stall_is_counted_and_named_once_and_fails_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    player, ends = played(tmp_path, "hold", "hold", timeout_s=60.0)
    assert not any(isinstance(end, BaseException) for end in ends)
    assert player.stalls() == {f"test_stalls.py:{HELD}": 2}
    assert caplog.text.count("without awaiting") == 1


def test_an_environment_that_awaits_holds_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    player, ends = played(tmp_path, "wait", "wait", "go", timeout_s=60.0)
    assert not any(isinstance(end, BaseException) for end in ends)
    assert (player.stalls(), caplog.text) == ({}, "")


def test_a_timeout_of_the_environments_own_is_told_as_such(tmp_path: Path) -> None:
    _, (end,) = played(tmp_path, "own", timeout_s=60.0)
    assert isinstance(end, EnvironmentFailed)
    assert str(end).startswith("step: test_stalls.py:") and str(end).endswith(": TimeoutError: of its own")
