"""The method in one file, examples/one_process.py: ages are exact, log-probs are those of a pass over the whole row."""

import copy
import random
import re
from collections.abc import Sequence
from itertools import count
from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch
from conftest import REPOSITORY
from torch import Tensor

from examples import one_process
from examples.one_process import CAP, END, MAX_TOKENS, MINIBATCHES, PROMPT_TOKENS, Batch, Policy
from streamppo import types
from streamppo.learner.batch.padded import pad

FILE = REPOSITORY / "examples" / "one_process.py"
TRAINING, HELD_OUT = one_process.prompts(seed=1)


@pytest.fixture(autouse=True)
def little_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_process, "WARM_START_STEPS", 5)
    monkeypatch.setattr(one_process, "BATCH_SIZE", 32)


def sampled(engine: Policy, version: int = 0) -> Batch:
    prompts = random.choices(TRAINING, k=one_process.BATCH_SIZE)
    return one_process.sample(engine, prompts, one_process.TEMPERATURE, version)


class Apart:
    """A learner that is two versions ahead of the policy that sampled `batch`."""

    def __init__(self, seed: int = 3) -> None:
        random.seed(seed)
        torch.manual_seed(seed)
        self.learner = Policy()
        one_process.warm_start(self.learner, TRAINING)
        self.behavior = copy.deepcopy(self.learner)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.learner.parameters(), lr=5e-3)
        self.batch = sampled(self.behavior)
        # A third of the completions is right, so that advantages have both signs.
        self.batch = self.batch._replace(reward_B=(torch.arange(len(self.batch.reward_B)) % 3 == 0).float())
        for version in range(2):
            self.train(sampled(self.learner, version)._replace(reward_B=self.batch.reward_B), version)
        with torch.no_grad():
            self.log_weights_BT = self.learner(self.batch.inputs_BL)[0] - self.batch.behavior_logprobs_BT

    def train(
        self, batch: Batch, version: int, correction: str = "truncate", negative: float = 1.0
    ) -> one_process.Update:
        return one_process.train(self.learner, self.optimizer, batch, version, correction, negative)


def parameters(policy: torch.nn.Module) -> Tensor:
    return torch.nn.utils.parameters_to_vector(policy.parameters()).detach()


@pytest.mark.parametrize("correction", ["off", "truncate", "topr"])
def test_at_lag_0_all_weights_and_first_ratios_are_1(correction: str) -> None:
    for update in one_process.main(["--updates", "3", "--correction", correction]):
        mask_BT = update.weights_BT != 0
        assert update.lag == 0
        assert mask_BT[:, 0].all(), "a first token is never padding"
        torch.testing.assert_close(update.weights_BT[mask_BT], torch.ones(int(mask_BT.sum())), atol=1e-4, rtol=0)
        torch.testing.assert_close(update.ratio_bT, torch.ones_like(update.ratio_bT), atol=1e-4, rtol=0)
        assert update.ess == pytest.approx(1.0, abs=1e-6)
        assert update.kl == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("lag", [1, 2, 4])
def test_a_batch_is_trained_exactly_lag_versions_after_it_was_sampled(lag: int) -> None:
    updates = one_process.main(["--lag", str(lag), "--updates", "7"])
    assert [update.lag for update in updates] == [min(version, lag) for version in range(7)]
    assert updates[0].kl == pytest.approx(0.0, abs=1e-6)
    assert all(update.kl > 1e-6 and update.ess < 1 for update in updates[1:])
    assert all(update.weights_BT.max() <= CAP for update in updates)


def test_the_engine_samples_with_the_version_that_the_learner_has_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[int, Tensor] = {}
    used: list[tuple[int, Tensor]] = []
    train, sample, version_of = one_process.train, one_process.sample, count(1)

    def trained(learner: Policy, *rest: object) -> one_process.Update:
        update = train(learner, *rest)  # pyright: ignore[reportArgumentType]
        made[next(version_of)] = parameters(learner)
        return update

    def noted(engine: Policy, some: Sequence[str], temperature: float, version: int) -> Batch:
        if temperature > 0:
            used.append((version, parameters(engine)))
        return sample(engine, some, temperature, version)

    monkeypatch.setattr(one_process, "train", trained)
    monkeypatch.setattr(one_process, "sample", noted)
    one_process.main(["--lag", "2", "--updates", "4"])
    assert [version for version, _ in used] == [0, 0, 0, 1, 2, 3]
    assert all(torch.equal(weights, made[version]) for version, weights in used if version > 0)


