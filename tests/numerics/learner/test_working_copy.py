"""A rank alone computes with a working copy of its weights: FSDP's mixed precision, bit for bit, without FSDP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamppo.learner.attention import layers
from streamppo.learner.batch.padded import pad
from streamppo.learner.checkpoint import checkpoint, manifest
from streamppo.learner.checkpoint.checkpoint import Saver, TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.model import load_policy, optimizer, policy
from streamppo.learner.model.frozen import follow
from streamppo.learner.model.snapshot import snapshot
from streamppo.learner.update import Updater
from streamppo.weights.buckets import Buckets, pack_whole

BF16 = ("model.dtype=bfloat16", "learner.micro_batch_tokens=30", "learner.minibatches=2", "learner.lr=0.01")
CONFIGS: dict[str, tuple[str, ...]] = {
    "as it is": (),
    "full": ("model.gradient_checkpointing=full",),
    "offloaded": ("model.gradient_checkpointing=offloaded",),
    "lora": ("model.lora={rank=2}",),
    "lora, checkpointed": ("model.lora={rank=2}", "model.gradient_checkpointing=full", "algorithm.kl.loss_beta=0.1"),
    "a critic of its own": ("algorithm.critic.model=policy", "algorithm.critic.epochs=2"),
    "no critic": ("algorithm.advantage.kind=grpo", "algorithm.aggregation=prompt-mean", "algorithm.entropy=0.01"),
    "a reference that follows": ("algorithm.kl.loss_beta=0.1", "algorithm.kl.follow_every=1"),
    "a reference that stands": ("algorithm.kl.reward_beta=0.1",),
    "a context without gradient": ("queue.segments={prefix='detached'}",),
    "max-norm": ("learner.norm=max-norm", "learner.max_grad_norm=0.001"),
    "a policy that stands": ("algorithm.critic.warmup_updates=2", "algorithm.critic.model=policy"),
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
MODELS: dict[str, Any] = {
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**case.SMALL, initializer_range=0.3, tie_word_embeddings=True)),
    "apart": lambda: LlamaForCausalLM(LlamaConfig(**case.SMALL, initializer_range=0.3, mlp_bias=True)),
    "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**case.SMALL, **EXPERTS, initializer_range=0.3)),
}


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A process group for all tests of this file."""
    with case.group(0, 1, tmp_path_factory.mktemp("group") / "store"):
        yield


def learner(folder: Path, *overrides: str, fsdp: bool, layered: bool = False) -> Updater:
    """An updater with AdamW, whose policy FSDP shards over this rank or not; with `layered`, layer by layer."""
    with pytest.MonkeyPatch.context() as patch:
        if fsdp:
            patch.setattr(load_policy, "is_whole", lambda *_, **__: False)
        if layered:
            patch.setattr(load_policy, "SHARD_LAYERS_ABOVE", 0)
        made = case.updater(case.config_of(*BF16, *overrides), folder)
    made.optimizer = optimizer.adamw(made.policy, made.config)
    assert isinstance(made.policy, FSDPModule) == fsdp
    return made


def several(updater: Updater) -> list[dict[str, float]]:
    """Three updates of two steps; their metrics but for times."""
    found = [case.metrics(updater, pad(case.batch(version=3 + n, seed=n))) for n in range(3)]
    return [{name: one for name, one in metrics.items() if name not in case.TIMES} for metrics in found]


def same_bits(one: Updater, other: Updater) -> None:
    case.assert_same_weights(case.whole(one.policy), case.whole(other.policy), atol=0)
    pairs = zip(one.optimizer.state.values(), other.optimizer.state.values(), strict=True)
    for moments, others in pairs:
        assert all(torch.equal(case.full(moments[name]), case.full(others[name])) for name in ("exp_avg", "exp_avg_sq"))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CONFIGS)
