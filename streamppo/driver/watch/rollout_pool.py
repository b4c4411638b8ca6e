"""A run's actors with engines: those that sample, or those that only evaluate.

created -> loading -> at work -> removed    because it is dead, silent, or no longer wanted

A removed actor gets no more calls. The queue takes back the actor's unfinished samples and ignores its later messages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Literal, TypeAlias

from ray import ObjectRef
from ray.actor import ActorProxy

from streamppo.driver.ray.cluster import actor_id, kill
from streamppo.driver.watch.watch import RunStage, WatchedCalls
from streamppo.errors import RunError
from streamppo.queue.actor import QueueActor
from streamppo.rollout.actor import RolloutActor
from streamppo.types import EvaluationReport, decode

Kind: TypeAlias = Literal["rollout", "evaluation"]
"""The beginning of an actor's name. Actors that only evaluate follow the versions and request no tickets."""
PARTS = 32
"""An evaluation has at least this number of parts, if it has as many prompts. Each answer resets the stall timer."""


@dataclass(slots=True, eq=False)
class RolloutHandle:
    """An actor, its name, and its number in the placement plan (placement.py).

    `at_work` is true once it has loaded. `is_starting` is true while its engine restarts.
    """

    name: str
    place: int
    actor: "ActorProxy[RolloutActor]"
    at_work: bool = False
    is_starting: bool = False

    @property
    def actor_id(self) -> str:
        return actor_id(self.actor)


class RolloutPool:
    """The actors of one kind in `handles`, the oldest first.

    `create(name, place)` creates an actor in the first free place. `note` records a restart. Names are not reused,
    because the queue ignores a removed actor permanently.
    """

    def __init__(
        self,
        create: "Callable[[str, int], ActorProxy[RolloutActor]]",
        queue: "ActorProxy[QueueActor]",
        calls: WatchedCalls,
        note: Callable[[RunStage, str, str], None],
        model_path: str,
        *,
        kind: Kind = "rollout",
    ) -> None:
        self._create = create
        self._queue = queue
        self._calls = calls
        self._note = note
        self._model_path = model_path
        self._kind: Kind = kind
        self._names = (f"{kind}-{number}" for number in count())
        self.handles: list[RolloutHandle] = []
        self.generating = False

    def resize(self, wanted: int) -> None:
        for handle in self.handles[wanted:]:
            self._dismiss(handle)
        while len(self.handles) < wanted:
            self._create_actor()

    def generate(self) -> None:
        """Start all actors, and from now on each new actor. The learner must have pushed weights."""
        if not self.generating:
            self.generating = True
            for handle in self.handles:
                self._start(handle)

    def replace(self, lost: str | None, reason: str) -> None:
        """Replace the actor whose name or Ray's id is `lost`, unless it was removed already."""
        for handle in [handle for handle in self.handles if lost in (handle.name, handle.actor_id)]:
            self._note(RunStage.ROLLOUT, f"{handle.name}: {reason}", f"{self._kind} {handle.place}")
            self._dismiss(handle)
            self._create_actor()

    def _create_actor(self) -> None:
        occupied = {handle.place for handle in self.handles}
        name, place = next(self._names), next(place for place in count() if place not in occupied)
        self.handles.append(RolloutHandle(name, place, self._create(name, place)))
        if self.generating:
            self._start(self.handles[-1])

    def _start(self, handle: RolloutHandle) -> None:
        def run(version: int) -> None:
            handle.at_work = True
            self._calls.reset_stall()
            work = handle.actor.run.remote() if self._kind == "rollout" else handle.actor.follow.remote()
            self._calls.watch(work, RunStage.ROLLOUT, stopped, name=handle.name)

        def stopped(_: None) -> None:
            raise RunError(f"{handle.name} stopped generating")

        self._calls.watch(handle.actor.start.remote(self._model_path), RunStage.ROLLOUT, run, name=handle.name)

    def _dismiss(self, handle: RolloutHandle) -> None:
        self.handles.remove(handle)
        self._calls.forget(RunStage.ROLLOUT, handle.name)
        kill(handle.actor)
        self._calls.watch_all([self._queue.lost.remote(handle.name)], RunStage.QUEUE)

    def at_work(self) -> list[RolloutHandle]:
        return [handle for handle in self.handles if handle.at_work]

    def loading(self) -> list[str]:
        return [handle.name for handle in self.handles if not handle.at_work]

    def evaluate(self, prompts: int, min_version: int, on_reports: Callable[[list[EvaluationReport]], None]) -> None:
        """Request greedy answers to held-out prompts by engines at `min_version` or later, for `on_reports`.

        The actors share min(`PARTS`, prompts) parts, or one part each if there are more actors. If an actor is lost,
        another actor gets its parts.
        """
        reports: list[EvaluationReport] = []
        parts = max(len(self._answering()), min(PARTS, prompts))

        def collect(answer: bytes) -> None:
            reports.append(decode(answer, EvaluationReport))
            self._calls.reset_stall()
            if len(reports) == parts:
                on_reports(reports)

        def request(part: int) -> "ObjectRef[bytes]":
            actors = self._answering()
            return actors[part % len(actors)].actor.evaluate.remote(part, parts, min_version)

        for part in range(parts):
            self._calls.watch(request(part), RunStage.EVALUATION, collect, repeat=lambda part=part: request(part))

    def _answering(self) -> list[RolloutHandle]:
        return self.at_work() or self.handles
