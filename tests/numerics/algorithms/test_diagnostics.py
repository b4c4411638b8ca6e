"""Diagnostics against loops over plain floats; they add over micro-batches and look before truncation."""

import math

import pytest
import torch
from largest import Largest
from padded_rows import Mask, Padded, compact, logprob_rows, near, ragged_mask

from streamppo.algorithms import diagnostics
from streamppo.algorithms.diagnostics import (
    LAG_BUCKETS,
    Divergence,
    off_policy,
    off_policy_of,
    off_policy_sums,
    ratio_quantiles,
    update_statistics_of,
    update_sums,
)


def lag_rows(mask: Mask) -> list[list[float]]:
    """Ages 0 to 11; a later token is younger, as when weights arrive in the middle of a response."""
    return [[float(max(0, 11 - 3 * b - t)) for t in range(len(row))] for b, row in enumerate(mask)]


def slow_bucket(lag: float) -> str:
    return {0: "0", 1: "1", 2: "2", 3: "3-4", 4: "3-4"}.get(int(lag), "5-8" if lag <= 8 else "9-16")


def slow_divergence(tokens: list[tuple[float, float]], log_sequences: list[float]) -> Divergence:
    w = [math.exp(p - b) for p, b in tokens]
    W = [math.exp(x) for x in log_sequences]
    n = len(w)
    return Divergence(
        tokens=n,
        sequences=len(W),
        ess_token=sum(w) ** 2 / (n * sum(x * x for x in w)),
        ess_sequence=sum(W) ** 2 / (len(W) * sum(x * x for x in W)) if W else 0.0,
        chi2_token=sum(x * x for x in w) / n - 1,
        chi2_sequence=sum(x * x for x in W) / len(W) - 1 if W else 0.0,
        k1=sum(b - p for p, b in tokens) / n,
        k3=sum(x - 1 - math.log(x) for x in w) / n,
        mean_abs_log_ratio=sum(abs(p - b) for p, b in tokens) / n,
        log_ppl_engine=-sum(b for _, b in tokens) / n,
        log_ppl_learner=-sum(p for p, _ in tokens) / n,
        fraction_high=sum(x > 2.0 for x in w) / n,
        fraction_low=sum(x < 0.5 for x in w) / n,
    )


def test_every_number_equals_its_definition_overall_and_by_lag() -> None:
    mask = ragged_mask(1, 6)
    behavior = logprob_rows(mask, 3)
    proximal, lags = near(behavior, 4, by=1.5), lag_rows(mask)
    padded = Padded(mask)
    lag = padded.raw(lags, 99.0).long()
    got = off_policy(padded.tensor(proximal), padded.tensor(behavior), padded.mask, lag)
    by_bucket: dict[str, list[tuple[float, float]]] = {}
    responses: dict[str, list[float]] = {}
    rows = zip(compact(proximal, mask), compact(behavior, mask), compact(lags, mask), strict=True)
    for p, b, ages in rows:
        for x, y, age in zip(p, b, ages, strict=True):
            by_bucket.setdefault(slow_bucket(age), []).append((x, y))
        if ages:
            responses.setdefault(slow_bucket(max(ages)), []).append(sum(p) - sum(b))
    assert set(got.by_lag) == set(by_bucket)
    assert len(by_bucket) >= 4
    for name, tokens in by_bucket.items():
        assert got.by_lag[name] == pytest.approx(slow_divergence(tokens, responses.get(name, [])))
    everything = [x for tokens in by_bucket.values() for x in tokens]
    whole = [x for sums in responses.values() for x in sums]
    assert got.overall == pytest.approx(slow_divergence(everything, whole))
    assert got.numerics == got.by_lag.get("0")
    assert 0 < got.overall.fraction_low < 1
    assert 0 < got.overall.fraction_high < 1


def test_the_lag_buckets_are_0_1_and_2_then_each_twice_as_wide_up_to_65_or_more() -> None:
    lag = torch.arange(70)[None]
    zero = torch.zeros(1, 70)
    got = off_policy(zero - 1, zero - 1, zero == 0, lag)
    assert {name: d.tokens for name, d in got.by_lag.items()} == dict(
        zip(LAG_BUCKETS, (1, 1, 1, 2, 4, 8, 16, 32, 5), strict=True)
    )


