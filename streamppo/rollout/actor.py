"""The Ray actor of rollout, which passes calls to one `Worker`. The driver imports this module without torch."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from importlib import import_module
from typing import TYPE_CHECKING

import ray

from streamppo import process
from streamppo.config.sections import Config
from streamppo.types import decode, encode
from streamppo.weights import store

if TYPE_CHECKING:
    from ray.actor import ActorProxy

    from streamppo.queue.actor import QueueActor
    from streamppo.rollout.worker import Worker
    from streamppo.tasks.rewards.reward_model import RewardModel


class RolloutActor:
    """Passes calls to a worker, all in one event loop. `start` makes the worker; other calls wait until it exists."""

    def __init__(
        self,
        config: bytes,
        name: str,
        place: int,
        queue: "ActorProxy[QueueActor]",
        reward_models: "Mapping[str, ActorProxy[RewardModel]]",
    ) -> None:
        process.log_to_stdout(name)
        with process.without_gc():
            import torch

            from streamppo.rollout import worker

            # The learner loads the model meanwhile.
            for library in ("auto.tokenization_auto", "llama.modeling_llama"):
                import_module(f"transformers.models.{library}")
        self._config = decode(config, Config)
        self._start_worker = worker.start
        self._name, self._place, self._queue, self._reward_models = name, place, queue, reward_models
        self._worker: Future[Worker] = Future()
        torch.set_num_threads(self._config.rollout.threads)

    @ray.method
    async def start(self, model_path: str) -> int:
        """Load tokenizer, task and reward; start the engine with the newest version. Returns that version."""
        await asyncio.to_thread(store.bring_model, self._config, model_path)
        worker = await self._start_worker(
            self._config, self._name, self._queue, self._reward_models, model_path, self._place
        )
        process.freeze_gc()
        self._worker.set_result(worker)
        return worker.version

    @ray.method
    async def run(self) -> None:
        await (await self._ready_worker()).run()

    @ray.method
    async def follow(self) -> None:
        await (await self._ready_worker()).follow()

    @ray.method
    async def evaluate(self, first: int, step: int, min_version: int) -> bytes:
        return encode(await (await self._ready_worker()).evaluate(first, step, min_version))

    @ray.method
    async def report(self) -> bytes:
        return encode((await self._ready_worker()).report())

    async def _ready_worker(self) -> "Worker":
        return await asyncio.wrap_future(self._worker)
