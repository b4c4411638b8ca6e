"""Precision, memory and gradient norms of the learner's model, and its refusals."""

from functools import partial
from pathlib import Path
from typing import Any

import fake_varlen
import learner_case as case
import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from streamppo.errors import ConfigError, RunError, UpdateError
from streamppo.learner import device
from streamppo.learner.attention import attention, layers, varlen
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import load_policy, optimizer

pytestmark = pytest.mark.usefixtures("alone")

BF16 = "model.dtype=bfloat16"


# --- precision and memory ------------------------------------------------------------------------------------


def test_bfloat16_trains_float32_master_weights(folder: Path) -> None:
    before = case.whole(case.updater(case.config_of(BF16), folder).policy)
    updater = case.updater(case.config_of(BF16, "learner.minibatches=2"), folder)
    metrics = case.metrics(updater, pad(case.batch()))
    assert metrics["steps"] == 2
    assert metrics["value_loss"] > 0
    for name, tensor in case.whole(updater.policy).items():
        assert tensor.dtype == torch.float32
        assert not torch.equal(tensor, tensor.bfloat16().float()) or name.endswith("bias"), name
        assert not torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("float32_head", [True, False])
def test_the_float32_head_multiplies_in_float32_what_bfloat16_gives_it(folder: Path, float32_head: bool) -> None:
    updater = case.updater(case.config_of(BF16, f"model.float32_head={str(float32_head).lower()}"), folder)
    hidden: list[torch.Tensor] = []
    updater.policy.lm.base_model.register_forward_hook(lambda *call: hidden.append(call[-1].last_hidden_state))
    padded = pad(case.batch())
    with torch.no_grad():
        scored = updater.policy(padded, "policy")
        product_BLV = hidden[0].float() @ updater.policy.lm.get_output_embeddings().weight.float().T
    assert hidden[0].dtype == torch.bfloat16
    error = {True: 0.0, False: 0.0}
    for wide, logits_BLV in {True: product_BLV, False: product_BLV.bfloat16().float()}.items():
        logp_BLV = logits_BLV.log_softmax(-1)
        for row in range(case.BATCH):
            start, length = int(padded.start_B[row]), int(padded.length_B[row])
            ids = padded.inputs_BL[row, start : start + length, None]
            expected_T = logp_BLV[row, start - 1 : start + length - 1].gather(-1, ids).squeeze(-1)
            error[wide] += (scored.logprobs_BT[row, :length] - expected_T).abs().sum().item()
    assert error[float32_head] < 1e-2 * error[not float32_head]


def test_gradient_checkpointing_computes_every_layer_again(folder: Path) -> None:
    calls = {}
    for choice in ("off", "full", "offloaded"):
        options = (f"model.gradient_checkpointing={choice}", "learner.epochs=2", "algorithm.critic.model=policy")
        updater = case.updater(case.config_of(*options, "learner.micro_batch_tokens=100000"), folder)
        calls[choice] = []
        for transformer in (updater.policy.lm.base_model, updater.policy.critic):
            transformer.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=calls[choice]: seen.append(1))
        updater.update(pad(case.batch()))
    again = dict.fromkeys(("full", "offloaded"), 2 + 8)
    assert {choice: len(seen) for choice, seen in calls.items()} == {"off": 2 + 4, **again}