def test_updates_make_the_bits_of_fsdp(name: str, folder: Path) -> None:
    one, other = (learner(folder, *CONFIGS[name], fsdp=fsdp, layered=name != "as it is") for fsdp in (False, True))
    assert one.policy.working_copy is not None
    assert several(one) == several(other)
    same_bits(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_so_do_those_of_other_models(name: str, tmp_path: Path) -> None:
    torch.manual_seed(5)
    MODELS[name]().save_pretrained(tmp_path)
    options = ("model.gradient_checkpointing=full", "algorithm.critic.model=policy")
    one, other = (learner(tmp_path, *options, fsdp=fsdp, layered=True) for fsdp in (False, True))
    assert several(one) == several(other)
    same_bits(one, other)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_so_do_those_of_compiled_layers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = torch.compile
    monkeypatch.setattr(layers.torch, "compile", lambda *given, **words: compiled(*given, **words, backend="aot_eager"))
    options = (
        "model.compile=true",
        "learner.exact=false",
        "model.share_prompts=false",
        "learner.micro_batch_tokens=200",
    )
    one, other = (learner(folder, *options, fsdp=fsdp, layered=True) for fsdp in (False, True))
    for updater in (one, other):
        updater.update(pad(case.batch()))
    same_bits(one, other)


def test_the_copy_is_rounded_from_what_was_written_last_whoever_wrote(folder: Path) -> None:
    updater, other, batch = learner(folder, fsdp=False), learner(folder, fsdp=False), pad(case.batch())
    other.update(batch)
    norm = updater.policy.lm.model.norm
    weight = dict(norm.named_parameters())["weight"]

    def write() -> None:
        with torch.no_grad():
            weight.add_(0.5)

    def load() -> None:
        updater.policy.load_state_dict({name: one + 1 for name, one in updater.policy.state_dict().items()})

    for change in (write, load, lambda: updater.update(batch), lambda: follow(updater.policy, other.policy, 0.5)):
        before = norm.weight.clone()
        change()
        with torch.no_grad():
            updater.policy(batch, "both")
        assert torch.equal(norm.weight, weight.bfloat16()) and not torch.equal(norm.weight, before)


def test_nothing_is_copied_between_steps_nor_where_types_are_alike(folder: Path) -> None:
    updater, copies = learner(folder, fsdp=False), list[str]()

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            copies.extend(["copy"] * ("_foreach_copy_" in func._schema.name))
            return func(*args, **(kwargs or {}))

    with Watched():
        updater.update(pad(case.batch()))
    # Two steps: the second one's passes begin with a copy, the first one's found it made.
    assert len(copies) == 1
    assert learner(folder, "model.dtype=float32", fsdp=False).policy.working_copy is None


def test_an_update_has_fewer_operations_than_with_fsdp(folder: Path) -> None:
    counts: dict[bool, int] = {}
    for fsdp in (False, True):
        updater = learner(folder, "model.gradient_checkpointing=full", fsdp=fsdp, layered=True)
        updater.update(pad(case.batch()))
        with Operations() as seen:
            updater.update(pad(case.batch(seed=1)))
        counts[fsdp] = seen.count
    assert counts[False] < 0.85 * counts[True], counts


class Operations(TorchDispatchMode):
    """Counts operations that are not views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view and "detach" not in func._schema.name
        return func(*args, **(kwargs or {}))


# --- what leaves a rank ----------------------------------------------------------------------------------------


def saved(updater: Updater, folder: Path) -> Path:
    state = CheckpointState(version=1, digest="", ranks=1, beta=0.0, bad_steps=(0, 0))
    saver = Saver(updater.config.checkpoint)
    done: Any = type("Done", (), {"result": lambda _: type("Pushed", (), {"digest": "d"})})()
    saver.start(folder, state, TrainState(updater.policy, updater.optimizer, None), done)
    saver.wait()
    return folder / "00000001"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fsdp", "overrides"), [(False, ()), (True, CONFIGS["a critic of its own"]), (True, CONFIGS["lora"])]
)
def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind(
    fsdp: bool, overrides: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    one, other = learner(folder, *overrides, fsdp=fsdp), learner(folder, *overrides, fsdp=not fsdp)
    one.update(pad(case.batch()))
    checkpoint.load(saved(one, tmp_path), TrainState(other.policy, other.optimizer, None))
    same_bits(one, other)
    for updater in (one, other):
        updater.update(pad(case.batch(seed=1)))
    same_bits(one, other)


def test_checkpoints_of_both_kinds_have_the_same_files(folder: Path, tmp_path: Path) -> None:
    names: list[set[str]] = []
    for fsdp in (False, True):
        path = saved(learner(folder, fsdp=fsdp), tmp_path / str(fsdp))
        names.append({*checkpoint.distcp.Reader(path).read_metadata().state_dict_metadata})
        assert manifest.read(path).state.version == 1
    assert names[0] == names[1]


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [(), CONFIGS["lora"]], ids=["all", "lora"])
def test_a_version_has_the_same_digest(overrides: tuple[str, ...], folder: Path) -> None:
    digests: list[Any] = []
    for fsdp in (False, True):
        updater = learner(folder, *overrides, fsdp=fsdp)
        updater.update(pad(case.batch()))
        gathered = policy.gather_weights(updater.policy, "bfloat16", updater.config.model.lora)
        buckets = Buckets(policy.shards(updater.policy, "bfloat16"), 3000)
        snapshot(updater.policy, buckets.tensors)
        pushed = buckets.push(1, rank=0, ranks=1).push
        digests.append(
            (pack_whole(1, gathered, 3000).push.digest, pushed.digest, policy.frozen(updater.policy, "bfloat16"))
        )
    assert digests[0] == digests[1]
