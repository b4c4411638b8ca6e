"""A run in one process with simulated time: the computation is real, its duration is taken from `Costs`.

Queue, journal, archive, rollout actors, engines, rewards and updates are those of a real run, in one event loop. Its
clock stands still during computation and advances when all tasks wait; a decoding step or an update then ends after its
simulated cost. So a run is the same bit for bit every time, however busy the machine is, and shows the effect of a rule
on learning per second on other hardware. It leaves out Ray, several learner ranks, deaths, and every cost that is not
in `Costs`.
"""

import asyncio
import selectors
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, TypeVarTuple, cast
from unittest import mock

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.lib import world
from benchmarks.lib.pace import Adaptive, Fixed, step
from benchmarks.lib.world import World
from streamppo.config.sections import Config
from streamppo.learner.batch.fetch import lag_histogram
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import policy
from streamppo.queue.actor import QueueActor
from streamppo.queue.store import batch_parts
from streamppo.rollout import worker
from streamppo.rollout.embedded.rows import DecodingRows
from streamppo.rollout.worker import Worker
from streamppo.types import Batch, EngineReport, QueueReport, decode, encode
from streamppo.weights import buckets

R = TypeVar("R")
Arguments = TypeVarTuple("Arguments")


CONTEXT = 192
"""Most tokens of a held-out prompt with its answer."""


class Costs(NamedTuple):
    """Simulated seconds. Everything else takes no time.

    A decoding step costs the same for any number of rows, as on a memory-bound GPU. An update costs `update_s` plus
    `token_s` for each token in its rows, including prompts and context. A token of a context without gradient costs
    `context_s`, a third of it: a forward pass instead of a forward and a backward pass (context_cost.py).
    """

    step_s: float = 0.1
    prefill_s: float = 0.02
    update_s: float = 0.1
    token_s: float = 5e-4
    context_s: float = 5e-4 / 3
    push_s: float = 0.1
    call_s: float = 0.002


# --- the clock -------------------------------------------------------------------------------------------------


class Clock(selectors.DefaultSelector):
    """A clock of simulated seconds since the start; it advances where an event loop would wait for time to pass."""

    def __init__(self) -> None:
        super().__init__()
        self._waited = self._owed = 0.0

    @property
    def now(self) -> float:
        """The time of every clock of the process; during a call, it includes the call's cost so far."""
        return self._waited + self._owed

    def cost(self, seconds: float) -> None:
        """Add `seconds` to the cost of the present call."""
        self._owed += seconds

    def settle(self) -> float:
        """End the present call; returns its cost in seconds."""
        took, self._owed = self._owed, 0.0
        return took

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Advance the clock by `timeout` at once. Raises `RuntimeError` on a deadlock: no timer is pending."""
        if timeout is None:
            raise RuntimeError("everybody waits for somebody else")
        self._waited += max(0.0, timeout)
        return super().select(0)


class Loop(asyncio.SelectorEventLoop):
    """An event loop with a `Clock`. A call in a thread is computed at once and ends when its cost has passed."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        super().__init__(clock)

    def time(self) -> float:
        """The simulated time."""
        return self._clock.now

    def run_in_executor(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, executor: Executor | None, func: Callable[[*Arguments], R], *args: *Arguments
    ) -> asyncio.Future[R]:
        """Call `func` now; the future gets its result or error after its simulated cost."""
        done: asyncio.Future[R] = self.create_future()
        try:
            ending = _ended(done, done.set_result, func(*args))
        except Exception as error:
            ending = _ended(done, done.set_exception, error)
        self.call_later(self._clock.settle(), ending)
        return done


def _ended(done: asyncio.Future[Any], end: Callable[[R], None], value: R) -> Callable[[], None]:
    return lambda: None if done.done() else end(value)


@contextmanager
def simulated(costs: Costs) -> Generator[asyncio.Runner]:
    """In the block, all clocks of the process show the runner's time, and engine steps have their costs."""
    clock = Clock()

    def priced(call: Callable[..., R], seconds: float) -> Callable[..., R]:
        def paid(*args: Any, **named: Any) -> R:
            clock.cost(seconds)
            return call(*args, **named)

        return paid

    with (
        mock.patch.multiple(time, perf_counter=lambda: clock.now, monotonic=lambda: clock.now),
        mock.patch.object(DecodingRows, "step", priced(DecodingRows.step, costs.step_s)),
        mock.patch.object(DecodingRows, "admit", priced(DecodingRows.admit, costs.prefill_s)),
        asyncio.Runner(loop_factory=lambda: Loop(clock)) as runner,
    ):
        yield runner


# --- fakes of Ray ----------------------------------------------------------------------------------------------


class Ref:
    """An awaitable reference of an array, as of one in Ray's object store."""

    def __init__(self, array: NDArray[np.uint8]) -> None:
        self._array = array

    def __await__(self) -> Generator[Any, Any, NDArray[np.uint8]]:
        return asyncio.sleep(0, self._array).__await__()


class Handle:
    """A fake actor handle: `handle.method.remote(...)` calls `actor.method(...)` after `Costs.call_s`."""

    def __init__(self, actor: object, costs: Costs) -> None:
        self._actor, self._costs = actor, costs

    def __getattr__(self, name: str) -> "_Method":
        return _Method(getattr(self._actor, name), self._costs.call_s)


class _Method(NamedTuple):
    call: Callable[..., Awaitable[Any]]
    call_s: float

    async def remote(self, *args: Any, **named: Any) -> Any:
        await asyncio.sleep(self.call_s)
        return await self.call(*args, **named)