def test_numerics_look_at_lag_zero_alone_so_that_drift_does_not_hide_a_broken_engine() -> None:
    behavior, mask = torch.full((1, 4), -1.0), torch.ones(1, 4, dtype=torch.bool)
    drifted = torch.tensor([[-1.0, -1.0, -1.7, -0.2]])
    got = off_policy(drifted, behavior, mask, torch.tensor([[0, 0, 3, 9]]))
    assert got.numerics is not None
    assert got.numerics.mean_abs_log_ratio == 0
    assert got.overall.mean_abs_log_ratio > 0.3
    assert off_policy(drifted, behavior, mask, torch.ones(1, 4, dtype=torch.long)).numerics is None


def test_equal_policies_have_ess_one_and_no_divergence() -> None:
    x = torch.full((2, 3), -0.7)
    got = off_policy(x, x, torch.ones(2, 3).bool(), torch.zeros(2, 3, dtype=torch.long)).overall
    assert (got.ess_token, got.ess_sequence, got.chi2_token, got.k1, got.k3) == (1.0, 1.0, 0.0, 0.0, 0.0)
    assert got.log_ppl_engine == got.log_ppl_learner == pytest.approx(0.7)


def test_a_collapsed_run_shows_because_weights_are_not_truncated_first() -> None:
    behavior, proximal = torch.full((1, 100), -9.0), torch.full((1, 100), -9.0)
    proximal[0, 0] = -0.1
    mask = torch.ones(1, 100, dtype=torch.bool)
    got = off_policy(proximal, behavior, mask, torch.zeros(1, 100, dtype=torch.long)).overall
    assert got.ess_token < 0.02
    assert got.chi2_token > 1e4


def test_sums_add_over_micro_batches_and_an_empty_batch_is_zeros() -> None:
    mask = ragged_mask(1, 6)
    behavior = logprob_rows(mask, 3)
    padded = Padded(mask)
    p, b = padded.tensor(near(behavior, 4)), padded.tensor(behavior)
    lag = padded.raw(lag_rows(mask), 0.0).long()
    parts = [off_policy_sums(p[s], b[s], padded.mask[s], lag[s]) for s in (slice(0, 3), slice(3, None))]
    assert off_policy_of(sum(parts[1:], parts[0])).overall == pytest.approx(off_policy(p, b, padded.mask, lag).overall)
    empty = off_policy(p, b, torch.zeros_like(padded.mask), lag)
    assert set(empty.overall) == {0.0}
    assert empty.by_lag == {}


def test_blocks_of_rows_change_no_sum_and_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    behavior = -torch.rand(64, 100, generator=generator)
    proximal = behavior + 0.1 * torch.randn(64, 100, generator=generator)
    mask, lag = torch.rand(64, 100, generator=generator) < 0.7, torch.arange(64)[:, None].expand(64, 100) % 11
    whole = off_policy_sums(proximal, behavior, mask, lag)
    for tokens in (1, 250, 6399):
        monkeypatch.setattr(diagnostics, "BLOCK_TOKENS", tokens)
        with Largest() as seen:
            in_blocks = off_policy_sums(proximal, behavior, mask, lag)
        torch.testing.assert_close(in_blocks, whole, rtol=1e-12, atol=1e-9)
        assert seen.elements <= 11 * max(100, tokens)


def test_update_statistics_and_ratio_quantiles_equal_their_definitions() -> None:
    mask = ragged_mask(1)
    proximal = logprob_rows(mask, 3)
    current = near(proximal, 5)
    padded = Padded(mask)
    pairs = [
        (c, p)
        for rows in zip(compact(current, mask), compact(proximal, mask), strict=True)
        for c, p in zip(*rows, strict=True)
    ]
    r = [math.exp(c - p) for c, p in pairs]
    ratio = padded.raw(
        [[math.exp(c - p) for c, p in zip(*rows, strict=True)] for rows in zip(current, proximal, strict=True)], 1.0
    )
    clipped = (ratio > 1.2) | (ratio < 0.8)
    sums = update_sums(padded.tensor(current), padded.tensor(proximal), padded.mask, clipped)
    got = update_statistics_of(sums)
    n = len(r)
    assert got == pytest.approx(
        (
            n,
            -sum(math.log(x) for x in r) / n,
            sum(x - 1 - math.log(x) for x in r) / n,
            sum(x > 1.2 for x in r) / n,
            sum(x < 0.8 for x in r) / n,
        )
    )
    assert got.clip_fraction_high > 0
    assert got.clip_fraction_low > 0
    ordered = sorted(r)
    expected = [ordered[round(share * (n - 1))] for share in (0.01, 0.5, 0.99)]
    assert ratio_quantiles(ratio, padded.mask) == pytest.approx(expected)
    assert ratio_quantiles(ratio, torch.zeros_like(padded.mask)) == (0.0, 0.0, 0.0)
