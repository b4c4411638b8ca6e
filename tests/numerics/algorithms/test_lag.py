"""The adaptive lag, against numbers by hand, and in a loop with data of the admitted lag."""

from collections import deque
from math import exp, nextafter

import pytest

from streamppo.algorithms.diagnostics import LAG_BUCKETS
from streamppo.algorithms.lag import FIRST_LAG_OF_BUCKET, LEAST_RATE, AdmittedLag, extrapolate_lag, lr_share, next_lag

GOOD = {0: 100, 1: 100, 2: 100, 3: 50, 4: 50}
"""A batch with tokens of all lags up to 4."""


def after(lag: AdmittedLag, *, at_most: int = 64, tokens: dict[int, int] = GOOD, **ess: float) -> AdmittedLag:
    """With an ESS of 0.9, but for the buckets that are named by their first lag."""
    named = {int(name[1:]): value for name, value in ess.items()}
    by_bucket = {name: named.get(first, 0.9) for name, first in zip(LAG_BUCKETS, FIRST_LAG_OF_BUCKET, strict=True)}
    return next_lag(lag, by_bucket, tokens, at_most=at_most, ess=0.5)


def test_the_lag_rises_where_the_data_at_its_bound_are_good() -> None:
    assert after(AdmittedLag(4)) == AdmittedLag(7), "log(0.75) / log(0.9) is 2.73, and 5 sqrt(2.73) is 8.26"
    assert after(AdmittedLag(4), _2=0.75) == AdmittedLag(5), "(1 + 0.5) / 2 is good"
    assert after(AdmittedLag(4), at_most=6) == AdmittedLag(6)


def test_it_rises_as_far_as_the_lowest_effective_sample_size_reaches_and_to_twice_that_at_most() -> None:
    for admitted in (0, 1, 2, 7, 31):
        assert extrapolate_lag(admitted, 1.0, 0.75) == max(1, 2 * admitted + 1), "a policy that does not move"
        assert extrapolate_lag(admitted, 0.999, 0.75) == max(1, 2 * admitted + 1)
        assert extrapolate_lag(admitted, 0.75, 0.75) == admitted + 1
    # 10 versions of 0.9 are as far as 16.5 of 0.75: the square of 1.65 is log(0.75) / log(0.9).
    assert extrapolate_lag(9, 0.9, 0.75) == 15
    assert extrapolate_lag(9, 0.9, 0.9) == extrapolate_lag(9, 0.9, nextafter(0.9, 0)) == 10


def test_the_lag_stays_where_it_is_not_reached_or_the_data_are_neither_good_nor_bad() -> None:
    assert after(AdmittedLag(5)) == AdmittedLag(5), "no token of lag 5"
    assert after(AdmittedLag(4), _2=0.74) == AdmittedLag(4)
    assert after(AdmittedLag(4), at_most=4) == AdmittedLag(4), "never beyond the hard bound"
    assert next_lag(AdmittedLag(4), {}, GOOD, at_most=9, ess=0.5) == AdmittedLag(4), "nothing was measured"
    assert after(AdmittedLag(4), tokens={0: 1000, 4: 9}) == AdmittedLag(4), "less than a hundredth is nothing"


def test_the_lag_falls_below_the_lowest_bucket_that_fails_and_does_not_rise_while_older_data_come() -> None:
    fallen = after(AdmittedLag(4), _2=0.49, _3=0.1)
    assert fallen == AdmittedLag(1, 1.0, hold=4)
    for left in (3, 2, 1, 0):
        fallen = after(fallen)
        assert fallen == AdmittedLag(1, 1.0, hold=left)
    assert after(fallen, _0=0.75) == AdmittedLag(2)


def test_buckets_beyond_the_admitted_lag_say_nothing_about_it() -> None:
    assert after(AdmittedLag(2, hold=2), _3=0.1) == AdmittedLag(2, hold=1)


def test_the_learning_rate_falls_where_no_lag_is_at_fault_and_comes_back_before_the_lag_does() -> None:
    lag = after(AdmittedLag(1), _0=0.4)
    assert lag == AdmittedLag(0, 0.5, hold=1)
    for _ in range(9):
        lag = after(lag, _0=0.4)
    assert (lag.admitted, lag.lr_share) == (0, LEAST_RATE)
    for share in (1 / 8, 1 / 4, 1 / 2, 1.0):
        lag = after(lag)
        assert (lag.admitted, lag.lr_share) == (0, share)
    assert after(lag).admitted == 1


def test_an_update_on_data_older_than_is_admitted_has_a_smaller_rate_as_long_as_they_may_come() -> None:
    assert lr_share(AdmittedLag(1, 1.0, hold=3), {0: 1, 1: 1, 3: 2}) == (1 + 1 + 2 * 2 / 4) / 4
    assert lr_share(AdmittedLag(1, 0.5, hold=3), {1: 4}) == 0.5
    assert lr_share(AdmittedLag(1), {9: 4}) == 1.0, "a long completion is none of them"
    assert lr_share(AdmittedLag(1, hold=1), {}) == 1.0


@pytest.mark.parametrize("at_most", [1, 4, 64])
def test_in_a_loop_the_lag_settles_where_the_data_are_good_enough(at_most: int) -> None:
    """ESS is exp(-lag / scale): 0.5 at 0.69 scale, 0.75 at 0.29 scale. Then the policy moves four times as fast."""
    lag, admitted = AdmittedLag(1), deque([0], maxlen=200)
    seen: dict[float, list[int]] = {}
    for scale in (40.0, 10.0):
        seen[scale] = []
        for _ in range(400):
            # In a full flow a batch was admitted `lag` updates ago.
            age = next((age for age, was in enumerate(reversed(admitted)) if was <= age), len(admitted) - 1)
            oldest = max(age, 1) if lag.admitted else 0
            tokens = dict.fromkeys(range(oldest + 1), 10)
            by_bucket = {
                name: exp(-(first + min(oldest, 2 * first)) / 2 / scale)
                for name, first in zip(LAG_BUCKETS, FIRST_LAG_OF_BUCKET, strict=True)
            }
            lag = next_lag(lag, by_bucket, tokens, at_most=at_most, ess=0.5)
            assert 0 <= lag.admitted <= at_most
            assert lag.lr_share == 1.0, "lag 0 is always good"
            admitted.append(lag.admitted)
            seen[scale].append(lag.admitted)
    slow, fast = max(seen[40.0][200:]), max(seen[10.0][200:])
    assert slow == at_most if at_most < 11 else 11 <= slow <= 28
    assert fast == at_most if at_most < 3 else 3 <= fast <= 8
