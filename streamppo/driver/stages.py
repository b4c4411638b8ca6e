"""The stages as the driver holds them: started in order, watched all the time, replaced when they die.

starting -> running -> stopped        one way; an error or a signal in either of the first two leads to the last

a rollout actor dies, or is silent    another takes its place under another name; what it was sampling is sampled again
another number of them is wanted      some come, or the newest go in the same way; no restart
the queue dies                        Ray starts it again from its journal and repeats the calls that were under way
a reward model dies                   Ray starts it again; the rollout actors' calls are retryable failures
a learner rank dies                   LearnerLost: the driver starts the group again from the last checkpoint
too many of these in a short time     RunError
"""

import itertools
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Timer
from types import TracebackType
from typing import Any, NamedTuple

import msgspec
import ray
from ray.exceptions import RayActorError, RayError

from streamppo.config import file as configfile
from streamppo.config.sections import BUILTIN, Config, model_path
from streamppo.driver import lock as running
from streamppo.driver.cluster import death, describe, init_ray
from streamppo.driver.crew import Crew, Seat
from streamppo.driver.interrupts import Interrupts
from streamppo.driver.placement import Placement, refuse_impossible
from streamppo.errors import ConfigError, LearnerLost, RunError
from streamppo.learner.group import LearnerGroup
from streamppo.queue.actor import QueueActor
from streamppo.rollout.actor import RolloutActor
from streamppo.tasks.rewards import reward_model as model
from streamppo.telemetry.record import Record
from streamppo.types import EngineReport, EvaluationReport, QueueReport, UpdateReport, decode

TICK_S = 0.5
"""How often the driver looks up while it waits."""
CLOSING_S = 10.0
"""How long Ray may take to end its processes."""
MAILBOX_CALLS = 10_000
"""Calls that may wait inside the replay actor at one time; more than all actors ever make."""
PARTS = 32
"""In so many parts, if there are as many prompts, an evaluation is asked for: each that is answered is progress."""

OnDone = Callable[[Any], None]


class Watched(NamedTuple):
    """A call that runs beside the driver. `again` makes it once more where its rollout actor died."""

    name: str
    done: OnDone
    again: Callable[[], Any] | None = None


