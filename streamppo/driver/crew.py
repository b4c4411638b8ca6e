"""The rollout actors of a run: who is there, under which name, and who is asked.

hired -> at work -> gone      dead and replaced by another one, or no longer wanted
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any


@dataclass(slots=True, eq=False)
class Seat:
    """A rollout actor, the name under which it samples, and its place (placement.py); `at_work` once it has loaded."""

    name: str
    place: int
    actor: Any
    at_work: bool = False

    @property
    def actor_id(self) -> str:
        """Ray's name for the actor."""
        return self.actor._actor_id.hex()


class Crew:
    """`seats` are those who are there, the oldest first; `create` makes the actor of a name, in the first free place.

    No name comes twice: the queue ignores for ever whoever has left. A driver that goes on with a run has another
    queue, of which the actors of the one before know nothing.
    """

    def __init__(self, create: Callable[[str, int], Any]) -> None:
        self._create = create
        self._names = (f"rollout-{number}" for number in count())
        self.seats: list[Seat] = []

    def hire(self) -> Seat:
        """One more."""
        name = next(self._names)
        place = next(place for place in count() if place not in {seat.place for seat in self.seats})
        self.seats.append(Seat(name, place, self._create(name, place)))
        return self.seats[-1]

    def find(self, actor_id: str | None) -> Seat | None:
        """The one that Ray calls so, unless it has left."""
        return next((seat for seat in self.seats if seat.actor_id == actor_id), None)

    def leave(self, seat: Seat) -> None:
        """It is not there any more."""
        self.seats.remove(seat)

    def at_work(self) -> list[Seat]:
        """Those who answer at once."""
        return [seat for seat in self.seats if seat.at_work]

    def share(self, part: int) -> Seat:
        """Whom to ask for part number `part` of a question: somebody at work, or anybody while nobody is."""
        asked = self.at_work() or self.seats
        return asked[part % len(asked)]
