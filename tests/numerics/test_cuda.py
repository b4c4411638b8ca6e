"""A GPU computes the CPU's results. `pytest -m gpu`"""

import asyncio
import os
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import learner_case as case
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.overrides import TorchFunctionMode
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from streamppo.algorithms import chunked_head
from streamppo.algorithms.candidates import Candidates
from streamppo.algorithms.chunked_head import LogitShape, chunked_logprobs_entropy
from streamppo.config.model import JOINED
from streamppo.learner import device, update
from streamppo.learner.attention import attention, prefix_kv, prefix_sharing, varlen
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import hf_files, norms, optimizer, snapshot
from streamppo.learner.model import policy as model
from streamppo.learner.objective.loss import Loss
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Sampling
from streamppo.types import Batch
from streamppo.weights.buckets import Buckets
from streamppo.weights.content import BLOCK, BLOCKS_AT_ONCE_ON_GPU, hash_tensor

DEVICE = "cuda"
# cuBLAS looks at it once, before the first product.
os.environ.update(device.DETERMINISTIC)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_the_engine_samples_on_cuda_with_the_log_probs_of_transformers(dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, **sizes)
    model = Qwen3ForCausalLM(config).eval().to("cuda", dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    async def generate() -> list[tuple[np.ndarray, np.ndarray]]:
        engine = EmbeddedEngine(
            config,
            weights,
            version=0,
            slots=4,
            max_total_tokens=64,
            ends=EndTokens(),
            seed=0,
            dtype=dtype,
            device="cuda",
        )
        requests = [np.arange(2, 5 + n, dtype=np.int32) for n in range(9)]
        done = await asyncio.gather(*(engine.generate(prompt, Sampling(20)) for prompt in requests))
        await engine.stop()
        return [
            (np.concatenate([prompt, completion.tokens]), completion.logprobs)
            for prompt, completion in zip(requests, done, strict=True)
        ]

    for tokens, logprobs in asyncio.run(generate()):
        ids = torch.from_numpy(tokens).long().to("cuda")[None]
        with torch.no_grad():
            logp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = logp[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)[-len(logprobs) :].cpu().numpy()
        np.testing.assert_allclose(logprobs, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_hash_of_weights_is_that_of_the_cpu_and_adds_up_over_shards(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3 * BLOCK * BLOCKS_AT_ONCE_ON_GPU // 2 + 7, generator=generator).to(dtype)
    on_gpu, expected = whole.to(DEVICE), hash_tensor(whole)
    assert hash_tensor(on_gpu) == expected
    cut = len(whole) // 3 + 1
    parts = hash_tensor(on_gpu[:cut]) + hash_tensor(on_gpu[cut:], cut * dtype.itemsize)
    assert parts % 2**64 == expected


UPDATES = [
    [],
    ["algorithm.advantage.kind=vtrace"],
    ["algorithm.kl.loss_beta=0.1"],
    ["algorithm.kl.loss_beta=0.1", "algorithm.kl.offload=true"],
    ["learner.offload=true", "model.gradient_checkpointing=offloaded"],
    ["algorithm.critic.model=policy", "model.gradient_checkpointing=full", "learner.minibatches=2"],
    ["algorithm.proximal=loglinear", "algorithm.advantage.kind=rloo", "learner.minibatches=2", "learner.norm=max-norm"],
]


@pytest.mark.parametrize("overrides", UPDATES, ids=" ".join)
def test_an_update_on_cuda_over_nccl_is_the_update_on_the_cpu_over_gloo(tmp_path: Path, overrides: list[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case.save_model(tmp_path / "model")
    results = {}
    on_gpu = "cpu:gloo,cuda:nccl" if "learner.offload=true" in overrides else "nccl"
    for place, backend in (("cpu", "gloo"), ("cuda", on_gpu)):
        with case.group(0, 1, tmp_path / f"store-{place}", backend):
            updater = case.updater(case.config_of(*overrides), tmp_path / "model", place)
            metrics = case.metrics(updater, pad(case.batch()).to(updater.device))
            results[place] = ({name: tensor.cpu() for name, tensor in case.whole(updater.policy).items()}, metrics)
    for name, tensor in results["cpu"][0].items():
        torch.testing.assert_close(results["cuda"][0][name], tensor, rtol=0, atol=1e-5, msg=name)
    assert results["cuda"][1]["policy_loss"] == pytest.approx(results["cpu"][1]["policy_loss"], abs=1e-5)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_norms_on_a_gpu_are_those_of_the_formula(dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(2)
    x_NC, weight_C = torch.randn(700, 128, device=DEVICE), torch.randn(128, device=DEVICE)
    found = []
    for kind in (torch.float64, dtype):
        module = Qwen2RMSNorm(128, eps=1e-5).to(DEVICE, kind)
        module.weight.data.copy_(weight_C.to(dtype))
        if kind is dtype:
            norms.prepare(module)
        given_NC = x_NC.to(dtype).to(kind).requires_grad_()
        made_NC = module(given_NC)
        made_NC.square().mean().backward()
        found.append((made_NC, given_NC.grad * 700, module.weight.grad))
    for exact, made in zip(*found, strict=True):
        torch.testing.assert_close(made.double(), exact.double(), rtol=2 * atol, atol=atol)


SINGLE = ("learner.micro_batch_tokens=30", "model.dtype=bfloat16", "learner.gpus=1")


@pytest.mark.parametrize("overrides", [(), ("algorithm.kl.loss_beta=0.1", "learner.minibatches=2")], ids=" ".join)
def test_passes_wait_for_nothing_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...]
) -> None:
    """torch raises where the host would wait for a GPU in a pass, a loss or a backward pass."""

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            before = torch.cuda.get_sync_debug_mode()
            torch.cuda.set_sync_debug_mode("error")
            try:
                return function(*arguments, **named)
            finally:
                torch.cuda.set_sync_debug_mode(before)

        return called

    case.save_model(tmp_path / "model")
    with case.group(0, 1, tmp_path / "store", "nccl"):
        updater = case.updater(case.config_of(*SINGLE, *overrides), tmp_path / "model", DEVICE)
        updater.update(rows())
        monkeypatch.setattr(update, "score", watched(update.score))
        monkeypatch.setattr(Loss, "share", watched(Loss.share))
        monkeypatch.setattr(update.Updater, "backward", watched(update.Updater.backward))
        updater.update(rows())


def test_a_version_is_copied_as_it_was_before_the_step_that_follows(tmp_path: Path) -> None:
    case.save_model(tmp_path / "model")
    with case.group(0, 1, tmp_path / "store", "nccl"):
        updater = case.updater(case.config_of(*SINGLE, "learner.lr=0.1"), tmp_path / "model", DEVICE)
        copies = snapshot.WeightSnapshots(updater.policy, updater.optimizer)
        for _ in range(3):
            expected = model.gather_weights(updater.policy, "bfloat16")
            buckets = Buckets(model.shards(updater.policy, "bfloat16"), 1 << 20, pinned=True)
            # A GPU that is busy copies late.
            torch.cuda._sleep(100_000_000)
            written = copies.write(buckets.tensors)
            for parameter in updater.policy.parameters():
                parameter.grad = torch.ones_like(parameter)
            updater.optimizer.step()
            written()
            assert all(torch.equal(buckets.tensors[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_float32_head_on_tensor_cores_is_the_head_that_casts_to_float32(
    monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(2)
    hidden = torch.randn(300, 256, device="cuda").bfloat16().requires_grad_()
    weight = (0.1 * (torch.randn(2000, 256, device="cuda") + torch.randn(256, device="cuda"))).bfloat16()
    targets, up = torch.randint(0, 2000, (300,), device="cuda"), torch.randn(2, 300, device="cuda")

    def found() -> list[torch.Tensor]:
        leaves = (hidden, weight.requires_grad_())
        scores = chunked_logprobs_entropy(*leaves, targets, temperature=temperature, chunk=128)
        return [*scores, *torch.autograd.grad((torch.stack(scores) * up).sum(), leaves)]

    assert chunked_head.has_wide_products(hidden, weight)
    wide = found()
    monkeypatch.setattr(chunked_head, "has_wide_products", lambda *_: False)
    cast = found()
    for one, other in zip(wide[:2], cast[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    for one, other in zip(wide[2:], cast[2:], strict=True):
        assert (one - other).float().norm() < 1e-3 * other.float().norm()


@pytest.mark.parametrize("vocabulary", [4096, 4001])
@pytest.mark.parametrize("shape", [LogitShape(), LogitShape(scale=0.4, soft_cap=3.0)], ids=str)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heads_kernels_are_as_near_to_float64_as_the_head_without_them(
    monkeypatch: pytest.MonkeyPatch, vocabulary: int, shape: LogitShape, cut: bool, dtype: torch.dtype
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(2)
    size = 300
    leaves = [torch.randn(size, 128), 0.1 * (torch.randn(vocabulary, 128) + torch.randn(128)), torch.randn(vocabulary)]
    leaves = [leaf.to(DEVICE, dtype) for leaf in leaves]
    targets, up = torch.randint(0, vocabulary, (size,), device=DEVICE), torch.randn(2, size, device=DEVICE)
    counts = torch.tensor([0, 1, 40], device=DEVICE).repeat(size // 3) * cut
    tokens = torch.rand(size, vocabulary, device=DEVICE).scatter_(1, targets[:, None], -1.0).argsort(1)[:, :40]
    sets = Candidates(tokens.flatten().int(), torch.arange(size, device=DEVICE) * 40, counts) if cut else None

    def found(kernels: bool, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
        monkeypatch.setattr(chunked_head, "has_kernels", lambda *_: kernels)
        own = [leaf.detach().to(dtype or leaf.dtype).requires_grad_() for leaf in leaves]
        options = {"temperature": torch.linspace(0.5, 1.5, size, device=DEVICE), "candidates": sets}
        scores = chunked_logprobs_entropy(*own[:2], targets, bias_V=own[2], shape=shape, **options)
        return [*scores, *torch.autograd.grad((torch.stack(scores) * up).sum(), own)]

    assert chunked_head.has_kernels(torch.device(DEVICE, 0), dtype)
    monkeypatch.setattr(chunked_head, "PIECE", size * 1024)
    exact, without, made, again = found(False, torch.float64), found(False), found(True), found(True)
    assert all(torch.equal(one, other) for one, other in zip(made, again, strict=True))
    for one, other, wanted in zip(made, without, exact, strict=True):
        bound = 1.1 * (other - wanted).norm() + 1e-6 * wanted.norm()
        assert (one - wanted).norm() < bound


def test_a_logit_that_is_no_number_is_seen_in_the_log_prob_of_the_heads_kernels() -> None:
    hidden, weight = torch.randn(8, 16, device=DEVICE), torch.randn(4001, 16, device=DEVICE)
    weight[3000, 0] = torch.nan
    assert chunked_head.has_kernels(weight.device, weight.dtype)
    assert chunked_logprobs_entropy(hidden, weight, torch.arange(8, device=DEVICE))[0].isnan().all()


# --- bfloat16, attention, the same bits ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads are as wide as every flash-attn wants them."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 17}
    config = Qwen2Config(num_attention_heads=4, num_key_value_heads=2, initializer_range=0.1, eos_token_id=1, **sizes)
    path = tmp_path_factory.mktemp("wide")
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def policy(folder: Path, implementation: str, dtype: torch.dtype = torch.bfloat16) -> model.Policy:
    """A transformer in `dtype` and a value head in float32, which is not zero, as FSDP's mixed precision has them."""
    torch.manual_seed(9)
    if implementation == varlen.NAME:
        varlen.register()
    made = model.Policy(hf_files.read(folder, implementation), 0.7, layout=attention.layout(implementation))
    torch.nn.init.normal_(made.value_head.weight, std=0.05)
    prefix_kv.prepare(made.transformers)
    made.lm.to(dtype)
    return made.to(DEVICE)


def each_attention() -> list[Any]:
    missing = [pytest.mark.skipif(torch.cuda.is_available(), reason="not installed")]
    return ["sdpa", "eager", *each_joined(missing)]


def each_joined(missing: list[Any]) -> list[Any]:
    installed = {name: attention.is_flash_installed(name) for name in attention.RUNS_ON}
    installed |= {varlen.NAME: varlen.is_available()}
    return [pytest.param(name, marks=[] if installed[name] else missing) for name in JOINED]


def rows() -> PaddedBatch:
    return pad(case.batch()).to(torch.device(DEVICE))


@pytest.mark.parametrize("implementation", each_attention())
def test_no_row_sees_another_whatever_computes_attention(wide: Path, implementation: str) -> None:
    """Rows that see each other have log-probs that are off by about 1."""
    batch = rows()
    with torch.no_grad():
        made = policy(wide, implementation)
        together = made(batch, "both")
        for row in range(case.BATCH):
            alone, length = made(batch.select(torch.tensor([row])), "both"), int(batch.length_B[row])
            for name in ("logprobs_BT", "values_BT"):
                got, expected = getattr(together, name)[row, :length], getattr(alone, name)[0]
                torch.testing.assert_close(got, expected, rtol=0, atol=0.05, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("implementation", each_attention())
def test_gradients_in_bfloat16_are_near_those_in_float32(wide: Path, implementation: str) -> None:
    def gradients(name: str, dtype: torch.dtype) -> torch.Tensor:
        made = policy(wide, name, dtype)
        scored = made(rows(), "both")
        (scored.logprobs_BT.sum() + scored.values_BT.square().sum()).backward()
        found = [parameter.grad for parameter in made.parameters() if parameter.grad is not None]
        return torch.cat([gradient.float().flatten() for gradient in found])

    expected, got = gradients("eager", torch.float32), gradients(implementation, torch.bfloat16)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.99
    assert ((got - expected).norm() / expected.norm()).item() < 0.1


@pytest.mark.parametrize("implementation", each_attention())
@pytest.mark.parametrize("prompts", [4, 1])
def test_samples_that_share_their_prompt_have_its_scores_and_gradients(
    wide: Path, monkeypatch: pytest.MonkeyPatch, implementation: str, prompts: int
) -> None:
    """Also where a prompt is longer than its completions, and where all rows have the same one."""
    if implementation == "eager":
        pytest.skip("computes every row on its own")
    drawn, generator = case.batch().trajectories, np.random.default_rng(3)
    starts = [generator.integers(2, 17, 40 + 30 * n).astype(np.int32).tobytes() for n in range(prompts)]
    made = [replace(one, prompt_tokens=starts[n % prompts]) for n, one in enumerate(drawn)]
    batch = pad(Batch(version=3, min_version=1, trajectories=tuple(made))).to(torch.device(DEVICE))
    monkeypatch.setattr(prefix_sharing, "WORTH", 100.0)
    found = []
    for dtype, name, share in ((torch.float32, "eager", False), (torch.bfloat16, implementation, True)):
        scorer_ = policy(wide, name, dtype)
        scorer_.share_prompts = share
        with Counted() as counted:
            scored = scorer_(batch, "both")
        (scored.logprobs_BT.sum() + scored.values_BT.square().sum()).backward()
        grads = [parameter.grad for parameter in scorer_.parameters() if parameter.grad is not None]
        found.append((scored, torch.cat([one.float().flatten() for one in grads]), counted.tokens))
    (exact, expected, every), (scored, got, shared) = found
    assert shared < 0.8 * every
    torch.testing.assert_close(scored.logprobs_BT, exact.logprobs_BT, rtol=0, atol=0.3)
    assert torch.nn.functional.cosine_similarity(got, expected, dim=0) > 0.99
    assert ((got - expected).norm() / expected.norm()).item() < 0.1


class Counted(TorchFunctionMode):
    """Counts the tokens that are embedded."""

    tokens = 0

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.embedding:
            self.tokens += args[0].numel()
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not varlen.is_available(), reason="torch has no attention over rows end to end")
def test_compiled_updates_make_the_same_bits_in_a_resumed_run(wide: Path, tmp_path: Path) -> None:
    """A resumed run compiles its layers for rows of other lengths than those that the run began with."""
    options = ["model.dtype=bfloat16", "model.attention=varlen", "learner.gpus=1"]
    options += ["model.compile=true", "learner.exact=false"]
    config = case.config_of(*options, "learner.lr=0.001", "learner.minibatches=2")
    torch.use_deterministic_algorithms(True)
    try:
        with case.group(0, 1, tmp_path / "store", "nccl"):
            updater = case.updater(config, wide, DEVICE)
            updater.optimizer = optimizer.adamw(updater.policy, config)
            updater.update(long_rows(60, seed=1))
            state = deepcopy((updater.policy.state_dict(), updater.optimizer.state_dict()))
            made = []
            for _ in range(2):
                updater.update(long_rows(900, seed=2))
                made.append({name: one.clone() for name, one in updater.policy.state_dict().items()})
                torch._dynamo.reset()
                updater.policy.load_state_dict(state[0])
                updater.optimizer.load_state_dict(deepcopy(state[1]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(one, made[1][name]) for name, one in made[0].items())


def long_rows(most: int, seed: int) -> PaddedBatch:
    generator = np.random.default_rng(seed)
    masks = [np.ones(int(generator.integers(most // 4, most)), np.bool_) for _ in range(case.BATCH)]
    drawn = [case.drawn_row(generator, n, 3, 5, mask) for n, mask in enumerate(masks)]
    return pad(Batch(version=3, min_version=1, trajectories=tuple(drawn))).to(torch.device(DEVICE))


@pytest.mark.parametrize("implementation", each_attention())
def test_updates_on_a_gpu_make_the_same_bits_every_time(wide: Path, tmp_path: Path, implementation: str) -> None:
    """Also that none of their operations lacks a deterministic form, which would raise."""
    options = ["model.dtype=bfloat16", f"model.attention={implementation}", "learner.gpus=1", "learner.epochs=2"]
    config = case.config_of(*options, "algorithm.kl.loss_beta=0.1", "algorithm.critic.model=policy", "learner.lr=0.001")
    made = []
    try:
        device.acquire(config.learner.gpus)
        for attempt in range(2):
            with case.group(0, 1, tmp_path / f"store-{attempt}", "nccl"):
                updater = case.updater(config, wide, DEVICE)
                updater.optimizer = optimizer.adamw(updater.policy, config)
                for version in (3, 4):
                    updater.update(pad(case.batch(version, seed=version)).to(updater.device))
                made.append(case.whole(updater.policy))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(tensor, made[1][name]) for name, tensor in made[0].items())
