"""A rollout actor without Ray: what it loads, what it refuses to go on with, and what it survives."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from streamppo.config.sections import Config
from streamppo.errors import EnvironmentFailed, ModelError, RewardFailed, TaskError, WeightsError
from streamppo.rollout import actor
from streamppo.rollout.episode import Episode
from streamppo.types import (
    EvaluationReport,
    Failure,
    Identity,
    Prompt,
    Reward,
    ScoredText,
    Ticket,
    Trajectory,
    decode,
    encode,
)
from streamppo.weights import buckets


class Remote:
    """A coroutine function under the name by which Ray would call it."""

    def __init__(self, function: Any) -> None:
        self.remote = function


class Queue:
    """Serves one version; the first `damaged` pulls of it arrive with a flipped bit."""

    def __init__(self, damaged: int) -> None:
        self.damaged = damaged
        self.pulls = 0
        self.swaps: list[int] = []
        self.weights_after = Remote(self._weights_after)
        self.swapped = Remote(self._swapped)

    async def _weights_after(self, name: str, version: int) -> Any:
        if version >= 1:
            await asyncio.Event().wait()
        self.pulls += 1
        push, arrays = buckets.flatten(1, 0, {"w": torch.arange(8.0)}, 1 << 20)
        if self.pulls <= self.damaged:
            arrays[0][3] ^= 1
        return encode(push), [_value(array) for array in arrays]

    async def _swapped(self, name: str, version: int) -> None:
        self.swaps.append(version)


async def _value(array: Any) -> Any:
    return array


class Engine:
    version = 0

    async def update_weights(self, version: int, tensors: Any) -> None:
        assert torch.equal(tensors["w"], torch.arange(8.0))
        self.version = version


def following(queue: Queue) -> Any:
    """An actor of which only the part that follows the weights has been set up."""
    made: Any = actor.RolloutActor.__new__(actor.RolloutActor)
    made.name, made.queue, made.engine = "rollout-0", queue, Engine()
    made._push_ms, made._digest = 0.0, ""
    made._swapped = asyncio.Condition()
    return made


def test_damaged_weights_are_refused_and_asked_for_again(capsys: pytest.CaptureFixture[str]) -> None:
    async def scenario() -> Queue:
        queue = Queue(damaged=actor.PULLS - 1)
        task = asyncio.create_task(following(queue)._follow_weights())
        while not queue.swaps:
            await asyncio.wait({task}, timeout=0.01)
        task.cancel()
        return queue

    queue = asyncio.run(scenario())
    assert (queue.pulls, queue.swaps) == (actor.PULLS, [1])
    assert capsys.readouterr().out.count("rollout-0: keeps version 0: push 1: bucket 0 does not match") == 2


def test_weights_that_stay_damaged_end_the_actor() -> None:
    async def scenario() -> None:
        queue = Queue(damaged=1000)
        with pytest.raises(WeightsError, match="bucket 0 does not match"):
            await following(queue)._follow_weights()
        assert (queue.pulls, queue.swaps) == (actor.PULLS, [])

    asyncio.run(scenario())


# --- what costs one trajectory, and nothing else ---------------------------------------------------------------

FAULTS = {
    "too long": (ModelError("a prompt of 99 tokens does not fit"), "engine"),
    "no template": (TaskError("no chat template"), "task"),
    "no world": (EnvironmentFailed("reset: OSError: \ud83d"), "environment"),
    "no score": (RewardFailed("no score after 30 s"), "reward"),
}


class Player:
    """Says 2 to every prompt that does not name a fault."""

    tokenizer = SimpleNamespace(decode=lambda tokens: "2")

    async def play(self, prompt: Prompt, sampling: Any) -> Episode:
        if prompt.text in FAULTS and prompt.text != "no score":
            raise FAULTS[prompt.text][0]
        one = np.ones(1, np.int32)
        return Episode(one, one, np.zeros(1, np.float32), 7 * one, one.astype(np.bool_), "stop", (0,))


class Rewards:
    """1 for the answer 2."""

    async def score(self, prompt: Prompt, text: ScoredText) -> Reward:
        if prompt.text == "no score":
            raise FAULTS["no score"][0]
        return Reward(score=float(text.completion == prompt.columns["answer"]))


def sampling(config: Config, *texts: str) -> Any:
    """An actor of which only the part that samples and answers has been set up, with these prompts."""
    made: Any = actor.RolloutActor.__new__(actor.RolloutActor)
    prompts = [Prompt(text=text, columns={"answer": "2"}) for text in texts]
    made.name, made.config, made.engine = "rollout-0", config, SimpleNamespace(version=7)
    made.task = SimpleNamespace(held_out=lambda limit: prompts, prompt=lambda number: prompts[number])
    made.player, made.tokenizer, made.rewards = Player(), Player.tokenizer, Rewards()
    made._sampling = made._greedy = None
    made._started, made._swapped = asyncio.Event(), asyncio.Condition()
    made._finished, made._delivery_due, made._free = [], asyncio.Event(), asyncio.Semaphore(0)
    made._trajectories = 0
    made._started.set()
    return made


@pytest.mark.parametrize("fault", FAULTS)
def test_a_held_out_prompt_that_fails_is_counted_and_named_and_the_others_are_judged(
    fault: str, math_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    async def story() -> EvaluationReport:
        return decode(await sampling(math_config(), "1+1=", fault, "0+2=").evaluate(0, 1, 7), EvaluationReport)

    report = asyncio.run(story())
    assert (report.correct, report.count, report.failed) == (2, 2, 1)
    assert (report.min_version, report.max_version) == (7, 7)
    error, stage = FAULTS[fault]
    said = f"rollout-0: 1 of 3 held-out prompts failed, the first of them: {stage}: {error}\n"
    assert capsys.readouterr().out == said.replace("\ud83d", "?")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_trajectory_that_fails_is_delivered_as_a_failure_of_its_stage(
    fault: str, math_config: Callable[..., Config]
) -> None:
    async def story() -> list[Trajectory | Failure]:
        made = sampling(math_config(), "1+1=", fault)
        for prompt in range(2):
            await made._sample(Ticket(identity=Identity(task="t", prompt=prompt, sample=0), slot=prompt))
        return made._finished

    trajectory, failure = asyncio.run(story())
    assert isinstance(trajectory, Trajectory) and trajectory.reward == 1.0
    assert isinstance(failure, Failure) and failure.stage == FAULTS[fault][1]
    assert decode(encode(failure), Failure) == failure
