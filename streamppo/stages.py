"""The stages as the driver holds them: started in order, watched all the time, replaced when they die.

starting -> running -> stopped        one way; an error or a signal in either of the first two leads to the last

a rollout actor dies, or is silent    another takes its place under another name; what it was sampling is sampled again
the queue dies                        Ray starts it again from its journal and repeats the calls that were under way
a learner rank dies                   LearnerLost: the driver starts the group again from the last checkpoint
too many of these in a short time     RunError
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from streamppo.config import Cluster, Config
from streamppo.errors import LearnerLost, RunError, StreamppoError
from streamppo.interrupts import Interrupts
from streamppo.learner.group import LearnerGroup
from streamppo.replay.actor import ReplayActor
from streamppo.rollout.actor import RolloutActor
from streamppo.types import EngineReport, EvaluationReport, QueueReport, UpdateReport, decode

TICK_S = 0.5
"""How often the driver looks up while it waits."""
BLAME_S = 5.0
"""How long the other ranks of a group may take to show which of them died."""
BUILTIN = "builtin:tiny"
MAILBOX_CALLS = 10_000
"""Calls that may wait inside the replay actor at one time; more than all actors ever make."""

OnDone = Callable[[Any], None]


class Watched(NamedTuple):
    """A call that runs beside the driver. `again` makes it once more where its rollout actor died."""

    name: str
    done: OnDone
    again: Callable[[], Any] | None = None


class Seat(NamedTuple):
    """A rollout actor, and the name under which it samples: no two actors ever share one."""

    actor: Any
    name: str


class Stages:
    """Queue, learner and rollout actors of one run. As a context manager it leaves no process behind."""

    queue: Any
    learner: LearnerGroup

    def __init__(self, config: Config, folder: Path, say: Callable[[str], None], interrupts: Interrupts) -> None:
        self.config = config
        self.folder = folder
        self.say = say
        self._interrupts = interrupts
        self.restarts: Counter[str] = Counter(rollout=0, replay=0, learner=0)
        self._recent: deque[float] = deque()
        self._seats: list[Seat] = []
        self._started: set[str] = set()
        self._watched: dict[Any, Watched] = {}
        self._progress = self._asked = time.monotonic()
        self._encoded = msgspec.msgpack.encode(config)
        self._flowing = self._fresh = False
        self._model_path = model_path(config, folder)

    # --- life ------------------------------------------------------------------------------------------------

    def __enter__(self) -> "Stages":
        init_ray(self.config)
        # Ray has installed a handler of its own.
        self._interrupts.catch()
        return self

    def start(self, version: int) -> int:
        """Create every actor at once, so that they import side by side. The ranks will start from `version`.

        Returns the newest version of the run, up to which they have to redo updates.
        """
        replay: Any = ray.remote(ReplayActor)
        options = {"max_concurrency": MAILBOX_CALLS, "max_restarts": -1, "max_task_retries": -1}
        self.queue = replay.options(name="replay", num_cpus=0, **options).remote(
            self._encoded, str(self.folder), self._model_path
        )
        self._seats = [self._seat(f"rollout-{number}") for number in range(self.config.rollout.actors)]
        self.learner, self._fresh = self._group(), True
        (newest,) = self.wait([self.queue.begin.remote(version)], "opening the journal")
        self._follow_queue("")
        return newest

    def start_learner(self, checkpoint: Path | None) -> None:
        """Model, weights, and then the flow, by a group of ranks that starts from `checkpoint` and was never used."""
        if not self._fresh:
            self.learner.kill()
            self.learner = self._group()
            self._watched = {ref: watched for ref, watched in self._watched.items() if watched.name != "checkpoint"}
        self._fresh = False
        if self.config.model.path == BUILTIN:
            self.wait(self.learner.make_model(self._model_path), "making builtin:tiny")
        path = str(checkpoint) if checkpoint else None
        self.wait(self.learner.setup(self.learner.rendezvous(), self._model_path, path), "loading the model")
        if not self._flowing:
            self._flowing = True
            for number in range(len(self._seats)):
                self._generate(number)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ray.shutdown()

    def _group(self) -> LearnerGroup:
        return LearnerGroup(self.config, self._encoded, self.queue, self.restarts["learner"])

    def _seat(self, name: str) -> Seat:
        rollout: Any = ray.remote(RolloutActor)
        actor = rollout.options(
            name=name,
            num_cpus=self.config.rollout.threads,
            num_gpus=self.config.rollout.gpus,
            max_concurrency=MAILBOX_CALLS,
        ).remote(self._encoded, name, self.queue)
        return Seat(actor, name)

    def _generate(self, number: int) -> None:
        """Let the actor in seat `number` start, and then generate for ever."""
        seat = self._seats[number]

        def run(_: Any) -> None:
            self._started.add(seat.name)
            self.watch(seat.actor.run.remote(), seat.name, _never(seat.name), lambda: None)

        self.watch(seat.actor.start.remote(self._model_path), seat.name, run, lambda: None)

    # --- waiting ---------------------------------------------------------------------------------------------

    def wait(self, refs: Sequence[Any], doing: str) -> list[Any]:
        """The values of `refs`, calls to queue or learner; meanwhile every watched call is watched.

        Raises `LearnerLost` when a rank dies, and `RunError` when a stage fails, when nothing progresses for
        `watchdog.stall_s`, or after a signal.
        """
        pending = list(refs)
        while pending:
            ready = self._turn(doing, pending)
            pending = [ref for ref in pending if ref not in ready]
        self._progress = time.monotonic()
        return ray.get(list(refs))

    def watch(self, ref: Any, name: str, done: OnDone, again: Callable[[], Any] | None = None) -> None:
        """Call `done` with the value of `ref` during some later `wait`; an error in it ends the run."""
        self._watched[ref] = Watched(name, done, again)

    def watch_all(self, refs: Sequence[Any], name: str) -> None:
        """Watch calls whose values nobody needs."""
        for ref in refs:
            self.watch(ref, name, _nothing)

    def drain(self, name: str) -> None:
        """Wait until nothing called `name` is being watched any more."""
        while any(watched.name == name for watched in self._watched.values()):
            self._turn(name, [])
        self._progress = time.monotonic()

    def _turn(self, doing: str, pending: Sequence[Any]) -> list[Any]:
        """Settle what is ready of `pending` and of all that is watched; looks up at least every `TICK_S`."""
        # A watched call may be the very one that is waited for; Ray wants each of them once.
        ready, _ = ray.wait(list({*pending, *self._watched}), num_returns=1, timeout=TICK_S)
        for ref in ready:
            self._settle(ref, doing, pending)
        self._interrupts.check()
        self._check_silence()
        self._check_stall(doing)
        return ready

    def _settle(self, ref: Any, doing: str, together: Sequence[Any]) -> None:
        watched = self._watched.pop(ref, Watched(doing, _nothing))
        try:
            value = ray.get(ref)
        except RayActorError as error:
            self._dead(watched.name, error)
            if watched.again is not None and (ref := watched.again()) is not None:
                self._watched[ref] = watched
            return
        except RayError as error:
            if death := _death(together):
                self._dead(watched.name, death)
            raise RunError(f"{watched.name}: {describe(error)}") from error
        watched.done(value)

    def _check_stall(self, doing: str) -> None:
        stall_s = self.config.watchdog.stall_s
        if time.monotonic() - self._progress < stall_s:
            return
        try:
            queue = ray.get(self.queue.waiting_for.remote(), timeout=TICK_S)
        except RayError as error:
            queue = f"gives no answer ({describe(error)})"
        raise RunError(f"nothing has progressed for {stall_s:g} s: the driver waits for {doing}; the queue {queue}")

    # --- deaths ----------------------------------------------------------------------------------------------

    def _dead(self, name: str, error: RayActorError) -> None:
        """Replace a rollout actor. Raises `LearnerLost` for a rank, `RunError` for a queue that cannot be rebuilt."""
        if error.actor_id in {rank._actor_id.hex() for rank in self.learner.ranks}:
            raise LearnerLost(f"{name}: {describe(error)}") from error
        if error.actor_id == self.queue._actor_id.hex():
            raise RunError(f"replay: {describe(error)}") from error
        self._replace(error.actor_id, describe(error))

    def _replace(self, actor_id: str | None, reason: str) -> None:
        """Another rollout actor in the place of the one that is gone, unless that was done before."""
        for number, seat in enumerate(self._seats):
            if seat.actor._actor_id.hex() != actor_id:
                continue
            self.note("rollout", f"{seat.name}: {reason}")
            ray.kill(seat.actor)
            self.watch(self.queue.lost.remote(seat.name), "replay", _nothing)
            self._seats[number] = self._seat(f"rollout-{number}.{self.restarts['rollout']}")
            if self._flowing:
                self._generate(number)

    def _follow_queue(self, life: str) -> None:
        """Learn of every new process of the queue."""

        def lived(another: str) -> None:
            if life:
                self.note("replay", "the queue died and was rebuilt from its journal")
            self._follow_queue(another)

        self.watch(self.queue.another_life.remote(life), "replay", lived)

    def _check_silence(self) -> None:
        """Give up actors that Ray takes for living and that call nobody."""
        limit_s = self.config.watchdog.heartbeat_s
        if time.monotonic() - self._asked < limit_s / 4:
            return
        self._asked = time.monotonic()
        names = {seat.name: seat.actor._actor_id.hex() for seat in self._seats if seat.name in self._started}

        def heard(silent: list[str]) -> None:
            for name in silent:
                self._replace(names[name], f"silent for more than {limit_s:g} s")

        self.watch(self.queue.silent.remote(list(names), limit_s), "replay", heard)

    def note(self, stage: str, reason: str) -> None:
        """Count a restart. Raises `RunError` if there were too many of late."""
        watchdog, present = self.config.watchdog, time.monotonic()
        self.restarts[stage] += 1
        self._recent.append(present)
        while present - self._recent[0] > watchdog.restarts_s:
            self._recent.popleft()
        if len(self._recent) > watchdog.max_restarts:
            raise RunError(f"{len(self._recent)} restarts within {watchdog.restarts_s:g} s; the last reason: {reason}")
        self.say(f"{reason}; starting {stage} again")
        self._progress = present

    # --- asking ----------------------------------------------------------------------------------------------

    def evaluate(self, min_version: int, done: Callable[[list[EvaluationReport]], None]) -> None:
        """Ask all rollout actors for a share of the held-out prompts; `done` gets the parts when all are there."""
        parts: list[EvaluationReport] = []
        count = len(self._seats)

        def collect(answer: bytes) -> None:
            parts.append(decode(answer, EvaluationReport))
            if len(parts) == count:
                done(parts)

        def ask(number: int) -> Any:
            return self._seats[number].actor.evaluate.remote(number, count, min_version)

        for number in range(count):
            self.watch(ask(number), "evaluation", collect, lambda number=number: ask(number))

    def reports(self) -> tuple[QueueReport, list[EngineReport]]:
        """What queue and engines have counted; an actor that dies over the question counts from zero."""
        engines: list[EngineReport] = []

        def ask(number: int) -> Any:
            return self._seats[number].actor.report.remote()

        for number in range(len(self._seats)):
            collect = lambda answer: engines.append(decode(answer, EngineReport))  # noqa: E731
            self.watch(ask(number), "report", collect, lambda number=number: ask(number))
        self.drain("report")
        (queue,) = self.wait([self.queue.report.remote()], "reports")
        return decode(queue, QueueReport), sorted(engines, key=lambda engine: engine.actor)

    def save(self, checkpoints: str) -> None:
        """A last checkpoint of whatever version the learner has, if `watchdog.shutdown_s` is enough for it."""
        self.queue.stop.remote()
        refs = [*self.learner.save(checkpoints), *self.learner.settle()]
        ready, late = ray.wait(refs, num_returns=len(refs), timeout=self.config.watchdog.shutdown_s)
        try:
            ray.get(ready)
        except RayError as error:
            # Where one rank fails, the others may stand in a collective that never ends.
            self.say(f"no last checkpoint: {describe(error)}")
            return
        if late:
            self.say("no checkpoint in time; the journal and the archive have everything since the last one")

    def finished(self, updates: Sequence[list[Any]]) -> list[UpdateReport]:
        """The reports of those of `updates` that were made before the learner stopped."""
        ready, _ = ray.wait([refs[0] for refs in updates], num_returns=len(updates), timeout=0)
        try:
            reports = [decode(answer, UpdateReport) for answer in ray.get(ready) if answer]
        except RayError as error:
            self.say(f"the last updates were not made: {describe(error)}")
            return []
        return sorted(reports, key=lambda report: report.version)


def _death(refs: Sequence[Any]) -> RayActorError | None:
    """The death among the calls of one group that explains why another of them failed."""
    deadline = time.monotonic() + BLAME_S
    for ref in refs:
        try:
            ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except RayActorError as error:
            return error
        except RayError:
            continue
    return None


def model_path(config: Config, run: Path) -> str:
    """Where the run's first model and its tokenizer are."""
    return str(run / "model") if config.model.path == BUILTIN else config.model.path


def find_plugins() -> None:
    """A reward module that stands beside the user's config is importable in every process that is started."""
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))


def init_ray(config: Config) -> None:
    """Start Ray here, or join the cluster."""
    cluster: Cluster = config.cluster
    find_plugins()
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
