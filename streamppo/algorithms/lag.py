"""Adaptive lag: the effective sample size at each lag decides how far engines may run ahead.

The older the behavior policy, the lower is the ESS (`Divergence.ess_token`, measured before any truncation). VCPO
lowers the learning rate at a low ESS (https://arxiv.org/abs/2602.17616). This module lowers the lag first. It lowers
the learning rate only if data of lag 0 have a low ESS too, or while data older than the admitted lag arrive.

    After every update, over the buckets of lags up to `admitted` that have at least the share `LEAST` of the tokens:

    the lowest bucket with ESS < ess starts at lag f > 0     admitted = f - 1; older data arrive for `hold` updates
    it starts at lag 0: lag is not the cause                 admitted = 0, lr_share is halved
    no bucket has ESS < ess, and lr_share < 1                lr_share is doubled
    all have ESS >= (1 + ess) / 2, admitted is reached       admitted rises by at least 1 (`extrapolate_lag`)

    an update's share of the learning rate    lr_share; while older data may arrive, this is multiplied by the mean over
                                              the batch's tokens of min(1, (admitted + 1) / (lag + 1))

The lag rises at most to 2 * admitted + 1 in one update, so that it stays near lags that were measured.
"""

from collections.abc import Callable, Mapping
from math import inf, log, sqrt
from typing import NamedTuple

from streamppo.algorithms.diagnostics import LAG_BUCKETS, LAST_LAG_OF_BUCKET

LEAST = 0.01
"""A range of lags, such as a bucket, counts if it has at least this share of a batch's tokens."""
LEAST_RATE = 1 / 16
FIRST_LAG_OF_BUCKET = (0, *(last + 1 for last in LAST_LAG_OF_BUCKET))


class AdmittedLag(NamedTuple):
    """The `admitted` lag in versions, and a factor on the learning rate; older data may arrive for `hold` updates."""

    admitted: int
    lr_share: float = 1.0
    hold: int = 0


def next_lag(
    lag: AdmittedLag, ess_by_bucket: Mapping[str, float], tokens_by_lag: Mapping[int, int], *, at_most: int, ess: float
) -> AdmittedLag:
    """The lag to admit after an update on a batch with `tokens_by_lag`. `ess_by_bucket` has keys of `LAG_BUCKETS`."""
    ess_by_first_lag = _bucket_ess(lag, ess_by_bucket, tokens_by_lag)
    failing = [first for first, value in ess_by_first_lag.items() if value < ess]
    if failing:
        # Data that were admitted under the larger lag arrive for `lag.admitted` more updates.
        hold, none_is_at_fault = max(lag.hold - 1, lag.admitted), min(failing) == 0
        rate = max(LEAST_RATE, lag.lr_share / 2) if none_is_at_fault else lag.lr_share
        return AdmittedLag(max(0, min(failing) - 1), rate, hold)
    waited = lag._replace(hold=max(0, lag.hold - 1))
    if lag.lr_share < 1:
        return waited._replace(lr_share=min(1.0, 2 * lag.lr_share))
    reached = _share(tokens_by_lag, lambda token_lag: token_lag >= lag.admitted) >= LEAST
    if lag.hold or not ess_by_first_lag or not reached or min(ess_by_first_lag.values()) < (1 + ess) / 2:
        return waited
    return waited._replace(
        admitted=min(at_most, extrapolate_lag(lag.admitted, min(ess_by_first_lag.values()), (1 + ess) / 2))
    )


def extrapolate_lag(admitted: int, worst: float, least: float) -> int:
    """The lag at which ESS would fall to `least`, if the lowest ESS up to lag `admitted` is `worst` >= `least`.

        lag + 1 = (admitted + 1) min(2, sqrt(log(least) / log(worst))), rounded down; lag is at least admitted + 1

    The formula assumes that log(ESS) falls with the square of lag + 1, as the variance of log-ratios grows.
    """
    reach = 2.0 if worst >= 1 else min(2.0, sqrt(log(least) / log(worst)))
    return max(admitted + 1, int(reach * (admitted + 1)) - 1)


def lr_share(lag: AdmittedLag, tokens_by_lag: Mapping[int, int]) -> float:
    """The factor on the learning rate for an update on a batch with `tokens_by_lag`."""
    if not lag.hold or not tokens_by_lag:
        return lag.lr_share
    young = sum(
        tokens * min(1.0, (lag.admitted + 1) / (token_lag + 1)) for token_lag, tokens in sorted(tokens_by_lag.items())
    )
    return lag.lr_share * young / sum(tokens_by_lag.values())


def _bucket_ess(
    lag: AdmittedLag, ess_by_bucket: Mapping[str, float], tokens_by_lag: Mapping[int, int]
) -> dict[int, float]:
    """The ESS by first lag of a bucket, for buckets up to `lag.admitted` that have at least `LEAST` of the tokens."""
    ess_by_first_lag: dict[int, float] = {}
    for name, first, last in zip(LAG_BUCKETS, FIRST_LAG_OF_BUCKET, (*LAST_LAG_OF_BUCKET, inf), strict=True):
        share = _share(tokens_by_lag, lambda token_lag, first=first, last=last: first <= token_lag <= last)
        if first <= lag.admitted and share >= LEAST and name in ess_by_bucket:
            ess_by_first_lag[first] = ess_by_bucket[name]
    return ess_by_first_lag


def _share(tokens_by_lag: Mapping[int, int], counts: Callable[[int], bool]) -> float:
    counted = sum(tokens for token_lag, tokens in tokens_by_lag.items() if counts(token_lag))
    return counted / max(1, sum(tokens_by_lag.values()))