class Stages:
    """Queue, learner and rollout actors of one run. As a context manager it leaves no process behind."""

    queue: Any
    learner: LearnerGroup

    def __init__(self, config: Config, folder: Path, record: Record, interrupts: Interrupts) -> None:
        self.config = config
        self.folder = folder
        self._record = record
        self._interrupts = interrupts
        self._epochs = itertools.count()
        self._recent: deque[float] = deque()
        self._crew = Crew(self._rollout)
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
        replay: Any = ray.remote(QueueActor)
        options = {"max_concurrency": MAILBOX_CALLS, "max_restarts": -1, "max_task_retries": -1}
        self.queue = replay.options(name="replay", num_cpus=0, **options).remote(
            self._encoded, str(self.folder), self._model_path
        )
        self._placement = Placement(self.config)
        self._reward_models = model.create(self.config.reward, self._placement.model)
        for _ in range(self.config.rollout.actors):
            self._crew.hire()
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
            for seat in self._crew.seats:
                self._generate(seat)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A Ray that hangs keeps no run from ending: its processes die with this one.
        last = Timer(CLOSING_S, self._end_without_ray, [error])
        last.daemon = True
        last.start()
        ray.shutdown()
        last.cancel()

    def _end_without_ray(self, error: BaseException | None) -> None:
        self._record.say(
            f"Ray has not ended within {CLOSING_S:g} s; ending without it" + (f": {error}" if error else "")
        )
        os._exit(1)

    def _group(self) -> LearnerGroup:
        return LearnerGroup(self.config, self._encoded, self.queue, self._placement.rank, next(self._epochs))

    def _rollout(self, name: str, place: int) -> Any:
        rollout: Any = ray.remote(RolloutActor)
        options = self._placement.actor(place)
        return rollout.options(name=name, max_concurrency=MAILBOX_CALLS, **options).remote(
            self._encoded, name, self.queue, self._reward_models
        )

    def _generate(self, seat: Seat) -> None:
        """Let an actor start, and then generate for ever."""

        def run(_: Any) -> None:
            seat.at_work = True
            self._progress = time.monotonic()
            self.watch(seat.actor.run.remote(), seat.name, _never(seat.name))

        self.watch(seat.actor.start.remote(self._model_path), seat.name, run)

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
        self._check_scale()
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
            if died := death(together):
                self._dead(watched.name, died)
            raise RunError(f"{watched.name}: {describe(error)}") from error
        watched.done(value)

    def _check_stall(self, doing: str) -> None:
        stall_s = self.config.watchdog.stall_s
        if self._flowing and not self._crew.at_work():
            # Engines start, which have a bound and a reason of their own.
            stall_s += self.config.rollout.engine.start_s
        if time.monotonic() - self._progress < stall_s:
            return
        try:
            queue = ray.get(self.queue.waiting_for.remote(), timeout=TICK_S)
        except RayError as error:
            queue = f"gives no answer ({describe(error)})"
        starting = ", ".join(seat.name for seat in self._crew.seats if not seat.at_work) or "none"
        raise RunError(
            f"nothing has progressed for {stall_s:g} s: the driver waits for {doing}; the queue {queue}; "
            f"rollout actors that have not started: {starting}{self._placement.waiting()}"
        )

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
        if (seat := self._crew.find(actor_id)) is None:
            return
        self.note("rollout", f"{seat.name}: {reason}")
        self._dismiss(seat)
        another = self._crew.hire()
        if self._flowing:
            self._generate(another)

    def _dismiss(self, seat: Seat) -> None:
        """What an actor was sampling goes back to the queue, which ignores whatever still comes from there."""
        self._crew.leave(seat)
        self._watched = {ref: watched for ref, watched in self._watched.items() if watched.name != seat.name}
        ray.kill(seat.actor)
        self.watch(self.queue.lost.remote(seat.name), "replay", _nothing)

    def _check_scale(self) -> None:
        """Have as many rollout actors as somebody asks for, if a run may have as many."""
        if not self._flowing:
            return
        try:
            if (wanted := running.take(self.folder)) is None:
                return
            changed = configfile.change(self.config, [f"rollout.actors={wanted}"])
            refuse_impossible(changed)
        except (ConfigError, RunError) as error:
            self._record.say(f"rollout actors: {len(self._crew.seats)} stay: {error}")
        else:
            self._scale(changed)
        running.done(self.folder)

    def _scale(self, changed: Config) -> None:
        """Have as many rollout actors as `changed` says; a resumed run has as many too."""
        wanted = changed.rollout.actors
        self._record.say(f"rollout actors: {wanted} wanted, {len(self._crew.seats)} there")
        configfile.save(changed, self.folder)
        self.config = changed
        for seat in self._crew.seats[wanted:]:
            self._dismiss(seat)
        while len(self._crew.seats) < wanted:
            self._generate(self._crew.hire())

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
        names = {seat.name: seat.actor_id for seat in self._crew.at_work()}

        def heard(silent: list[str]) -> None:
            for name in silent:
                self._replace(names[name], f"silent for more than {limit_s:g} s")

        self.watch(self.queue.silent.remote(list(names), limit_s), "replay", heard)

    def note(self, stage: str, reason: str) -> None:
        """Write a restart down. Raises `RunError` instead if there were too many of late."""
        watchdog, present = self.config.watchdog, time.monotonic()
        self._recent.append(present)
        while present - self._recent[0] > watchdog.restarts_s:
            self._recent.popleft()
        if len(self._recent) > watchdog.max_restarts:
            raise RunError(f"{len(self._recent)} restarts within {watchdog.restarts_s:g} s; the last reason: {reason}")
        self._record.restart(stage, reason)
        self._progress = present

    # --- asking ----------------------------------------------------------------------------------------------

    def evaluate(self, min_version: int, done: Callable[[list[EvaluationReport]], None]) -> None:
        """Ask the rollout actors for the held-out prompts, in turns; `done` gets the parts when all are there.

        One that starts while others are at work is not asked. The share of one that leaves is asked of another.
        """
        parts: list[EvaluationReport] = []
        count = max(len(self._crew.at_work() or self._crew.seats), min(PARTS, self.config.evaluation.prompts))

        def collect(answer: bytes) -> None:
            parts.append(decode(answer, EvaluationReport))
            self._progress = time.monotonic()
            if len(parts) == count:
                done(parts)

        def ask(part: int) -> Any:
            return self._crew.share(part).actor.evaluate.remote(part, count, min_version)

        for part in range(count):
            self.watch(ask(part), "evaluation", collect, lambda part=part: ask(part))

    def reports(self) -> tuple[QueueReport, list[EngineReport]]:
        """What the queue and those engines have counted that are at work at present."""
        engines: list[EngineReport] = []

        def collect(answer: bytes) -> None:
            engines.append(decode(answer, EngineReport))

        for seat in self._crew.at_work():
            self.watch(seat.actor.report.remote(), "report", collect)
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
            self._record.say(f"no last checkpoint: {describe(error)}")
            return
        if late:
            self._record.say("no checkpoint in time; the journal and the archive have everything since the last one")

    def finished(self, updates: Sequence[list[Any]]) -> list[UpdateReport]:
        """The reports of those of `updates` that were made before the learner stopped."""
        ready, _ = ray.wait([refs[0] for refs in updates], num_returns=len(updates), timeout=0)
        try:
            reports = [decode(answer, UpdateReport) for answer in ray.get(ready) if answer]
        except RayError as error:
            self._record.say(f"the last updates were not made: {describe(error)}")
            return []
        return sorted(reports, key=lambda report: report.version)


def _never(name: str) -> OnDone:
    def done(value: Any) -> None:
        raise RunError(f"{name} stopped generating")

    return done


def _nothing(value: Any) -> None:
    pass
