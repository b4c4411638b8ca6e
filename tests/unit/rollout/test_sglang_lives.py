"""The lives and deaths of SGLang as our side of it sees them, with an SGLang that is a dozen lines."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.fit import Architecture
from streamppo.rollout.sglang.engine import SGLangEngine, start
from streamppo.rollout.sglang.life import Setup

pytest_plugins = ["rollout_log"]
CONFIG = Qwen2Config(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)
PROMPT = np.array([3, 4], np.int32)


class Fake:
    """An SGLang, the link to it and the carrier of its weights in one.

    `gate` holds completions back; `swallows` loses pushes; `deadly` kills over prompts.
    """

    version, ranks = (0, 5, 21), 1

    def __init__(self, capacity: int = 4) -> None:
        self.capacity = capacity
        self.lives: list[int] = []
        self.aborted: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.look = asyncio.Event()
        self.look.set()
        self.dead = ""
        self.swallows = self.deadly = self.barren = False
        self.running = self.most = self.stopped = 0
        self.loaded, self.norm = -1, 0.0

    async def start(self, life: int) -> "Fake":
        if self.barren:
            raise ModelError("SGLang cannot start: no luck")
        self.lives.append(life)
        self.dead, self.loaded = "", -1
        return self

    async def connect(self, link: Any) -> "Fake":
        return self

    async def carry(self, version: int, tensors: Any, *, flush: bool) -> None:
        if not self.swallows:
            self.loaded, self.norm = version, float(tensors["model.norm.weight"][0])

    async def call(self, name: str, /, **fields: Any) -> Any:
        if name in ("weights_checker", "get_weights_by_name", "begin_weight_update"):
            raise NotImplementedError(name)
        if name != "generate":
            return None
        if "rid" not in fields:
            await self.look.wait()
            return {"meta_info": {"input_token_logprobs": [(None, 1, None), (self.norm, 2, None)]}}
        if self.deadly:
            raise ConnectionError("it fell over")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        spans = [{"version": str(self.loaded), "start": 0, "end": 1}]
        finish = {"type": "length"}
        return {
            "meta_info": {"finish_reason": finish, "output_token_logprobs": [(-1.0, 7, None)], "weight_versions": spans}
        }

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def death(self) -> str:
        return self.dead

    async def stop(self) -> None:
        self.stopped += 1


def pushed(norm: float) -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, norm) for name, shape in Architecture(CONFIG).shapes.items()}


async def opened(fake: Fake, tensors: dict[str, torch.Tensor] | None = None) -> SGLangEngine:
    setup = Setup(fake.start, fake.connect, "keep", CONFIG.vocab_size, start_s=20)
    return await start(setup, CONFIG, version=5, tensors=tensors or pushed(1.0), eos_ids={1}, max_total_tokens=32)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


def test_what_was_in_flight_at_a_death_is_sampled_again_by_the_version_that_was_served(log_lines: list[str]) -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        await engine.update_weights(6, pushed(2.0))
        fake.gate.clear()
        under_way = asyncio.ensure_future(engine.generate(PROMPT, Sampling(1)))
        await asyncio.sleep(0.05)
        fake.dead = "killed by a test"
        while len(fake.lives) < 2:
            await asyncio.sleep(0.01)
        fake.gate.set()
        assert (await under_way).versions.tolist() == [6]
        assert (fake.lives, fake.norm, engine.usage().restarts) == ([0, 1], 2.0, 1)
        assert log_lines == ["SGLang ended: killed by a test; starting it again with version 6"]
        await engine.stop()

    run(case())


def test_a_push_that_was_swallowed_is_noticed_and_ends_that_life() -> None:
    async def case() -> None:
        fake = Fake()
        engine = await opened(fake)
        fake.swallows = True
        with pytest.raises(WeightsError, match=r"version 6: SGLang has not taken .*by log-probs"):
            await engine.update_weights(6, pushed(2.0))
        fake.swallows = False
        assert (await engine.generate(PROMPT, Sampling(1))).versions.tolist() == [5]
        assert (engine.version, fake.lives, fake.norm) == (5, [0, 1], 1.0)
        await engine.update_weights(6, pushed(2.0))
        assert (await engine.generate(PROMPT, Sampling(1))).versions.tolist() == [6]
        await engine.stop()

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
        with pytest.raises(ModelError, match="died 3 times over one prompt of 2 tokens"):
            await engine.generate(PROMPT, Sampling(1))
        fake.deadly = False
        assert (await engine.generate(PROMPT, Sampling(1))).tokens.tolist() == [7]
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
        async def carry(self, version: int, tensors: Any, *, flush: bool) -> None:
            raise ValueError("no such layer")

    async def case() -> None:
        fake = Refuses()
        with pytest.raises(WeightsError, match="version 5: no such layer"):
            await opened(fake)
        assert (fake.lives, fake.stopped) == ([0], 1)

    run(case())


def test_an_sglang_that_dies_over_its_first_weights_is_told_and_not_waited_for() -> None:
    class Dies(Fake):
        async def carry(self, version: int, tensors: Any, *, flush: bool) -> None:
            self.dead = "killed by a test"
            await asyncio.Event().wait()

    async def case() -> None:
        fake = Dies()
        with pytest.raises(ModelError, match="died while it took version 5: killed by a test"):
            await opened(fake)
        assert fake.stopped == 1

    run(case())


def test_a_version_that_names_no_candidates_is_refused_where_top_p_or_top_k_are_on() -> None:
    async def case() -> None:
        fake = Fake()
        fake.version = (0, 5, 20)
        setup = Setup(fake.start, fake.connect, "keep", CONFIG.vocab_size, start_s=20)
        life = {"version": 5, "tensors": pushed(1.0), "eos_ids": {1}, "max_total_tokens": 32}
        with pytest.raises(ModelError, match=r"SGLang must be 0.5.21 or newer, and is 0.5.20"):
            await start(setup._replace(cuts=True), CONFIG, **life)
        assert fake.stopped == 1
        await (await start(setup, CONFIG, **life)).stop()

    run(case())


def test_a_first_load_that_never_ends_is_given_up_after_the_start_time_and_named() -> None:
    class Hangs(Fake):
        async def carry(self, version: int, tensors: Any, *, flush: bool) -> None:
            await asyncio.Event().wait()

    async def case() -> None:
        fake = Hangs()
        setup = Setup(fake.start, fake.connect, "keep", CONFIG.vocab_size, start_s=0.1)
        with pytest.raises(ModelError, match=r"has not taken version 5 within rollout.engine.start_s \(0.1 s\)"):
            await start(setup, CONFIG, version=5, tensors=pushed(1.0), eos_ids={1}, max_total_tokens=32)
        assert fake.stopped == 1

    run(case())
