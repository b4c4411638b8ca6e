"""The take: which complete units make the next batch, and which units are too old. Pure; it changes nothing.

Without `queue.segments`, a batch consists of the P oldest ready units; a window of W units in the order of issue may
limit the choice. S is the lag that admission aims at, L is max_lag.

    mask, drop   all ready units, the oldest first: any number of units may overtake a slow one
    wait         W = 1: strict first in, first out
    windowed     W = (L - S) * P + 1: the window starts at the oldest held unit that is not ready and has W places in
                 the order of issue; units after the window wait until that unit is ready

"windowed" is torchtitan's rule for RL (its docs/windowed_fifo.md), after MiniMax (https://arxiv.org/abs/2605.26494).
Unit n opens for an engine of version n // P - S or later. Before unit n, all n older units and at most W - 1 younger
units are taken, so unit n is in batch (n + W - 1) // P at the latest. The age of its tokens is at most

    S + ceil((W - 1) / P) = L

So no token is too old, and no unit is sampled again because of its age. In return the learner waits for a slow unit:
with "wait" as soon as it is the oldest unit, with a window after W - 1 younger units have overtaken it.

S and W are derived from L. S is the greatest lag for which W - 1 is at least 3/10 of the (S + 1) * P held units, which
is MiniMax's share. L = 1 leaves room for either a flow lag or a window; the flow lag is chosen: S = 1, W = 1. Example:

    L       2        4         8         16
    S       1        2         5         12
    W - 1   P        2 P       3 P       4 P

With `queue.segments`, S = max(1, L - 1). Update u starts from version u.

    a cut       an engine that swaps to version v delivers every segment whose oldest token is of v - S or before, and
                some segments earlier, so that not too many are due together (rollout/segment_cuts.py)
    a place     each waiting segment takes one; the rest of its completion, which the cut has opened, takes another
    admission   as for whole completions, with S instead of L, and with the slowest actor's last cut as version
    the take    segments with the oldest tokens first; it waits for actors whose cuts could still be due

So every due segment finds room in a batch. Cuts by length open places too. Admission counts these places in advance:
for each completion in flight, as many as an ended completion had on average. The average is not a bound: if completions
have more cuts, tokens may become too old and are masked.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from streamppo.queue.rules.slot import Unit, all_younger, count_older
from streamppo.queue.rules.state import QueueSettings, QueueState


class ChosenUnits(NamedTuple):
    """A batch's units, oldest first (none if too few), its number of masked tokens, and units too old to train on."""

    units: Sequence[Unit]
    masked_tokens: int
    too_old: Sequence[Unit]


NONE = ChosenUnits((), 0, ())


def choose(settings: QueueSettings, state: QueueState, min_version: int) -> ChosenUnits:
    """Choose a batch that trains on tokens of `min_version` or later."""
    if settings.segments is None:
        return _choose_completions(settings, state, min_version)
    # Future segments have tokens of version last_cut - S + 1 or later, which may be too old for the next batch.
    if (last_cut := state.last_cut) is not None and max(0, last_cut - settings.flow_lag + 1) <= min_version:
        return NONE
    return _choose_segments(settings, state, min_version)


def _choose_completions(settings: QueueSettings, state: QueueState, min_version: int) -> ChosenUnits:
    count = settings.batch_units
    if state.ready_units < count:
        return NONE
    first = list(islice(_units_in_window(settings, state, ()), count))
    if len(first) == count and all_younger(first, min_version):
        return ChosenUnits(first, 0, ())
    units: list[Unit] = []
    too_old: list[Unit] = []
    masked_tokens = 0
    for unit in _units_in_window(settings, state, too_old):
        old_tokens = _num_old_tokens(settings, unit, min_version)
        if old_tokens is None:
            too_old.append(unit)
            continue
        units.append(unit)
        masked_tokens += old_tokens
        if len(units) == count:
            return ChosenUnits(units, masked_tokens, too_old)
    return ChosenUnits((), 0, too_old)


def _units_in_window(settings: QueueSettings, state: QueueState, too_old: Sequence[Unit]) -> Iterator[Unit]:
    """Iterate over the complete units that a batch may take, oldest first; the window may start in `too_old`."""
    window, oldest = settings.window, None
    for (number, _), unit in state.units.items():
        if window is not None and oldest is not None and number - oldest >= window * settings.unit_size:
            return
        if unit.missing == 0:
            yield unit
        if oldest is None and (unit.missing or (too_old and too_old[-1] is unit)):
            oldest = number


def _num_old_tokens(settings: QueueSettings, unit: Unit, min_version: int) -> int | None:
    ages = [count_older(trajectory, min_version) for trajectory in unit.trajectories]
    if settings.too_old == "mask":
        too_old = any(old == sampled for old, sampled in ages)
    else:
        too_old = any(old for old, _ in ages)
    return None if too_old else sum(old for old, _ in ages)


def _choose_segments(settings: QueueSettings, state: QueueState, min_version: int) -> ChosenUnits:
    young: list[tuple[int, tuple[int, int], int, Unit]] = []
    too_old: list[Unit] = []
    for unit in (unit for unit in state.units.values() if unit.missing == 0):
        (trajectory,) = unit.trajectories
        old, sampled = count_older(trajectory, min_version)
        if old == sampled:
            too_old.append(unit)
        else:
            young.append((trajectory.oldest_version, unit.slots[0].place, old, unit))
    first = sorted(young, key=lambda segment: segment[:2])[: settings.batch_size]
    if len(first) < settings.batch_size:
        return ChosenUnits((), 0, too_old)
    return ChosenUnits([unit for *_, unit in first], sum(old for _, _, old, _ in first), too_old)
