"""Weights that are cut between ranks, by heads and units or by experts: the update of one rank, one push."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from streamppo.errors import ConfigError, ModelError
from streamppo.learner.attention import prefix_sharing
from streamppo.learner.batch.padded import pad
from streamppo.learner.checkpoint import checkpoint
from streamppo.learner.checkpoint.checkpoint import Saver, TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.device import mesh_of
from streamppo.learner.model import load_policy, optimizer, weight_files
from streamppo.learner.model import policy as model
from streamppo.learner.model.frozen import follow
from streamppo.learner.model.snapshot import snapshot
from streamppo.learner.parallel import context_parallel, expert_parallel, tensor_parallel
from streamppo.weights.buckets import Buckets, pack_whole
from streamppo.weights.pusher import PushedVersion
from streamppo.weights.shares import join

RANKS = 4
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
FAMILIES = {
    "qwen2": Qwen2Config(**case.SMALL, initializer_range=0.3),
    "llama": LlamaConfig(
        **case.SMALL | {"num_key_value_heads": 4}, initializer_range=0.3, attention_bias=True, mlp_bias=True
    ),
    "qwen3": Qwen3Config(**case.SMALL, head_dim=8, initializer_range=0.3),
    "qwen3_moe": Qwen3MoeConfig(**case.SMALL, **MOE, num_experts=4, initializer_range=0.3),
    "six": Qwen3MoeConfig(**case.SMALL, **MOE, num_experts=6, initializer_range=0.3),
    "mixtral": MixtralConfig(**case.SMALL, num_local_experts=4, num_experts_per_tok=2, initializer_range=0.3),
}
QUICK = ("qwen2", "llama", "qwen3_moe")
"""Every kind of cut; the others are slow."""
T2, E2 = "learner.mesh.tensor=2", "learner.mesh.expert=2"
CASES = {
    "qwen2": (
        (T2,),
        (T2, "learner.mesh.replicate=2", "algorithm.entropy=0.01"),
        (T2, "algorithm.critic.model=policy", "algorithm.kl.loss_beta=0.1", "learner.minibatches=2"),
        (T2, "model.gradient_checkpointing=full", "algorithm.teacher.model=FOLDER"),
        (T2, "model.gradient_checkpointing=full", "learner.norm=max-norm"),
    ),
    "llama": (("learner.mesh.tensor=4",), (T2, "learner.mesh.context=2")),
    "qwen3": ((T2,),),
    "qwen3_moe": (
        (E2,),
        ("learner.mesh.expert=4", "model.gradient_checkpointing=offloaded"),
        (E2, T2, "learner.offload=true"),
        ("learner.mesh.expert=4", T2, "algorithm.kl.loss_beta=0.1"),
        (E2, "learner.mesh.replicate=2"),
        (E2, "learner.mesh.context=2", "model.gradient_checkpointing=full"),
    ),
    "six": ((E2,),),
    "mixtral": ((E2,), ("learner.mesh.expert=4",)),
}


def made(ranks: int, folder: Path, cases: tuple[tuple[str, ...], ...]) -> list[Any]:
    """The weights and metrics of an update for each of `cases`; the digests of its push and of what is gathered."""
    load_policy.SHARD_LAYERS_ABOVE, prefix_sharing.WORTH = 0, 100.0
    found: list[Any] = []
    for overrides in cases:
        several = [one.replace("FOLDER", str(folder)) for one in overrides if ranks > 1 or "mesh" not in one]
        small = "learner.lr=0.01", "learner.micro_batch_tokens=40", "learner.max_grad_norm=0.5"
        updater = case.updater(case.config_of(f"learner.ranks={ranks}", *small, *several), folder)
        metrics = case.metrics(updater, pad(case.batch()))
        buckets = Buckets(model.shards(updater.policy, "bfloat16"), 3000)
        snapshot(updater.policy, buckets.tensors)
        pushes: list[Any] = [None] * ranks
        dist.all_gather_object(pushes, buckets.push(1, rank=dist.get_rank(), ranks=ranks).push)
        gathered = model.gather_weights(updater.policy, "bfloat16")
        digests = join(pushes).digest, pack_whole(1, gathered, 3000).push.digest if gathered else ""
        found.append((case.whole(updater.policy), metrics, digests))
    return found


@case.CUTS
@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_an_update_of_cut_weights_is_that_of_whole_ones(family: str, tmp_path: Path) -> None:
    save_model(tmp_path / "model", family)
    whole, cut = (case.by_ranks(made, n, tmp_path, tmp_path / "model", CASES[family]) for n in (1, RANKS))
    for one, other in zip(whole, cut, strict=True):
        case.assert_same(one[:2], other[:2])
        assert other[2][0] == other[2][1], "what was pushed is the whole policy, once"


def save_model(folder: Path, family: str) -> Any:
    torch.manual_seed(5)
    made: Any = AutoModelForCausalLM.from_config(FAMILIES[family])
    made.save_pretrained(folder)
    return made


def saved(ranks: int, folder: Path, out: Path, mesh: str) -> dict[str, Any]:
    """What AdamW makes of a checkpoint, twice, and then a reference that follows it by the half."""
    load_policy.SHARD_LAYERS_ABOVE = 0
    small = "learner.lr=0.001", "learner.micro_batch_tokens=40", "algorithm.kl.loss_beta=0.1"
    config = case.config_of(f"learner.ranks={ranks}", *small, "algorithm.kl.follow_every=9", f"learner.mesh={{{mesh}}}")
    updater = case.updater(config, folder)
    updater.optimizer = optimizer.adamw(updater.policy, config)
    case.metrics(updater, pad(case.batch(seed=1)))
    trained, done = TrainState(updater.policy, updater.optimizer, None), Future[PushedVersion]()
    done.set_result(PushedVersion("", 0.0, 0))
    saver = Saver(config.checkpoint)
    saver.start(out, CheckpointState(version=1, digest="", ranks=ranks, beta=0.0, bad_steps=(0, 0)), trained, done)
    saver.wait()
    dist.barrier()
    after: list[case.Weights] = []
    for _ in range(2):
        checkpoint.load(out / "00000001", trained)
        case.metrics(updater, pad(case.batch(seed=2)))
        after.append(case.whole(updater.policy))
    assert isinstance(updater.reference, model.Policy)
    before = case.whole(updater.reference)
    follow(updater.reference, updater.policy, 0.5)
    return {"after": after, "before": before, "follower": case.whole(updater.reference)}


@case.CUTS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"), [("qwen2", "tensor = 2, context = 1"), ("qwen3_moe", "replicate = 2, expert = 2, tensor = 2")]
)
def test_a_checkpoint_of_cut_weights_is_trained_on_bit_for_bit_and_as_by_one_rank(
    family: str, mesh: str, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", family)
    one, cut = (
        case.by_ranks(saved, n, tmp_path, tmp_path / "model", tmp_path / f"of-{n}", how)
        for n, how in ((1, ""), (RANKS, mesh))
    )
    case.assert_same_weights(*cut["after"], atol=0)
    # AdamW's steps are of a gradient's direction alone, which rounding decides where the gradient is nearly zero.
    case.assert_same_weights(one["after"][0], cut["after"][0], atol=3e-3)
    gap = [(one["after"][0][name] - tensor).abs().mean().item() for name, tensor in cut["after"][0].items()]
    assert max(gap) < 1e-5
    for name, tensor in cut["follower"].items():
        if name.startswith("lm."):
            half = (cut["before"][name] + cut["after"][1][name]) / 2
            torch.testing.assert_close(tensor, half, rtol=0, atol=1e-6)


def loaded(ranks: int, folder: Path, mesh: str) -> case.Weights:
    """The weights of all ranks, each of which has read its own part."""
    weight_files.LARGE = load_policy.SHARD_LAYERS_ABOVE = 0
    config = case.config_of(f"learner.ranks={ranks}", f"learner.mesh={{{mesh}}}")
    slices = context_parallel.slices_of("cpu", config.learner.mesh)
    return case.whole(load_policy.load(config.model, folder, 1.0, mesh_of("cpu", config.learner.mesh), slices=slices))


@case.CUTS
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "mesh"), [("llama", "tensor = 4"), ("qwen2", "tensor = 2"), ("six", "replicate = 2, expert = 2")]
)
def test_every_rank_reads_its_part_of_a_model(family: str, mesh: str, tmp_path: Path) -> None:
    own = save_model(tmp_path / "model", family)
    found = case.by_ranks(loaded, RANKS, tmp_path, tmp_path / "model", mesh)
    for name, one in own.named_parameters():
        assert torch.equal(found[f"lm.{name}"], one), name


def all_to_the_first(ranks: int, computes: str) -> list[Any]:
    """Sum what the first of two experts, one on each rank, makes of all tokens; the gradient of every rank's expert."""
    settings = Qwen3MoeConfig(**case.SMALL, **MOE | {"num_experts_per_tok": 1}, num_experts=ranks)
    settings._experts_implementation = computes
    torch.manual_seed(3)
    experts = Qwen3MoeExperts(settings)
    for one in experts.parameters():
        torch.nn.init.normal_(one)
        one.data = one.data[dist.get_rank() :][:1].clone()
    experts.num_experts = 1
    tokens_ND = torch.randn(5, 32, requires_grad=True)
    to_first = torch.zeros(5, 1, dtype=torch.long), torch.ones(5, 1)
    expert_parallel.dispatch_to_experts(experts, dist.group.WORLD, 1, tokens_ND, *to_first).sum().backward()  # pyright: ignore
    assert tokens_ND.grad is not None and tokens_ND.grad.any()
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, [None if one.grad is None else bool(one.grad.any()) for one in experts.parameters()])
    return found


