"""Rewards that compute when imported, need much memory or many threads, or fail inside of a library."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from reward_case import one_function, started, text, total

from streamppo.errors import RewardFailed
from streamppo.tasks import user_traceback
from streamppo.types import Prompt

COMPUTES = """
import torch

model = torch.nn.Linear(2000, 2000)
model(torch.ones(256, 2000))


def batched(completions, **kwargs):
    with torch.no_grad():
        return model(torch.ones(256, 2000))[: len(completions), 0] * 0


def single(trajectory):
    return model(torch.ones(256, 2000)).detach().sum() * 0


async def awaiting(trajectory):
    return single(trajectory)
"""
NEEDS = """
import mmap
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy
import torch

NEEDS = {
    "bytes": lambda: bytearray(2**30),
    "numpy": lambda: numpy.ones(2**28),
    "torch": lambda: torch.ones(2**28),
    "mapping": lambda: mmap.mmap(-1, 2**30, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "threads": lambda: list(ThreadPoolExecutor(100).map(time.sleep, [0.2] * 100)),
}


def sync(trajectory):
    NEEDS[trajectory.completion]()
    return 1.0


async def awaiting(trajectory):
    return sync(trajectory)


def batched(completions, **kwargs):
    return [NEEDS[completion]() and 1.0 for completion in completions]
"""


async def failure(config: Any, completion: str) -> str:
    async with started(config) as rewards:
        with pytest.raises(RewardFailed) as failed:
            await total(rewards, completion)
        return str(failed.value)


@pytest.mark.parametrize("name", ["batched", "single", "awaiting"])
def test_a_module_that_computes_when_it_is_imported_scores(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    (tmp_path / "computes.py").write_text(COMPUTES)
    config = one_function(function=f"{tmp_path / 'computes.py'}:{name}", timeout_s=30.0)

    async def story() -> None:
        async with started(config) as rewards:
            scored = await asyncio.gather(*(rewards.score(Prompt(text="", columns={}), text("x")) for _ in range(4)))
        assert [reward.total for reward in scored] == [0.0] * 4

    asyncio.run(story())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is bounded on Linux alone")
@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ["sync", "awaiting", "batched"])
@pytest.mark.parametrize("need", ["bytes", "numpy", "torch", "mapping", "threads"])
def test_a_reward_without_the_memory_it_needs_names_the_limit(name: str, need: str, tmp_path: Path) -> None:
    (tmp_path / "needs.py").write_text(NEEDS)
    config = one_function(function=f"{tmp_path / 'needs.py'}:{name}", timeout_s=30.0, memory_mib=400)
    reason = asyncio.run(failure(config, need))
    assert reason.startswith("needs.py:")
    assert reason.endswith("; the reward's memory_mib (400) bounds memory and the stacks of threads: raise it")


def test_a_gpu_without_memory_is_not_the_limit(tmp_path: Path) -> None:
    (tmp_path / "full.py").write_text(
        "import torch\n\n\ndef score(trajectory):\n    raise torch.OutOfMemoryError('CUDA out of memory.')\n"
    )
    reason = asyncio.run(failure(one_function(function=f"{tmp_path / 'full.py'}:score", timeout_s=30.0), "x"))
    assert reason == "full.py:5: OutOfMemoryError: CUDA out of memory."


def test_an_error_inside_of_a_library_names_the_line_of_the_reward(tmp_path: Path) -> None:
    module = tmp_path / "wrong.py"
    module.write_text("import httpx\n\n\ndef score(trajectory):\n    return httpx.get('http://127.0.0.1:9/').json()\n")
    reason = asyncio.run(failure(one_function(function=f"{module}:score", timeout_s=30.0), "x"))
    assert reason.startswith("wrong.py:5: ConnectError: ")


@pytest.mark.parametrize("folder", ["site-packages", "dist-packages"])
def test_a_library_of_any_environment_is_not_code_of_the_user(folder: str, tmp_path: Path) -> None:
    library = os.path.join(tmp_path, "lib", "python3.11", folder, "library.py")
    names: dict[str, Any] = {}
    exec(compile("def fails():\n    raise ValueError('bad')", library, "exec"), names)
    exec(compile("\n\ndef score():\n    fails()", str(tmp_path / "mine.py"), "exec"), names)
    with pytest.raises(ValueError, match="bad") as failed:
        names["score"]()
    failed.value.__traceback__ = failed.tb.tb_next
    assert user_traceback.format_user_error(failed.value) == "mine.py:4: ValueError: bad"


@pytest.mark.parametrize("length", [1, 2, 5000])
def test_the_place_of_an_error_is_found_in_a_long_chain_or_a_cycle_of_causes(length: int, tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile("\ndef score():\n    raise ValueError('bad')", str(tmp_path / "mine.py"), "exec"), names)
    with pytest.raises(ValueError, match="bad") as failed:
        names["score"]()
    first = last = failed.value
    for _ in range(length - 1):
        last.__cause__ = TimeoutError()
        last = last.__cause__
    last.__cause__ = first
    assert user_traceback.locate(TimeoutError()) == ""
    assert user_traceback.locate(first) == "mine.py:3"
