"""The rules for segments: which of them make a batch, and how far engines may go ahead. Pure, as in rules.py.

Update u trains from version u. `S` is the lag that the flow aims at, `L` is max_lag; S = L - 1, if that is above 0.

    a cut       an engine that swaps to version v hands over every segment whose oldest token is of v - S or before, and
                others so early that not too many are due at once (rollout/segment_cuts.py)
    a place     a segment that waits has one, and so has the rest behind it, which its cut has opened
    admission   as for whole completions, with S in the place of L, and with the slowest actor's last cut as version
    the take    the segments with the oldest tokens come first; it waits for actors whose cuts could still be due

So those that are due find room in a batch. Cuts by length open places too, before they have to: each completion under
way is counted with as many of them as the average one has had. That is an average, and not a bound: where it errs,
tokens may grow too old, and are masked.
"""

from typing import NamedTuple

from streamppo.queue.rules.slot import Unit, count_older
from streamppo.queue.rules.state import QueueSettings, QueueState


class ChosenUnits(NamedTuple):
    """Units for a batch; how many of their tokens are too old, and the units that have no others."""

    units: list[Unit]
    masked_tokens: int
    given_up: list[Unit]


def last_cut(state: QueueState) -> int | None:
    """The version for which all actors that sample have cut and delivered; None if nobody samples."""
    return min((state.cut_for.get(actor, -1) for actor in state.issued), default=None)


def expected_cuts(settings: QueueSettings, state: QueueState) -> int:
    """The places that completions under way will open by cuts by length, if they are like those that have ended."""
    if settings.segments is None or not settings.segments.max_tokens:
        return 0
    cut, ended = state.counts["cut"], state.counts["stored"] - state.counts["cut"]
    return sum(state.issued.values()) * cut // max(1, ended)


def is_behind(settings: QueueSettings, state: QueueState, min_version: int) -> bool:
    """True if an actor may still sample behind tokens that would be too old for the batch after this one."""
    newest = last_cut(state)
    # Behind a cut for version v there are tokens of v - S + 1 and later ones.
    return newest is not None and max(0, newest - settings.flow_lag + 1) <= min_version


def choose(state: QueueState, min_version: int, count: int) -> ChosenUnits:
    """Choose `count` segments for a batch whose tokens are of `min_version` or later; fewer if there are no more."""
    young: list[tuple[int, tuple[int, int], int, Unit]] = []
    given_up: list[Unit] = []
    for unit in (unit for unit in state.units.values() if unit.missing == 0):
        (trajectory,) = unit.trajectories
        old, sampled = count_older(trajectory, min_version)
        if old == sampled:
            given_up.append(unit)
        else:
            young.append((trajectory.oldest_version, unit.slots[0].place, old, unit))
    first = sorted(young, key=lambda one: one[:2])[:count]
    return ChosenUnits([unit for *_, unit in first], sum(old for _, _, old, _ in first), given_up)