@pytest.mark.parametrize("computes", ["eager", "grouped_mm"])
def test_experts_without_a_token_have_a_gradient_of_zero(tmp_path: Path, computes: str) -> None:
    assert case.by_ranks(all_to_the_first, 2, tmp_path, computes) == [[True, True], [False, False]]


def in_rounds(ranks: int, folder: Path, cases: tuple[tuple[str, ...], ...]) -> list[Any]:
    """`made`, with three rounds or more in each exchange of pairs."""
    expert_parallel.FEW, expert_parallel.UNEVEN = 1, 0.4
    return made(ranks, folder, cases)


@case.CUTS
@pytest.mark.slow
def test_pairs_that_go_in_rounds_make_the_update_of_one_rank(tmp_path: Path) -> None:
    save_model(tmp_path / "model", "qwen3_moe")
    cases = (
        ("learner.mesh.expert=4",),
        (E2, "model.gradient_checkpointing=full"),
        (E2, T2, "algorithm.kl.loss_beta=0.1"),
    )
    whole = case.by_ranks(made, 1, tmp_path, tmp_path / "model", cases)
    for one, other in zip(whole, case.by_ranks(in_rounds, RANKS, tmp_path, tmp_path / "model", cases), strict=True):
        case.assert_same(one[:2], other[:2])


