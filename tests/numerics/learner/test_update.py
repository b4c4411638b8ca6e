"""Splitting an update differently (micro-batches, ranks, one pass or two) changes nothing beyond rounding."""

import sys
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
from conftest import REPOSITORY
from msgspec.structs import replace

from streamppo.errors import UpdateError
from streamppo.learner.batch.padded import PaddedBatch, SharedPrompts, pad, row_order
from streamppo.learner.batching import micro_batches
from streamppo.learner.model.policy import PolicyOutput
from streamppo.learner.update import Updater

sys.path.insert(0, str(REPOSITORY))

from benchmarks.learning.algorithms import LOSSES


def updated(folder: Path, *overrides: str) -> tuple[case.Weights, dict[str, float]]:
    return case.updated(folder, pad(case.batch()), *overrides)


OWN_CRITIC = "algorithm.critic.model=policy"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"])
def test_the_micro_batch_budget_changes_nothing(folder: Path, aggregation: str) -> None:
    choice = f"algorithm.aggregation={aggregation}"
    whole = updated(folder, choice, "learner.micro_batch_tokens=100000")
    for budget in (1, 40):
        split = updated(folder, choice, f"learner.micro_batch_tokens={budget}")
        case.assert_same(whole, split, rel=1e-4)


ADVANTAGES = ["vtrace", "sequence", "grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"]
FILTERS = "algorithm.filters=[{kind='truncated'}, {kind='off_policy_negative', delta=0.1}]"
CHOICES = [
    *([f"algorithm.advantage.kind={kind}"] for kind in ADVANTAGES),
    *([f"algorithm.policy_loss.kind={kind}"] for kind in LOSSES if kind != "clip"),
    [f"algorithm.advantage={{kind='function', function='{REPOSITORY}/examples/custom_advantage.py:advantage'}}"],
    ["algorithm.correction.kind=off"],
    ["algorithm.correction.kind=mask", "algorithm.correction.band=[0.1, 5.0]"],
    ["algorithm.correction={kind='truncate', floor=0.5, reject=[{kind='geometric', band=[0.1, 9.0]}]}"],
    [
        "algorithm.correction={kind='reject', reject=[{kind='token', band=[0.1, 9.0]}, "
        "{kind='sequence', band=[0.001, 99.0]}, {kind='outlier', band=[0.001, 99.0]}, {kind='k3', at_most=5.0}]}"
    ],
    ["algorithm.correction={kind='function', function='examples/custom_correction.py:weights'}"],
    [FILTERS],
    [FILTERS, "algorithm.advantage.kind=rloo", "algorithm.proximal=loglinear"],
    ["algorithm.correction.kind=second_moment", "algorithm.correction.threshold=0.5"],
    ["algorithm.correction.level=sequence"],
    ["algorithm.correction.kind=topr"],
    ["algorithm.correction.kind=topr", "algorithm.negative_weight=0.25", "algorithm.advantage.kind=grpo"],
    ["algorithm.correction.kind=topr", "algorithm.advantage.kind=rloo", "algorithm.proximal=loglinear"],
    ["algorithm.negative_weight=0"],
    ["algorithm.advantage={kind='dr_grpo', baseline_shift=-0.1}"],
    ["algorithm.aggregation=constant"],
    ["algorithm.aggregation=prompt-mean"],
    ["algorithm.whiten.over=group", "algorithm.whiten.unbiased=true"],
    ["algorithm.advantage.adaptive_alpha=0.5"],
    ["algorithm.advantage.kind=grpo", "algorithm.zero_variance=mask"],
    ["algorithm.critic.model=policy", "algorithm.critic.huber=1"],
    ["algorithm.critic.model=scratch", "algorithm.critic.epochs=2", "algorithm.critic.minibatches=3"],
    ["algorithm.proximal=loglinear", "algorithm.advantage.kind=rloo"],
    ["algorithm.proximal=loglinear", "algorithm.critic.model=policy", "algorithm.correction.level=sequence"],
    ["algorithm.proximal=behavior", "algorithm.correction.kind=off"],
    ["algorithm.proximal=behavior", "algorithm.correction.kind=off", "algorithm.advantage.kind=grpo"],
    ["learner.norm=max-norm"],
    ["algorithm.kl.reward_beta=0.1"],
    ["algorithm.kl.loss_beta=0.1", "algorithm.kl.straight_through=true"],
    ["algorithm.policy_loss.dual=3.0", "algorithm.entropy=0.1", "model.gradient_checkpointing=full"],
]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("choice", CHOICES, ids=" ".join)
def test_every_choice_trains_and_is_indifferent_to_the_split(folder: Path, choice: list[str]) -> None:
    two_steps = ["learner.minibatches=2", *choice]
    whole = updated(folder, *two_steps, "learner.micro_batch_tokens=100000")
    split = updated(folder, *two_steps, "learner.micro_batch_tokens=40")
    case.assert_same(whole, split)
    assert whole[1]["grad_norm"] > 0
    assert whole[1]["steps"] == 2


