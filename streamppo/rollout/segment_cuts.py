"""The places at which a completion that has not ended hands over what is sampled so far. Pure.

A segment whose oldest token is `age` versions old has `max_age` - `age` versions left. If many became due at once, the
learner could not train on them in time. So at every swap as many are cut as a batch has room for, the oldest first:

    under way                                                          at most max_age * share
    of those whose segment is of an age a or more, without a cut       at most (max_age - a) * share
    of those of an age `aim` or more, which is the lag that is wanted  as many as then still fit into `share`

The first line makes the second cost no more than `share` cuts at a swap. An actor that had got the tickets of others
would cut more than a batch has room for at every swap, until tokens grow too old.

A completion that waits for its reward, or for an environment, may have no token to come, and the reward needs one to
stand on. So it keeps its tokens of the newest version, and the queue waits for them before they are too old.
"""

from collections.abc import Iterable, Sequence

from streamppo.rollout.engine import Cuts
from streamppo.types import Ints


def segments_to_cut(version: int, running: Sequence[tuple[Cuts, int]]) -> list[int]:
    """The places in `running` of those to be cut before a swap to `version`; each with its segment's oldest version."""
    if not running:
        return []
    one, _ = running[0]
    return due([version - oldest for _, oldest in running], one.max_age, one.share, one.aim())


def most_under_way(max_age: int, share: float) -> int:
    """The completions that an actor may have under way, so that a batch has room for all that it has to cut."""
    return max(1, int(max_age * share))


def due(ages: Sequence[int], max_age: int, share: float, aim: int = 0) -> list[int]:
    """The places in `ages` of the segments to be cut, with the ages that they have under the new version.

    Without an `aim` none is cut before it has to be.
    """
    oldest_first = sorted(range(len(ages)), key=lambda place: -ages[place])
    cut: list[int] = []
    for age in range(max_age, 0, -1):
        going_on = [place for place in oldest_first if ages[place] >= age and place not in cut]
        cut += going_on[: max(0, len(going_on) - int((max_age - age) * share))]
    if aim:
        wanted = [place for place in oldest_first if ages[place] >= aim and place not in cut]
        cut += wanted[: max(0, int(share) - len(cut))]
    return cut


def kept_from(versions: Ints) -> int:
    """The first of the tokens that a waiting completion keeps: `versions` [T] rise from token to token."""
    return int(versions.searchsorted(versions[-1]))


def cut_for(version: int, oldest: Iterable[int], flow_lag: int) -> int:
    """The newest version for which all is cut, of an engine at `version` that keeps tokens of these versions.

    Behind a cut for version v, tokens are of v - `flow_lag` + 1 or later.
    """
    return min([version, *(kept + flow_lag - 1 for kept in oldest)])