# --- the run ---------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """The results of a run: the time of each version, its metrics and lags, evaluations, and the last counters."""

    seconds: list[float] = field(default_factory=list[float])
    waits: list[float] = field(default_factory=list[float])
    metrics: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    lags: list[dict[int, int]] = field(default_factory=list[dict[int, int]])
    accuracies: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])
    queue: QueueReport | None = None
    engines: Sequence[EngineReport] = ()


def run(config: Config, model: Path, folder: Path, costs: Costs) -> Found:
    """Make all updates of `config`; journal and archive are written to `folder`."""
    folder.mkdir(parents=True)
    with simulated(costs) as runner:
        return runner.run(_run(config, model, folder, costs))


async def _run(config: Config, model: Path, folder: Path, costs: Costs) -> Found:
    made = await world.build(config, model, slots=config.evaluation.prompts, max_total_tokens=CONTEXT)
    queue: Any = Handle(QueueActor(msgspec.msgpack.encode(config), str(folder), str(model), cast("Any", Ref)), costs)
    await queue.begin.remote(0)
    learner = _Learner(made, queue, costs)
    await learner.push(0, learner.weights())
    learner.evaluate(0)
    names = [f"rollout-{number}" for number in range(config.rollout.actors)]
    workers = [await worker.start(config, name, queue, {}, str(model)) for name in names]
    sampling = [asyncio.create_task(one.run()) for one in workers]
    learning = asyncio.create_task(learner.learn())
    # Actors end only by an error, which `result` raises.
    await asyncio.wait([learning, *sampling], return_when=asyncio.FIRST_COMPLETED)
    for task in sampling:
        if task.done():
            task.result()
    found = await learning
    found.queue, found.engines = decode(await queue.report.remote(), QueueReport), [one.report() for one in workers]
    await _end(sampling, workers, made)
    return found


async def _end(sampling: Sequence[asyncio.Task[None]], workers: Sequence[Worker], made: World) -> None:
    for task in sampling:
        task.cancel()
    await asyncio.wait(sampling)
    await made.engine.stop()


class _Learner:
    """The work of a rank and its driver, without their processes. `queue` is a `Handle`."""

    def __init__(self, made: World, queue: Any, costs: Costs) -> None:
        self._world, self._queue, self._costs = made, queue, costs
        self._pace = Fixed(0) if made.config.queue.first_lag is None else Adaptive(made.config)
        self._found = Found()
        self._evaluation: asyncio.Task[None] | None = None

    async def learn(self) -> Found:
        """Make all updates. Pushes and evaluations run concurrently with later updates."""
        config, found, loop = self._world.config, self._found, asyncio.get_running_loop()
        pushed: asyncio.Task[None] | None = None
        for version in range(config.updates):
            begin = loop.time()
            refs: list[Ref] | None = await self._queue.take.remote(version)
            assert refs is not None, "nobody stops the queue"
            batch = pad(batch_parts.merge([decode((await ref).data, Batch) for ref in refs]))
            found.waits.append(loop.time() - begin)
            learned = self._update(batch)
            await asyncio.sleep(update_s(self._costs, batch, config.queue.prefix))
            found.seconds.append(loop.time())
            if pushed is not None:
                await pushed
            pushed = asyncio.create_task(self.push(version + 1, self.weights(), learned))
            if (version + 1) % max(1, config.evaluation.every) == 0 or version + 1 == config.updates:
                self.evaluate(version + 1)
        assert self._evaluation is not None, "the last version is evaluated"
        await self._evaluation
        return found

    def _update(self, batch: PaddedBatch) -> bytes:
        """Make one update; returns the encoded `TokenRecord` of the batch."""
        updated, metrics, _ = step(self._world, self._pace, batch)
        self._found.lags.append(lag_histogram(batch))
        self._found.metrics.append(metrics)
        return encode(self._world.updater.token_record(updated))

    def weights(self) -> dict[str, Tensor]:
        """A copy of the policy's present weights."""
        return policy.gather_weights(self._world.updater.policy, self._world.config.model.dtype)

    async def push(self, version: int, weights: dict[str, Tensor], learned: bytes = b"") -> None:
        """Publish a version for the engines to pull."""
        packed = buckets.pack_whole(version, weights, self._world.config.learner.bucket_bytes)
        admitted = self._pace.admitted if isinstance(self._pace, Adaptive) else None
        push = structs.replace(packed.push, admitted_lag=admitted)
        await asyncio.sleep(self._costs.push_s)
        refs = [Ref(array) for array in packed.arrays]
        await self._queue.publish.remote(encode(push), refs, learned, 1)

    def evaluate(self, version: int) -> None:
        """Start to answer the held-out prompts, with a separate engine."""
        weights, before = self.weights(), self._evaluation

        async def answer() -> None:
            if before is not None:
                await before
            await self._world.engine.update_weights(version, weights)
            self._found.accuracies.append((version, await world.accuracy(self._world)))

        self._evaluation = asyncio.create_task(answer())


def update_s(costs: Costs, batch: PaddedBatch, prefix: Literal["attached", "detached"]) -> float:
    """Return the simulated seconds of an update, by the number of tokens in a batch's rows, without padding."""
    whole_B = batch.start_B + batch.length_B
    if prefix == "attached":
        return costs.update_s + costs.token_s * int(whole_B.sum())
    # The last token of a context is computed with gradient: it predicts the first of the completion.
    context = int((batch.start_B - 1).sum())
    return costs.update_s + costs.token_s * (int(whole_B.sum()) - context) + costs.context_s * context