@pytest.mark.usefixtures("alone")
def test_a_critic_is_trained_only_by_the_estimators_that_need_one(folder: Path) -> None:
    before = case.whole(case.updater(case.config_of(), folder).policy)
    for kind, moves in (("gae", True), ("vtrace", True), ("sequence", True), ("rloo", False)):
        after, metrics = updated(folder, f"algorithm.advantage.kind={kind}")
        assert torch.equal(before["value_head.weight"], after["value_head.weight"]) is not moves, kind
        assert (metrics["value_loss"] > 0) is moves, kind


@pytest.mark.usefixtures("alone")
def test_target_kl_ends_an_update_before_the_step_that_would_go_too_far(folder: Path) -> None:
    free = ("learner.epochs=4", "learner.lr=0.01")
    _, unlimited = updated(folder, *free)
    _, limited = updated(folder, *free, "algorithm.target_kl=0.001")
    assert (unlimited["steps"], unlimited["stopped_early"]) == (4, 0)
    assert limited["stopped_early"] == 1
    assert 1 <= limited["steps"] < 4


@pytest.mark.usefixtures("alone")
def test_after_an_early_stop_the_policy_passes_over_nothing_more(folder: Path) -> None:
    choices = ("learner.epochs=4", "learner.lr=0.01", "algorithm.target_kl=0.001")
    minibatches = case.updater(case.config_of(*choices), folder).update(pad(case.batch())).minibatches
    assert [minibatch.stopped_early for minibatch in minibatches] == [False, True]


