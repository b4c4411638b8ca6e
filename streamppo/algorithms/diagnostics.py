"""Distances between the three policies, before any truncation, which would hide a collapse.

B sequences, T response tokens (padded), K lag buckets, S sums. All distances are computed from sums. For numbers over
all ranks, add the `off_policy_sums` of each rank, then call `off_policy_of`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.corrections import log_weights
from streamppo.algorithms.masked import bounded_exp, check_tokens, fill, sequence_count

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65+")
LAST_LAG_OF_BUCKET = (0, 1, 2, 4, 8, 16, 32, 64)
HIGH, LOW = 2.0, 0.5
"""A weight above HIGH counts as high, a weight below LOW as low."""
BLOCK_TOKENS = 2**18
"""Maximum number of tokens that are summed at one time, in a block of rows; a longer row is one block."""
QUANTILES = (0.01, 0.5, 0.99)


class Divergence(NamedTuple):
    """The distance of the proximal from the behavior policy on a set of tokens; w = proximal / behavior.

        ess       = sum(w)^2 / (n * sum(w^2))
        chi2      = mean(w^2) - 1
        k1        = mean(-log(w))
        k3        = mean(w - 1 - log(w))
        log_ppl   = -mean(logprobs)
        fraction  = mean(w > HIGH), mean(w < LOW)

    ess is the effective share of tokens in the weighted gradient, chi2 the variance of the weights around 1; for
    `*_sequence`, w is of a whole response. k1 and k3 estimate KL(behavior || proximal).
    """

    tokens: float
    sequences: float
    ess_token: float
    ess_sequence: float
    chi2_token: float
    chi2_sequence: float
    k1: float
    k3: float
    mean_abs_log_ratio: float
    log_ppl_engine: float
    log_ppl_learner: float
    fraction_high: float
    fraction_low: float


class OffPolicy(NamedTuple):
    """Divergences over all tokens, by lag bucket, and at lag 0 (numerical error); None without tokens."""

    overall: Divergence
    by_lag: dict[str, Divergence]
    numerics: Divergence | None


def in_buckets(lag: Tensor, member: Tensor) -> Tensor:
    """[K, *] float64, the bucket of each `lag` (of any shape) as a one-hot vector; zeros where `member` is False."""
    edges = torch.tensor(LAST_LAG_OF_BUCKET, device=lag.device, dtype=lag.dtype)
    bucket = torch.bucketize(lag, edges)
    number = torch.arange(len(LAG_BUCKETS), device=lag.device).view(-1, *(1 for _ in lag.shape))
    return ((bucket == number) & member).double()


def off_policy_sums(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, lag_BT: Tensor
) -> Tensor:
    """[K, S] float64 sums by lag bucket: add them over micro-batches and ranks, then call `off_policy_of`.

    `lag_BT` is the lag of each token (int). A response counts in the bucket of its oldest unmasked token. Rows are
    processed in blocks of `BLOCK_TOKENS`, because a token takes 260 bytes while its block is summed.
    """
    check_tokens(mask_BT, proximal=proximal_logprobs_BT, behavior=behavior_logprobs_BT, lag=lag_BT)
    rows = max(1, BLOCK_TOKENS // max(1, mask_BT.shape[1]))
    blocks = [slice(start, start + rows) for start in range(0, max(1, len(mask_BT)), rows)]
    first, *others = (
        _block_sums(proximal_logprobs_BT[block], behavior_logprobs_BT[block], mask_BT[block], lag_BT[block])
        for block in blocks
    )
    return sum(others, start=first)


def _block_sums(proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, lag_BT: Tensor) -> Tensor:
    log_w_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token").double()
    w_BT = bounded_exp(log_w_BT)
    engine_BT, learner_BT = fill(behavior_logprobs_BT.detach(), mask_BT), fill(proximal_logprobs_BT.detach(), mask_BT)
    columns = (
        torch.ones_like(w_BT), w_BT, w_BT.square(),
        log_w_BT, w_BT - 1 - log_w_BT, log_w_BT.abs(),
        engine_BT.double(), learner_BT.double(), (w_BT > HIGH).double(), (w_BT < LOW).double(),
    )  # fmt: skip
    token_KS = in_buckets(lag_BT, mask_BT).flatten(1) @ torch.stack(columns, -1).flatten(0, -2)
    W_B = bounded_exp(log_w_BT.sum(-1))
    oldest_B = lag_BT.masked_fill(~mask_BT, 0).amax(-1)
    member_KB = in_buckets(oldest_B, sequence_count(mask_BT) > 0)
    return torch.cat([token_KS, member_KB @ torch.stack([torch.ones_like(W_B), W_B, W_B.square()], -1)], -1)


def to_floats(sums_S: Tensor) -> list[float]:
    """The entries of a vector as floats, copied from the device in one transfer."""
    return [float(x) for x in sums_S.cpu()]


def divergence_of(sums_S: list[float]) -> Divergence:
    """The divergence computed from one row of `off_policy_sums` or from a sum of its rows; zeros without tokens."""
    n, w, ww, log_w, k3, absolute, engine, learner, high, low, m, W, WW = sums_S
    per_token, per_sequence = 1 / max(n, 1.0), 1 / max(m, 1.0)
    return Divergence(
        tokens=n,
        sequences=m,
        ess_token=w * w / (n * ww) if n else 0.0,
        ess_sequence=W * W / (m * WW) if m else 0.0,
        chi2_token=ww * per_token - 1 if n else 0.0,
        chi2_sequence=WW * per_sequence - 1 if m else 0.0,
        k1=-log_w * per_token,
        k3=k3 * per_token,
        mean_abs_log_ratio=absolute * per_token,
        log_ppl_engine=-engine * per_token,
        log_ppl_learner=-learner * per_token,
        fraction_high=high * per_token,
        fraction_low=low * per_token,
    )


def off_policy_of(sums_KS: Tensor) -> OffPolicy:
    """The divergences computed from `off_policy_sums`; lag buckets without tokens are left out."""
    rows = {name: to_floats(row_S) for name, row_S in zip(LAG_BUCKETS, sums_KS.cpu(), strict=True)}
    by_lag = {name: divergence_of(row) for name, row in rows.items() if row[0] > 0}
    return OffPolicy(divergence_of(to_floats(sums_KS.sum(0))), by_lag, by_lag.get("0"))


def off_policy(
    proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, lag_BT: Tensor
) -> OffPolicy:
    """ESS, chi-squared, KL and perplexities of proximal against behavior: overall, by lag, and for lag 0 alone.

    ESS is Kong's measure, https://arxiv.org/abs/1602.03572; k1 and k3 are from http://joschu.net/blog/kl-approx.html.
    With proximal == behavior ess is 1 and chi2, k1 and k3 are 0.
    """
    return off_policy_of(off_policy_sums(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, lag_BT))


class UpdateStatistics(NamedTuple):
    """KL(proximal || current) by two estimators, and the share of tokens clipped on each side."""

    tokens: float
    k1: float
    k3: float
    clip_fraction_high: float
    clip_fraction_low: float


def update_sums(logprobs_BT: Tensor, proximal_logprobs_BT: Tensor, mask_BT: Tensor, clipped_BT: Tensor) -> Tensor:
    """[5] float64 sums: add them over micro-batches and ranks, then call `update_statistics_of`."""
    check_tokens(mask_BT, clipped_BT=clipped_BT)
    log_r_BT = log_weights(logprobs_BT, proximal_logprobs_BT, mask_BT, level="token").double()
    r_BT = bounded_exp(log_r_BT)
    clipped_BT = clipped_BT & mask_BT
    upper_BT, lower_BT = clipped_BT & (log_r_BT > 0), clipped_BT & (log_r_BT <= 0)
    counted_BT = mask_BT.double()
    columns = (counted_BT, -log_r_BT, r_BT - 1 - log_r_BT, upper_BT.double(), lower_BT.double())
    return torch.stack([column.sum() for column in columns])


def update_statistics_of(sums_S: Tensor) -> UpdateStatistics:
    """The means computed from `update_sums`; k3 is the approximate KL that `kl.stop_early` takes."""
    tokens, *totals = to_floats(sums_S)
    return UpdateStatistics(tokens, *(total / max(tokens, 1.0) for total in totals))


def ratio_quantiles(ratio_BT: Tensor, mask_BT: Tensor) -> tuple[float, ...]:
    """The `QUANTILES` of the unmasked ratios, by nearest rank; zeros if all tokens are masked."""
    ordered = ratio_BT.detach()[mask_BT].sort().values
    if ordered.numel() == 0:
        return tuple(0.0 for _ in QUANTILES)
    last = ordered.numel() - 1
    return tuple(float(ordered[round(q * last)]) for q in QUANTILES)