def test_weights_are_proximal_over_behavior() -> None:
    apart = Apart()
    mask_BT, w_BT = apart.batch.mask_BT, apart.log_weights_BT.exp()
    update = apart.train(apart.batch, version=2)
    assert update.lag == 2
    w_M = w_BT[mask_BT].double()
    torch.testing.assert_close(update.weights_BT[mask_BT], w_BT.clamp(max=CAP)[mask_BT], atol=1e-5, rtol=1e-5)
    assert update.ess == pytest.approx(float(w_M.sum() ** 2 / (len(w_M) * w_M.square().sum())), rel=1e-5)
    assert update.kl == pytest.approx(float((w_M - 1 - w_M.log()).mean()), rel=1e-3)
    assert (update.weights_BT[~mask_BT] == 0).all()


def test_topr_tapers_what_went_wrong_alone() -> None:
    apart = Apart()
    mask_BT = apart.batch.mask_BT
    W_B = (apart.log_weights_BT * mask_BT).sum(-1).exp()
    # The critic is near 0 at the start: a reward of 1 is a positive advantage.
    weights_BT = apart.train(apart.batch, version=2, correction="topr").weights_BT
    right_B = apart.batch.reward_B == 1
    assert (weights_BT[right_B][mask_BT[right_B]] == 1).all()
    expected_BT = W_B.clamp(max=1)[:, None] * mask_BT
    torch.testing.assert_close(weights_BT[~right_B], expected_BT[~right_B], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("correction", "negative"), [("off", 1.0), ("truncate", 1.0), ("topr", 0.25)])
def test_an_update_is_that_of_the_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, correction: str, negative: float
) -> None:
    monkeypatch.setattr(one_process, "MINIBATCHES", 1)
    apart = Apart()
    apart.learner.lm.save_pretrained(tmp_path)
    config = case.config_of(
        f"queue.batch_size={len(apart.batch.mask_BT)}",
        f"algorithm.correction={{kind='{correction}'}}",
        f"algorithm.negative_weight={negative}",
    )
    updater = case.updater(config, tmp_path)
    apart.learner.value_head.load_state_dict(case.whole(updater.policy.value_head))
    # Plain descent, as in `updater`: AdamW makes a full step of what is rounding.
    apart.optimizer = torch.optim.SGD(apart.learner.parameters(), lr=config.learner.lr * 100)
    before = parameters(apart.learner)
    update = apart.train(apart.batch, 2, correction, negative)
    metrics = case.metrics(updater, pad(trajectories(apart.batch)))
    expected, got = case.whole(updater.policy.lm), apart.learner.lm.state_dict()
    assert (parameters(apart.learner) - before).abs().max() > 1e-3, "the step is far above rounding"
    for name, weights in expected.items():
        torch.testing.assert_close(got[name], weights, atol=1e-5, rtol=0, msg=name)
    value_head = case.whole(updater.policy.value_head)["weight"]
    torch.testing.assert_close(apart.learner.value_head.weight.detach(), value_head, atol=1e-5, rtol=0)
    assert (metrics["reward"], metrics["lag_max"]) == (pytest.approx(update.reward), update.lag)
    assert (metrics["ess"], metrics["behavior_kl"]) == (pytest.approx(update.ess), pytest.approx(update.kl))


def trajectories(batch: Batch) -> types.Batch:
    """The batch as the learner gets it from the queue, at version 2."""
    rows = zip(batch.inputs_BL.int(), batch.behavior_logprobs_BT, batch.mask_BT.sum(-1).tolist(), strict=True)
    made = [
        types.Trajectory(
            identity=types.Identity(task="t", prompt=number, sample=0),
            actor="rollout-0",
            prompt_tokens=inputs_L[:PROMPT_TOKENS].numpy().tobytes(),
            tokens=inputs_L[PROMPT_TOKENS : PROMPT_TOKENS + length].numpy().tobytes(),
            logprobs=logprobs_T[:length].numpy().tobytes(),
            versions=np.full(length, batch.version, np.int32).tobytes(),
            mask=bytes([1]) * length,
            finish="stop" if int(inputs_L[PROMPT_TOKENS + length - 1]) == END else "length",
            reward=float(batch.reward_B[number]),
        )
        for number, (inputs_L, logprobs_T, length) in enumerate(rows)
    ]
    return types.Batch(version=2, min_version=0, trajectories=tuple(made))


