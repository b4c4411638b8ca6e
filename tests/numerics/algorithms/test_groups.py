"""Group estimators against the statistics module, and the treatment of groups that teach nothing."""

import statistics

import pytest
import torch
from padded_rows import Padded, assert_rows, compact, ragged_mask, random_rows

from streamppo.algorithms import groups

SCORES = [1.0, 0.0, 0.3, 0.1, 0.1, 0.1, 0.9, 0.0, 1.0, 0.0]
GROUPS = [5, 5, 9, 2, 2, 2, 5, 7, 7, 7]


def by_group(f: "dict[int, list[float]]") -> list[float]:
    iterators = {g: iter(x) for g, x in f.items()}
    return [next(iterators[g]) for g in GROUPS]


def members() -> dict[int, list[float]]:
    return {g: [s for s, h in zip(SCORES, GROUPS, strict=True) if h == g] for g in set(GROUPS)}


def tensors() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(SCORES, dtype=torch.float64), torch.tensor(GROUPS)


def approx(x: list[float]) -> object:
    return pytest.approx(x, rel=1e-9, abs=1e-9)


def test_grpo_divides_by_the_groups_standard_deviation() -> None:
    unbiased, biased = {}, {}
    for g, x in members().items():
        mean = statistics.fmean(x)
        std = statistics.stdev(x) if len(x) > 1 else 0.0
        unbiased[g] = [(s - mean) / (std + 1e-6) for s in x]
        biased[g] = [(s - mean) / (statistics.pstdev(x) + 1e-6) for s in x]
    assert groups.grpo(*tensors()).tolist() == approx(by_group(unbiased))
    assert groups.grpo(*tensors(), unbiased=False).tolist() == approx(by_group(biased))


def test_dr_grpo_subtracts_the_mean_and_rloo_the_mean_of_the_others() -> None:
    centred = {g: [s - statistics.fmean(x) for s in x] for g, x in members().items()}
    others = {g: [s - (sum(x) - s) / (len(x) - 1) if len(x) > 1 else 0.0 for s in x] for g, x in members().items()}
    assert groups.dr_grpo(*tensors()).tolist() == approx(by_group(centred))
    assert groups.rloo(*tensors()).tolist() == approx(by_group(others))


OTHER = [0.0, 0.2, 5.0, 1.0, 3.0, 3.0, 0.2, 9.0, 9.0, 8.0]
"""A second component, of another scale."""


def normalised(component: list[float]) -> list[float]:
    """(c - mean) / std within each group, in plain floats."""
    result: dict[int, list[float]] = {}
    for group in set(GROUPS):
        own = [c for c, g in zip(component, GROUPS, strict=True) if g == group]
        std = statistics.stdev(own) if len(own) > 1 else 0.0
        result[group] = [(c - statistics.fmean(own)) / (std + 1e-6) for c in own]
    return by_group(result)


def test_gdpo_adds_components_that_are_normalised_by_group_and_normalises_over_the_batch() -> None:
    scores, ids = tensors()
    components = {"right": scores, "other": torch.tensor(OTHER, dtype=torch.float64)}
    added = [a + 0.5 * b for a, b in zip(normalised(SCORES), normalised(OTHER), strict=True)]
    mean, std = statistics.fmean(added), statistics.stdev(added)
    found = groups.gdpo(components, ids, weights={"right": 1.0, "other": 0.5})
    assert found.tolist() == pytest.approx([(a - mean) / (std + 1e-6) for a in added], rel=1e-5, abs=1e-6)


def test_gdpo_of_one_component_is_grpo_normalised_over_the_batch() -> None:
    scores, ids = tensors()
    grpo = groups.grpo(scores, ids, unbiased=False)
    found = groups.gdpo({"right": scores}, ids, weights={"right": 3.0}, unbiased=False)
    expected = (grpo - grpo.mean()) / grpo.std(unbiased=False)
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)


