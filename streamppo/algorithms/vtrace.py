"""V-trace: returns of the proximal policy, estimated from tokens of an older policy.

B sequences, T response tokens (padded), C rows of one block. `values_BT` and `bootstrap_B` are as in `advantages`.
"""

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms.advantages import AdvantageEstimate, column
from streamppo.algorithms.corrections import log_weights
from streamppo.algorithms.masked import bounded_exp, check_sequences, check_tokens, fill
from streamppo.algorithms.scan import next_unmasked, reverse_scan, running_sum

BLOCK_ELEMENTS = 2**22
"""The size of the largest [B, C, T] block that `cumulative_scan` holds: 32 MiB in float64."""
LOG_OF_ZERO = -800.0
"""Used for log(0): its exponential is 0 in float64, and its differences from other logs stay finite."""


class TraceClip(NamedTuple):
    """The bounds of V-trace; the defaults are the published bounds.

    `rho_bar` bounds the weight of one TD error; it determines the policy whose value is learned. `c_bar` bounds the
    trace: every factor of it ("step") or their product ("cumulative").
    """

    rho_bar: float = 1.0
    c_bar: float = 1.0
    kind: Literal["step", "cumulative"] = "step"


PUBLISHED = TraceClip()


def log_rho(proximal_logprobs_BT: Tensor, behavior_logprobs_BT: Tensor, mask_BT: Tensor, *, lag_BT: Tensor) -> Tensor:
    """[B, T], log(proximal / behavior); set to 0 at tokens of lag 0, where it is only numerical error."""
    check_tokens(mask_BT, lag_BT=lag_BT)
    log_w_BT = log_weights(proximal_logprobs_BT, behavior_logprobs_BT, mask_BT, level="token")
    return log_w_BT.masked_fill(lag_BT == 0, 0.0)


def vtrace(
    rewards_BT: Tensor,
    values_BT: Tensor,
    mask_BT: Tensor,
    bootstrap_B: Tensor,
    log_rho_BT: Tensor,
    *,
    gamma: float | Tensor,
    lam: float | Tensor = 1.0,
    clip: TraceClip = PUBLISHED,
) -> AdvantageEstimate:
    """GAE in which every step is weighted by a clipped rho = exp(log_rho) = proximal / behavior.

        delta_t      = min(rho_bar, rho_t) * (rewards_t + gamma * values_{t+1} - values_t)
        trace_st     = prod_{s<=i<t} min(c_bar, rho_i)        step
        trace_st     = min(c_bar, prod_{s<=i<t} rho_i)        cumulative
        returns_s    = values_s + sum_{t>=s} (gamma * lam)^(t-s) * trace_st * delta_t
        next_t       = lam * returns_{t+1} + (1 - lam) * values_{t+1}
        advantages_t = rewards_t + gamma * next_t - values_t

    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, also weight the advantage by min(rho_bar, rho_t); here a
    `Correction` weights the loss instead. A product of clipped steps can only fall: at realistic noise in the
    log-ratios, a final reward's credit halves every 34 to 350 tokens. "cumulative" clips the product instead (truncated
    importance sampling in https://arxiv.org/abs/2301.11321), which takes O(T^2) operations. `gamma` may be [B, T], with
    a discount for each step. If all rho are 1, this is `gae`.
    """
    check_tokens(mask_BT, rewards_BT=rewards_BT, values_BT=values_BT, log_rho_BT=log_rho_BT)
    check_sequences(mask_BT, bootstrap_B=bootstrap_B)
    log_rho_BT, values_BT = fill(log_rho_BT.detach(), mask_BT), fill(values_BT.detach(), mask_BT)
    rewards_BT = fill(rewards_BT, mask_BT)
    gamma_ = fill(gamma, mask_BT) if isinstance(gamma, Tensor) else gamma
    lam_ = column(lam, values_BT)
    decay_BT = (gamma_ * lam_).expand_as(values_BT)
    rho_BT = bounded_exp(log_rho_BT)
    next_values_BT = next_unmasked(values_BT, mask_BT, bootstrap_B.detach())
    delta_BT = rho_BT.clamp(max=clip.rho_bar) * (rewards_BT + gamma_ * next_values_BT - values_BT)
    if clip.kind == "step":
        error_BT = reverse_scan(delta_BT, decay_BT * rho_BT.clamp(max=clip.c_bar), mask_BT)
    else:
        error_BT = cumulative_scan(delta_BT, decay_BT, log_rho_BT, mask_BT, clip.c_bar)
    returns_BT = values_BT + error_BT
    next_returns_BT = next_unmasked(returns_BT, mask_BT, bootstrap_B.detach())
    q_BT = rewards_BT + gamma_ * (lam_ * next_returns_BT + (1 - lam_) * next_values_BT)
    return AdvantageEstimate((q_BT - values_BT).masked_fill(~mask_BT, 0.0), returns_BT)


def cumulative_scan(delta_BT: Tensor, decay_BT: Tensor, log_rho_BT: Tensor, mask_BT: Tensor, c_bar: float) -> Tensor:
    """[B, T], the sum over t of V-trace with a clipped product, for every s.

        sum_{t>=s} prod_{s<=i<t}(decay_i) * min(c_bar, prod_{s<=i<t}(rho_i)) * delta_t

    The clipped product is not a recurrence, so the sum is computed in [C, T] triangles from prefix sums in float64.
    `c_bar` must be at least 1, because an empty product is 1.
    """
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
