"""Every metric that an update writes says what its sentence in the catalogue says: one tiny batch, numbers by hand.

The policy is a table: its probabilities are BEFORE until the first step, and AFTER from then on. Seven tokens are
sampled, and a masked one is not; one of the seven is too old. All importance weights are powers of two.
"""

import math
from collections.abc import Iterator

import learner_case as case
import msgspec
import pytest
import table_policy as tables
import torch
from conftest import trajectory

from streamppo.algorithms.candidates import Candidates
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.telemetry.catalogue import SOMETIMES, UPDATE
from streamppo.types import Batch

BEFORE, AFTER = ([1 / 8, 1 / 8, 1 / 4, 1 / 2], [0.0, 0.5, 1.0, 0.25]), ([1 / 4] * 4, [0.0, 0.9, 1.5, 0.35])
"""Probabilities and values of the tokens 0 to 3."""
FIRST_MODEL = [1 / 8, 1 / 4, 1 / 8, 1 / 2]
LN2 = math.log(2)


def rows(min_version: int = 2) -> PaddedBatch:
    """Two prompts of two answers; the sampled probabilities beside, and proximal / behavior behind each line."""
    made = [
        # tokens, log2 of behavior, versions, mask, reward
        ([3, 2], [-1, -4], [3, 3], [1, 1], 1.0),  # 1, 4
        ([1], [-1], [2], [1], 1.0),  # 1/4
        ([3, 0, 1], [-3, 0, -3], [2, 2, 3], [1, 0, 1], 0.0),  # 4, not sampled, 1
        ([2, 3], [-2, -1], [0, 2], [1, 1], 2.0),  # 1 (too old), 1
    ]
    trajectories = [
        trajectory(
            tokens,
            prompt=[0],
            number=row // 2,
            sample=row % 2,
            versions=versions,
            logprobs=[power * LN2 for power in powers],
            mask=[bool(bit) for bit in mask],
            reward=reward,
            finish="length" if row == 2 else "stop",
        )
        for row, (tokens, powers, versions, mask, reward) in enumerate(made)
    ]
    trajectories[0] = msgspec.structs.replace(trajectories[0], components={"form": 1.0})
    trajectories[2] = msgspec.structs.replace(trajectories[2], components={"form": 0.5})
    return pad(Batch(version=3, min_version=min_version, trajectories=tuple(trajectories)))


CHOICES = (
    "algorithm.advantage={kind = 'gae', lam = 1.0}",
    "algorithm.correction={kind = 'truncate', cap = 2.0}",
    "algorithm.whiten.over=off",
    # Small enough to need a reference, and to leave the gradient as it is.
    "algorithm.kl.loss_beta=1e-9",
    "algorithm.entropy=0",
    "learner.epochs=2",
)


