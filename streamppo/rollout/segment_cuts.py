"""Decides where running completions are cut into segments, so that each can be trained on in time. Pure.

A segment's age is the engine's version minus the version of its oldest token. A segment of age `max_age` is due. Many
segments due at once would not fit into one batch. So every swap cuts about as many segments as a batch has room for,
the oldest first. `share` is the number of segments in a batch divided by the number of actors:

    completions under way                                   at most max_age * share
    uncut segments of an age of a or more, for each a       at most (max_age - a) * share
    segments of an age of `aim` (the wanted lag) or more    cut, up to `share` cuts in all

While the first bound holds, the second causes at most `share` cuts at a swap.

Example: max_age 2, share 1. Of two segments of age 1, one is cut, because at most (2 - 1) * 1 may stay uncut.

A completion that waits for its reward or environment may get no more tokens, and its reward must be on a token. So a
cut leaves it the tokens of its newest version. The queue delays an update for which these tokens would be too old.
"""

from collections.abc import Iterable, Sequence

from streamppo.rollout.engine import Cuts
from streamppo.types import Ints


def segments_to_cut(version: int, running: Sequence[tuple[Cuts, int]]) -> list[int]:
    """Return the indices of the segments to cut before a swap to `version`; `running` has their oldest versions."""
    if not running:
        return []
    cuts, _ = running[0]
    return due([version - oldest for _, oldest in running], cuts.max_age, cuts.share, cuts.aim())


def max_in_flight(max_age: int, share: float) -> int:
    """Return how many completions an actor may have under way, so that a batch has room for their cuts."""
    return max(1, int(max_age * share))


def due(ages: Sequence[int], max_age: int, share: float, aim: int = 0) -> list[int]:
    """Return the indices of the segments to cut; `ages` are the ages of all segments at the new version."""
    oldest_first = sorted(range(len(ages)), key=lambda index: -ages[index])
    cut: list[int] = []
    for age in range(max_age, 0, -1):
        uncut = [index for index in oldest_first if ages[index] >= age and index not in cut]
        cut += uncut[: max(0, len(uncut) - int((max_age - age) * share))]
    if aim:
        at_aim = [index for index in oldest_first if ages[index] >= aim and index not in cut]
        cut += at_aim[: max(0, int(share) - len(cut))]
    return cut


def newest_version_start(versions: Ints) -> int:
    """Return the index of the first token of the newest version; `versions` [T] must not decrease."""
    return int(versions.searchsorted(versions[-1]))


def cut_for(version: int, oldest_versions: Iterable[int], flow_lag: int) -> int:
    """Return the newest version for which an engine at `version` has cut all due segments.

    `oldest_versions` has, for each waiting completion, the oldest version of the tokens that it keeps. When all
    segments due at version v are cut, every uncut token has version v - `flow_lag` + 1 or a newer one.
    """
    return min([version, *(oldest_kept + flow_lag - 1 for oldest_kept in oldest_versions)])
