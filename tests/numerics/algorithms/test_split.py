"""The batch's loss does not depend on how it is cut: micro-batches, ranks or padding, for every loss."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_rows import Mask, Padded, Rows, compact, logprob_rows, near, ragged_mask, random_rows
from test_policy_losses import LOSSES, slow_rows
from torch import Tensor

from streamppo.algorithms.aggregate import Aggregation, Denominators, aggregate, denominators
from streamppo.algorithms.corrections import importance_weights
from streamppo.algorithms.masked import sequence_count
from streamppo.algorithms.value_losses import value_loss

KINDS: list[Aggregation] = [
    "token-mean",
    "sequence-mean-token-mean",
    "sequence-mean-token-sum",
    "prompt-mean",
    "constant",
]
LONGEST = 32.0
PROMPTS = [7, 9, 7, 3, 3, 7]
"""The prompt of each row; the only row of one of them is masked altogether."""
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[5, 1], [0, 3, 2], [4]]]


def slow_aggregate(rows: Rows, kind: Aggregation, prompts: list[int] | None = None) -> float:
    """Means over compacted rows, from their definitions."""
    full = [row for row in rows if row]
    if kind == "prompt-mean":
        together: dict[int, list[float]] = {}
        for row, prompt in zip(rows, PROMPTS if prompts is None else prompts, strict=True):
            together.setdefault(prompt, []).extend(row)
        means = [sum(losses) / len(losses) for losses in together.values() if losses]
        return sum(means) / len(means)
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


def cut_loss(name: str, kind: Aggregation, split: list[list[int]]) -> tuple[float, list[Rows]]:
    """(sum of the micro-batches' losses, gradient rows), with the denominators of the whole batch."""
    mask = ragged_mask()
    whole = Padded(mask)
    totals = denominators(whole.mask, constant=LONGEST, prompt_B=torch.tensor(PROMPTS))
    loss, gradients = 0.0, [[] for _ in mask]
    columns = rows_of(mask)
    for members in split:
        padded = Padded([mask[b] for b in members])
        current, proximal, adv = ([column[b] for b in members] for column in columns)
        logprobs = padded.tensor(current).requires_grad_()
        tokens = LOSSES[name][0](logprobs, padded.tensor(proximal), padded.tensor(adv), padded.mask)
        prompt = torch.tensor(PROMPTS)[members]
        part = aggregate(tokens.loss, padded.mask, kind, totals, sequence_count(padded.mask), prompt)
        part.backward()
        loss += part.item()
        assert logprobs.grad is not None
        for b, row in zip(members, padded.unmasked(logprobs.grad), strict=True):
            gradients[b] = row
    return loss, gradients


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_any_split_gives_the_loss_and_gradient_of_the_whole_batch(name: str, kind: Aggregation) -> None:
    mask = ragged_mask()
    current, proximal, adv = (compact(rows, mask) for rows in rows_of(mask))
    expected = slow_aggregate(slow_rows(LOSSES[name][1], current, current, proximal, adv), kind)
    results = [cut_loss(name, kind, split) for split in SPLITS]
    for loss, gradients in results:
        assert loss == pytest.approx(expected, rel=1e-10)
        for row, first in zip(gradients, results[0][1], strict=True):
            assert row == pytest.approx(first, rel=1e-10, abs=1e-14)
    assert any(abs(x) > 1e-6 for row in results[0][1] for x in row)


@pytest.mark.parametrize("kind", KINDS)
def test_a_corrected_value_or_policy_loss_with_dropped_tokens_adds_up_too(kind: Aggregation) -> None:
    mask = ragged_mask()
    whole = Padded(mask)
    totals = denominators(whole.mask, constant=LONGEST, prompt_B=torch.tensor(PROMPTS))
    current, proximal, returns = rows_of(mask)

    def share(members: list[int]) -> Tensor:
        padded = Padded([mask[b] for b in members])
        new, old, target = (padded.tensor([column[b] for b in members]) for column in (current, proximal, returns))
        correction = importance_weights(new, old, padded.mask, level="geometric", mode="mask", lo=0.95, hi=1.1)
        tokens = value_loss(new, old, target, padded.mask, clip=0.2)
        lengths = sequence_count(padded.mask)
        loss = tokens.loss * correction.weights
        return aggregate(loss, correction.keep, kind, totals, lengths, torch.tensor(PROMPTS)[members])

    sums = [sum(share(members).item() for members in split) for split in SPLITS]
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-12)
    assert sums[0] > 0


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.data())
def test_any_ragged_batch_cut_anywhere_aggregates_to_the_slow_mean(data: st.DataObject) -> None:
    bools = st.lists(st.booleans(), min_size=1, max_size=6)
    mask = data.draw(st.lists(bools, min_size=1, max_size=6).filter(lambda rows: any(map(any, rows))))
    order = data.draw(st.permutations(range(len(mask))))
    cut = data.draw(st.integers(0, len(mask)))
    kind = data.draw(st.sampled_from(KINDS))
    rows = random_rows(mask, 1)
    prompts = data.draw(st.lists(st.integers(-3, 3), min_size=len(mask), max_size=len(mask)))
    totals = denominators(Padded(mask).mask, constant=LONGEST, prompt_B=torch.tensor(prompts))
    loss = 0.0
    for members in filter(None, (order[:cut], order[cut:])):
        padded = Padded([mask[b] for b in members])
        part = padded.tensor([rows[b] for b in members])
        prompt = torch.tensor([prompts[b] for b in members])
        loss += aggregate(part, padded.mask, kind, totals, sequence_count(padded.mask), prompt).item()
    assert loss == pytest.approx(slow_aggregate(compact(rows, mask), kind, prompts), rel=1e-10, abs=1e-14)