def skewed(ranks: int, few: int) -> list[Any]:
    """Pairs in each call of an expert, on every rank, before and in the backward pass; the tokens' gradient.

    Five of six pairs are for the first rank.
    """
    expert_parallel.FEW, expert_parallel.UNEVEN = few, 1.5
    torch.manual_seed(3)
    weight, tokens_ND = torch.randn(ranks, 8, 8, requires_grad=True), torch.randn(60, 8, requires_grad=True)
    calls: list[int] = []

    def compute(hidden_PD: torch.Tensor, index_P1: torch.Tensor, weights_P1: torch.Tensor) -> torch.Tensor:
        calls.append(len(hidden_PD))
        assert not index_P1.any(), "a rank has one expert"
        return (hidden_PD @ weight[dist.get_rank()]).relu() * weights_P1

    chosen = torch.arange(60).remainder(6)
    index_N1 = torch.where(chosen < 5, 0, 1 + torch.arange(60).remainder(ranks - 1))[:, None]
    weights_N1 = torch.linspace(0.5, 1.5, 60)[:, None].requires_grad_()
    found_ND = expert_parallel.dispatch_to_experts(compute, dist.group.WORLD, 1, tokens_ND, index_N1, weights_N1)  # pyright: ignore
    forward = len(calls)
    (found_ND * torch.arange(8.0)).sum().backward()
    dist.all_reduce(weight.grad)
    every: list[Any] = [None] * ranks
    dist.all_gather_object(every, [calls[:forward], calls[forward:]])
    return [every, found_ND.detach(), tokens_ND.grad, weights_N1.grad, weight.grad]