def test_off_weighs_old_data_like_fresh() -> None:
    apart = Apart()
    update = apart.train(apart.batch, version=2, correction="off")
    assert torch.equal(update.weights_BT, apart.batch.mask_BT.float())
    assert update.ess < 1, "diagnostics look at the policies, not at the weights"


def test_the_cache_samples_with_the_log_probs_of_a_pass_over_the_whole_row() -> None:
    torch.manual_seed(2)
    policy = Policy()
    batch = sampled(policy)
    with torch.no_grad():
        logprobs_BT, _, _ = policy(batch.inputs_BL)
    mask_BT = batch.mask_BT
    torch.testing.assert_close(batch.behavior_logprobs_BT[mask_BT], logprobs_BT[mask_BT], atol=1e-4, rtol=0)


def test_a_completion_ends_with_its_first_end() -> None:
    torch.manual_seed(2)
    batch = sampled(Policy())
    for tokens, mask in zip(batch.inputs_BL[:, PROMPT_TOKENS:].tolist(), batch.mask_BT.tolist(), strict=True):
        length = tokens.index(END) + 1 if END in tokens else MAX_TOKENS
        assert mask == [place < length for place in range(MAX_TOKENS)]
        assert tokens[length:] == [one_process.PADDING] * (MAX_TOKENS - length)


def test_the_reward_is_1_for_exactly_the_answer() -> None:
    answers = {"12": 1.0, "1": 0.0, "13": 0.0, "012": 0.0, "": 0.0}
    rows = [[*one_process.encode(text), END, 0, 0, 0][:MAX_TOKENS] for text in answers]
    rows.append(one_process.encode("1212"))
    expected = [*answers.values(), 0.0]
    assert one_process.rewards([" 7+ 5="] * len(rows), torch.tensor(rows)).tolist() == expected


def test_no_held_out_problem_is_trained_on_even_mirrored() -> None:
    def pairs(some: Sequence[str]) -> set[frozenset[int]]:
        return {frozenset(map(int, prompt.rstrip("=").split("+"))) for prompt in some}

    assert not pairs(TRAINING) & pairs(HELD_OUT)
    assert len(TRAINING) + len(HELD_OUT) == len(one_process.FIRST) * len(one_process.SECOND)


def test_the_same_seed_prints_the_same_lines(capsys: pytest.CaptureFixture[str]) -> None:
    def printed(seed: int) -> str:
        one_process.main(["--lag", "1", "--updates", "10", "--seed", str(seed)])
        return capsys.readouterr().out

    first = printed(5)
    assert len(first.splitlines()) == 2
    assert printed(5) == first
    assert printed(6) != first


def test_the_last_update_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    one_process.main(["--updates", "12"])
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["update", "0"],
        ["update", "10"],
        ["update", "12"],
    ]


@pytest.mark.parametrize("wrong", [("--lag", "-1"), ("--updates", "-1"), ("--negative-weight", "1.5")])
def test_what_cannot_be_right_is_refused(wrong: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        one_process.main(wrong)
    assert wrong[0] in capsys.readouterr().err


def test_the_file_is_read_in_one_sitting() -> None:
    text = FILE.read_text()
    assert len(text.splitlines()) <= 300
    assert not re.search(r"\b(ray|asyncio|queue|multiprocessing|threading)\b.*import|import (ray|asyncio|queue)", text)
    assert MINIBATCHES > 1, "else the ratio is always 1 and the clip never acts"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_from_fresh_data_and_from_old(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.undo()

    def accuracies(*arguments: str) -> list[float]:
        one_process.main(["--updates", "150", *arguments])
        return [float(number) for number in re.findall(r"held-out accuracy ([\d.]+)", capsys.readouterr().out)]

    fresh, old, uncorrected = (
        accuracies(),
        accuracies("--lag", "16", "--correction", "topr"),
        accuracies("--lag", "16", "--correction", "off"),
    )
    assert fresh[0] == old[0] == uncorrected[0] < 0.6, "all begin with the same model"
    assert min(fresh[-3:]) > fresh[0] + 0.25
    assert min(old[-3:]) > old[0] + 0.25
    assert max(uncorrected[-3:]) < uncorrected[0], "old data taken as fresh harm"