def test_gdpo_tells_answers_apart_whose_components_differ_and_whose_sums_do_not() -> None:
    ids = torch.zeros(4, dtype=torch.long)
    right, form = torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert (right + form).tolist() == [1.0, 1.0, 1.0, 0.0]
    found = groups.gdpo({"right": right, "form": form}, ids, weights={"right": 1.0, "form": 1.0})
    assert found[0] > found[1] == found[2] > found[3]


def test_gdpo_names_a_component_that_is_not_there() -> None:
    scores, ids = tensors()
    with pytest.raises(ValueError, match=r"no trajectory has the component 'form' \(there are right\)"):
        groups.gdpo({"right": scores}, ids, weights={"form": 1.0})
    scores[3] = torch.nan
    with pytest.raises(ValueError, match="trajectory 3 lacks the component 'right'"):
        groups.gdpo({"right": scores}, ids, weights={"right": 1.0})


def test_maxrl_weighs_a_prompt_by_one_over_its_success_rate() -> None:
    expected = {}
    for g, x in members().items():
        mean = statistics.fmean(x)
        expected[g] = [(s - mean) / mean if mean > 0 else 0.0 for s in x]
    assert groups.maxrl(*tensors()).tolist() == approx(by_group(expected))
    assert groups.maxrl(torch.zeros(3), torch.zeros(3)).tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(ValueError, match="scores >= 0"):
        groups.maxrl(torch.tensor([-1.0, 1.0]), torch.zeros(2))


def test_zero_variance_finds_groups_that_scored_the_same_and_groups_of_one() -> None:
    got = groups.zero_variance(*tensors())
    assert got.tolist() == [g in (2, 9) for g in GROUPS]


def test_a_group_without_variance_gets_advantages_of_zero_in_every_estimator() -> None:
    scores, ids = torch.full((6,), 0.1), torch.zeros(6)
    for estimator in (groups.grpo, groups.dr_grpo, groups.rloo, groups.maxrl):
        assert estimator(scores, ids).abs().max() < 1e-6


def test_reinforce_plus_plus_whitens_discounted_returns_over_the_batch() -> None:
    mask = ragged_mask()
    rewards = random_rows(mask, 1)
    padded = Padded(mask)
    to_go = [
        [sum(0.9 ** (u - t) * r[u] for u in range(t, len(r))) for t in range(len(r))] for r in compact(rewards, mask)
    ]
    flat = [x for row in to_go for x in row]
    mean, std = statistics.fmean(flat), statistics.pstdev(flat)
    got = groups.reinforce_plus_plus(padded.tensor(rewards), padded.mask, gamma=0.9)
    assert_rows(padded.unmasked(got), [[(x - mean) / std for x in row] for row in to_go], 1e-6)


def test_reinforce_plus_plus_baseline_centres_by_group_and_scales_by_batch() -> None:
    mask = ragged_mask()
    padded = Padded(mask)
    scores, ids = [1.0, 0.0, 0.0, 1.0, 1.0, 0.5], [0, 0, 1, 1, 1, 0]
    mean = {0: 0.5, 1: 2 / 3}
    rows = [[s - mean[g] for m in row if m] for s, g, row in zip(scores, ids, mask, strict=True)]
    flat = [x for row in rows for x in row]
    centre, std = statistics.fmean(flat), statistics.pstdev(flat)
    got = groups.reinforce_plus_plus_baseline(torch.tensor(scores, dtype=torch.float64), torch.tensor(ids), padded.mask)
    assert_rows(padded.unmasked(got), [[(x - centre) / std for x in row] for row in rows], 1e-6)


def test_scores_that_are_not_numbers_or_do_not_fit_their_groups_are_refused() -> None:
    with pytest.raises(ValueError, match="must both be"):
        groups.rloo(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ValueError, match="scores must be finite"):
        groups.grpo(torch.tensor([1.0, float("nan")]), torch.zeros(2))
