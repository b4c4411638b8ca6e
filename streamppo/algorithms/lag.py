"""The lag that steers itself: the effective sample size of each lag decides how far engines may go ahead.

The older the policy that sampled, the further it is from the learner's, and the fewer of the tokens the weighted
gradient really rests on (`Divergence.ess_token`, measured before any truncation). VCPO takes ESS as the sign that a run
is about to collapse, and lowers the learning rate by it (https://arxiv.org/abs/2602.17616). Here the lag is lowered
first, and the learning rate where that is of no use, or not yet.

    after every update, of the buckets of lags up to `admitted` that have `LEAST` of the tokens:

    the lowest bucket with ESS < ess begins at lag f > 0     admitted = f - 1, and for `hold` updates older data come
    that is lag 0                                            admitted = 0, lr_share is halved: no lag is at fault
    none has, and lr_share < 1                               lr_share is doubled
    all have ESS >= (1 + ess) / 2, admitted is reached       as far as they reach, 1 more at least (`farther`)

    an update's share of the learning rate    lr_share; while older data may come, times the mean over its tokens of
                                              min(1, (admitted + 1) / (lag + 1))

The lag falls below all of the bucket that fails (buckets double in width), and rises with the evidence that the data at
its bound are good, to twice that at most: it never goes far beyond what was measured. With all ESS above (1 + ess) / 2
it rises to its bound wherever that is reached, and stays there.
"""

from collections.abc import Callable, Mapping
from math import inf, log, sqrt
from typing import NamedTuple

from streamppo.algorithms.diagnostics import LAG_BUCKETS, LAST_LAG_OF_BUCKET

LEAST = 0.01
"""The share of the tokens from which a bucket counts, and from which the admitted lag is reached."""
LEAST_RATE = 1 / 16
"""The smallest `lr_share`."""
FIRST_LAG_OF_BUCKET = (0, *(last + 1 for last in LAST_LAG_OF_BUCKET))


class AdmittedLag(NamedTuple):
    """The lag that is admitted, in versions; a share of the learning rate; updates for which older data may come."""

    admitted: int
    lr_share: float = 1.0
    hold: int = 0


def next_lag(
    lag: AdmittedLag, ess_by_bucket: Mapping[str, float], tokens_by_lag: Mapping[int, int], *, at_most: int, ess: float
) -> AdmittedLag:
    """The lag to admit after an update on a batch with these tokens; `ess_by_bucket` is by `LAG_BUCKETS`."""
    found = _bucket_ess(lag, ess_by_bucket, tokens_by_lag)
    failing = [first for first, value in found.items() if value < ess]
    if failing:
        # Data that were admitted before come for as many updates.
        hold, none_is_at_fault = max(lag.hold - 1, lag.admitted), min(failing) == 0
        rate = max(LEAST_RATE, lag.lr_share / 2) if none_is_at_fault else lag.lr_share
        return AdmittedLag(max(0, min(failing) - 1), rate, hold)
    waited = lag._replace(hold=max(0, lag.hold - 1))
    if lag.lr_share < 1:
        return waited._replace(lr_share=min(1.0, 2 * lag.lr_share))
    reached = _share(tokens_by_lag, lambda one: one >= lag.admitted) >= LEAST
    if lag.hold or not found or not reached or min(found.values()) < (1 + ess) / 2:
        return waited
    return waited._replace(admitted=min(at_most, extrapolate_lag(lag.admitted, min(found.values()), (1 + ess) / 2)))


def extrapolate_lag(admitted: int, worst: float, least: float) -> int:
    """The lag to which data reach whose lowest ESS, of at least `least`, is `worst` as far as lag `admitted`.

    The variance of a policy's log-ratios grows with the square of the distance that it moves, which is at most
    proportional to the versions between: so log(ESS) is taken to fall with the square of lag + 1.

        lag + 1 = (admitted + 1) min(2, sqrt(log(least) / log(worst))), rounded down; admitted + 1 at least
    """
    reach = 2.0 if worst >= 1 else min(2.0, sqrt(log(least) / log(worst)))
    return max(admitted + 1, int(reach * (admitted + 1)) - 1)


def lr_share(lag: AdmittedLag, tokens_by_lag: Mapping[int, int]) -> float:
    """The share of the learning rate for the update on a batch with these tokens."""
    if not lag.hold or not tokens_by_lag:
        return lag.lr_share
    young = sum(tokens * min(1.0, (lag.admitted + 1) / (one + 1)) for one, tokens in sorted(tokens_by_lag.items()))
    return lag.lr_share * young / sum(tokens_by_lag.values())


def _bucket_ess(
    lag: AdmittedLag, ess_by_bucket: Mapping[str, float], tokens_by_lag: Mapping[int, int]
) -> dict[int, float]:
    """The effective sample sizes of the buckets that count, by the first lag of each."""
    found: dict[int, float] = {}
    for name, first, last in zip(LAG_BUCKETS, FIRST_LAG_OF_BUCKET, (*LAST_LAG_OF_BUCKET, inf), strict=True):
        share = _share(tokens_by_lag, lambda one, first=first, last=last: first <= one <= last)
        if first <= lag.admitted and share >= LEAST and name in ess_by_bucket:
            found[first] = ess_by_bucket[name]
    return found


def _share(tokens_by_lag: Mapping[int, int], counts: Callable[[int], bool]) -> float:
    """The share of the tokens whose lag `counts`."""
    counted = sum(tokens for one, tokens in tokens_by_lag.items() if counts(one))
    return counted / max(1, sum(tokens_by_lag.values()))
