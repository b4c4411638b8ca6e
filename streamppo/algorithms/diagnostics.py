"""How far apart the three policies are, before anything is truncated.

B sequences, T response tokens (padded), N response tokens (packed), K lag buckets, S sums.
Everything is made of sums, so a number over all ranks is: `off_policy_sums` on each, SUM all-reduce,
`off_policy_of`. Truncated weights would hide what these are for: after min(w, cap) the effective sample size
of a collapsed run looks healthy.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.corrections import LOG_RATIO_BOUND, log_weights
from streamppo.algorithms.layout import check, fill, pad, sequence_count

LAG_BUCKETS = ("0", "1", "2", "3-4", "5-8", "9+")
LAST_LAG_OF_BUCKET = (0, 1, 2, 4, 8)


class Divergence(NamedTuple):
    """Proximal against behavior over a set of tokens; w = proximal / behavior of a token, W of a response.

    ess        (sum w)^2 / (n sum w^2): the fraction of the tokens that the weighted gradient really rests on
    chi2       mean(w^2) - 1: the variance that the weights add
    k1, k3     KL(behavior || proximal), estimated as mean(-log w) and mean(w - 1 - log w)
    log_ppl    -mean log-prob, as the engine reported it and as the learner computes it
    fraction   of tokens with w > high, w < low
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
    rms_log_ratio: float
    log_ppl_engine: float
    log_ppl_learner: float
    fraction_high: float
    fraction_low: float


class OffPolicy(NamedTuple):
    """`numerics` is over tokens of lag 0, where engine and learner hold equal weights; None without any."""

    overall: Divergence
    by_lag: dict[str, Divergence]
    numerics: Divergence | None


def in_buckets(lag: Tensor, member: Tensor) -> Tensor:
    """[K, *] float64 one-hot of the lag bucket; all zero where `member` is False."""
    edges = torch.tensor(LAST_LAG_OF_BUCKET, device=lag.device, dtype=lag.dtype)
    bucket = torch.bucketize(lag, edges)
    number = torch.arange(len(LAG_BUCKETS), device=lag.device).view(-1, *(1 for _ in lag.shape))
    return ((bucket == number) & member).double()


def off_policy_sums(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    lag: Tensor,
    *,
    high: float = 2.0,
    low: float = 0.5,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """[K, 14] float64 sums by lag bucket; add over micro-batches and ranks, then `off_policy_of`.

    `lag` is that of each token (int, the mask's layout). A response counts in the bucket of its oldest
    unmasked token. Log-ratios are clamped to +-20 only where they are exponentiated.
    """
    check(mask, cu_seqlens, lag=lag)
    log_w = log_weights(proximal_logprobs, behavior_logprobs, mask, level="token", cu_seqlens=cu_seqlens).double()
    w = log_w.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    engine, learner = fill(behavior_logprobs.detach(), mask), fill(proximal_logprobs.detach(), mask)
    columns = (
        torch.ones_like(w), w, w.square(), log_w, w - 1 - log_w, log_w.abs(), log_w.square(),
        engine.double(), learner.double(), (w > high).double(), (w < low).double(),
    )  # fmt: skip
    token_KS = in_buckets(lag, mask).flatten(1) @ torch.stack(columns, -1).flatten(0, -2)
    log_W_B = pad(log_w, cu_seqlens).sum(-1)
    W_B = log_W_B.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    oldest_B = pad(lag.masked_fill(~mask, 0), cu_seqlens).amax(-1)
    member_KB = in_buckets(oldest_B, sequence_count(mask, cu_seqlens) > 0)
    return torch.cat([token_KS, member_KB @ torch.stack([torch.ones_like(W_B), W_B, W_B.square()], -1)], -1)


def numbers(sums: Tensor) -> list[float]:
    """A vector as floats, read back from the device at once."""
    return [float(x) for x in sums.cpu()]


def divergence_of(sums_S: list[float]) -> Divergence:
    """One row of `off_policy_sums`, or a sum of rows -> its means; zeros where nothing is counted."""
    n, w, ww, log_w, k3, absolute, square, engine, learner, high, low, m, W, WW = sums_S
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
        rms_log_ratio=(square * per_token) ** 0.5,
        log_ppl_engine=-engine * per_token,
        log_ppl_learner=-learner * per_token,
        fraction_high=high * per_token,
        fraction_low=low * per_token,
    )


def off_policy_of(sums_KS: Tensor) -> OffPolicy:
    """The table of `off_policy_sums` as numbers; a lag bucket without tokens does not appear."""
    rows = {name: numbers(row_S) for name, row_S in zip(LAG_BUCKETS, sums_KS.cpu(), strict=True)}
    by_lag = {name: divergence_of(row) for name, row in rows.items() if row[0] > 0}
    return OffPolicy(divergence_of(numbers(sums_KS.sum(0))), by_lag, by_lag.get("0"))


def off_policy(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    lag: Tensor,
    *,
    high: float = 2.0,
    low: float = 0.5,
    cu_seqlens: Tensor | None = None,
) -> OffPolicy:
    """What the correction is up against: ESS, chi-squared, KL and perplexities of proximal against behavior.

    Overall, by lag, and for lag 0 alone (engine numerics). ESS: Kong's measure, https://arxiv.org/abs/1602.03572;
    k1 and k3: http://joschu.net/blog/kl-approx.html. With proximal == behavior ess is 1 and the rest is 0.
    """
    return off_policy_of(
        off_policy_sums(proximal_logprobs, behavior_logprobs, mask, lag, high=high, low=low, cu_seqlens=cu_seqlens)
    )


class UpdateStatistics(NamedTuple):
    """Current against proximal: KL(proximal || current), what was clipped on each side, the mean ratio."""

    tokens: float
    k1: float
    k3: float
    clip_fraction_high: float
    clip_fraction_low: float
    ratio_mean: float


def update_sums(
    logprobs: Tensor,
    proximal_logprobs: Tensor,
    mask: Tensor,
    clipped: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """[6] float64 sums for `update_statistics_of`: add them over micro-batches and ranks."""
    check(mask, cu_seqlens, clipped=clipped)
    log_r = log_weights(logprobs, proximal_logprobs, mask, level="token", cu_seqlens=cu_seqlens).double()
    r = log_r.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    upper, lower = clipped & mask & (log_r > 0), clipped & mask & (log_r <= 0)
    counted = mask.double()
    columns = (counted, -log_r, r - 1 - log_r, upper.double(), lower.double(), r * counted)
    return torch.stack([column.sum() for column in columns])


def update_statistics_of(sums: Tensor) -> UpdateStatistics:
    """Means from `update_sums`; k3 is the approximate KL that `kl.stop_early` looks at."""
    tokens, *totals = numbers(sums)
    return UpdateStatistics(tokens, *(total / max(tokens, 1.0) for total in totals))


def ratio_quantiles(ratio: Tensor, mask: Tensor, *, at: tuple[float, ...] = (0.01, 0.5, 0.99)) -> tuple[float, ...]:
    """Order statistics of the unmasked ratios (nearest rank, any layout); zeros where all is masked."""
    ordered = ratio.detach()[mask].sort().values
    if ordered.numel() == 0:
        return tuple(0.0 for _ in at)
    last = ordered.numel() - 1
    return tuple(float(ordered[round(q * last)]) for q in at)
