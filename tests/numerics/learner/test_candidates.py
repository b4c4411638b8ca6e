"""Sampling with top-p and top-k: the learner's log-probs are among the tokens that the engine could have sampled."""

import asyncio
from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from streamppo.learner.batch.padded import pad
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Sampling
from streamppo.types import Batch, Identity, Trajectory, encode, ints

REFERENCE = ("algorithm.kl.loss_beta=0.1", "algorithm.entropy=0.1", "learner.minibatches=2")


@pytest.mark.usefixtures("alone")
def test_log_probs_and_entropies_are_those_of_a_plain_forward_renormalised_over_the_candidates(folder: Path) -> None:
    updater = case.updater(case.config_of("rollout.temperature=0.7"), folder)
    batch = case.cut(case.batch())
    padded = pad(batch)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: set[int] = set()
    with torch.no_grad():
        scored = updater.policy(padded, "policy")
        for row, one in enumerate(batch.trajectories):
            start, counts = int(padded.start_B[row]), ints(one.candidate_counts).tolist()
            ids = padded.inputs_BL[row : row + 1, : start + one.num_tokens]
            logits_TV = (lm(input_ids=ids).logits[0] / 0.7)[start - 1 : -1]
            sets = np.split(ints(one.candidates), np.cumsum(counts)[:-1])
            for t, (kept, token) in enumerate(zip(sets, ints(one.tokens).tolist(), strict=True)):
                among = torch.tensor(kept.tolist() or list(range(17)))
                logp = logits_TV[t, among].log_softmax(-1)
                expected = logp[among == token].item()
                assert scored.logprobs_BT[row, t].item() == pytest.approx(expected, abs=1e-5)
                assert scored.entropy_BT[row, t].item() == pytest.approx(-(logp.exp() @ logp).item(), abs=1e-5)
                assert expected == 0 or len(kept) != 1
                seen.add(len(kept))
    assert {0, 1, 3} <= seen


# --- the engine and the learner ------------------------------------------------------------------------------


async def _sampled(folder: Path, sampling: Sampling) -> Batch:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tensors = {name: one.detach() for name, one in model.named_parameters()}
    engine = EmbeddedEngine(model.config, tensors, version=3, slots=4, max_total_tokens=64, ends=EndTokens({1}), seed=7)
    prompts = [np.array([2 + n % 13, 5], np.int32) for n in range(24)]
    done = await asyncio.gather(*(engine.generate(prompt, sampling) for prompt in prompts))
    await engine.stop()
    trajectories = [
        Trajectory(
            identity=Identity(task="t", prompt=n // 2, sample=n % 2),
            actor="a",
            prompt_tokens=prompt.tobytes(),
            tokens=one.tokens.tobytes(),
            logprobs=one.logprobs.tobytes(),
            versions=one.versions.tobytes(),
            mask=np.ones(len(one.tokens), np.bool_).tobytes(),
            finish=one.finish,
            reward=float(n % 3),
            candidates=b"" if one.candidates is None else one.candidates.tokens.tobytes(),
            candidate_counts=b"" if one.candidates is None else one.candidates.counts.tobytes(),
        )
        for n, (prompt, one) in enumerate(zip(prompts, done, strict=True))
    ]
    return Batch(version=3, min_version=0, trajectories=tuple(trajectories))


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("top_p", "top_k"), [(0.9, 0), (1.0, 3), (0.8, 5)])
def test_at_lag_zero_every_weight_is_one_and_without_candidates_it_is_not(
    folder: Path, top_p: float, top_k: int
) -> None:
    sampling = Sampling(16, 1.2, top_p, top_k)
    batch = asyncio.run(_sampled(folder, sampling))
    updater = case.updater(case.config_of("queue.batch_size=24", "rollout.temperature=1.2"), folder)
    metrics = case.metrics(updater, pad(batch))
    assert metrics["mismatch"] < 2e-6
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    assert metrics["chi2"] == pytest.approx(0.0, abs=1e-5)
    assert 1 <= metrics["candidates"] <= (top_k or 16)
    lost = [replace(one, candidates=b"", candidate_counts=b"") for one in batch.trajectories]
    without = case.metrics(
        case.updater(case.config_of("queue.batch_size=24", "rollout.temperature=1.2"), folder),
        pad(replace(batch, trajectories=tuple(lost))),
    )
    assert without["mismatch"] > 0.05
    assert without["chi2"] < -0.05, "every weight is below 1"
    assert "candidates" not in without


@pytest.mark.usefixtures("alone")
def test_without_top_p_and_top_k_a_trajectory_has_no_column_and_not_a_byte_of_it(folder: Path) -> None:
    batch = asyncio.run(_sampled(folder, Sampling(16)))
    assert pad(batch).candidates is None
    assert b"candidate" not in encode(batch)


# --- the split -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_micro_batches_and_padding_change_nothing(folder: Path) -> None:
    batch = pad(case.cut(case.batch()))
    whole = case.updated(folder, batch, *REFERENCE, "learner.micro_batch_tokens=100000")
    for budget in (1, 40):
        case.assert_same(whole, case.updated(folder, batch, *REFERENCE, f"learner.micro_batch_tokens={budget}"))
    assert whole[1]["forced"] > 0
    uncut = case.updated(folder, pad(case.batch()), *REFERENCE)
    assert abs(uncut[1]["entropy"] - whole[1]["entropy"]) > 0.1, "the candidates make a difference"


@pytest.mark.usefixtures("alone")
def test_a_batch_may_hold_trajectories_with_and_without_candidates(folder: Path) -> None:
    cut, plain = case.cut(case.batch()).trajectories, case.batch().trajectories
    mixed = pad(replace(case.batch(), trajectories=(*plain[:5], *cut[5:])))
    policy = case.updater(case.config_of(), folder).policy
    with torch.no_grad():
        found_BT = policy(mixed, "policy").logprobs_BT
        plain_BT, cut_BT = (policy(pad(one), "policy").logprobs_BT for one in (case.batch(), case.cut(case.batch())))
    torch.testing.assert_close(found_BT[:5], plain_BT[:5], rtol=0, atol=1e-6)
    torch.testing.assert_close(found_BT[5:], cut_BT[5:], rtol=0, atol=1e-6)


@pytest.mark.usefixtures("alone")
def test_the_reference_is_compared_over_the_same_candidates(folder: Path) -> None:
    """The first model beside itself is no distance away, whichever tokens it could have sampled."""
    choices = ("algorithm.kl.loss_beta=0.1", "algorithm.correction.kind=off")
    _, metrics = case.updated(folder, pad(case.cut(case.batch())), *choices)
    assert metrics["reference_kl"] == pytest.approx(0.0, abs=1e-6)


def _made(ranks: int, folder: Path) -> object:
    overrides = (*REFERENCE, f"learner.ranks={ranks}", "learner.micro_batch_tokens=40")
    return case.updated(folder, pad(case.cut(case.batch())), *overrides)


@pytest.mark.slow
def test_three_ranks_make_the_update_of_one(folder: Path, tmp_path: Path) -> None:
    case.assert_same(*(case.by_ranks(_made, ranks, tmp_path, folder) for ranks in (1, 3)))
