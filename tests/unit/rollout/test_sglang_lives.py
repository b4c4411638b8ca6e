"""Starts and deaths of SGLang as the actor sees them; this SGLang is a dozen lines."""

import asyncio
import signal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_sglang import CONFIG, Fake, opened, pushed, run

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.sglang import in_process, processes
from streamppo.rollout.sglang.engine import start
from streamppo.rollout.sglang.session import STARTS, SessionSetup
from streamppo.rollout.weight_checks import Architecture

pytest_plugins = ["rollout_log"]
PROMPT = np.array([3, 4], np.int32)


def test_what_was_in_flight_at_a_death_is_sampled_again_by_the_version_that_was_served(log_lines: list[str]) -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        await engine.update_weights(6, pushed(2.0))
        fake.gate.clear()
        under_way = asyncio.ensure_future(engine.generate(PROMPT, Sampling(1)))
        await asyncio.sleep(0.05)
        fake.returns.clear()
        fake.dead = "killed by a test"
        while not engine.usage().is_starting:
            await asyncio.sleep(0.01)
        fake.returns.set()
        while len(fake.lives) < 2:
            await asyncio.sleep(0.01)
        fake.gate.set()
        assert (await under_way).versions.tolist() == [6]
        assert (fake.lives, fake.norm, engine.usage().restarts) == ([0, 1], 2.0, 1)
        assert not engine.usage().is_starting
        assert log_lines == ["SGLang ended: killed by a test; its next start gets version 6"]
        await engine.stop()

    run(case())


def test_a_push_that_was_swallowed_is_noticed_and_ends_that_life() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.swallows = True
        with pytest.raises(WeightsError, match=r"version 6: SGLang has not loaded .*by its checksum"):
            await engine.update_weights(6, pushed(2.0))
        fake.swallows = False
        assert (await engine.generate(PROMPT, Sampling(1))).versions.tolist() == [5]
        assert (engine.version, fake.lives, fake.norm) == (5, [0, 1], 1.0)
        await engine.update_weights(6, pushed(2.0))
        assert (await engine.generate(PROMPT, Sampling(1))).versions.tolist() == [6]
        await engine.stop()

    run(case())


def test_the_transport_of_every_session_is_closed_before_its_link_is_stopped() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.swallows = True
        with pytest.raises(WeightsError):
            await engine.update_weights(6, pushed(2.0))
        fake.swallows = False
        await engine.generate(PROMPT, Sampling(1))
        assert (fake.lives, fake.closed, fake.stopped) == ([0, 1], 1, 1), "after a refused push"
        fake.dead = "killed by a test"
        while len(fake.lives) < 3:
            await asyncio.sleep(0.01)
        await engine.generate(PROMPT, Sampling(1))
        assert (fake.closed, fake.stopped) == (2, 2), "after a death"
        await engine.stop()
        assert (fake.closed, fake.stopped) == (3, 3)

        refused = Fake()
        refused.swallows = True
        with pytest.raises(WeightsError):
            await opened(refused)
        assert (refused.lives, refused.closed, refused.stopped) == ([0], 1, 1), "after a failed start"

    run(case())


def test_a_completion_of_weights_in_doubt_is_not_handed_over() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.gate.clear()
        fake.look.clear()
        under_way = asyncio.ensure_future(engine.generate(PROMPT, Sampling(1)))
        await asyncio.sleep(0.05)
        fake.swallows = True
        update = asyncio.ensure_future(engine.update_weights(6, pushed(2.0)))
        while fake.staged != 2.0:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        fake.gate.set()
        await asyncio.sleep(0.05)
        assert not under_way.done()
        fake.swallows = False
        fake.look.set()
        with pytest.raises(WeightsError):
            await update
        assert (await under_way).versions.tolist() == [5]
        assert fake.lives == [0, 1]
        assert len({*fake.keys}) == 2, "a server's cache of the weights in doubt is not used"
        await engine.stop()

    run(case())


def test_a_push_that_changes_nothing_is_taken() -> None:
    async def case() -> None:
        engine = await opened(Fake())
        await engine.update_weights(6, pushed(1.0))
        assert (engine.version, engine.usage().swaps, engine.usage().restarts) == (6, 1, 0)
        await engine.stop()

    run(case())


def test_a_prompt_over_which_it_always_dies_is_given_up() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.deadly = True
        with pytest.raises(ModelError, match="died or disconnected 3 times during one prompt of 2 tokens"):
            await engine.generate(PROMPT, Sampling(1))
        fake.deadly = False
        assert (await engine.generate(PROMPT, Sampling(1))).tokens.tolist() == [7]
        await engine.stop()

    run(case())


