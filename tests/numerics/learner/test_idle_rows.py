"""Rows that teach nothing are in no pass, and the weights are those of an update with all rows."""

from collections.abc import Iterator
from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch
from msgspec.structs import replace

from streamppo.learner import update
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.batching import ActiveRows
from streamppo.learner.model import policy
from streamppo.queue.store import batch_parts
from streamppo.types import Batch

GRPO, MASK = "algorithm.advantage.kind=grpo", "algorithm.zero_variance=mask"
FREE = "algorithm.entropy=0"
"""Nothing but advantages moves the policy."""
RECIPES: dict[str, tuple[str, ...]] = {
    **{kind: (f"algorithm.advantage.kind={kind}", MASK) for kind in ("grpo", "dr_grpo", "rloo")},
    **{
        f"{kind}, kept": (f"algorithm.advantage.kind={kind}", FREE, "learner.minibatches=3")
        for kind in ("grpo", "dr_grpo", "rloo", "maxrl")
    },
    "maxrl": ("algorithm.advantage.kind=maxrl", MASK),
    "reinforce++": ("algorithm.advantage.kind=reinforce_plus_plus",),
    "reinforce++ with a baseline": ("algorithm.advantage.kind=reinforce_plus_plus_baseline", MASK),
    "gae": (),
    "vtrace": ("algorithm.advantage.kind=vtrace",),
    "a critic of its own": ("algorithm.critic.model=policy", "algorithm.filters=[{kind='truncated'}]"),
    "no whitening of gae": ("algorithm.whiten.over=off",),
    **{
        kind: (GRPO, MASK, f"algorithm.aggregation={kind}", "learner.minibatches=2")
        for kind in ("sequence-mean-token-mean", "sequence-mean-token-sum", "prompt-mean", "constant")
    },
    **{
        f"loss {kind}": (GRPO, FREE, f"algorithm.policy_loss.kind={kind}", "learner.epochs=2")
        for kind in ("clip", "cispo", "gspo", "gmpo", "vespo", "reinforce", "dppo_tv", "dppo_kl", "ipo", "sapo")
    },
    "entropy": (GRPO, MASK, "algorithm.entropy=0.01", "learner.minibatches=3"),
    "entropy, kept": (GRPO, "algorithm.entropy=0.01"),
    "kl in the loss": (GRPO, MASK, "algorithm.kl.loss_beta=0.1", "learner.minibatches=2"),
    "kl in the reward": (GRPO, MASK, "algorithm.kl.reward_beta=0.1"),
    "rules": (GRPO, MASK, "algorithm.correction={kind='reject', reject=[{kind='k3', at_most=0.7}]}"),
    "second moment": (GRPO, MASK, "algorithm.correction={kind='second_moment', threshold=0.5}"),
    "topr": (GRPO, FREE, "algorithm.correction.kind=topr", "algorithm.negative_weight=0.25", "learner.epochs=2"),
    "a shifted baseline": ("algorithm.advantage={kind='dr_grpo', baseline_shift=-0.1}", FREE),
    "mask": (GRPO, MASK, "algorithm.correction.kind=mask", "learner.epochs=2"),
    "top entropy": (GRPO, MASK, "algorithm.exploration={kind='top_entropy', share=0.5}"),
    "positive nll": (GRPO, MASK, "algorithm.positive_nll=0.1"),
    "target kl": (GRPO, MASK, "algorithm.target_kl=0.001", "learner.epochs=3"),
    "loglinear": (GRPO, MASK, "algorithm.proximal=loglinear", "learner.minibatches=3", "learner.epochs=2"),
    "behavior": (GRPO, FREE, "algorithm.proximal=behavior", "algorithm.correction.kind=off", "learner.minibatches=6"),
    "truncated": (GRPO, FREE, "algorithm.filters=[{kind='truncated'}]", "learner.minibatches=2"),
}


def batch_of(equal: int, *, old: int = 0) -> Batch:
    """Six groups of two, `equal` of them with equal scores, others 0 and 1; the last `old` rows are too old."""
    made = case.batch()
    rows = []
    for number, one in enumerate(made.trajectories):
        reward = 0.25 if number // 2 < equal else float(number % 2)
        versions = np.zeros(one.num_tokens, np.int32).tobytes() if number >= case.BATCH - old else one.versions
        rows.append(replace(one, reward=reward, versions=versions))
    return replace(made, trajectories=tuple(rows))