@pytest.mark.usefixtures("alone")
def test_losses_are_means_over_minibatches_whether_or_not_each_became_a_step(folder: Path) -> None:
    twice = ("learner.epochs=2", "learner.lr=0.01")
    _, stepped = updated(folder, *twice)
    _, stopped = updated(folder, *twice, "algorithm.target_kl=0.001")
    assert (stepped["steps"], stopped["steps"]) == (2, 1)
    own = "algorithm.critic.model=policy"
    _, once = updated(folder, own)
    _, standing = updated(folder, own, "learner.epochs=2", "algorithm.critic.warmup_updates=4")
    assert (standing["steps"], standing["critic_steps"]) == (0, 2)
    for name in ("policy_loss", "entropy"):
        assert stopped[name] == stepped[name] != 0
    assert standing["policy_loss"] == 0
    assert standing["entropy"] == pytest.approx(once["entropy"], rel=1e-6)
    for name in ("value_loss", "value_clip_fraction"):
        assert stopped[name] == stepped[name] != 0


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("norm", ["2-norm", "max-norm"])
def test_a_gradient_that_is_not_finite_moves_nothing_and_ends_the_run_when_it_stays(folder: Path, norm: str) -> None:
    updater = case.updater(case.config_of("learner.max_bad_steps=2", f"learner.norm={norm}"), folder)
    before = case.whole(updater.policy)
    real = updater.objective.policy_loss

    def explosive(*arguments: torch.Tensor):
        return (found := real(*arguments))._replace(loss=found.loss * torch.inf)

    updater.objective = updater.objective._replace(policy_loss=explosive)
    assert case.metrics(updater, pad(case.batch()))["bad_steps"] == 1
    with pytest.raises(UpdateError, match="2 optimizer steps in a row"):
        updater.update(pad(case.batch()))
    after = case.whole(updater.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.usefixtures("alone")
def test_log_probs_that_are_not_numbers_are_bad_steps_under_target_kl_and_end_the_run_when_they_stay(
    folder: Path,
) -> None:
    updater = case.updater(case.config_of("algorithm.target_kl=0.1", "learner.max_bad_steps=2", OWN_CRITIC), folder)
    with torch.no_grad():
        next(updater.policy.lm.parameters()).fill_(torch.nan)
    metrics = case.metrics(updater, pad(case.batch()))
    assert (metrics["bad_steps"], metrics["stopped_early"], metrics["steps"]) == (1, 0, 0)
    assert metrics["critic_steps"] == 1
    with pytest.raises(UpdateError, match="2 optimizer steps in a row"):
        updater.update(pad(case.batch()))


@pytest.mark.usefixtures("alone")
def test_data_that_must_not_be_trained_on_is_refused_by_name(folder: Path) -> None:
    updater = case.updater(case.config_of(), folder)
    padded = pad(case.batch())
    broken = padded.behavior_logprobs_BT.clone()
    broken[0, 0] = torch.nan
    with pytest.raises(UpdateError, match=r"batch 3 cannot be trained on: .*behavior"):
        updater.update(padded._replace(behavior_logprobs_BT=broken, mask_BT=padded.mask_BT | (broken.isnan())))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("beta", ["reward_beta", "loss_beta"])
def test_a_reference_without_log_probs_is_refused_in_reward_and_loss(folder: Path, beta: str) -> None:
    updater = case.updater(case.config_of(f"algorithm.kl.{beta}=0.1"), folder)
    assert updater.reference is not None
    with torch.no_grad():
        next(updater.reference.parameters()).fill_(torch.nan)
    with pytest.raises(UpdateError, match=r"reference.*not finite"):
        updater.update(pad(case.batch()))


@pytest.mark.usefixtures("alone")
def test_a_value_after_the_last_token_that_is_not_finite_is_refused_wherever_it_stands(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    updater, padded = case.updater(case.config_of(), folder), pad(case.batch())
    finished = padded.truncated_B.logical_not().nonzero()[0]
    before = Updater._score_batch

    def poisoned(*arguments: Any, **named: Any) -> tuple[PolicyOutput, list[PolicyOutput]]:
        scored, graphs = before(*arguments, **named)
        return scored._replace(bootstrap_B=scored.bootstrap_B.index_fill(0, finished, torch.nan)), graphs

    monkeypatch.setattr(Updater, "_score_batch", poisoned)
    with pytest.raises(UpdateError, match=rf"bootstrap\[{int(finished)}\] = nan"):
        updater.update(padded)


@pytest.mark.usefixtures("alone")
def test_the_controller_moves_beta_towards_its_target(folder: Path) -> None:
    updater = case.updater(
        case.config_of("algorithm.kl.reward_beta=0.1", "algorithm.kl.target=0.001", "learner.lr=0.01"), folder
    )
    assert case.metrics(updater, pad(case.batch()))["reference_kl"] == pytest.approx(0.0, abs=1e-6)
    below = updater.beta
    case.metrics(updater, pad(case.batch()))
    assert below < 0.1
    assert updater.beta > below


@pytest.mark.usefixtures("alone")
def test_an_update_moves_every_parameter(folder: Path) -> None:
    before = case.whole(case.updater(case.config_of(), folder).policy)
    after, _ = updated(folder)
    assert [name for name in before if torch.equal(before[name], after[name])] == []


@pytest.mark.usefixtures("alone")
def test_one_pass_equals_two_passes_where_nothing_moves_between_them(folder: Path) -> None:
    single = ("learner.minibatches=1", "learner.micro_batch_tokens=100000")
    once, _ = updated(folder, *single)
    twice, _ = updated(folder, "learner.minibatches=1", "learner.micro_batch_tokens=60")
    case.assert_same_weights(once, twice)


@pytest.mark.usefixtures("alone")
def test_one_pass_means_one_forward(folder: Path) -> None:
    updater = case.updater(case.config_of("learner.minibatches=1", "learner.micro_batch_tokens=100000"), folder)
    calls: list[int] = []
    updater.policy.register_forward_pre_hook(lambda *_: calls.append(1))
    updater.update(pad(case.batch()))
    assert len(calls) == 1


@pytest.mark.usefixtures("alone")
def test_the_same_update_twice_gives_the_same_bits(folder: Path) -> None:
    one, _ = updated(folder)
    other, _ = updated(folder)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.usefixtures("alone")
def test_tokens_that_are_too_old_enter_the_denominator_and_not_the_loss(folder: Path) -> None:
    """Their advantage is poisoned: if one of them reached the loss, the result would differ."""
    updater = case.updater(case.config_of(), folder)
    batch = pad(case.batch(min_version=2))
    old_BT = batch.mask_BT & ~batch.fresh_BT
    assert old_BT.any()
    real = updater.objective.advantages

    def poisoned(padded: PaddedBatch, proximal, rewards_BT: torch.Tensor):
        estimate = real(padded, proximal, rewards_BT)
        return estimate._replace(advantages=estimate.advantages.masked_fill(old_BT, 1e6))

    updater.objective = updater.objective._replace(advantages=poisoned)
    updater.update(batch)
    clean = case.updater(case.config_of(), folder)
    clean.update(batch)
    case.assert_same_weights(case.whole(clean.policy), case.whole(updater.policy), atol=0)


@pytest.mark.usefixtures("alone")
def test_log_probs_and_values_are_those_of_a_plain_forward_without_padding(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    updater = case.updater(case.config_of("rollout.temperature=0.7"), folder)
    padded = pad(case.batch())
    with torch.no_grad():
        head_1D = case.full(updater.policy.value_head.weight)
        scored = updater.policy(padded, "both")
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for row in range(case.BATCH):
            start, length = int(padded.start_B[row]), int(padded.length_B[row])
            ids = padded.inputs_BL[row : row + 1, : start + length]
            logits_LV = lm(input_ids=ids).logits[0] / 0.7
            logp_LV = logits_LV.log_softmax(-1)
            expected_T = logp_LV[start - 1 : -1].gather(-1, ids[0, start:, None]).squeeze(-1)
            entropy_T = -(logp_LV.exp() * logp_LV).sum(-1)[start - 1 : -1]
            torch.testing.assert_close(scored.logprobs_BT[row, :length], expected_T, rtol=0, atol=1e-5)
            torch.testing.assert_close(scored.entropy_BT[row, :length], entropy_T, rtol=0, atol=1e-5)
            hidden_LD = lm.base_model(input_ids=ids).last_hidden_state[0]
            values_L = head_1D @ hidden_LD.T
            torch.testing.assert_close(scored.values_BT[row, :length], values_L[0, start - 1 : -1], rtol=0, atol=1e-5)
            torch.testing.assert_close(scored.bootstrap_B[row], values_L[0, -1], rtol=0, atol=1e-5)


LOGLINEAR = ["algorithm.proximal=loglinear", "algorithm.advantage.kind=rloo"]
BEHAVIOR = ["algorithm.proximal=behavior", "algorithm.correction.kind=off", "algorithm.advantage.kind=rloo"]
REJECT = "algorithm.correction={kind='reject', reject=[{kind='geometric', band=[0.3, 3.0]}, {kind='k3', at_most=2.0}]}"
RANKED = [
    [],
    # Two trajectories in a minibatch: one rank has none.
    ["algorithm.critic.model=scratch", "algorithm.critic.minibatches=6", "learner.norm=max-norm"],
    [*LOGLINEAR, "learner.minibatches=6"],
    # In the second epoch rows are dealt to other ranks than in the first.
    ["learner.epochs=2", "learner.minibatches=2", "learner.lr=1e-5"],
    [*LOGLINEAR, "learner.epochs=2", "learner.minibatches=2", "learner.lr=1e-5", "algorithm.kl.loss_beta=0.1"],
    [*BEHAVIOR, "learner.minibatches=6", "algorithm.kl.loss_beta=0.1"],
    # Both ranks count what the filters and the rules leave out, and agree on steps of which nothing is left.
    [FILTERS, REJECT, "algorithm.advantage.kind=rloo", "learner.epochs=2", "learner.minibatches=6", "learner.lr=1e-5"],
    ["algorithm.correction={kind='function', function='examples/custom_correction.py:weights'}"],
    ["algorithm.correction.kind=topr", "algorithm.negative_weight=0.25", "learner.minibatches=6", "learner.lr=1e-5"],
]


def _made(ranks: int, folder: Path) -> list[tuple[case.Weights, dict[str, float]]]:
    return [updated(folder, f"learner.ranks={ranks}", "learner.micro_batch_tokens=40", *more) for more in RANKED]


def test_three_ranks_make_the_update_of_one(folder: Path, tmp_path: Path) -> None:
    of_one, of_three = (case.by_ranks(_made, ranks, tmp_path, folder) for ranks in (1, 3))
    for one, three in zip(of_one, of_three, strict=True):
        case.assert_same(one, three, rel=1e-4)


# --- padding -------------------------------------------------------------------------------------------------


def test_the_order_of_minibatches_is_the_same_in_every_python_and_process() -> None:
    assert row_order(12, seed=0, version=3, epoch=0).tolist() == [3, 2, 0, 6, 10, 8, 4, 1, 7, 9, 5, 11]
    assert row_order(12, seed=0, version=3, epoch=1).tolist() == [2, 1, 0, 8, 10, 11, 4, 5, 6, 9, 3, 7]
    assert row_order(12, seed=0, version=4, epoch=0).tolist() == [10, 6, 7, 0, 11, 5, 4, 3, 1, 2, 9, 8]
    assert row_order(12, seed=1, version=3, epoch=0).tolist() == [3, 9, 0, 11, 2, 7, 8, 10, 1, 5, 4, 6]


@pytest.mark.usefixtures("alone")
def test_minibatches_are_cut_from_that_order_in_every_epoch_anew(folder: Path) -> None:
    choices = ("learner.minibatches=3", "learner.epochs=2")
    updated = case.updater(case.config_of(*choices), folder).update(pad(case.batch(version=3)))
    rows = [minibatch.rows.tolist() for minibatch in updated.minibatches]
    assert [len(some) for some in rows] == [4] * 6
    seed = case.config_of().seed
    for epoch in (0, 1):
        expected = row_order(case.BATCH, seed, version=3, epoch=epoch).tolist()
        assert [row for some in rows[3 * epoch : 3 * epoch + 3] for row in some] == expected


def test_micro_batches_hold_every_row_once_within_the_budget_and_equal_counts() -> None:
    tokens_B = torch.tensor([5, 30, 7, 7, 12, 1, 18, 9])
    for ranks in (1, 2, 3):
        shares = micro_batches(torch.arange(8), tokens_B, 24, ranks)
        assert len({len(share) for share in shares}) == 1
        rows = torch.cat([piece for share in shares for piece in share])
        assert sorted(rows.tolist()) == list(range(8))
        for piece in (piece for share in shares for piece in share if len(piece) > 1):
            assert len(piece) * int(tokens_B[piece].max()) <= 24


def test_micro_batches_of_joined_rows_hold_as_many_as_the_budget_has_tokens_for() -> None:
    tokens_B = torch.tensor([5, 30, 7, 7, 12, 1, 18, 9])
    (share,) = micro_batches(torch.arange(8), tokens_B, 24, 1, padded=False)
    assert [tokens_B[piece].tolist() for piece in share] == [[30], [18], [12, 9], [7, 7, 5, 1]]


def test_a_micro_batch_of_joined_rows_counts_the_prompt_of_its_samples_once() -> None:
    generator = torch.Generator().manual_seed(4)
    group_B, shared_B = torch.arange(60) % 9, torch.randint(1, 40, (9,), generator=generator)[torch.arange(60) % 9]
    tokens_B = shared_B + torch.randint(1, 60, (60,), generator=generator)

    def tokens(piece: torch.Tensor) -> int:
        once = {int(group_B[row]): int(shared_B[row]) for row in piece.tolist()}
        return int((tokens_B - shared_B)[piece].sum()) + sum(once.values())

    for ranks in (1, 2):
        shares = micro_batches(
            torch.arange(60), tokens_B, 300, ranks, padded=False, prompts=SharedPrompts(group_B, shared_B)
        )
        assert sorted(torch.cat([piece for share in shares for piece in share]).tolist()) == list(range(60))
        assert all(tokens(piece) <= 300 for share in shares for piece in share)
        apart = micro_batches(torch.arange(60), tokens_B, 300, ranks, padded=False)
        assert len(shares[0]) < len(apart[0])
        groups = [set(group_B[piece].tolist()) for piece in shares[0]]
        # At most the last samples of one piece are of the prompt of the next one's first.
        assert all(len(one & other) <= 1 for one, other in pairwise(groups))


def test_segments_of_a_row_share_nothing_with_those_of_other_rows() -> None:
    batch = case.batch()
    made = [replace(one, prefix=n % 3, prompt_tokens=bytes(20)) for n, one in enumerate(batch.trajectories)]
    rows = pad(replace(batch, trajectories=tuple(made)))
    assert rows.prefix_B.count_nonzero() > 1
    group_B, own = rows.on_host.shared_prompts().group_B, rows.prefix_B > 0
    assert len(group_B[own].unique()) == int(own.sum()) and not set(group_B[own].tolist()) & set(group_B[~own].tolist())
    for row, other in combinations(torch.arange(len(group_B))[~own].tolist(), 2):
        if group_B[row] == group_B[other]:
            assert rows.prompt_B[row] == rows.prompt_B[other] and rows.start_B[row] == rows.start_B[other]


def test_the_heaviest_rank_is_ahead_of_the_lightest_by_its_shortest_row_at_most() -> None:
    generator = torch.Generator().manual_seed(0)
    for ranks in (2, 3, 7):
        tokens_B = (torch.rand(50, generator=generator) ** 4 * 1000).long() + 1
        shares = micro_batches(torch.arange(50), tokens_B, 4000, ranks)
        rows = [tokens_B[torch.cat(share)] for share in shares]
        heaviest = max(rows, key=lambda tokens: int(tokens.sum()))
        assert heaviest.sum() - min(int(tokens.sum()) for tokens in rows) <= heaviest.min()


def test_a_heavy_tail_of_lengths_is_padded_to_less_than_twice_its_tokens_and_other_rows_are_not_split_for_it() -> None:
    generator = torch.Generator().manual_seed(0)
    drawn_B = (8 * (2 * torch.rand(512, generator=generator)) ** (-1 / 1.3)).clamp(4, 512).round().long() + 6
    (share,) = micro_batches(torch.arange(512), drawn_B, 16384, 1)
    assert sorted(torch.cat(share).tolist()) == list(range(512))
    assert len(share) <= 7 and sum(len(rows) * int(drawn_B[rows].max()) for rows in share) < 1.4 * drawn_B.sum()
    (fine,) = micro_batches(torch.arange(512), drawn_B, 16384, 1, overhead=30.0)
    assert len(fine) <= 25 and sum(len(rows) * int(drawn_B[rows].max()) for rows in fine) < 1.05 * drawn_B.sum()
    for lengths_B in (torch.full((512,), 13), torch.arange(512) % 8 + 8, torch.tensor([512, 6, 6])):
        (share,) = micro_batches(torch.arange(len(lengths_B)), lengths_B, 16384, 1)
        assert len(share) == 1
    (joined,) = micro_batches(torch.arange(512), drawn_B, 16384, 1, padded=False)
    assert len(joined) == 1, "without padding nothing is split for it"


def test_rows_are_cut_in_two_where_that_saves_more_padding_than_a_pass_costs() -> None:
    tokens_B = torch.tensor([3, 40, 2, 38, 4])
    for overhead, expected in ((109.0, [[40, 38, 4, 3, 2]]), (107.0, [[40, 38], [4, 3, 2]])):
        (share,) = micro_batches(torch.arange(5), tokens_B, 400, 1, overhead=overhead)
        assert [tokens_B[rows].tolist() for rows in share] == expected
    # A row of three lines is padded three times.
    (share,) = micro_batches(
        torch.arange(2), torch.tensor([40, 4]), 400, 1, overhead=100.0, lines_B=torch.tensor([1, 3])
    )
    assert len(share) == 2


def test_the_samples_of_a_prompt_stay_together_where_one_row_for_each_prompt_is_less_work() -> None:
    """Two prompts of four samples each: completions of 100 to 107 tokens, with 100 tokens of prompt or with one."""
    completions_B, group_B = torch.arange(8) + 100, torch.arange(8) // 4
    for prompt, pieces in ((100, 1), (1, 2)):
        prompts = SharedPrompts(group_B, torch.full((8,), prompt))
        (share,) = micro_batches(torch.arange(8), completions_B + prompt, 4000, 1, prompts=prompts, overhead=5.0)
        assert len(share) == pieces


def test_rows_are_dealt_by_their_work_of_which_long_ones_have_more_than_tokens() -> None:
    tokens_B = torch.tensor([100, *[10] * 10])
    by_tokens = micro_batches(torch.arange(11), tokens_B, 400, 2)
    by_work = micro_batches(torch.arange(11), tokens_B, 400, 2, work=lambda tokens: tokens + tokens**2 / 100)
    assert [int(tokens_B[torch.cat(share)].sum()) for share in by_tokens] == [100, 100]
    assert [len(torch.cat(share)) for share in by_work] == [1, 10]


def test_padding_keeps_every_column_in_its_row() -> None:
    batch = case.batch()
    padded = pad(batch)
    for row, trajectory in enumerate(batch.trajectories):
        start, count = int(padded.start_B[row]), trajectory.num_tokens
        assert padded.inputs_BL[row, start : start + count].numpy().astype("<i4").tobytes() == trajectory.tokens
        assert padded.behavior_logprobs_BT[row, :count].numpy().tobytes() == trajectory.logprobs
        assert padded.mask_BT[row, :count].numpy().tobytes() == trajectory.mask
        assert not padded.mask_BT[row, count:].any()
        lag = padded.lag_BT[row, :count]
        assert ((lag <= batch.version - batch.min_version) & padded.mask_BT[row, :count]).equal(
            padded.fresh_BT[row, :count]
        )