def test_a_request_whose_connection_breaks_is_sent_again_and_costs_no_other(log_lines: list[str]) -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.gate.clear()
        other = asyncio.ensure_future(engine.generate(PROMPT, Sampling(1)))
        await asyncio.sleep(0.05)
        fake.deadly = True
        broken = asyncio.ensure_future(engine.generate(PROMPT, Sampling(1)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        fake.deadly = False
        fake.gate.set()
        assert [(await one).versions.tolist() for one in (broken, other)] == [[5], [5]]
        assert log_lines == ["a request is sent again: it fell over"]
        assert (fake.lives, len(fake.keys), engine.usage().restarts) == ([0], 2, 0)
        await engine.stop()

    run(case())


def test_a_start_that_fails_is_told_to_every_waiting_caller() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.barren, fake.dead = True, "gone"
        await asyncio.sleep(0)
        fake.gate.clear()
        with pytest.raises(ModelError, match="no luck"):
            await engine.generate(PROMPT, Sampling(1))
        with pytest.raises(ModelError, match="no luck"):
            await engine.update_weights(6, pushed(2.0))

    run(case())


def test_no_more_is_sent_than_it_runs_at_once() -> None:
    async def case() -> None:
        fake = Fake(capacity=3)
        engine = await opened(fake)
        await asyncio.gather(*(engine.generate(PROMPT, Sampling(1)) for _ in range(20)))
        assert fake.most == 3
        assert engine.usage().tokens == 20
        await engine.stop()

    run(case())


def test_tokens_that_its_cache_had_are_counted() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        for fake.cached in (0, 1, 1):
            await engine.generate(PROMPT, Sampling(1))
        assert (engine.usage().prompted, engine.usage().reused) == (6, 2)
        await engine.stop()

    run(case())


def test_a_request_that_nobody_waits_for_is_aborted() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.gate.clear()
        under_way = asyncio.ensure_future(engine.generate(PROMPT, Sampling(1)))
        await asyncio.sleep(0.05)
        under_way.cancel()
        with pytest.raises(asyncio.CancelledError):
            await under_way
        assert len(fake.aborted) == 1
        await engine.stop()

    run(case())


def test_a_first_push_that_does_not_fit_starts_nothing() -> None:
    async def case() -> None:
        fake = Fake()
        wrong = pushed(1.0)
        wrong["model.norm.weight"] = torch.zeros(3)
        with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(3,\)"):
            await opened(fake, wrong)
        assert fake.lives == []

    run(case())


def test_an_sglang_that_does_not_take_its_first_weights_is_stopped() -> None:
    class Refuses(Fake):
        async def carry(self, version: int, *, flush: bool) -> None:
            raise ValueError("no such layer")

    async def case() -> None:
        fake = Refuses()
        with pytest.raises(WeightsError, match="version 5: no such layer"):
            await opened(fake)
        assert (fake.lives, fake.stopped) == ([0], 1)

    run(case())


@pytest.mark.parametrize("place", ["start", "carry"])
@pytest.mark.parametrize("deaths", [1, STARTS])
def test_an_sglang_that_is_killed_during_a_start_is_started_up_to_three_times(
    deaths: int, place: str, log_lines: list[str]
) -> None:
    class Dies(Fake):
        left = deaths

        async def start(self, life: int) -> Fake:
            await super().start(life)
            if place == "start":
                self._die()
            return self

        async def carry(self, version: int, *, flush: bool) -> None:
            if place == "carry" and self.left:
                self.left -= 1
                self.dead = "killed by a test"
                await asyncio.Event().wait()
            await super().carry(version, flush=flush)

        def _die(self) -> None:
            if self.left:
                self.left -= 1
                raise ConnectionError("killed by a test")

    async def case() -> None:
        fake = Dies()
        if deaths == STARTS:
            with pytest.raises(ModelError, match="died in each of 3 starts with version 5: killed by a test"):
                await opened(fake)
        else:
            engine = await opened(fake)
            assert (await engine.generate(PROMPT, Sampling(1))).versions.tolist() == [5]
            await engine.stop()
        assert len(fake.lives) == min(deaths + 1, STARTS)
        assert log_lines[0] == "SGLang died before it had loaded version 5 (killed by a test); it gets 2 more starts"

    run(case())


class Killed(NamedTuple):
    """A process that has ended with `exitcode`, or runs if it is None."""

    exitcode: int | None


def test_only_a_signal_is_a_kill() -> None:
    started: Any = [Killed(None), Killed(0), Killed(1), Killed(-9)]
    assert processes.killed(started) == "one of its processes was killed by SIGKILL"
    assert not processes.killed(started[:3])


TAKEN = (
    "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    "torch.distributed.DistNetworkError: The server socket has failed to listen on any local network address. port: "
    "40001, useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use\n"
)


@pytest.mark.parametrize(
    ("written", "error", "message"),
    [
        (TAKEN, ConnectionError, "a port that it needs is taken"),
        ("ValueError: no\n", ModelError, "start: ValueError: no"),
    ],
)
def test_a_start_whose_port_another_engine_took_may_be_repeated_and_one_with_a_mistake_not(
    written: str, error: type[Exception], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def build(settings: object, seed: int, log: str) -> None:
        Path(log).write_text(written)
        raise RuntimeError("Initialization failed. Please see the error messages above.")

    monkeypatch.setattr(in_process, "_build", build)
    monkeypatch.setattr(processes, "_contexts", list)
    settings = in_process.LaunchSettings({}, {}, capacity=1, ranks=1, seed=0, start_s=60.0)
    before = signal.getsignal(signal.SIGQUIT)
    try:
        with pytest.raises(error, match=message):
            run(in_process.start(settings, 0))
    finally:
        signal.signal(signal.SIGQUIT, before)


def test_a_first_load_that_never_ends_is_given_up_after_the_start_time_and_named() -> None:
    class Hangs(Fake):
        async def carry(self, version: int, *, flush: bool) -> None:
            await asyncio.Event().wait()

    async def case() -> None:
        fake = Hangs()
        setup = SessionSetup(fake.start, fake.connect, "keep", CONFIG.vocab_size, start_s=0.1)
        with pytest.raises(ModelError, match=r"has not loaded version 5 within rollout.engine.start_s \(0.1 s\)"):
            await start(setup, Architecture(CONFIG), 5, pushed(1.0))
        assert fake.stopped == 1

    run(case())
