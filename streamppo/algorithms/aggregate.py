"""From one loss per token to one number, so that any split of the batch adds up to exactly that number.

B sequences, T response tokens (padded), N response tokens (packed). The denominators are counted once, from
the full minibatch over all ranks and before any filtering; then every micro-batch on every rank divides by
them and the results are ADDED. Averaging micro-batch means instead weighs a token by the company it happens
to be in.
"""

from typing import Literal, NamedTuple

from torch import Tensor

from streamppo.algorithms.layout import at_least_float32, check, check_sequences, fill, sequence_count, sequence_sum

Aggregation = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]


class Denominators(NamedTuple):
    """What a minibatch divides by. `tokens` and `sequences` add over ranks, `constant` is the same on all."""

    tokens: float
    sequences: float
    constant: float = 1.0

    def __add__(self, other: object) -> "Denominators":
        if not isinstance(other, Denominators):
            return NotImplemented
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences, self.constant)


def denominators(mask: Tensor, *, constant: float = 1.0, cu_seqlens: Tensor | None = None) -> Denominators:
    """Count the unmasked tokens, and the sequences that have at least one, of a full minibatch.

    `constant` is the length that the "constant" aggregation divides by: any fixed one, such as the longest allowed.
    """
    check(mask, cu_seqlens)
    if constant <= 0:
        raise ValueError(f"constant must be positive, got {constant}")
    counts_B = sequence_count(mask, cu_seqlens)
    return Denominators(float(counts_B.sum()), float((counts_B > 0).sum()), float(constant))


def aggregate(
    loss: Tensor,
    mask: Tensor,
    kind: Aggregation,
    denominators: Denominators,
    lengths_B: Tensor | None = None,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """This micro-batch's share of the minibatch's loss; scalar, differentiable, additive over micro-batches.

        token-mean                 sum_bt loss / tokens                   (DAPO,
        https://arxiv.org/abs/2503.14476) sequence-mean-token-mean   sum_b (sum_t loss / length_b) / sequences
          (GRPO, arxiv.org/abs/2402.03300) sequence-mean-token-sum    sum_b (sum_t loss) / sequences
          (the sequence's log-likelihood)
        constant                   sum_bt loss / (sequences * constant)   (Dr. GRPO, arxiv.org/abs/2503.20783)

    `mask` selects the tokens that contribute. `lengths_B` is each sequence's own unmasked count BEFORE
    filtering (default: that of `mask`). With equal lengths the four differ only by a factor.
    Raises ValueError where the minibatch has no token: an all-masked update must not be taken.
    """
    check(mask, cu_seqlens, loss=loss)
    if denominators.tokens <= 0 or denominators.sequences <= 0:
        raise ValueError("every token of the minibatch is masked: there is nothing to average over")
    if kind == "token-mean":
        return fill(loss, mask).sum() / denominators.tokens
    if kind == "sequence-mean-token-sum":
        return fill(loss, mask).sum() / denominators.sequences
    if kind == "constant":
        return fill(loss, mask).sum() / (denominators.sequences * denominators.constant)
    if kind != "sequence-mean-token-mean":
        raise ValueError(f"unknown aggregation {kind!r}")
    if lengths_B is None:
        lengths_B = sequence_count(mask, cu_seqlens)
    check_sequences(mask, cu_seqlens, lengths_B=lengths_B)
    sums_B = sequence_sum(loss, mask, cu_seqlens)
    return (sums_B / at_least_float32(lengths_B).clamp(min=1).to(sums_B)).sum() / denominators.sequences
