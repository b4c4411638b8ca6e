"""Adapters under FSDP: the trained, pushed and saved parts of a policy with frozen weights."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import learner_case as case
import model_families
import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import AutoModelForCausalLM

from streamppo.config.model import Lora
from streamppo.config.sections import Config
from streamppo.errors import ModelError, WeightsError
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.checkpoint import checkpoint
from streamppo.learner.checkpoint.checkpoint import TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.model import adapters, load_policy, optimizer
from streamppo.learner.model import policy as model
from streamppo.learner.model.frozen import NoReferenceWeights
from streamppo.learner.model.policy import Policy
from streamppo.learner.model.snapshot import snapshot
from streamppo.types import Push
from streamppo.weights.adapters import MergedAdapters, merge_adapters, source
from streamppo.weights.buckets import Buckets
from streamppo.weights.content import check
from streamppo.weights.models import loading as models
from streamppo.weights.replica import Replica
from streamppo.weights.shares import join

LORA = "model.lora={rank=3, alpha=6}"
RANKS = (1, 2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    case.save_model(tmp_path / "model")
    return tmp_path


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    with case.group(0, 1, tmp_path / "store"):
        yield


def loaded(config: Config, path: str, *, moved: bool = True) -> Policy:
    """A policy with adapters, of which B is no longer 0 if they have `moved`."""
    torch.manual_seed(3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = load_policy.load(config.model, path, 1.0, mesh, lora=config.model.lora)
    if moved:
        with torch.no_grad():
            for name, one in adapters.adapter_parameters(policy.lm).items():
                if name.endswith("lora_B.weight"):
                    made = torch.randn(one.shape, generator=torch.Generator().manual_seed(len(name))) * 0.2
                    one.copy_(distribute_tensor(made, mesh, one.placements) if isinstance(one, DTensor) else made)
    return policy


def pushed(policy: Policy, config: Config) -> Replica:
    """A rollout actor's copy of the policy, on rank 0, from the shares of all ranks."""
    dtype, ranks = config.model.dtype, dist.get_world_size()
    buckets = Buckets(model.shards(policy, dtype), 3000)
    snapshot(policy, buckets.tensors)
    mine = buckets.push(0, rank=dist.get_rank(), ranks=ranks)
    described = structs.replace(mine.push, frozen=model.frozen(policy, dtype))
    everybody: list[Any] = [None] * ranks
    dist.all_gather_object(everybody, (described, mine.arrays))
    replica = Replica()
    replica.take(join([push for push, _ in everybody]), [one for _, arrays in everybody for one in arrays])
    return replica


def versions(ranks: int, path: str) -> dict[str, str]:
    """On rank 0: the digest of a version in each type, whose tensors an actor makes of it and of the model's files."""
    return {dtype: digest(path, dtype) for dtype in ("float32", "bfloat16")}


def digest(path: str, dtype: str) -> str:
    config = case.config_of(LORA, f"model.dtype={dtype}")
    policy = loaded(config, path)
    replica, gathered = pushed(policy, config), model.gather_weights(policy, dtype, config.model.lora)
    if dist.get_rank():
        return ""
    found = asyncio.run(source(config, path).materialize(replica))
    check(found.contents, found.tensors.items())
    assert list(found.tensors) == list(gathered)
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in gathered.items())
    assert all(".lora_" in name for name in replica.tensors)
    assert replica.push is not None
    return replica.push.digest


@pytest.mark.slow
def test_actors_make_the_policy_of_its_adapters_alone_whatever_the_number_of_ranks(folder: Path) -> None:
    made = [case.by_ranks(versions, ranks, folder, str(folder / "model")) for ranks in RANKS]
    assert made[0] == made[1] and len({*made[0].values(), ""}) == 3


def scores(policy: Any, batch: PaddedBatch) -> torch.Tensor:
    with torch.no_grad():
        return policy(batch, "policy").logprobs_BT


@pytest.mark.usefixtures("alone")
def test_the_learner_scores_as_the_merged_model_does(folder: Path) -> None:
    config, batch = case.config_of(LORA), pad(case.batch())
    policy = loaded(config, str(folder / "model"))
    lm = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    first = scores(Policy(lm, 1.0), batch)
    assert (scores(policy, batch) - first).abs().max() > 0.1
    whole = asyncio.run(source(config, str(folder / "model")).materialize(pushed(policy, config))).tensors
    with torch.no_grad():
        for name, one in lm.named_parameters():
            one.copy_(whole[name])
    torch.testing.assert_close(scores(policy, batch), scores(Policy(lm, 1.0), batch), rtol=0, atol=1e-5)