BATCHES = {
    "two thirds": batch_of(4),
    "old and equal": batch_of(2, old=3),
    "one group": batch_of(5),
    "none": batch_of(6),
}


def all_rows(_: object, batch: PaddedBatch) -> ActiveRows:
    every_B = torch.ones(len(batch.reward_B), dtype=torch.bool)
    return ActiveRows(every_B, every_B, ~every_B)


def weights(folder: Path, overrides: tuple[str, ...], batch: Batch, *, leave: bool) -> case.Weights:
    """The weights after two updates; the second one shows the state that the first has left.

    AdamW with a large epsilon: it moves by its moments where a gradient is 0, and little where that is so but for
    rounding.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not leave:
            patch.setattr(update, "active_rows", all_rows)
        updater = case.updater(case.config_of("learner.micro_batch_tokens=30", *overrides), folder)
        some = [parameter for parameter in updater.policy.parameters() if parameter.requires_grad]
        updater.optimizer = torch.optim.AdamW(some, lr=0.01, eps=1e-2, weight_decay=0.1)
        for version in (3, 4):
            taken = replace(batch, version=version)
            case.metrics(updater, pad(taken))
        return case.whole(updater.policy)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group for all tests of this file."""
    with case.group(0, 1, tmp_path_factory.mktemp("group") / "store"):
        yield


SOME = ("grpo", "grpo, kept", "entropy", "gae", "behavior", "truncated")
"""Recipes that are tried with each batch in every run of the tests; the others with one of them."""


def is_quick(recipe: str, name: str) -> bool:
    return recipe in SOME or name == "old and equal"


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        pytest.param(recipe, name, marks=() if is_quick(recipe, name) else pytest.mark.slow)
        for recipe in RECIPES
        for name in BATCHES
    ],
)
def test_weights_are_those_of_an_update_that_passes_over_all(recipe: str, name: str, folder: Path) -> None:
    made = [weights(folder, RECIPES[recipe], BATCHES[name], leave=leave) for leave in (False, True)]
    case.assert_same_weights(*made)


def of_ranks(ranks: int, folder: Path, *, leave: bool, own: bool) -> list[case.Weights]:
    """The weights of an update for some recipes; with `own` each rank has the tokens of its own rows alone."""
    found = []
    with pytest.MonkeyPatch.context() as patch:
        if not leave:
            patch.setattr(update, "active_rows", all_rows)
        for name in SOME:
            overrides = (f"learner.ranks={ranks}", "learner.micro_batch_tokens=30", *RECIPES[name])
            updater = case.updater(case.config_of(*overrides), folder)
            batch = BATCHES["old and equal"]
            if own:
                outline = batch_parts.make_outline(batch)
                batch = batch_parts.join(
                    outline, batch_parts.select_tokens(batch, updater.rank_rows(pad(batch_parts.join(outline, []))))
                )
            case.metrics(updater, pad(batch))
            found.append(case.whole(updater.policy))
    return found


def both(ranks: int, folder: Path) -> list[list[case.Weights]]:
    """With all rows passed over, without, and without their tokens."""
    return [
        of_ranks(ranks, folder, leave=leave, own=own) for leave, own in ((False, False), (True, False), (True, True))
    ]


@pytest.mark.slow
def test_two_ranks_make_the_same_weights_without_the_tokens_of_such_rows(folder: Path, tmp_path: Path) -> None:
    every, left, own = case.by_ranks(both, 2, tmp_path, folder)
    for whole, without, bare in zip(every, left, own, strict=True):
        case.assert_same_weights(whole, without)
        case.assert_same_weights(without, bare, atol=0)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("override", [MASK, FREE])
def test_an_update_of_which_two_thirds_teach_nothing_passes_over_a_third(
    override: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed: list[int] = []
    forward = policy.Policy.forward

    def counted(self: policy.Policy, rows: PaddedBatch, part: policy.Part) -> policy.PolicyOutput:
        passed.append(len(rows.reward_B))
        return forward(self, rows, part)

    monkeypatch.setattr(policy.Policy, "forward", counted)
    updater = case.updater(case.config_of(GRPO, override, "learner.minibatches=2"), folder)
    found = case.metrics(updater, pad(batch_of(4)))
    assert sum(passed) == 2 * case.BATCH / 3
    idle_B = [one.mask for one in batch_of(4).trajectories][:8]
    assert found["tokens_idle"] == sum(sum(mask) for mask in idle_B)
    assert found["tokens"] > found["tokens_idle"] > 0