@pytest.mark.slow
def test_a_skew_bounds_what_a_rank_computes_at_a_time_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "once").mkdir()
    once, rounds = (
        case.by_ranks(skewed, RANKS, folder, few) for folder, few in ((tmp_path / "once", 1000), (tmp_path, 1))
    )
    assert once[0][0] == [[200], []], "3.3 times the share of 60"
    forward, backward = rounds[0][0]
    assert len(forward) == 3 and sum(forward) == 200 and max(forward) <= 1.5 * 60
    assert sorted(backward) == sorted(forward), "each is computed again, one after another"
    assert {tuple(map(len, calls)) for calls in rounds[0]} == {(3, 3)}, "all ranks make as many exchanges"
    for one, other in zip(once[1:], rounds[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("family", "experts", "reason"),
    [
        ("qwen2", 2, "learner.mesh.expert = 2 is not possible: transformers has no plan that splits the experts"),
        ("six", 4, "learner.mesh.expert = 4 must divide the 6 experts"),
        ("six", 3, ""),
        ("qwen2", 1, ""),
    ],
)
def test_experts_that_cannot_be_shared_are_refused(family: str, experts: int, reason: str) -> None:
    assert tensor_parallel.refusal(FAMILIES[family], experts).startswith(reason)
    assert bool(tensor_parallel.refusal(FAMILIES[family], experts)) == bool(reason)


def refused(ranks: int, folder: Path, mesh: str) -> str:
    try:
        loaded(ranks, folder, mesh)
    except ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("shape", "mesh", "reason"),
    [
        (
            {"intermediate_size": 33},
            "tensor = 2",
            "mlp.gate_proj.weight has 33 entries, which cannot be split between 2 ranks",
        ),
        ({"num_key_value_heads": 1}, "tensor = 2", "tensor = 2 must divide the 1 heads of keys and values"),
        ({}, "expert = 2", "transformers has no plan that splits the experts"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_when_it_is_loaded(
    shape: dict[str, int], mesh: str, reason: str, tmp_path: Path
) -> None:
    AutoModelForCausalLM.from_config(LlamaConfig(**case.SMALL | shape)).save_pretrained(tmp_path / "model")
    assert reason in case.by_ranks(refused, 2, tmp_path, tmp_path / "model", mesh)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["learner.ranks=3"], r"learner.mesh.tensor \(2\) must divide learner.ranks \(3\)"),
        (["learner.ranks=2", "learner.mesh.context=2"], r"context \* tensor \(4\) must divide learner.ranks \(2\)"),
        (["learner.ranks=6", "learner.mesh.replicate=3", "learner.mesh.expert=4"], r"expert \(4\) must divide the 2"),
        (["learner.ranks=2", "model.lora.rank=2"], "tensor = 2 splits weights, which model.lora does not support"),
        (["learner.ranks=2", "model.attention=eager"], "tensor = 2 is not possible with model.attention = 'eager'"),
        (["learner.ranks=2", "model.compile=true"], "tensor = 2 is not possible with model.compile"),
        (
            ["learner.ranks=2", "queue.segments={max_tokens=2,prefix='detached'}"],
            "tensor = 2 computes all tokens of a row together.*prefix = 'detached'",
        ),
    ],
)
def test_choices_that_do_not_go_together(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        case.config_of(T2, *overrides)
