"""Routing replay: a token goes to the experts that the engine chose, in every family and division of a batch."""

from pathlib import Path
from typing import Any

import learner_case as case
import model_families
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from transformers import AutoModelForCausalLM

from streamppo.errors import ModelError
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import load_policy
from streamppo.queue.store import batch_parts
from streamppo.types import Batch, Trajectory, ints, routes

EXPERTS, TOP_K, LAYERS = 4, 2, 2
TEMPERATURE = case.config_of().rollout.temperature
SGLANG = ("rollout.engine.kind=sglang", "rollout.engine.routes=true")
FAMILIES = {
    "GptOss": ("model.attention=eager",),
    "GraniteMoe": (),
    "Mixtral": (),
    "Qwen3Moe": (),
    "Qwen3Next": ("model.attention=eager",),
}


def folder_of(folder: Path, family: str = "Qwen3Moe") -> Path:
    model_families.make(family, folder)
    return folder


def routed(batch: Batch, seed: int = 0) -> Batch:
    """The batch with random experts for every token of each row but the last; some are not known."""
    generator = np.random.default_rng(seed)
    return replace(batch, trajectories=tuple(_with_routes(generator, one) for one in batch.trajectories))


def _with_routes(generator: np.random.Generator, one: Trajectory) -> Trajectory:
    tokens = (len(one.prompt_tokens) + len(one.tokens)) // 4 - 1
    chosen = np.stack([[generator.permutation(EXPERTS)[:TOP_K] for _ in range(LAYERS)] for _ in range(tokens)])
    chosen[generator.random(tokens) < 0.2] = -1
    return replace(one, routes=chosen.astype(np.int16).tobytes())


def own_routes(lm: Any, text: torch.Tensor) -> torch.Tensor:
    """[L, layers, k] the experts that transformers' own pass over one row chooses, seen from without."""
    found: list[torch.Tensor] = []
    original = torch.topk

    def seen(scores: torch.Tensor, k: int, *others: Any, **named: Any) -> Any:
        made = original(scores, k, *others, **named)
        if scores.shape[-1] == EXPERTS and k == TOP_K:
            found.append(made.indices)
        return made

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "topk", seen)
        patch.setattr(torch.Tensor, "topk", seen)
        lm(text[None])
    return torch.stack(found, 1)


def sent(lm: Any, text: torch.Tensor, routes: bytes) -> torch.Tensor:
    """[L - 1] log-probs by transformers' own pass, whose choice of experts is made by hand, layer by layer."""
    chosen = torch.from_numpy(np.frombuffer(routes, "<i2").copy()).long().view(-1, LAYERS, TOP_K)
    layers, original = iter(chosen.unbind(1)), torch.topk

    def by_hand(scores: torch.Tensor, k: int, *others: Any, **named: Any) -> Any:
        own = original(scores, k, *others, **named)
        if scores.shape[-1] != EXPERTS or k != TOP_K:
            return own
        entries = [one if one[0] >= 0 else its for one, its in zip(next(layers), own.indices, strict=True)]
        values = torch.stack([row[entry] for row, entry in zip(scores, entries, strict=True)])
        return torch.return_types.topk((values, torch.stack(entries)))

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch, "topk", by_hand)
        patch.setattr(torch.Tensor, "topk", by_hand)
        logprobs = (lm(text[None, :-1]).logits[0].float() / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, text[1:, None])[:, 0]


