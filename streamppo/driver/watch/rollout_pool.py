"""The rollout actors of a run and their lives.

hired -> loading -> at work -> gone    dead, silent, or no longer wanted

An actor that is gone is never asked again: what it was sampling goes back to the queue, which ignores everything that
still comes from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING

from streamppo.driver.ray.cluster import actor_id, kill
from streamppo.driver.watch.watch import RunStage, WatchedCalls
from streamppo.errors import RunError
from streamppo.queue.actor import QueueActor
from streamppo.rollout.actor import RolloutActor

if TYPE_CHECKING:
    from ray.actor import ActorProxy


@dataclass(slots=True, eq=False)
class RolloutHandle:
    """A rollout actor, the name under which it samples, and its place (placement.py); `at_work` once it has loaded."""

    name: str
    place: int
    actor: "ActorProxy[RolloutActor]"
    at_work: bool = False

    @property
    def actor_id(self) -> str:
        """Ray's name for the actor."""
        return actor_id(self.actor)


class RolloutPool:
    """The rollout actors, the oldest first, in `seats`.

    `create` makes the actor of a name in the first free place; `note` writes a restart down, and whose. No name comes
    twice: the queue ignores for ever an actor that has left. A driver that continues a run has another queue, of which
    the actors of the queue before know nothing.
    """

    def __init__(
        self,
        create: "Callable[[str, int], ActorProxy[RolloutActor]]",
        queue: "ActorProxy[QueueActor]",
        calls: WatchedCalls,
        note: Callable[[RunStage, str, str], None],
        *,
        model_path: str,
    ) -> None:
        self._create = create
        self._queue = queue
        self._calls = calls
        self._note = note
        self._model_path = model_path
        self._names = (f"rollout-{number}" for number in count())
        self.seats: list[RolloutHandle] = []
        self.generating = False

    # --- coming and going ------------------------------------------------------------------------------------

    def resize(self, wanted: int) -> None:
        """Hire, or dismiss the newest, until there are `wanted` actors."""
        for seat in self.seats[wanted:]:
            self._dismiss(seat)
        while len(self.seats) < wanted:
            self._create_actor()

    def generate(self) -> None:
        """Start every actor, and from here on every new one: the learner has pushed weights."""
        if not self.generating:
            self.generating = True
            for seat in self.seats:
                self._start(seat)

    def replace(self, lost_id: str | None, reason: str) -> None:
        """Hire another actor in the place of the one that Ray calls `lost_id`, unless it has left already."""
        if seat := next((seat for seat in self.seats if seat.actor_id == lost_id), None):
            self._replace(seat, reason)

    def replace_silent(self, name: str, reason: str) -> None:
        """Hire another actor in the place of the one that samples under `name`, unless it has left already."""
        if seat := next((seat for seat in self.seats if seat.name == name), None):
            self._replace(seat, reason)

    def _replace(self, seat: RolloutHandle, reason: str) -> None:
        self._note(RunStage.ROLLOUT, f"{seat.name}: {reason}", f"{RunStage.ROLLOUT} {seat.place}")
        self._dismiss(seat)
        self._create_actor()

    def _create_actor(self) -> None:
        taken = {seat.place for seat in self.seats}
        name, place = next(self._names), next(place for place in count() if place not in taken)
        self.seats.append(RolloutHandle(name, place, self._create(name, place)))
        if self.generating:
            self._start(self.seats[-1])

    def _start(self, seat: RolloutHandle) -> None:
        """Let an actor load, and then generate for ever."""

        def run(version: int) -> None:
            seat.at_work = True
            self._calls.reset_stall()
            self._calls.watch(seat.actor.run.remote(), RunStage.ROLLOUT, stopped, name=seat.name)

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
        """The actors that have loaded, and answer at once."""
        return [seat for seat in self.seats if seat.at_work]

    def answering(self) -> list[RolloutHandle]:
        """The actors to ask for an evaluation: those at work, or all while none is."""
        return self.at_work() or self.seats

    def loading(self) -> list[str]:
        """The names of the actors that have not loaded yet."""
        return [seat.name for seat in self.seats if not seat.at_work]
