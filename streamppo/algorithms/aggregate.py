"""One loss from many token losses. The results of any split of a batch add up to the result of the whole batch.

B sequences, T response tokens (padded). The denominators are counted once, over the full minibatch on all ranks and
before any filtering. Every micro-batch on every rank divides by these counts, and the results are ADDED. A mean of
micro-batch means would give the tokens of smaller micro-batches more weight.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.algorithms import masked
from streamppo.algorithms.scan import group_sums, leaders

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "prompt-mean", "constant"]


class Prompts(NamedTuple):
    """The prompts of a minibatch; `num_prompts` counts prompts with unmasked tokens.

    `prompt_B` is each sequence's prompt, sorted; `tokens_B[i]` is the number of unmasked tokens of `prompt_B[i]`.
    """

    num_prompts: float
    prompt_B: Tensor
    tokens_B: Tensor


class Denominators(NamedTuple):
    """The divisors of a minibatch's loss: its counts of tokens, sequences and prompts, and the fixed length `constant`.

    `right_tokens` is the number of tokens of right answers, for `policy_losses.positive_nll`.
    """

    tokens: float
    sequences: float
    constant: float = 1.0
    prompts: Prompts | None = None
    right_tokens: float = 0.0


def denominators(mask_BT: Tensor, *, constant: float = 1.0, prompt_B: Tensor | None = None) -> Denominators:
    """Count a full minibatch's unmasked tokens, and its sequences and prompts with at least one unmasked token.

    `constant` is the divisor of the "constant" aggregation: any fixed length, such as the longest allowed response.
    `prompt_B` is the prompt of each sequence, for "prompt-mean".
    """
    masked.check_tokens(mask_BT)
    counts_B = masked.sequence_count(mask_BT)
    prompts = None
    if prompt_B is not None:
        tokens_B, order_B = group_sums(counts_B.double()[None], prompt_B)[0], prompt_B.argsort(stable=True)
        is_first_B = leaders(prompt_B) == torch.arange(len(prompt_B), device=prompt_B.device)
        prompts = Prompts(float((is_first_B & (tokens_B > 0)).sum()), prompt_B[order_B], tokens_B[order_B])
    return Denominators(float(counts_B.sum()), float((counts_B > 0).sum()), float(constant), prompts)


def aggregate(
    loss_BT: Tensor,
    mask_BT: Tensor,
    kind: Aggregation,
    denominators: Denominators,
    lengths_B: Tensor,
    prompt_B: Tensor | None = None,
) -> Tensor:
    """This micro-batch's share of the minibatch's loss; scalar, differentiable, additive over micro-batches.

        token-mean                  sum_bt(loss_bt) / tokens
        sequence-mean-token-mean    sum_b(sum_t(loss_bt) / lengths_b) / sequences
        sequence-mean-token-sum     sum_b(sum_t(loss_bt)) / sequences
        prompt-mean                 sum_b(sum_t(loss_bt) / tokens of b's prompt) / prompts
        constant                    sum_bt(loss_bt) / (sequences * constant)

    Sources, in this order: DAPO, https://arxiv.org/abs/2503.14476; GRPO, https://arxiv.org/abs/2402.03300; the
    log-likelihood of a sequence; prime-rl's `loss_aggregation`; Dr. GRPO, https://arxiv.org/abs/2503.20783. `mask_BT`
    selects the tokens that contribute. `lengths_B` is each sequence's unmasked count BEFORE filtering. `prompt_B` is
    each sequence's prompt, needed only for "prompt-mean". Raises ValueError if the minibatch has no unmasked token.
    """
    masked.check_tokens(mask_BT, loss_BT=loss_BT)
    masked.check_sequences(mask_BT, lengths_B=lengths_B)
    if denominators.tokens <= 0 or denominators.sequences <= 0:
        raise ValueError("every token of the minibatch is masked: there is nothing to average over")
    if kind == "token-mean":
        return masked.fill(loss_BT, mask_BT).sum() / denominators.tokens
    if kind == "sequence-mean-token-sum":
        return masked.fill(loss_BT, mask_BT).sum() / denominators.sequences
    if kind == "constant":
        return masked.fill(loss_BT, mask_BT).sum() / (denominators.sequences * denominators.constant)
    sums_B = masked.sequence_sum(loss_BT, mask_BT)
    if kind == "prompt-mean":
        assert denominators.prompts is not None and prompt_B is not None, "the prompt of every sequence"
        num_prompts, sorted_B, tokens_B = denominators.prompts
        tokens_B = tokens_B[torch.searchsorted(sorted_B, prompt_B)]
        return (sums_B / tokens_B.clamp(min=1).to(sums_B)).sum() / num_prompts
    return (sums_B / masked.at_least_float32(lengths_B).clamp(min=1).to(sums_B)).sum() / denominators.sequences