def test_prompts_of_one_sequence_make_prompt_mean_the_mean_of_sequence_means() -> None:
    mask, rows = ragged_mask(), random_rows(ragged_mask(), 1)
    padded, prompt = Padded(mask), torch.arange(6)
    totals, lengths = denominators(padded.mask, prompt_B=prompt), sequence_count(padded.mask)
    found = aggregate(padded.tensor(rows), padded.mask, "prompt-mean", totals, lengths, prompt)
    known = aggregate(padded.tensor(rows), padded.mask, "sequence-mean-token-mean", totals, lengths)
    assert found.item() == pytest.approx(known.item(), rel=1e-12)


def test_a_long_answer_to_one_prompt_outweighs_its_short_one_and_no_other_prompt() -> None:
    mask = torch.tensor([[True] * 3, [True, False, False], [True, True, False]])
    prompt, loss = torch.tensor([1, 1, 2]), torch.tensor([[3.0] * 3, [7.0] * 3, [1.0] * 3])
    totals = denominators(mask, prompt_B=prompt)
    found = aggregate(loss, mask, "prompt-mean", totals, sequence_count(mask), prompt)
    assert found.item() == pytest.approx(((3 * 3 + 7) / 4 + 1) / 2)


def test_denominators_of_ranks_add_up_to_those_of_the_batch() -> None:
    mask = ragged_mask()
    whole = denominators(Padded(mask).mask, constant=9.0)
    parts = [denominators(Padded(rows).mask, constant=9.0) for rows in (mask[:2], mask[2:])]
    assert (parts[0].tokens + parts[1].tokens, parts[0].sequences + parts[1].sequences) == whole[:2]
    assert whole == Denominators(sum(map(sum, mask)), sum(map(any, mask)), 9.0)


def test_a_dropped_token_shrinks_the_loss_and_never_inflates_the_others() -> None:
    mask = torch.ones(1, 4, dtype=torch.bool)
    keep = torch.tensor([[True, True, False, False]])
    prompt = torch.tensor([5])
    totals = denominators(mask, constant=8.0, prompt_B=prompt)
    for kind, expected in zip(KINDS, (0.5, 0.5, 2.0, 0.5, 0.25), strict=True):
        got = aggregate(torch.ones(1, 4), keep, kind, totals, sequence_count(mask), prompt)
        assert got.item() == pytest.approx(expected)


def test_an_all_masked_minibatch_is_refused_and_an_all_masked_micro_batch_adds_zero() -> None:
    loss, none = torch.full((1, 2), float("nan")), torch.zeros(1, 2, dtype=torch.bool)
    prompt = torch.tensor([1])
    counted = denominators(torch.ones(1, 3) > 0, prompt_B=prompt)
    for kind in KINDS:
        assert aggregate(loss, none, kind, counted, sequence_count(none), prompt).item() == 0.0
        with pytest.raises(ValueError, match="every token of the minibatch is masked"):
            aggregate(loss, none, kind, denominators(none), sequence_count(none))