def updates(ranks: int, folder: Path, cases: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Weights and metrics of an update for each of `cases`, on a batch with routes."""
    load_policy.SHARD_LAYERS_ABOVE = 0
    small = f"learner.ranks={ranks}", "learner.lr=0.01", "learner.micro_batch_tokens=8", "learner.minibatches=4"
    found: list[Any] = []
    for overrides in cases:
        several = [one for one in overrides if ranks > 1 or "mesh" not in one]
        updater = case.updater(case.config_of(*SGLANG, *small, *several), folder)
        metrics = case.metrics(updater, pad(routed(case.batch())))
        found.append((case.whole(updater.policy), metrics))
    return found


def by_parts(ranks: int, folder: Path) -> list[case.Weights]:
    """The weights after an update with everything on each rank, and with its own rows in a byte a number."""
    made: list[case.Weights] = []
    for own in (False, True):
        updater = case.updater(
            case.config_of(*SGLANG, f"learner.ranks={ranks}", "learner.micro_batch_tokens=30"), folder
        )
        whole = narrowed(routed(case.batch())) if own else routed(case.batch())
        if own:
            outline = batch_parts.make_outline(whole)
            rows = updater.rank_rows(pad(batch_parts.join(outline, [])))
            whole = batch_parts.join(outline, batch_parts.select_tokens(whole, rows))
            assert 0 < sum(bool(one.routes) for one in whole.trajectories) < len(whole.trajectories)
        case.metrics(updater, pad(whole))
        made.append(case.whole(updater.policy))
    return made


def narrowed(batch: Batch) -> Batch:
    """The batch with routes as an actor writes them."""
    rows = [(one, routes.column(shaped(one.routes).reshape(-1, LAYERS * TOP_K))) for one in batch.trajectories]
    assert {width for _, (_, width) in rows} == {1}
    return replace(batch, trajectories=tuple(replace(one, routes=column, route_bytes=1) for one, (column, _) in rows))


def rows_of(batch: Batch) -> list[torch.Tensor]:
    return [torch.tensor(ints(one.prompt_tokens + one.tokens)).long() for one in batch.trajectories]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_own_choice_replayed_changes_nothing_and_another_one_does(tmp_path: Path, family: str) -> None:
    folder, batch = folder_of(tmp_path / "model", family), case.batch()
    lm = AutoModelForCausalLM.from_pretrained(folder)
    same = tuple(
        replace(one, routes=own_routes(lm, text)[:-1].numpy().astype(np.int16).tobytes())
        for one, text in zip(batch.trajectories, rows_of(batch), strict=True)
    )
    with case.group(0, 1, tmp_path / "store"):
        updater = case.updater(case.config_of(*SGLANG, *FAMILIES[family]), folder)
        with torch.no_grad():
            plain = updater.policy(pad(batch), "both")
            again = updater.policy(pad(replace(batch, trajectories=same)), "both")
            other = updater.policy(pad(routed(batch)), "both")
        metrics = updater.policy.routers.metrics(updater.device)
    for trajectory, text, scored_T in zip(routed(batch).trajectories, rows_of(batch), other.logprobs_BT, strict=True):
        expected_T = sent(lm, text, trajectory.routes)[-trajectory.num_tokens :]
        torch.testing.assert_close(scored_T[: trajectory.num_tokens], expected_T, rtol=0, atol=1e-4)
    assert torch.equal(plain.logprobs_BT, again.logprobs_BT) and torch.equal(plain.values_BT, again.values_BT)
    assert (plain.logprobs_BT - other.logprobs_BT).abs().max() > 0.1
    assert 0.4 < metrics["routes_own"] < 1 and 1 <= metrics["expert_load"] <= EXPERTS / TOP_K
    assert metrics["experts_idle"] == 0


@pytest.mark.slow
def test_ranks_slices_and_layers_that_are_computed_twice_send_tokens_alike(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    kinds = "full", "offloaded"
    cases = (), *((f"model.gradient_checkpointing={kind}",) for kind in kinds)
    plain, *checkpointed = case.by_ranks(updates, 1, tmp_path, folder, cases)
    for one in checkpointed:
        case.assert_same_weights(plain[0], one[0])
    # A minibatch of three rows leaves one of two ranks with a row less: it passes another, which does not count.
    divided = ("learner.mesh.context=2",), ("learner.mesh.context=2", "model.gradient_checkpointing=full"), ()
    for one in case.by_ranks(updates, 2, tmp_path, folder, divided):
        case.assert_same_weights(plain[0], one[0])
        for name in ("expert_load", "experts_idle", "routes_own", "ess"):
            assert one[1][name] == pytest.approx(plain[1][name], rel=1e-6), name


@pytest.mark.slow
def test_a_rank_with_the_routes_of_its_own_rows_makes_the_same_bits(tmp_path: Path) -> None:
    made = case.by_ranks(by_parts, 2, tmp_path, folder_of(tmp_path / "model"))
    case.assert_same_weights(*made, atol=0)


def test_a_rank_holds_the_routes_of_its_rows_alone_and_not_on_its_device() -> None:
    whole = narrowed(routed(case.batch()))
    outline = batch_parts.make_outline(whole)
    part = pad(batch_parts.join(outline, batch_parts.select_tokens(whole, [1])))
    tokens, held = batch_parts.widths(outline)[1] - 1, part.routes
    assert held is not None and held.numbers_ME.shape == (tokens, LAYERS * TOP_K)
    assert held.numbers_ME.dtype == torch.uint8
    bare = pad(replace(whole, trajectories=tuple(replace(one, routes=b"") for one in whole.trajectories)))
    assert pad(whole)._tensors().keys() == bare._tensors().keys(), "these go to a GPU"
    numbers_NE, known_N = held.at(torch.tensor([1, 1, 0]), torch.tensor([0, tokens, 0]))
    assert not known_N[1:].any(), "a row's last token, and a row of another rank"
    assert numbers_NE[0].tolist() == held.numbers_ME[0].tolist()


def test_routes_are_used_where_they_are_asked_for_and_by_the_policy_alone(tmp_path: Path) -> None:
    folder, batch = folder_of(tmp_path / "model"), pad(routed(case.batch()))
    reference = ("algorithm.kl.loss_beta=0.1",)
    with case.group(0, 1, tmp_path / "store"):
        replayed = case.updater(case.config_of(*SGLANG, *reference), folder)
        own = case.updater(case.config_of(*reference), folder)
        by_routes, without = case.metrics(replayed, batch), case.metrics(own, batch)
        plain = case.metrics(case.updater(case.config_of(*reference), folder), pad(case.batch()))
    assert without == pytest.approx(plain | {name: without[name] for name in case.TIMES})
    assert without["reference_kl"] == pytest.approx(0, abs=1e-6), "the reference is the policy as it began"
    assert by_routes["reference_kl"] > 0.01, "its routers choose for themselves"
    assert "routes_own" in by_routes and "routes_own" not in without


@pytest.mark.usefixtures("alone")
def test_a_reference_of_the_policys_weights_leaves_its_routes_to_layers_that_are_computed_again(tmp_path: Path) -> None:
    folder, batch, found = folder_of(tmp_path / "model"), pad(routed(case.batch())), list[Any]()
    for kind, beta in (("off", 0.1), ("full", 0.1), ("off", 0.0)):
        options = f"model.gradient_checkpointing={kind}", f"algorithm.kl.reward_beta={beta}", "model.lora={}"
        updater = case.updater(case.config_of(*SGLANG, *options), folder)
        with torch.no_grad():
            for name, one in updater.policy.lm.named_parameters():
                if "lora_B" in name:
                    one.copy_(torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))))
        metrics = case.metrics(updater, batch)
        found.append((case.whole(updater.policy), metrics))
    case.assert_same(found[0], found[1])
    assert found[0][1]["expert_load"] == found[2][1]["expert_load"], "the reference's passes do not count"


@pytest.mark.usefixtures("alone")
def test_routes_of_another_model_and_models_without_experts_are_refused(tmp_path: Path) -> None:
    folder, batch = folder_of(tmp_path / "moe"), routed(case.batch())
    updater = case.updater(case.config_of(*SGLANG), folder)
    wrong = {
        "2 entries per token and go up to expert 3, but layer 1": lambda given: given[:, :1],
        "4 entries per token and go up to expert 7, but layer 0": lambda given: given + np.int16(EXPERTS),
    }
    for reason, change in wrong.items():
        changed = [replace(one, routes=change(shaped(one.routes)).tobytes()) for one in batch.trajectories]
        with pytest.raises(ModelError, match=reason):
            updater.policy(pad(replace(batch, trajectories=tuple(changed))), "policy")
    updater.policy(pad(batch), "policy")
    case.save_model(tmp_path / "dense")
    with pytest.raises(ModelError, match="needs a mixture of experts"):
        case.updater(case.config_of(*SGLANG), tmp_path / "dense")


def shaped(routes: bytes) -> Any:
    """[tokens, layers, k]"""
    return np.frombuffer(routes, "<i2").reshape(-1, LAYERS, TOP_K)
