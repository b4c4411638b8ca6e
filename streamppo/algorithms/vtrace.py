"""V-trace: returns of the proximal policy from tokens that an older one sampled.

B sequences, T response tokens (padded), N response tokens (packed), C rows of one block. `values` and
`bootstrap_B` are as in `advantages`.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.advantages import Estimate, check_fraction, column
from streamppo.algorithms.corrections import LOG_RATIO_BOUND, log_weights
from streamppo.algorithms.layout import check, check_sequences, fill, pack, pad
from streamppo.algorithms.scan import next_unmasked, reverse_scan, running_sum

BLOCK_ELEMENTS = 2**22
LOG_OF_ZERO = -800.0


class TraceClip(NamedTuple):
    """Where V-trace clips. The defaults are the published ones, with advantages left unweighted.

    rho_bar      bound on the weight of one TD error: which policy's value is learned
    c_bar        bound on the trace: how far credit travels, at which variance
    kind         "step" clips every factor of the trace, "cumulative" the product
    rho_bar_pg   bound on the weight of the advantage; None where a `Correction` already weights the loss
    """

    rho_bar: float = 1.0
    c_bar: float = 1.0
    kind: Literal["step", "cumulative"] = "step"
    rho_bar_pg: float | None = None


PUBLISHED = TraceClip()


def log_rho(
    proximal_logprobs: Tensor,
    behavior_logprobs: Tensor,
    mask: Tensor,
    *,
    lag: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """log(proximal / behavior) per token, exactly 0 where lag is 0: what differs there is numerics."""
    log_w = log_weights(proximal_logprobs, behavior_logprobs, mask, level="token", cu_seqlens=cu_seqlens)
    if lag is None:
        return log_w
    check(mask, cu_seqlens, lag=lag)
    return log_w.masked_fill(lag == 0, 0.0)


def vtrace(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    bootstrap_B: Tensor,
    log_rho: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor = 1.0,
    clip: TraceClip = PUBLISHED,
    cu_seqlens: Tensor | None = None,
) -> Estimate:
    """GAE with every step weighted by how likely the proximal policy was to take it; rho = exp(log_rho).

        delta_t = min(rho_bar, rho_t) (rewards_t + gamma v_{t+1} - v_t)
        step         returns_s - v_s = sum_{t>=s} (gamma lam)^(t-s) prod_{s<=i<t} min(c_bar, rho_i) delta_t
        cumulative   returns_s - v_s = sum_{t>=s} (gamma lam)^(t-s) min(c_bar, prod_{s<=i<t} rho_i) delta_t
        advantages_t = min(rho_bar_pg, rho_t) (rewards_t + gamma (lam returns_{t+1} + (1 - lam) v_{t+1}) - v_t)

    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561. A product of clipped steps can only fall: at
    realistic noise in the log-ratios a final reward's credit halves every 34 to 350 tokens. "cumulative"
    clips the product instead (truncated importance sampling in https://arxiv.org/abs/2301.11321): O(T^2).
    `gamma` may be a tensor in the mask's layout. All rho = 1 gives `gae`.
    """
    check(mask, cu_seqlens, rewards=rewards, values=values, log_rho=log_rho)
    check_sequences(mask, cu_seqlens, bootstrap_B=bootstrap_B)
    check_fraction(gamma=gamma, lam=lam)
    mask_BT, log_rho_BT = pad(mask, cu_seqlens), pad(fill(log_rho.detach(), mask), cu_seqlens)
    values_BT, rewards_BT = pad(fill(values.detach(), mask), cu_seqlens), pad(fill(rewards, mask), cu_seqlens)
    gamma_ = pad(fill(gamma, mask), cu_seqlens) if isinstance(gamma, Tensor) else gamma
    lam_ = column(lam, values_BT)
    decay_BT = (gamma_ * lam_).expand_as(values_BT)
    rho_BT = log_rho_BT.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    next_values_BT = next_unmasked(values_BT, mask_BT, bootstrap_B.detach())
    delta_BT = rho_BT.clamp(max=clip.rho_bar) * (rewards_BT + gamma_ * next_values_BT - values_BT)
    if clip.kind == "step":
        error_BT = reverse_scan(delta_BT, decay_BT * rho_BT.clamp(max=clip.c_bar), mask_BT)
    elif clip.kind == "cumulative":
        error_BT = cumulative_scan(delta_BT, decay_BT, log_rho_BT, mask_BT, clip.c_bar)
    else:
        raise ValueError(f"unknown clip.kind {clip.kind!r}: step or cumulative")
    returns_BT = values_BT + error_BT
    next_returns_BT = next_unmasked(returns_BT, mask_BT, bootstrap_B.detach())
    q_BT = rewards_BT + gamma_ * (lam_ * next_returns_BT + (1 - lam_) * next_values_BT)
    weight_BT = 1.0 if clip.rho_bar_pg is None else rho_BT.clamp(max=clip.rho_bar_pg)
    advantages_BT = (weight_BT * (q_BT - values_BT)).masked_fill(~mask_BT, 0.0)
    return Estimate(pack(advantages_BT, cu_seqlens), pack(returns_BT, cu_seqlens))


def cumulative_scan(delta_BT: Tensor, decay_BT: Tensor, log_rho_BT: Tensor, mask_BT: Tensor, c_bar: float) -> Tensor:
    """sum_{t>=s} (prod_{s<=i<t} decay_i) min(c_bar, prod_{s<=i<t} rho_i) delta_t for every s.

    The clipped product is no recurrence, so this is a [C, T] triangle at a time, from prefix sums in float64.
    """
    if c_bar < 1:
        raise ValueError(f"cumulative clipping needs c_bar >= 1, got {c_bar}: an empty product is 1")
    B, T = delta_BT.shape
    log_decay_BT = torch.where(decay_BT > 0, decay_BT.double().log(), LOG_OF_ZERO).masked_fill(~mask_BT, 0.0)
    decay_before_BT = torch.nn.functional.pad(running_sum(log_decay_BT)[:, :-1], (1, 0))
    rho_before_BT = torch.nn.functional.pad(running_sum(log_rho_BT.double())[:, :-1], (1, 0))
    delta_BT1 = delta_BT.masked_fill(~mask_BT, 0.0).double()[..., None]
    position_T = torch.arange(T, device=delta_BT.device)
    rows: list[Tensor] = []
    block = max(1, BLOCK_ELEMENTS // max(1, B * T))
    for start in range(0, T, block):
        s = slice(start, start + block)
        log_trace_BCT = (rho_before_BT[:, None, :] - rho_before_BT[:, s, None]).clamp(max=math.log(c_bar))
        log_trace_BCT = log_trace_BCT + (decay_before_BT[:, None, :] - decay_before_BT[:, s, None])
        earlier_CT = position_T[None, :] < position_T[s, None]
        rows.append((log_trace_BCT.masked_fill(earlier_CT, -math.inf).exp() @ delta_BT1).squeeze(-1))
    return torch.cat(rows, dim=-1).to(delta_BT.dtype).masked_fill(~mask_BT, 0.0)
