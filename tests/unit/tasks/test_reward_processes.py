"""A call that holds the process of an async reward costs the calls beside it nothing but a new beginning."""

import asyncio
from pathlib import Path
from typing import cast

import pytest
from faulty_rewards import TOGETHER
from reward_case import faulty, one_function, processes, started, total

from streamppo.errors import RewardFailed, TaskError
from streamppo.tasks.rewards.processes import forks, template
from streamppo.tasks.rewards.processes.wire import Outbox


def kill_template() -> None:
    template, process = processes()
    template.kill()
    process.wait(timeout=30.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("fault", ["sleeps", "sleeps in a task", "spins", "blocks a little"])
def test_calls_beside_one_that_holds_their_process_go_on_together(fault: str) -> None:
    """They wait for each other, so fewer at a time would never end; and the guilty call is the last to end."""

    async def story() -> None:
        ended: list[str] = []

        async def one(completion: str) -> float | RewardFailed:
            try:
                return await total(rewards, completion)
            except RewardFailed as error:
                return error
            finally:
                ended.append(completion)

        async with started(faulty("beside", timeout_s=60.0 if fault == "blocks a little" else 4.0)) as rewards:
            found = await asyncio.gather(one(fault), *(one("waits") for _ in range(TOGETHER)))
        guilty, *others = found
        assert others == [1.0] * TOGETHER
        if fault == "blocks a little":
            assert guilty == 1.0
        else:
            assert str(guilty).startswith("no score after 4 s")
            if fault == "sleeps":
                assert str(guilty).endswith(", in which it blocked the event loop: await, or use asyncio.to_thread")
            assert ended[-1] == fault

    asyncio.run(story())


@pytest.mark.slow
def test_calls_beside_a_callback_that_nobody_can_be_blamed_for_run_alone() -> None:
    async def story() -> None:
        async with started(faulty("beside", timeout_s=10.0)) as rewards:
            asked = ["sleeps in a callback", *["naps"] * 8]
            guilty, *others = await asyncio.gather(*(total(rewards, one) for one in asked), return_exceptions=True)
        assert str(guilty).startswith("no score after 10 s") and others == [1.0] * 8

    asyncio.run(story())


@pytest.mark.slow
def test_several_calls_that_hold_their_process_fail_alone() -> None:
    async def story() -> None:
        async with started(faulty("beside", timeout_s=6.0)) as rewards:
            asked = ["sleeps", *["waits"] * TOGETHER, *["sleeps"] * 3]
            found = await asyncio.gather(*(total(rewards, one) for one in asked), return_exceptions=True)
        assert [one for one in found if isinstance(one, float)] == [1.0] * TOGETHER

    asyncio.run(story())


@pytest.mark.slow
def test_a_busy_process_is_not_replaced() -> None:
    async def story() -> None:
        async with started(faulty("beside")) as rewards:
            before = await total(rewards, "process")
            found = await asyncio.gather(*(total(rewards, "spins") for _ in range(40)), return_exceptions=True)
            assert all(str(one).startswith("no score after 1 s") for one in found)
            while True:
                try:
                    assert await total(rewards, "process") == before
                    break
                # The loop still ends the calls that were given up.
                except RewardFailed:
                    continue
            assert rewards.report()[0].respawns == 0

    asyncio.run(story())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("function", ["sync", "awaiting"])
def test_a_template_that_dies_is_replaced(
    function: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        # A template takes a second to start: three deaths pass the bound as six do.
        monkeypatch.setattr(forks, "DEATHS", 1)
        async with started(faulty(function)) as rewards:
            for _ in range(forks.DEATHS + 2):
                assert await total(rewards, "fine") == 1.0
                kill_template()
            assert await total(rewards, "fine") == 1.0
        assert processes() == []
        assert sum("has died: it is replaced" in line for line in caplog.messages) == forks.DEATHS + 2

    asyncio.run(story())


DRAWS = """
import random, time
import numpy, torch

def score(trajectory):
    time.sleep(0.5)
    draw = {"python": random.random, "numpy": numpy.random.rand, "torch": lambda: torch.rand(())}
    return float(draw[trajectory.completion]())
"""


def test_processes_of_a_sync_reward_draw_different_random_numbers(tmp_path: Path) -> None:
    (tmp_path / "draws.py").write_text(DRAWS)

    async def story() -> None:
        async with started(one_function(function=f"{tmp_path}/draws.py:score", processes=2)) as rewards:
            for library in ("python", "numpy", "torch"):
                first, second = await asyncio.gather(total(rewards, library), total(rewards, library))
                assert first != second, library

    asyncio.run(story())


POOL = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

def length(text):
    return len(text)

def score(trajectory):
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("METHOD")) as pool:
        return float(pool.submit(length, trajectory.completion).result())
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_process_pool_of_a_reward_finds_the_functions_of_its_file(method: str, tmp_path: Path) -> None:
    (tmp_path / "my rewards.v2.py").write_text(POOL.replace("METHOD", method))

    async def story() -> None:
        async with started(one_function(function=f"{tmp_path / 'my rewards.v2.py'}:score", timeout_s=60.0)) as rewards:
            assert await total(rewards, "four") == 4.0

    asyncio.run(story())


def test_calls_that_run_when_the_template_dies_begin_again() -> None:
    async def story() -> None:
        async with started(faulty("beside", timeout_s=60.0)) as rewards:
            calls = [asyncio.create_task(total(rewards, "waits")) for _ in range(TOGETHER - 1)]
            await total(rewards, "process")
            kill_template()
            # Without the last one none of them has ended.
            assert await asyncio.gather(*calls, total(rewards, "waits")) == [1.0] * TOGETHER

    asyncio.run(story())


def test_a_call_that_kills_its_template_fails_alone() -> None:
    async def story() -> None:
        async with started(faulty("beside", timeout_s=60.0)) as rewards:
            with pytest.raises(RewardFailed, match="the template process died during each of 3 tries"):
                await total(rewards, "kills its template")
            assert await total(rewards, "process") > 0

    asyncio.run(story())


def test_templates_that_die_without_a_score_in_between_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        monkeypatch.setattr(forks, "DEATHS", 1)
        async with started(faulty("beside", timeout_s=60.0)) as rewards:
            with pytest.raises(TaskError, match="has died, 2 times without a score in between"):
                await total(rewards, "kills its template")

    asyncio.run(story())


def test_a_reward_that_prints_too_much_is_cut_off_and_scored(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with started(faulty("chatty", timeout_s=60.0)) as rewards:
            assert await total(rewards, "20") == 1.0
            assert await total(rewards, "20") == 1.0

    asyncio.run(story())
    assert capfd.readouterr().out.count("x") <= template.WINDOW_BYTES
    assert sum("prints more than 64 KiB a minute" in line for line in caplog.messages) == 1


def test_what_is_sent_in_one_turn_of_the_loop_is_one_write() -> None:
    class Writes(list[bytes]):
        write = list[bytes].append

    async def story() -> None:
        writes = Writes()
        outbox = Outbox(cast(asyncio.StreamWriter, writes))
        for message in (b"a", b"b"):
            outbox.put(message)
        assert writes == []
        await asyncio.sleep(0)
        outbox.put(b"c")
        await asyncio.sleep(0)
        assert writes == [b"ab", b"c"]

    asyncio.run(story())
