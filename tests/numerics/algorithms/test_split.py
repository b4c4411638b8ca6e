"""The batch's loss does not depend on how it is cut: micro-batches, ranks, padding or packing, for every loss."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_layout import Layout, Mask, Rows, compact, logprob_rows, near, ragged_mask, random_rows
from test_policy_losses import LOSSES, slow_rows
from torch import Tensor

from streamppo.algorithms.aggregate import Aggregation, Denominators, aggregate, denominators
from streamppo.algorithms.corrections import importance_weights
from streamppo.algorithms.layout import sequence_count
from streamppo.algorithms.value_losses import value_loss

KINDS: list[Aggregation] = ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]
LONGEST = 32.0
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 3, 2], [4]]]
CUTS = list(itertools.product(range(len(SPLITS)), [False, True]))


def slow_aggregate(rows: Rows, kind: Aggregation) -> float:
    """Means over compacted rows, from their definitions."""
    full = [row for row in rows if row]
    tokens = sum(len(row) for row in full)
    if kind == "token-mean":
        return sum(x for row in full for x in row) / tokens
    if kind == "sequence-mean-token-mean":
        return sum(sum(row) / len(row) for row in full) / len(full)
    if kind == "sequence-mean-token-sum":
        return sum(sum(row) for row in full) / len(full)
    return sum(sum(row) for row in full) / len(full) / LONGEST


def rows_of(mask: Mask) -> tuple[Rows, Rows, Rows]:
    proximal = logprob_rows(mask, 3)
    return near(proximal, 7), proximal, random_rows(mask, 6)


def cut_loss(name: str, kind: Aggregation, split: list[list[int]], packed: bool) -> tuple[float, list[Rows]]:
    """(sum of the micro-batches' losses, gradient rows), with the denominators of the whole batch."""
    mask = ragged_mask()
    whole = Layout(mask, False)
    totals = denominators(whole.mask, constant=LONGEST)
    loss, gradients = 0.0, [[] for _ in mask]
    columns = rows_of(mask)
    for members in split:
        lay = Layout([mask[b] for b in members], packed)
        current, proximal, adv = ([column[b] for b in members] for column in columns)
        logprobs = lay.tensor(current).requires_grad_()
        tokens = LOSSES[name][0](logprobs, lay.tensor(proximal), lay.tensor(adv), lay.mask, cu_seqlens=lay.cu_seqlens)
        part = aggregate(tokens.loss, lay.mask, kind, totals, cu_seqlens=lay.cu_seqlens)
        part.backward()
        loss += part.item()
        assert logprobs.grad is not None
        for b, row in zip(members, lay.unmasked(logprobs.grad), strict=True):
            gradients[b] = row
    return loss, gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_packed_or_padded_gives_the_loss_and_gradient_of_the_whole_batch(
    name: str, kind: Aggregation
) -> None:
    mask = ragged_mask()
    current, proximal, adv = (compact(rows, mask) for rows in rows_of(mask))
    expected = slow_aggregate(slow_rows(LOSSES[name][1], current, current, proximal, adv), kind)
    results = [cut_loss(name, kind, SPLITS[split], packed) for split, packed in CUTS]
    for loss, gradients in results:
        assert loss == pytest.approx(expected, rel=1e-10)
        for row, first in zip(gradients, results[0][1], strict=True):
            assert row == pytest.approx(first, rel=1e-10, abs=1e-14)
    assert any(abs(x) > 1e-6 for row in results[0][1] for x in row)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrected_value_or_policy_loss_with_dropped_tokens_adds_up_too(kind: Aggregation) -> None:
    mask = ragged_mask()
    whole = Layout(mask, False)
    totals = denominators(whole.mask, constant=LONGEST)
    current, proximal, returns = rows_of(mask)

    def share(members: list[int], packed: bool) -> Tensor:
        lay = Layout([mask[b] for b in members], packed)
        new, old, target = (lay.tensor([column[b] for b in members]) for column in (current, proximal, returns))
        correction = importance_weights(
            new, old, lay.mask, level="geometric", mode="mask", lo=0.95, hi=1.1, cu_seqlens=lay.cu_seqlens
        )
        tokens = value_loss(new, old, target, lay.mask, clip=0.2, cu_seqlens=lay.cu_seqlens)
        lengths = sequence_count(lay.mask, lay.cu_seqlens)
        loss = tokens.loss * correction.weights
        return aggregate(loss, correction.keep, kind, totals, lengths, cu_seqlens=lay.cu_seqlens)

    sums = [sum(share(m, packed).item() for m in SPLITS[split]) for split, packed in CUTS]
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-12)
    assert sums[0] > 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_ragged_batch_cut_anywhere_aggregates_to_the_slow_mean(data: st.DataObject) -> None:
    bools = st.lists(st.booleans(), min_size=1, max_size=6)
    mask = data.draw(st.lists(bools, min_size=1, max_size=6).filter(lambda rows: any(map(any, rows))))
    order = data.draw(st.permutations(range(len(mask))))
    cut, packed = data.draw(st.integers(0, len(mask))), data.draw(st.booleans())
    kind = data.draw(st.sampled_from(KINDS))
    rows = random_rows(mask, 1)
    totals = denominators(Layout(mask, False).mask, constant=LONGEST)
    loss = 0.0
    for members in filter(None, (order[:cut], order[cut:])):
        lay = Layout([mask[b] for b in members], packed)
        part = lay.tensor([rows[b] for b in members])
        loss += aggregate(part, lay.mask, kind, totals, cu_seqlens=lay.cu_seqlens).item()
    assert loss == pytest.approx(slow_aggregate(compact(rows, mask), kind), rel=1e-10, abs=1e-14)


def test_denominators_of_ranks_add_up_to_those_of_the_batch() -> None:
    mask = ragged_mask()
    whole = denominators(Layout(mask, True).mask, constant=9.0, cu_seqlens=Layout(mask, True).cu_seqlens)
    parts = [denominators(Layout(rows, False).mask, constant=9.0) for rows in (mask[:2], mask[2:])]
    assert parts[0] + parts[1] == whole
    assert whole == Denominators(sum(map(sum, mask)), sum(map(any, mask)), 9.0)


def test_a_dropped_token_shrinks_the_loss_and_never_inflates_the_others() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    keep = torch.tensor([[True, True, False, False]])
    totals = denominators(mask, constant=8.0)
    for kind, expected in zip(KINDS, (0.5, 0.5, 2.0, 0.25), strict=True):
        got = aggregate(torch.ones(1, 4), keep, kind, totals, sequence_count(mask, None))
        assert got.item() == pytest.approx(expected)


def test_an_all_masked_minibatch_is_refused_and_an_all_masked_micro_batch_adds_zero() -> None:
    loss, none = torch.full((1, 2), float("nan")), torch.zeros(1, 2, dtype=torch.bool)
    for kind in KINDS:
        assert aggregate(loss, none, kind, Denominators(3, 1)).item() == 0.0
        with pytest.raises(ValueError, match="every token of the minibatch is masked"):
            aggregate(loss, none, kind, denominators(none))
    with pytest.raises(ValueError, match="constant must be positive"):
        denominators(none, constant=0.0)
    with pytest.raises(ValueError, match="unknown aggregation"):
        aggregate(loss, none, "mean", Denominators(1, 1))  # pyright: ignore[reportArgumentType]
