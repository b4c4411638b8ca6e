"""The places at which a running completion hands over what is sampled so far, and goes on. Pure.

A segment whose oldest token is `age` versions old has `max_age` - `age` versions left. If many became due at once, the
learner could not train on them in time. So at every swap as many are cut as a batch has room for, the oldest first:

    of the completions whose segment is of an age a or more, at most (max_age - a) * share go on without a cut
"""

from collections.abc import Sequence


def due(ages: Sequence[int], max_age: int, share: float) -> list[int]:
    """The places in `ages` of the segments to be cut, with the ages that they have under the new version."""
    oldest_first = sorted(range(len(ages)), key=lambda place: -ages[place])
    cut: list[int] = []
    for age in range(max_age, 0, -1):
        going_on = [place for place in oldest_first if ages[place] >= age and place not in cut]
        cut += going_on[: max(0, len(going_on) - int((max_age - age) * share))]
    return cut
