"""A minimal fake of SGLang: it starts, dies, loads weights, and streams completions."""

import asyncio
import random
from collections.abc import AsyncGenerator, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Qwen2Config

from streamppo.errors import ModelError
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.engine import SGLangEngine, start
from streamppo.rollout.sglang.session import SessionSetup
from streamppo.rollout.sglang.verify_weights import held_name
from streamppo.rollout.weight_checks import Architecture

CONFIG = Qwen2Config(
    vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1
)


class Fake:
    """A fake SGLang, the link to it and the carrier of its weights in one object.

    `gate` delays completions; `returns` delays starts; `swallows` loses pushes; `deadly` fails on prompts; `cached` is
    the reported number of cached tokens.
    """

    ranks, longest, is_ordered = 1, 1 << 20, True

    def __init__(self, capacity: int = 4) -> None:
        self.capacity = capacity
        self.lives: list[int] = []
        self.aborted: list[str] = []
        self.keys: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.look = asyncio.Event()
        self.look.set()
        self.returns = asyncio.Event()
        self.returns.set()
        self.dead = ""
        self.swallows = self.deadly = self.barren = False
        self.running = self.most = self.stopped = self.closed = self.cached = 0
        self.loaded, self.norm, self.staged = -1, 0.0, 0.0

    async def start(self, life: int) -> "Fake":
        if self.barren:
            raise ModelError("SGLang cannot start: no luck")
        await self.returns.wait()
        self.lives.append(life)
        self.dead, self.loaded = "", -1
        return self

    async def connect(self, link: Any) -> "Fake":
        return self

    async def stage(self, tensors: Any) -> None:
        self.staged = float(tensors["model.norm.weight"][0])

    async def carry(self, version: int, *, flush: bool) -> None:
        if not self.swallows:
            self.loaded, self.norm = version, self.staged

    async def close(self) -> None:
        assert self.closed == self.stopped, "the link is still connected"
        self.closed += 1

    async def call(self, name: str, /, **fields: Any) -> Any:
        if name == "weights_checker":
            return await self._check(fields["action"])
        if name != "generate":
            return None
        if self.deadly:
            raise ConnectionError("it fell over")
        self.keys.append(fields["extra_key"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.gate.wait()
            await asyncio.sleep(0)
        finally:
            self.running -= 1
        spans = [{"version": wire.version_name(self.loaded), "start": 0, "end": 1}]
        finish = {"type": "length"}
        return {
            "meta_info": {
                "finish_reason": finish,
                "output_token_logprobs": [(-1.0, 7, None)],
                "weight_versions": spans,
                "cached_tokens": self.cached,
            }
        }

    async def _check(self, action: str) -> Any:
        if action == "reset_tensors":
            self.norm = random.random()
            return None
        await self.look.wait()
        return [{"checksums": {held_name(name): str(self.norm) for name in Architecture(CONFIG).shapes}}]

    def stream(self, **fields: object) -> AsyncGenerator[Any]:
        raise NotImplementedError

    async def abort(self, rid: str) -> None:
        self.aborted.append(rid)

    async def death(self) -> str:
        return self.dead

    async def stop(self) -> None:
        self.stopped += 1


@dataclass
class Running:
    """A streamed completion: its tokens' true versions, and the numbers of counted and of sent tokens."""

    name: int
    limit: int
    interval: int
    candidates: bool
    truth: list[int] = field(default_factory=list)
    counted: int = 0
    sent: int = 0
    changes: list[tuple[str, int]] = field(default_factory=list)
    answers: "asyncio.Queue[Any]" = field(default_factory=asyncio.Queue)


class Streaming(Fake):
    """Steps all streamed completions by one token, as often as a test requests, unless paused.

    As in SGLang with overlap scheduling, a token is counted, and may be sent, when the next step has begun: a pause
    leaves one token uncounted, which SGLang attributes to the next version. With `repeats`, each message has all tokens
    so far, as from a server without incremental output. With `lags`, messages arrive when the weights are verified.
    """

    def __init__(self, capacity: int = 64, *, repeats: bool = False) -> None:
        super().__init__(capacity)
        self.repeats = repeats
        self.requests: list[Running] = []
        self.all: list[Running] = []
        self.steps = 0
        self.paused = False
        self.break_off = self.lags = False
        self._late: list[tuple[Running, Any]] = []
        self.finish: dict[str, str] = {"type": "length"}

    async def start(self, life: int) -> Fake:
        self.paused, self.requests = False, []
        self._stepping = asyncio.create_task(self._step_always())
        return await super().start(life)

    async def call(self, name: str, /, **fields: Any) -> Any:
        if name == "pause_generation":
            self.paused = True
            if fields["mode"] == "retract":
                for one in list(self.requests):
                    self._count(one)
        if name == "continue_generation":
            self.paused = False
        if fields.get("action") == "checksum":
            self.lags, late, self._late = False, self._late, []
            for one, answer in late:
                one.answers.put_nowait(answer)
        return await super().call(name, **fields)

    async def carry(self, version: int, *, flush: bool) -> None:
        before = self.loaded
        await asyncio.sleep(0.001)
        await super().carry(version, flush=flush)
        for one in self.requests:
            if one.counted:
                one.changes.append((wire.version_name(before), one.counted))

    async def stream(self, **fields: Any) -> AsyncGenerator[Any]:
        knobs = fields["sampling_params"]
        candidates = fields.get("return_sampling_mask", False)
        one = Running(len(self.all), knobs["max_new_tokens"], knobs["stream_interval"], candidates)
        self.requests.append(one)
        self.all.append(one)
        try:
            while (answer := await one.answers.get()) is not None:
                yield answer
        finally:
            self.requests = [other for other in self.requests if other is not one]

    async def stop(self) -> None:
        self._stepping.cancel()
        await super().stop()

    async def step(self, count: int) -> None:
        """Let pending requests arrive, make `count` steps, and let their tokens arrive."""
        await _settled()
        self.steps = count
        while self.steps:
            await asyncio.sleep(0)
        await _settled()

    async def took(self, version: int) -> None:
        """Wait until it continues with `version`."""
        while self.paused or self.loaded != version:
            await asyncio.sleep(0.001)

    async def ended(self, work: "asyncio.Future[Any]") -> Any:
        """Make steps until `work` is done."""
        while not work.done():
            await self.step(1)
        return await work

    async def _step_always(self) -> None:
        while True:
            await asyncio.sleep(0 if self.steps and not self.paused else 0.001)
            if self.steps and not self.paused and not self.dead:
                self.steps -= 1
                for one in list(self.requests):
                    if len(one.truth) < one.limit:
                        one.truth.append(self.loaded)
                    self._count(one, under_way=len(one.truth) < one.limit)

    def _count(self, one: Running, *, under_way: bool = False) -> None:
        """Count all tokens except that of the step under way; send them at the interval and at the end."""
        one.counted = len(one.truth) - under_way
        at_end = one.counted == one.limit
        if one.counted > one.sent and (at_end or one.interval == 1 or one.counted % one.interval == 1):
            answer = self._answer(one, at_end=at_end)
            if self.lags:
                self._late.append((one, answer))
            else:
                one.answers.put_nowait(answer)
            one.sent = one.counted
            if at_end or self.break_off:
                one.answers.put_nowait(None)
                self.requests = [other for other in self.requests if other is not one]

    def _answer(self, one: Running, *, at_end: bool) -> Mapping[str, Any]:
        places = range(0 if self.repeats else one.sent, one.counted)
        meta: dict[str, Any] = {
            "completion_tokens": one.counted,
            "cached_tokens": self.cached,
            "finish_reason": self.finish if at_end else None,
            "output_token_logprobs": [(logprob(n), token(one.name, n), None) for n in places],
        }
        if one.candidates:
            meta["output_token_sampling_mask"] = [candidates(one.name, n) for n in places]
            meta["output_token_sampling_logprobs"] = [2 * logprob(n) for n in places]
        if at_end:
            ends = [*one.changes, (wire.version_name(self.loaded), one.counted)]
            begins = [0, *(end for _, end in ends)]
            meta["weight_versions"] = [
                {"version": version, "start": begin, "end": end}
                for (version, end), begin in zip(ends, begins, strict=False)
                if end > begin
            ]
        return {"meta_info": meta}


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def token(name: int, place: int) -> int:
    """The token at `place` in the completion of request number `name`; all tokens differ."""
    return 1000 * name + place


def logprob(place: int) -> float:
    """The log-prob of the token at `place`, exact in float32."""
    return -(place + 1) / 64


def candidates(name: int, place: int) -> list[int]:
    """The 1 to 3 candidates of a token."""
    return [token(name, place) + more for more in range(place % 3 + 1)]


def pushed(norm: float) -> dict[str, torch.Tensor]:
    """Weights with the value `norm` in every element."""
    return {name: torch.full(shape, norm) for name, shape in Architecture(CONFIG).shapes.items()}


async def opened(fake: Fake, tensors: dict[str, torch.Tensor] | None = None, **setup: Any) -> SGLangEngine:
    """An engine on `fake`, at version 5."""
    context = 32 if not isinstance(fake, Streaming) else 4096
    setup = {"eos_ids": {1}, "context": context, **setup}
    given = SessionSetup(fake.start, fake.connect, "keep", CONFIG.vocab_size, start_s=20)._replace(**setup)
    return await start(given, Architecture(CONFIG), 5, tensors or pushed(1.0))


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine."""
    asyncio.run(asyncio.wait_for(work, 30))
