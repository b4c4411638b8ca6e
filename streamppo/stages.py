"""The stages as the driver holds them: started in order, watched all the time, stopped together.

starting -> running -> stopped        one way; an error or a signal in either of the first two leads to the last
"""

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError, RayTaskError

from streamppo.config import Cluster, Config
from streamppo.errors import RunError, StreamppoError
from streamppo.interrupts import Interrupts
from streamppo.learner.group import LearnerGroup
from streamppo.replay.actor import ReplayActor
from streamppo.rollout.actor import RolloutActor
from streamppo.types import EngineReport, EvaluationReport, QueueReport, decode

TICK_S = 0.5
"""How often the driver looks up while it waits."""
BUILTIN = "builtin:tiny"
MAILBOX_CALLS = 10_000
"""Calls that may wait inside the replay actor at one time; more than all actors ever make."""

OnDone = Callable[[Any], None]


class Stages:
    """Queue, learner and rollout actors of one run. As a context manager it leaves no process behind."""

    queue: Any
    learner: LearnerGroup
    rollouts: list[Any]

    def __init__(self, config: Config, folder: Path, interrupts: Interrupts) -> None:
        self.config = config
        self.folder = folder
        self._interrupts = interrupts
        self._watched: dict[Any, tuple[str, OnDone]] = {}
        self._progress = time.monotonic()
        self._actors: list[Any] = []

    # --- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Stages":
        _init_ray(self.config)
        # Ray has installed a handler of its own.
        self._interrupts.catch()
        return self

    def start(self, resume_from: Path | None, version: int) -> None:
        """Create every actor at once, so that they import side by side; then model, weights, engines, flow."""
        config, encoded = self.config, msgspec.msgpack.encode(self.config)
        replay: Any = ray.remote(ReplayActor).options(name="replay", num_cpus=0, max_concurrency=MAILBOX_CALLS)
        self.queue = replay.remote(encoded, version)
        self.learner = LearnerGroup(config, encoded, self.queue)
        rollout: Any = ray.remote(RolloutActor)
        self.rollouts = [
            rollout.options(
                name=f"rollout-{number}",
                num_cpus=config.rollout.threads,
                num_gpus=config.rollout.gpus,
                max_concurrency=MAILBOX_CALLS,
            ).remote(encoded, f"rollout-{number}", self.queue)
            for number in range(config.rollout.actors)
        ]
        self._actors = [self.queue, *self.learner.ranks, *self.rollouts]
        path = config.model.path
        if path == BUILTIN:
            path = str(self.folder / "model")
            self.wait(self.learner.make_model(path), "making builtin:tiny")
        resumed = str(resume_from) if resume_from else None
        starting = [actor.start.remote(path) for actor in self.rollouts]
        self.wait([*self.learner.setup(self.learner.rendezvous(), path, resumed), *starting], "loading the model")

    def generate(self) -> None:
        """Let every rollout actor generate for ever."""
        for number, actor in enumerate(self.rollouts):
            name = f"rollout-{number}"
            self._watched[actor.run.remote()] = (name, _never(name))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for actor in self._actors:
            ray.kill(actor)
        ray.shutdown()

    # --- waiting ---------------------------------------------------------------------------------------------

    def wait(self, refs: Sequence[Any], doing: str) -> list[Any]:
        """The values of `refs`; meanwhile every watched call is watched.

        Raises `RunError` when a stage dies, when nothing progresses for `watchdog.stall_s`, or after a signal.
        """
        pending = list(refs)
        while pending:
            # A watched call may be the very one that is waited for; Ray wants each of them once.
            ready, _ = ray.wait(list({*pending, *self._watched}), num_returns=1, timeout=TICK_S)
            for ref in ready:
                self._settle(ref, doing)
            pending = [ref for ref in pending if ref not in ready]
            self._interrupts.check()
            self._check_stall(doing)
        self._progress = time.monotonic()
        return ray.get(list(refs))

    def watch(self, ref: Any, name: str, done: OnDone) -> None:
        """Call `done` with the value of `ref` during some later `wait`; an error in it ends the run."""
        self._watched[ref] = (name, done)

    def drain(self, name: str) -> None:
        """Wait until nothing called `name` is being watched any more."""
        while refs := [ref for ref, (watched, _) in self._watched.items() if watched == name]:
            self.wait(refs, name)

    def _settle(self, ref: Any, doing: str) -> None:
        name, done = self._watched.pop(ref, (doing, _nothing))
        try:
            value = ray.get(ref)
        except RayError as error:
            raise RunError(f"{name}: {describe(error)}") from error
        done(value)

    def _check_stall(self, doing: str) -> None:
        stall_s = self.config.watchdog.stall_s
        if time.monotonic() - self._progress < stall_s:
            return
        try:
            queue = ray.get(self.queue.waiting_for.remote(), timeout=TICK_S)
        except RayError as error:
            queue = f"gives no answer ({describe(error)})"
        raise RunError(f"nothing has progressed for {stall_s:g} s: the driver waits for {doing}; the queue {queue}")

    # --- asking ----------------------------------------------------------------------------------------------

    def evaluate(self, min_version: int, done: Callable[[list[EvaluationReport]], None]) -> None:
        """Ask all rollout actors for a share of the held-out prompts; `done` gets the parts when all are there."""
        parts: list[EvaluationReport] = []

        def collect(answer: bytes) -> None:
            parts.append(decode(answer, EvaluationReport))
            if len(parts) == len(self.rollouts):
                done(parts)

        for number, actor in enumerate(self.rollouts):
            ref = actor.evaluate.remote(number, len(self.rollouts), min_version)
            self.watch(ref, "evaluation", collect)

    def reports(self) -> tuple[QueueReport, list[EngineReport]]:
        """What queue and engines have counted."""
        answers = self.wait([self.queue.report.remote(), *(r.report.remote() for r in self.rollouts)], "reports")
        return decode(answers[0], QueueReport), [decode(answer, EngineReport) for answer in answers[1:]]


def _init_ray(config: Config) -> None:
    cluster: Cluster = config.cluster
    # A reward module that stands beside the user's config is importable in every worker.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    if cluster.address != "local":
        ray.init(address=cluster.address, log_to_driver=True, logging_level=logging.ERROR)
        return
    learner, rollout = config.learner, config.rollout
    wanted = learner.ranks * learner.threads + rollout.actors * rollout.threads
    ray.init(
        address="local",
        num_cpus=cluster.cpus or wanted,
        include_dashboard=False,
        object_store_memory=cluster.object_store_mib * 2**20,
        logging_level=logging.ERROR,
    )


def describe(error: BaseException) -> str:
    """The root of a chain of remote errors and exception groups, in one line."""
    while True:
        if isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            break
    lines = str(error).strip().splitlines()
    text = lines[0] if lines else ""
    return text if isinstance(error, StreamppoError) else f"{type(error).__name__}: {text}"


def _never(name: str) -> OnDone:
    def done(value: Any) -> None:
        raise RunError(f"{name} stopped generating")

    return done


def _nothing(value: Any) -> None:
    pass