class Products(TorchDispatchMode):
    """Counts the computed matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.name() in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


def test_checkpointing_computes_all_products_but_the_last_again_and_changes_no_gradient(folder: Path) -> None:
    counts, gradients = {}, {}
    for choice in ("off", "full", "offloaded"):
        updater = case.updater(
            case.config_of(f"model.gradient_checkpointing={choice}", "algorithm.entropy=0.1"), folder
        )
        with Products() as seen:
            updater.policy(pad(case.batch()), "policy").logprobs_BT.sum().backward()
        counts[choice] = seen.count
        gradients[choice] = [case.full(parameter.grad) for parameter in updater.policy.lm.parameters()]
    # Of a layer's seven products the last, whose result nothing needs, is never computed again.
    assert counts["full"] - counts["off"] == 2 * 6
    for choice in ("full", "offloaded"):
        assert all(torch.equal(one, other) for one, other in zip(gradients[choice], gradients["off"], strict=True))


@pytest.mark.parametrize(("choice", "moved"), [("full", 0), ("offloaded", 2)])
def test_inputs_of_layers_wait_on_the_cpu_where_that_is_chosen(
    folder: Path, monkeypatch: pytest.MonkeyPatch, choice: str, moved: int
) -> None:
    shapes: list[tuple[int, ...]] = []

    class Seen(torch.autograd.graph.save_on_cpu):
        def __init__(self, pin_memory: bool) -> None:
            super().__init__(pin_memory=pin_memory)
            pack = self.pack_hook
            self.pack_hook = lambda tensor: (shapes.append(tuple(tensor.shape)), pack(tensor))[1]

    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Seen)
    config = case.config_of(f"model.gradient_checkpointing={choice}", "learner.micro_batch_tokens=100000")
    updater, rows = case.updater(config, folder), pad(case.batch())
    updater.policy(rows, "policy").logprobs_BT.sum().backward()
    # Of a layer its input alone, and of the last norm what it needs.
    assert sum(shape == (*rows.inputs_BL.shape, 32) for shape in shapes) >= moved
    assert bool(shapes) == bool(moved) and not any(48 in shape for shape in shapes)


def test_offloaded_weights_are_trained_as_all_others(folder: Path) -> None:
    found: list[case.Weights] = []
    for choice in ("false", "true"):
        config = case.config_of(f"learner.offload={choice}", "learner.epochs=2", "model.dtype=bfloat16")
        updater = case.updater(config, folder)
        updater.optimizer = optimizer.adamw(updater.policy, config)
        for seed in (0, 1):
            case.metrics(updater, pad(case.batch(seed=seed)))
        found.append(case.whole(updater.policy))
        moments = [one for state in updater.optimizer.state.values() for one in state.values()]
        assert {one.device.type for one in (*updater.policy.parameters(), *moments)} == {"cpu"}
    case.assert_same_weights(*found, atol=0)


@pytest.mark.parametrize("offload", ["false", "true"])
def test_compiled_layers_are_computed_again_outside_of_what_is_compiled(
    folder: Path, monkeypatch: pytest.MonkeyPatch, offload: str
) -> None:
    inside, again = list[bool](), list[int]()

    def compiled(function: Any, **_: Any) -> Any:
        return lambda *arguments, **named: (inside.append(bool(again)), function(*arguments, **named))[1]

    monkeypatch.setattr(layers.torch, "compile", compiled)
    options = ("model.compile=true", "learner.exact=false", "model.gradient_checkpointing=full")
    # With offload it is sharded, and its layers are of a subclass that FSDP has made.
    config = case.config_of(*options, f"learner.offload={offload}", "model.share_prompts=false")
    policy = case.updater(config, folder).policy
    recompute = layers.checkpoint
    monkeypatch.setattr(layers, "checkpoint", lambda *these, **named: (again.append(0), recompute(*these, **named))[1])
    policy(pad(case.batch()), "policy").logprobs_BT.sum().backward()
    count = case.SMALL["num_hidden_layers"]
    assert len(again) == count
    assert len(inside) == 2 * count and all(inside), "in the forward pass and in the backward pass"


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_compiled_layers_compute_the_same_and_keep_their_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Everything but the compilation of kernels.
    monkeypatch.setattr(layers.torch, "compile", partial(torch.compile, backend="aot_eager"))
    scores, names = [], []
    for options in ((), ("model.compile=true", "learner.exact=false", "model.gradient_checkpointing=full")):
        updater = case.updater(case.config_of(*options, "model.share_prompts=false"), folder)
        scored = updater.policy(pad(case.batch()), "both")
        scored.logprobs_BT.sum().backward()
        names.append([name for name, _ in updater.policy.named_parameters()])
        scores.append(scored.logprobs_BT.detach())
    assert names[0] == names[1]
    torch.testing.assert_close(scores[1], scores[0], rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("share_prompts", [False, True])
def test_layers_over_rows_end_to_end_are_compiled_for_few_numbers_of_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch, share_prompts: bool
) -> None:
    """Scores and gradients are those without a compiler, and no size of the first rows is in what is compiled later."""
    fake_varlen.install(monkeypatch)
    monkeypatch.setattr(attention, "choose", lambda *_: varlen.register())
    widths: list[int] = []

    compiled_by, everything_but_kernels = torch.compile, torch._dynamo.lookup_backend("aot_eager")

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        hidden_1ND = next(one for one in inputs if isinstance(one, torch.Tensor) and one.dim() == 3)
        widths.append(hidden_1ND.shape[1])
        return everything_but_kernels(module, inputs)

    def compile_all(function: Any, *, options: Any, dynamic: bool) -> Any:
        return compiled_by(function, dynamic=dynamic, backend=backend)

    monkeypatch.setattr(layers.torch, "compile", compile_all)
    torch._dynamo.reset()
    found = []
    for compiled in ("false", "true"):
        options = (f"model.compile={compiled}", f"model.share_prompts={str(share_prompts).lower()}")
        updater = case.updater(case.config_of(*options, "learner.exact=false", "learner.micro_batch_tokens=40"), folder)
        for seed in range(5):
            scored = updater.policy(pad(case.batch(seed=seed)), "both")
            (scored.logprobs_BT.sum() + scored.values_BT.sum()).backward()
        found.append({name: case.full(one.grad) for name, one in updater.policy.named_parameters()})
    for name, gradient in found[0].items():
        torch.testing.assert_close(found[1][name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name)
    assert all(width % 5 == 0 for width in widths), widths
    # The compiler may begin its first one again.
    assert 1 < len(set(widths)) <= len(widths) <= len(set(widths)) + 1


def test_what_a_compiler_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.compile .* needs learner.exact = false"):
        case.config_of("model.compile=true")


def test_an_offloaded_reference_stays_on_the_cpu_and_says_the_same(folder: Path) -> None:
    kl = ("algorithm.kl.loss_beta=0.1", "learner.epochs=2", "learner.lr=0.01")
    plain, offloaded = (
        case.updater(case.config_of(*kl, f"algorithm.kl.offload={choice}"), folder) for choice in ("false", "true")
    )
    said = [case.metrics(updater, pad(case.batch()))["reference_kl"] for updater in (plain, offloaded)]
    assert said[0] == said[1]
    assert offloaded.reference is not None
    assert {parameter.device.type for parameter in offloaded.reference.parameters()} == {"cpu"}


@pytest.mark.parametrize("layers_above", [0, load_policy.SHARD_LAYERS_ABOVE])
def test_of_a_references_pass_nothing_stays_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch, layers_above: int
) -> None:
    monkeypatch.setattr(load_policy, "SHARD_LAYERS_ABOVE", layers_above)
    # As if it were one rank of several.
    monkeypatch.setattr(load_policy, "is_whole", lambda *_, **__: False)
    choices = ("algorithm.kl.loss_beta=0.1", "learner.micro_batch_tokens=40", "model.dtype=bfloat16")
    updater = case.updater(case.config_of(*choices), folder)
    reference: Any = updater.reference

    def record() -> list[Any]:
        return reference._get_fsdp_state()._comm_ctx.post_forward_order

    sharded: set[Any] = set()
    reference.register_forward_hook(lambda *_: sharded.update(record()))
    for _ in range(2):
        updater.update(pad(case.batch()))
        assert len(sharded) == 1 + (0 if layers_above else case.SMALL["num_hidden_layers"])
        assert not record()
        assert not any(group._post_forward_indices for group in sharded)
        assert all(isinstance(parameter, DTensor) for parameter in reference.parameters())


# --- the gradient's norm -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("norm", "size"), [("2-norm", 2.0), ("max-norm", torch.inf)])
def test_the_step_is_as_long_as_the_chosen_norm_allows(folder: Path, norm: str, size: float) -> None:
    bound = 1e-3
    config = case.config_of(f"learner.norm={norm}", f"learner.max_grad_norm={bound}")
    updater = case.updater(config, folder)
    before = case.whole(updater.policy)
    assert case.metrics(updater, pad(case.batch()))["grad_norm"] > bound
    moved = torch.cat([(after - before[name]).flatten() for name, after in case.whole(updater.policy).items()])
    assert moved.norm(size).item() == pytest.approx(config.learner.lr * 100 * bound, rel=1e-2)


# --- what is refused -----------------------------------------------------------------------------------------


def without_tokens(batch: PaddedBatch) -> PaddedBatch:
    return batch._replace(mask_BT=torch.zeros_like(batch.mask_BT), fresh_BT=torch.zeros_like(batch.mask_BT))


def with_behavior(value: float) -> PaddedBatch:
    batch = pad(case.batch())
    row, place = batch.mask_BT.nonzero()[0].tolist()
    broken_BT = batch.behavior_logprobs_BT.clone()
    broken_BT[row, place] = value
    return batch._replace(behavior_logprobs_BT=broken_BT)


BAD = {
    "every token of the batch is masked": lambda: without_tokens(pad(case.batch())),
    r"behavior\[0, 0\] = nan is not finite": lambda: with_behavior(torch.nan),
    r"behavior\[0, 0\] = 0.5 is above 0": lambda: with_behavior(0.5),
    r"rewards\[0, \d\] = nan is not finite": lambda: (good := pad(case.batch()))._replace(
        rewards_BT=torch.full_like(good.rewards_BT, torch.nan)
    ),
    "behavior has shape": lambda: (good := pad(case.batch()))._replace(
        behavior_logprobs_BT=good.behavior_logprobs_BT[:, :-1]
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("message", BAD)
@pytest.mark.parametrize("advantage", ["gae", "rloo"])
def test_data_that_must_not_be_trained_on_changes_no_weight(folder: Path, message: str, advantage: str) -> None:
    updater = case.updater(case.config_of(f"algorithm.advantage.kind={advantage}"), folder)
    before = case.whole(updater.policy)
    with pytest.raises(UpdateError, match=f"batch 3 cannot be trained on: .*{message}"):
        updater.update(BAD[message]())
    after = case.whole(updater.policy)
    assert all(torch.equal(before[name], after[name]) for name in before)


# --- the device ----------------------------------------------------------------------------------------------


def test_a_rank_that_was_promised_a_gpu_says_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device.acquire(0).type == "cpu"
    with pytest.raises(RunError, match=r"learner.gpus = 0.5, and torch .* sees no GPU here"):
        device.acquire(0.5)


def test_a_rank_on_a_gpu_computes_the_same_bits_every_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    try:
        assert device.acquire(1.0) == torch.device("cuda", 0)
        assert torch.are_deterministic_algorithms_enabled()
        assert device.os.environ == {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "FLASH_ATTENTION_DETERMINISTIC": "1"}
        device.acquire(1.0, exact=False)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_rank_that_need_not_be_exact_tells_no_library_to_be_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.os, "environ", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    device.acquire(1.0, exact=False)
    assert device.os.environ == {}
    assert not torch.are_deterministic_algorithms_enabled()
