"""The actors of a run with engines, those that sample or those that only evaluate, and their states.

created -> loading -> at work -> gone    dead, silent, or no longer wanted

A gone actor gets no more calls. Its unfinished samples go back to the queue, which ignores all its later messages.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal, TypeAlias

from streamppo.driver.ray.cluster import actor_id, kill
from streamppo.driver.watch.watch import RunStage, WatchedCalls
from streamppo.errors import RunError
from streamppo.queue.actor import QueueActor
from streamppo.rollout.actor import RolloutActor

if TYPE_CHECKING:
    from ray.actor import ActorProxy

Kind: TypeAlias = Literal["rollout", "evaluation"]
"""What an actor's name begins with. Actors of an evaluation follow the versions and ask for no tickets."""


@dataclass(slots=True, eq=False)
class RolloutHandle:
    """A rollout actor, its name, and its number in the placement plan (placement.py); `at_work` once it has loaded."""

    name: str
    place: int
    actor: "ActorProxy[RolloutActor]"
    at_work: bool = False

    @property
    def actor_id(self) -> str:
        """Ray's id of the actor."""
        return actor_id(self.actor)


class RolloutPool:
    """The actors of one kind, the oldest first, in `seats`.

    `create(name, place)` makes an actor in the first free place; `note` records a restart. Names are never reused,
    because the queue ignores a gone actor for ever. After a resume the names start again: the queue is a new one, and
    earlier actors have no handle to it.
    """

    def __init__(
        self,
        create: "Callable[[str, int], ActorProxy[RolloutActor]]",
        queue: "ActorProxy[QueueActor]",
        calls: WatchedCalls,
        note: Callable[[RunStage, str, str], None],
        *,
        model_path: str,
        kind: Kind = "rollout",
    ) -> None:
        self._create = create
        self._queue = queue
        self._calls = calls
        self._note = note
        self._model_path = model_path
        self._kind: Kind = kind
        self._names = (f"{kind}-{number}" for number in count())
        self.seats: list[RolloutHandle] = []
        self.generating = False

    # --- coming and going ------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """Create actors, or dismiss the newest, until there are `wanted`."""
        for seat in self.seats[wanted:]:
            self._dismiss(seat)
        while len(self.seats) < wanted:
            self._create_actor()

    def generate(self) -> None:
        """Start every actor, and from now on every new one: the learner has pushed weights."""
        if not self.generating:
            self.generating = True
            for seat in self.seats:
                self._start(seat)

    def replace(self, lost_id: str | None, reason: str) -> None:
        """Replace the actor with Ray's id `lost_id`, unless it is gone already."""
        if seat := next((seat for seat in self.seats if seat.actor_id == lost_id), None):
            self._replace(seat, reason)

    def replace_silent(self, name: str, reason: str) -> None:
        """Replace the actor named `name`, unless it is gone already."""
        if seat := next((seat for seat in self.seats if seat.name == name), None):
            self._replace(seat, reason)

    def _replace(self, seat: RolloutHandle, reason: str) -> None:
        self._note(RunStage.ROLLOUT, f"{seat.name}: {reason}", f"{self._kind} {seat.place}")
        self._dismiss(seat)
        self._create_actor()

    def _create_actor(self) -> None:
        taken = {seat.place for seat in self.seats}
        name, place = next(self._names), next(place for place in count() if place not in taken)
        self.seats.append(RolloutHandle(name, place, self._create(name, place)))
        if self.generating:
            self._start(self.seats[-1])

    def _start(self, seat: RolloutHandle) -> None:
        """Let an actor load, and then generate, or follow the versions, until it is killed."""

        def run(version: int) -> None:
            seat.at_work = True
            self._calls.reset_stall()
            endless = seat.actor.run.remote() if self._kind == "rollout" else seat.actor.follow.remote()
            self._calls.watch(endless, RunStage.ROLLOUT, stopped, name=seat.name)

        def stopped(_: None) -> None:
            raise RunError(f"{seat.name} stopped generating")

        self._calls.watch(seat.actor.start.remote(self._model_path), RunStage.ROLLOUT, run, name=seat.name)

    def _dismiss(self, seat: RolloutHandle) -> None:
        self.seats.remove(seat)
        self._calls.forget(RunStage.ROLLOUT, seat.name)
        kill(seat.actor)
        self._calls.watch_all([self._queue.lost.remote(seat.name)], RunStage.QUEUE)

    # --- asking ----------------------------------------------------------------------------------------------

    def at_work(self) -> list[RolloutHandle]:
        """The loaded actors, which answer at once."""
        return [seat for seat in self.seats if seat.at_work]

    def answering(self) -> list[RolloutHandle]:
        """The actors for an evaluation: the ones at work, or all while none is."""
        return self.at_work() or self.seats

    def loading(self) -> list[str]:
        """The names of the actors that are still loading."""
        return [seat.name for seat in self.seats if not seat.at_work]