def metrics(*overrides: str, batch: PaddedBatch | None = None) -> dict[str, float]:
    """The metrics of an update of two passes; a critic with steps of its own learns after the policy."""
    config = case.config_of(*CHOICES, *overrides)
    policy = tables.TablePolicy(*BEFORE)
    own = config.algorithm.critic.model != "head"
    moved = (AFTER[0], BEFORE[1])
    script = [moved, moved, AFTER] if own else [AFTER]
    reference = tables.TablePolicy(FIRST_MODEL, BEFORE[1])
    updater = tables.updater(config, policy, reference, tables.Scripted(policy, script))
    return case.metrics(updater, rows() if batch is None else batch)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group for all tests of this file."""
    with case.group(0, 1, tmp_path_factory.mktemp("group") / "store"):
        yield


@pytest.fixture(scope="module")
def found(group: None) -> dict[str, float]:
    return metrics()


@pytest.fixture(scope="module")
def found_with_own_critic(group: None) -> dict[str, float]:
    return metrics("algorithm.critic.model=policy")


LOGITS_NORMS = (
    math.hypot(0.203125, 0.578125, 0.40625, -1.1875) / 7,
    math.hypot(0.0625, 1.0625, 0.0625, -1.1875) / 7,
)
VALUES_NORMS = (0.5 * 2.25 / 7, 0.5 * math.hypot(0.9, 0.5, -1.95) / 7)
EXPECTED = {
    "reward": 1.0,
    "length": 7 / 4,
    "truncated": 1 / 4,
    "tokens": 7,
    "tokens_too_old": 1,
    "tokens_trained": 6,
    # With values to learn every row is passed over; test_idle_rows.py has batches where some are not.
    "tokens_idle": 0,
    "equal_groups": 1 / 2,
    "lag_mean": 6 / 7,
    "lag_max": 3,
    "behavior_kl_k1": -2 * LN2 / 7,
    "behavior_kl": (12.25 - 7 - 2 * LN2) / 7,
    "ess": 12.25**2 / (7 * 36.0625),
    "ess_sequence": 9.25**2 / (4 * 33.0625),
    "chi2": 36.0625 / 7 - 1,
    "chi2_sequence": 33.0625 / 4 - 1,
    "weights_high": 2 / 7,
    "weights_low": 1 / 7,
    "log_ppl_engine": 15 * LN2 / 7,
    "log_ppl_learner": 13 * LN2 / 7,
    "mismatch": 2 * LN2 / 3,
    "explained_variance": 1 - (5.1875 / 7 - (3.25 / 7) ** 2) / (4 / 7),
    # Advantages are 3/4, 0; 1/2; -1/4, -1/2; 7/4. The second pass, at ratios 1/2, 1; 2; 1/2, 2; 1/2, adds up to 0.
    "policy_loss": -1.625 / 7 / 2,
    "value_loss": (4.1875 / 2 + 2.20875) / 7 / 2,
    "value_clip_fraction": 1 / 12,
    "entropy": (1.75 + 2) / 2 * LN2,
    "proximal_kl_k1": LN2 / 12,
    "proximal_kl": (6.5 - 6 + LN2) / 12,
    "clip_fraction_high": 1 / 12,
    "clip_fraction_low": 1 / 12,
    "ratio_p01": 1 / 2,
    "ratio_p50": 1 / 2,
    "ratio_p99": 2,
    "grad_norm": sum(map(math.hypot, LOGITS_NORMS, VALUES_NORMS)) / 2,
    "steps": 2,
    "bad_steps": 0,
    "empty_steps": 0,
    "stopped_early": 0,
    "lr": 0.25,
    "reference_kl": (5 * (LN2 - 1 / 2) + 1.25 * (1 - LN2)) / 4,
    "kl_beta": 0,
    "reward_form": 0.75,
    "ess_lag_0": 6**2 / (3 * 18),
    "ess_lag_1": 5.25**2 / (3 * 17.0625),
    "ess_lag_3-4": 1,
    "behavior_kl_lag_0": (3 - 2 * LN2) / 3,
    "behavior_kl_lag_1": 2.25 / 3,
    "behavior_kl_lag_3-4": 0,
}
OWN_CRITIC = EXPECTED | {
    "grad_norm": sum(LOGITS_NORMS) / 2,
    "critic_steps": 2,
    "critic_grad_norm": sum(VALUES_NORMS) / 2,
}
EXPLORING = {"singled_out": 1 / 6, "entropy_weight": 0.125}
"""One of six tokens pays. The bonus begins with this weight, and is steered by the entropy from then on."""
TAUGHT = {
    # The teacher is the first model: the sum of `reference_kl`, per token.
    "teacher_kl": (5 * (LN2 - 1 / 2) + 1.25 * (1 - LN2)) / 7,
    # Young tokens of the answers with reward 1 and above: 3 and 2, 1, and 3.
    "positive_nll": (LN2 + 2 * LN2 + 3 * LN2 + LN2) / 4,
}
CUT = {"candidates": (2 + 1 + 4 + 3) / 4, "forced": 1 / 7}
TIMES = {"score_s", "train_s", "wait_s", "fetch_s", "update_s", "push_ms", "push_mib"}
SPEEDS = {"learner_tokens_per_s", "learner_tflops"}
"""test_speed.py has their numbers, and those of a GPU."""


@pytest.mark.parametrize("name", EXPECTED)
def test_a_metric_is_the_number_that_its_sentence_says(name: str, found: dict[str, float]) -> None:
    assert found[name] == pytest.approx(EXPECTED[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", OWN_CRITIC)
def test_a_critic_with_steps_of_its_own_adds_its_numbers_and_changes_no_other(
    name: str, found_with_own_critic: dict[str, float]
) -> None:
    assert found_with_own_critic[name] == pytest.approx(OWN_CRITIC[name], rel=1e-5, abs=1e-6)


@pytest.mark.usefixtures("group")
def test_exploration_adds_its_numbers() -> None:
    control = "algorithm.entropy_control={target = 1.0, range = [0.0, 0.5]}"
    found = metrics("algorithm.exploration={kind='kl_cov', share=0.2}", "algorithm.entropy=0.125", control)
    assert {name: found[name] for name in found.keys() - OWN_CRITIC.keys() - TIMES} == pytest.approx(EXPLORING)


@pytest.mark.usefixtures("group")
def test_top_p_adds_numbers_about_the_tokens_that_it_left() -> None:
    counts = torch.tensor([[2, 1, 0], [0, 0, 0], [4, 9, 3], [0, 0, 0]])
    cut = Candidates(torch.zeros(19, dtype=torch.int32), counts.flatten().cumsum(0).view(4, 3) - counts, counts)
    found = metrics(batch=rows()._replace(candidates=cut))
    assert {name: found[name] for name in CUT} == CUT


@pytest.mark.usefixtures("group")
def test_an_update_without_tokens_of_lag_0_has_no_mismatch() -> None:
    """A 0 would be counted in the mean over updates, and hide an engine of another policy in asynchronous training."""
    batch = rows()
    older = metrics(batch=batch._replace(lag_BT=batch.lag_BT + 1))
    assert "mismatch" in metrics() and "mismatch" not in older


@pytest.mark.usefixtures("group")
def test_a_teacher_and_the_nll_of_right_answers_add_a_number_each() -> None:
    config = case.config_of(*CHOICES, "algorithm.teacher.model=x", "algorithm.positive_nll=1e-9")
    policy = tables.TablePolicy(*BEFORE)
    updater = tables.updater(config, policy, tables.TablePolicy(FIRST_MODEL, BEFORE[1]), tables.Scripted(policy, []))
    updater.teacher = updater.reference
    found = case.metrics(updater, rows())
    assert {name: found[name] for name in TAUGHT} == pytest.approx(TAUGHT, rel=1e-5)


def test_these_are_all_numbers_of_the_catalogue(
    found: dict[str, float], found_with_own_critic: dict[str, float]
) -> None:
    assert found.keys() == EXPECTED.keys() | {"score_s", "train_s"}
    assert found_with_own_critic.keys() == OWN_CRITIC.keys() | {"score_s", "train_s"}
    assert UPDATE.keys() - TIMES - SPEEDS <= EXPECTED.keys()
    known = OWN_CRITIC.keys() | EXPLORING.keys() | CUT.keys() | TAUGHT.keys()
    others = [name for name in SOMETIMES if not any(one.startswith(name) for one in known)]
    elsewhere = [
        "segments_cut",
        "outcomes_explained",
        "admitted_lag",
        "lr_share",
        "mfu",
        "peak_memory_mib",
        "filtered_",
        "rejected_",
    ]
    elsewhere[4:4] = ["expert_load", "experts_idle", "routes_own"]
    assert others == elsewhere, "test_segments.py, test_steering.py, test_routing.py and test_left_out.py have them"


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    "aggregation", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "prompt-mean", "constant"]
)
@pytest.mark.parametrize("min_version", [0, 2, 3])
def test_neither_entropy_nor_value_clipping_depends_on_the_average_of_the_loss(
    aggregation: str, min_version: int
) -> None:
    """With fewer young tokens the entropy, which is equal at all of them, stays."""
    found = metrics(f"algorithm.aggregation={aggregation}", batch=rows(min_version))
    clipped = {0: 2 / 14, 2: 1 / 12, 3: 0}
    assert found["entropy"] == pytest.approx(EXPECTED["entropy"], rel=1e-5)
    assert found["value_clip_fraction"] == pytest.approx(clipped[min_version], rel=1e-5)