@pytest.mark.usefixtures("alone")
def test_an_update_moves_the_adapters_alone_and_by_the_gradient_of_the_merged_model(folder: Path) -> None:
    """dL/dB = scale * dL/dW A^T and dL/dA = scale * B^T dL/dW."""
    config, batch = case.config_of(LORA), pad(case.batch())
    policy, lm = loaded(config, str(folder / "model")), AutoModelForCausalLM.from_pretrained(folder / "model")
    still = {name: one.detach().clone() for name, one in lm.named_parameters()}
    held = {name: case.full(one) for name, one in adapters.adapter_parameters(policy.lm).items()}
    with torch.no_grad():
        for name, one in lm.named_parameters():
            one.copy_(merge_adapters(still, held, 2.0)[name])
    for one in (policy, Policy(lm, 1.0)):
        one(batch, "policy").logprobs_BT.square().sum().backward()
    gradients = {name: one.grad for name, one in adapters.adapter_parameters(policy.lm).items()}
    assert len(gradients) == 2 * 7 * case.SMALL["num_hidden_layers"]
    for name, one in gradients.items():
        base, _, kind = name.rpartition(".lora_")
        whole = lm.get_parameter(f"{base}.weight").grad
        a, b = held[f"{base}.lora_A.weight"], held[f"{base}.lora_B.weight"]
        expected = 2.0 * (whole @ a.T if kind.startswith("B") else b.T @ whole)
        torch.testing.assert_close(case.full(one), expected, rtol=1e-3, atol=1e-4)
    assert all(one.grad is None for one in adapters.frozen(policy.lm).values())
    updater = case.updater(config, folder / "model")
    before = case.whole(updater.policy)
    case.metrics(updater, batch)
    moved = {name for name, one in case.whole(updater.policy).items() if not torch.equal(one, before[name])}
    assert moved and all(".lora_" in name or name.startswith("value_head") for name in moved)


@pytest.mark.usefixtures("alone")
def test_the_reference_is_the_policy_without_its_adapters_bit_for_bit(folder: Path) -> None:
    config, batch = case.config_of(LORA), pad(case.batch())
    policy = loaded(config, str(folder / "model"))
    first, now = scores(loaded(config, str(folder / "model"), moved=False), batch), scores(policy, batch)
    reference = NoReferenceWeights(policy)
    assert torch.equal(scores(reference, batch), first)
    assert torch.equal(scores(policy, batch), now)
    with pytest.raises(AttributeError):
        reference(cast("Any", SimpleNamespace()), "policy")
    assert torch.equal(scores(policy, batch), now), "also after a pass that raised"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("more", [(), ("algorithm.advantage.kind=rloo",)])
def test_the_kl_is_that_to_a_second_model(folder: Path, more: tuple[str, ...]) -> None:
    """One step without a value head trains on the graph of the scoring pass, which lies around the reference's."""
    kl = ("algorithm.kl.loss_beta=0.3", LORA, *more)
    with_lora = case.updater(case.config_of(*kl), folder / "model")
    by_hand = case.updater(case.config_of(*kl), folder / "model")
    config = case.config_of(*kl[:1], *more)
    by_hand.reference = load_policy.load(config.model, folder / "model", 1.0, init_device_mesh("cpu", (1,)))
    batches = [pad(case.batch(seed=seed)) for seed in range(3)]
    for batch in batches:
        one, other = case.metrics(with_lora, batch), case.metrics(by_hand, batch)
        for name in one.keys() - case.TIMES:
            assert one[name] == pytest.approx(other[name], rel=1e-4, abs=1e-6), name
    assert one["reference_kl"] > 1e-6
    case.assert_same_weights(case.whole(with_lora.policy), case.whole(by_hand.policy))


@pytest.mark.usefixtures("alone")
def test_a_checkpoint_has_the_adapters_and_their_moments_and_no_frozen_weight(folder: Path) -> None:
    config, batch = case.config_of(LORA), pad(case.batch())
    policy = loaded(config, str(folder / "model"))
    adamw = optimizer.adamw(policy, config)
    policy(batch, "both").logprobs_BT.sum().backward()
    adamw.step()
    trained, state = (
        TrainState(policy, adamw, None),
        CheckpointState(version=1, digest="", ranks=1, beta=0.0, bad_steps=(0, 0)),
    )
    held = checkpoint._tensors(trained, state)
    assert all(".lora_" in name or "value_head" in name for name in held["policy"])
    assert held["optimizer"].keys() == held["policy"].keys()
    saver = checkpoint.Saver(config.checkpoint)
    published: Any = SimpleNamespace(result=lambda: SimpleNamespace(digest="d"))
    saver.start(folder / "checkpoints", state, trained, published)
    saver.wait()
    other = loaded(config, str(folder / "model"), moved=False)
    checkpoint.load(folder / "checkpoints" / "00000001", TrainState(other, optimizer.adamw(other, config), None))
    case.assert_same_weights(case.whole(policy), case.whole(other), atol=0.0)


