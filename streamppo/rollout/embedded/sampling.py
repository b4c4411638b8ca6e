"""Draws tokens from logits [B rows, V vocabulary], with their log-probs under the distribution they are drawn from."""

from typing import NamedTuple

import torch
from torch import Tensor

from streamppo.errors import ModelError

LARGE, BLOCK = 8192, 512
"""A vocabulary of more than `LARGE` tokens is searched in blocks of `BLOCK` tokens."""
BELOW_ONE = 1 - 2.0**-50


class Draws(NamedTuple):
    """Sampling parameters, one for each row [B]. Temperature 0 is greedy, top-p 1 and top-k 0 are off."""

    temperature_B: Tensor
    top_p_B: Tensor
    top_k_B: Tensor


class SampledTokens(NamedTuple):
    """One token for each row, and its log-prob. `candidates_BV` is true for candidates; None if all tokens are."""

    tokens_B: Tensor
    logprobs_B: Tensor
    candidates_BV: Tensor | None


def sample(logits_BV: Tensor, draws: Draws | None, uniform_B: Tensor) -> SampledTokens:
    """Draw one token for each row: the first whose cumulative probability is above u (float64, 0 < u < 1).

    Without `draws` nothing changes the model's distribution. Greedy rows get log-probs at temperature 1. Raises
    `ModelError`.
    """
    greedy_B = None if draws is None else draws.temperature_B == 0
    candidates_BV = None
    if draws is not None and greedy_B is not None:
        logits_BV = logits_BV / draws.temperature_B.masked_fill(greedy_B, 1.0)[:, None]
        candidates_BV = _candidates(logits_BV, draws)
    if candidates_BV is not None:
        logits_BV = logits_BV.masked_fill(~candidates_BV, -torch.inf)
    logp_BV = logits_BV.log_softmax(-1)
    tokens_B = _draw(logp_BV, uniform_B)
    # For logits that are not finite, `_draw` returns an index beyond the vocabulary.
    tokens_B = tokens_B.clamp(max=logits_BV.shape[-1] - 1)
    if greedy_B is not None:
        tokens_B = torch.where(greedy_B, logp_BV.argmax(-1), tokens_B)
    logprobs_B = logp_BV.gather(-1, tokens_B[:, None]).squeeze(-1)
    if not bool(logprobs_B.isfinite().all()):
        raise ModelError("the logits are not finite: the weights have diverged")
    return SampledTokens(tokens_B, logprobs_B, candidates_BV)


def _draw(logp_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """Return [B], the first token of each row whose cumulative probability is above u; V or more if there is none."""
    B, V = logp_BV.shape
    if V <= LARGE:
        # In float32 the sum over a vocabulary would lose rare tokens.
        return _first_above(logp_BV.double().exp().cumsum(-1), uniform_B)
    # In a large vocabulary, float64 sums over all tokens would take most of a step's time.
    p_BV = logp_BV.new_zeros(B, -(-V // BLOCK) * BLOCK)
    torch.exp(logp_BV, out=p_BV[:, :V])
    p_BNW = p_BV.view(B, -1, BLOCK)
    mass_BN = p_BNW.sum(-1).double()
    cumulative_BN = mass_BN.cumsum(-1)
    block_B = _first_above(cumulative_BN, uniform_B).clamp(max=mass_BN.shape[1] - 1)
    row_B = torch.arange(B, device=logp_BV.device)
    mass_B = mass_BN[row_B, block_B]
    # The position of u within its block. A float32 sum over a block loses no rare token.
    within_B = ((uniform_B * cumulative_BN[:, -1] - cumulative_BN[row_B, block_B] + mass_B) / mass_B).clamp(
        0.0, BELOW_ONE
    )
    return block_B * BLOCK + _first_above(p_BNW[row_B, block_B].double().cumsum(-1), within_B)


def _first_above(cumulative_BV: Tensor, share_B: Tensor) -> Tensor:
    """Return [B], the first index of each row whose cumulative sum is above this share of its total; V if none is."""
    return torch.searchsorted(cumulative_BV, (share_B * cumulative_BV[:, -1])[:, None], right=True).squeeze(-1)


def _candidates(logits_BV: Tensor, draws: Draws) -> Tensor | None:
    """Return [B, V], true for candidates: of the top k, the fewest that sum to top_p; None if all tokens are chosen."""
    V = logits_BV.shape[-1]
    if bool(((draws.top_k_B == 0) & (draws.top_p_B == 1)).all()):
        return None
    sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=True)
    rank_V = torch.arange(V, device=logits_BV.device)
    k_B = torch.where(draws.top_k_B > 0, draws.top_k_B, V)
    outside_BV = rank_V >= k_B[:, None]
    p_BV = sorted_BV.masked_fill(outside_BV, -torch.inf).softmax(-1)
    before_BV = p_BV.cumsum(-1) - p_BV
    # With top-p off no token may be excluded, even if rounding takes a cumulative sum above 1.
    outside_BV |= (before_BV >= draws.top_p_B[:, None]) & (draws.top_p_B < 1)[:, None]
    outside_BV[:, 0] = False
    return torch.empty_like(outside_BV).scatter_(-1, order_BV, ~outside_BV)
