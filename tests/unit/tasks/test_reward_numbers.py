"""A score is a number of any library that the learner can square in float32; a reward may work in any way."""

import asyncio
import math
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from reward_case import one_function, processes, started, text, total

from streamppo.config.reward import FunctionScorer, Reward
from streamppo.errors import EnvironmentFailed, RewardFailed
from streamppo.tasks.environments import Done, EnvSession
from streamppo.tasks.rewards.outcome import LARGEST, Outcome, check, check_batch, check_scored
from streamppo.tasks.stalls import EnvironmentCalls, EventLoopStalls
from streamppo.types import Prompt
from streamppo.types import Reward as Given

ONES = [
    True,
    1,
    1.0,
    Decimal("1"),
    Fraction(1),
    *(getattr(np, kind)(1) for kind in ("bool_", "int8", "uint64", "float16", "float32", "float64", "longdouble")),
    np.array(1.0),
    np.array([1]),
    *(torch.tensor(1.0, dtype=kind) for kind in (torch.float16, torch.bfloat16, torch.float64)),
    torch.tensor([1]),
    torch.tensor(True),
    torch.tensor(1.0, requires_grad=True),
]


@pytest.mark.parametrize("value", ONES, ids=lambda one: f"{type(one).__module__}.{type(one).__name__} {one!r}")
def test_a_number_of_any_library_is_a_score(value: Any) -> None:
    one = text("3")
    assert check(value, one) == Outcome(reward=Given(score=1.0))
    assert check(Given(score=value, components={"part": value}), one).reward == Given(
        score=1.0, components={"part": 1.0}
    )
    assert check_batch([value], (one,))[0].reward == Given(score=1.0)
    assert check_scored({"score": value, "part": value}, one).reward == Given(score=1.0, components={"part": 1.0})


@pytest.mark.parametrize("array", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_arrays_of_numbers_are_rewards_of_tokens_and_turns(array: Any) -> None:
    answer = text("346")
    assert check(Given(tokens=array([0.5, 0.0, 2.0])), answer).reward == Given(tokens=(0.5, 0.0, 2.0))
    assert check(Given(turns=array([0.0])), answer).reward == Given(turns=(0.0,))
    for short in ([0.0], [1.0, 2.0]):
        assert check(Given(tokens=array(short)), answer).reason == f"returned {len(short)} rewards for 3 tokens"


NO_NUMBERS = [
    None,
    "1",
    b"1",
    [1.0],
    1j,
    np.complex64(1),
    np.str_("1"),
    np.array(["1"]),
    np.array([1.0, 2.0]),
    np.array([], dtype=float),
    torch.ones(2),
    np.datetime64("2020-01-01"),
    math.nan,
    -math.inf,
    Decimal("NaN"),
    Decimal("sNaN"),
    10**400,
    Fraction(10**400),
]


@pytest.mark.parametrize("value", NO_NUMBERS, ids=repr)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    assert "not a finite number" in check(value, text("3")).reason


@pytest.mark.parametrize("value", [1e39, -1e39, 1e20, Decimal("1e300"), 10**39, np.float64(1e39), torch.tensor(1e38)])
def test_a_reward_whose_square_float32_does_not_hold_fails_with_its_reason(value: Any) -> None:
    one = text("3")
    parts = [Given(score=value), Given(tokens=(value,)), Given(turns=(value,)), Given(components={"a": value})]
    for outcome in (check(value, one), check_scored({"score": value}, one), *(check(part, one) for part in parts)):
        assert outcome.reward is None
        assert "beyond 1e+16, and the learner squares rewards in float32: scale it down" in outcome.reason


def test_the_largest_reward_of_a_batch_is_squared_and_summed_within_float32() -> None:
    batch = torch.full((4096,), LARGEST, dtype=torch.float32)
    assert batch.square().sum().isfinite()


def test_weights_that_carry_a_sum_beyond_the_bound_fail_the_trajectory(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("async def score(trajectory, **columns):\n    return 1e10\n")
    scorer = FunctionScorer(function=f"{tmp_path / 'score.py'}:score", where="actor", weight=1e30)

    async def story() -> None:
        async with started(Reward(scorers={"large": scorer})) as rewards:
            with pytest.raises(RewardFailed, match=r"the sum of large is beyond 1e\+16"):
                await total(rewards, "3")

    asyncio.run(story())


def test_an_environments_reward_beyond_the_bound_fails_its_trajectory() -> None:
    class Large:
        async def reset(self, prompt: Prompt) -> str:
            return prompt.text

        async def step(self, text: str) -> Done:
            return Done(reward=1e39)

    async def story() -> None:
        with pytest.raises(EnvironmentFailed, match=r"beyond 1e\+16"):
            await EnvSession(Large(), EnvironmentCalls(EventLoopStalls("large", 5.0))).step("3")

    asyncio.run(story())


WAYS = {
    "its own event loop": """
import asyncio
async def ask(text):
    await asyncio.sleep(0)
    return float(len(text))
def score(trajectory, **columns):
    return asyncio.run(ask(trajectory.completion))
""",
    "threads of its own": """
import threading
def score(trajectory, **columns):
    found = []
    threads = [threading.Thread(target=found.append, args=(one,)) for one in trajectory.completion]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
    return len(found)
""",
    "a thread that never ends": """
import threading, time
def score(trajectory, **columns):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return len(trajectory.completion)
""",
    "a pool of threads": """
from concurrent.futures import ThreadPoolExecutor
POOL = ThreadPoolExecutor(2)
def score(trajectory, **columns):
    return sum(POOL.map(len, trajectory.completion))
""",
    "a program": """
import subprocess
def score(trajectory, **columns):
    return int(subprocess.run(["wc", "-c"], input=trajectory.completion.encode(), capture_output=True).stdout)
""",
    "processes of its own": """
from concurrent.futures import ProcessPoolExecutor
def score(trajectory, **columns):
    with ProcessPoolExecutor(1) as pool:
        return sum(pool.map(len, trajectory.completion))
""",
    "a program, awaited": """
import asyncio
async def score(trajectory, **columns):
    program = await asyncio.create_subprocess_exec("wc", "-c", stdin=-1, stdout=-1)
    said, _ = await program.communicate(trajectory.completion.encode())
    return int(said)
""",
    "a thread, awaited": """
import asyncio
async def score(trajectory, **columns):
    return await asyncio.to_thread(len, trajectory.completion)
""",
    "a thread of the module that does not end with it": """
import pathlib, threading, time
def wait():
    while not pathlib.Path(__file__).with_name("end").exists():
        time.sleep(0.05)
threading.Thread(target=wait).start()
def score(trajectory, **columns):
    return len(trajectory.completion)
""",
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", WAYS)
def test_a_reward_may_work_in_any_way_and_leaves_no_process(tmp_path: Path, way: str) -> None:
    (tmp_path / "score.py").write_text(WAYS[way])

    async def story() -> None:
        config = one_function(function=f"{tmp_path / 'score.py'}:score", processes=1, timeout_s=20.0)
        async with asyncio.timeout(30), started(config) as rewards:
            assert await total(rewards, "three") == 5
            assert await total(rewards, "four") == 4

    asyncio.run(story())
    assert processes() == []
    # The module was imported here too: this process would wait for its thread.
    (tmp_path / "end").touch()