@pytest.mark.usefixtures("alone")
def test_adapters_of_another_model_or_damaged_ones_are_refused_by_name(folder: Path) -> None:
    config = case.config_of(LORA)
    policy = loaded(config, str(folder / "model"))
    replica, names = pushed(policy, config), dict(model.gather_weights(policy, "float32", config.model.lora))
    still = {
        name: one.clone() for name, one in AutoModelForCausalLM.from_pretrained(folder / "model").named_parameters()
    }
    assert names.keys() == still.keys()
    still["model.norm.weight"][3] += 1
    with pytest.raises(WeightsError, match=r"another model .*model\.norm\.weight differs, and 0 more"):
        asyncio.run(MergedAdapters(still, 2.0).materialize(replica))
    still["model.norm.weight"][3] -= 1
    asyncio.run(MergedAdapters(still, 2.0).materialize(replica))
    broken = replica.tensors["model.layers.0.self_attn.q_proj.lora_A.weight"]
    broken[0, 0] += 1
    with pytest.raises(WeightsError, match=r"q_proj\.lora_A"):
        asyncio.run(MergedAdapters(still, 2.0).materialize(replica))


@pytest.mark.usefixtures("alone")
def test_an_actor_reads_the_frozen_model_in_its_type_and_holds_the_learners_bits(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, read = case.config_of(LORA, "model.dtype=bfloat16"), list[torch.dtype]()
    whole = models.load

    def load(path: str, **options: Any) -> Any:
        made = whole(path, **options)
        read.extend(one.dtype for one in made.model.parameters())
        return made

    replica = pushed(loaded(config, str(folder / "model")), config)
    monkeypatch.setattr(models, "load", load)
    asyncio.run(source(config, str(folder / "model")).materialize(replica))
    assert set(read) == {torch.bfloat16}, "of 32 billion parameters 131 GB in float32, for each actor"


@pytest.mark.usefixtures("alone")
def test_targets_are_chosen_by_the_ends_of_their_names_and_unknown_ones_refused(folder: Path) -> None:
    policy = loaded(case.config_of("model.lora={targets=['q_proj', 'v_proj']}"), str(folder / "model"))
    assert {name.split(".")[-3] for name in adapters.adapter_parameters(policy.lm)} == {"q_proj", "v_proj"}
    with pytest.raises(ModelError, match="no_proj"):
        loaded(case.config_of("model.lora={targets=['no_proj']}"), str(folder / "model"))
    assert Lora(rank=4, alpha=6).scale == 1.5


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "family", ["Ernie4_5_Moe", "FalconH1", "Gemma3Text", "Llava", "Mixtral", "Qwen3Moe", "Qwen3Next", "Qwen3_5"]
)
def test_without_targets_the_linear_layers_have_adapters_and_every_model_is_merged(tmp_path: Path, family: str) -> None:
    model_families.make(family, tmp_path / "model")
    policy = loaded(case.config_of(LORA), str(tmp_path / "model"))
    pushed, still = adapters.adapter_parameters(policy.lm), adapters.frozen(policy.lm)
    places = {name.rpartition(".lora_")[0] for name in pushed}
    assert places and not any(place.endswith((".gate", "experts", "lm_head")) for place in places)
    merged = merge_adapters(still, {name: one.detach() for name, one in pushed.items()}, 2.0)
    assert {name.removesuffix(".weight") for name in merged if not torch.equal(merged[name], still[name])} == places


@pytest.mark.usefixtures("alone")
def test_a_target_that_is_no_linear_layer_is_refused(tmp_path: Path) -> None:
    model_families.make("GPT2", tmp_path / "model")
    # Of transformers' own class, whose weights are transposed.
    with pytest.raises(ModelError, match=r"model.lora.targets \(c_proj\): .*c_proj is a Conv1D, and only linear"):
        loaded(case.config_of("model.lora={targets=['c_proj']}"), str(tmp_path / "model"))


@pytest.mark.usefixtures("alone")
def test_a_target_outside_of_the_transformer_is_refused(folder: Path) -> None:
    """The learner reads the head's weight, and would not train an adapter on it."""
    with pytest.raises(ModelError, match="lm_head is not in the transformer, and an adapter there would not be"):
        loaded(case.config_of("model.lora={targets=['lm_head', 'q_proj']}"), str(folder / "model"))


def test_a_push_names_its_frozen_tensors_in_its_digest() -> None:
    push = Push(version=0, base_version=None, tensors=(), pieces=(), bucket_bytes=())
    one: Any = SimpleNamespace(name="w", dtype="float32", shape=(1,), content=1)
    other: Any = SimpleNamespace(name="w", dtype="float32", shape=(1,), content=2)
    digests = {structs.replace(push, frozen=frozen).digest for frozen in ((), (one,), (other,))}
    assert len(digests) == 3
