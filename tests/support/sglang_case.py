"""Helpers for the tests of SGLang: small models, an engine for each, and transformers' log-probs of its tokens."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import MATH
from transformers import (
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from streamppo.config import file as configfile
from streamppo.rollout import build
from streamppo.rollout.engine import Completion, Sampling

CLOSE = 1e-4
Run = Callable[[Coroutine[Any, Any, Any]], Any]
SHAPE: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 16,
}
MODELS = {
    # Its completions end only at their length limit.
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, eos_token_id=None)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, eos_token_id=1)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS, eos_token_id=None)),
}
BEGUN_S = 0.3
"""Seconds after which requests are being decoded."""
SGLANG = ("rollout.engine.kind=sglang", "rollout.slots=16")


def model(family: str = "qwen2", seed: int = 0) -> Any:
    """A small random model."""
    torch.manual_seed(seed)
    made = MODELS[family]().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "bias" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def tensors(made: Any) -> dict[str, torch.Tensor]:
    """The tensors of a push of the model."""
    return {name: parameter.detach().clone() for name, parameter in made.named_parameters()}


def save(made: Any, folder: Path) -> str:
    """Save the model; return the folder's path."""
    made.save_pretrained(folder)
    return str(folder)


async def engine(folder: str, pushed: Mapping[str, Any], *overrides: str) -> Any:
    """A real engine on `folder`, with `pushed` as version 0."""
    config = configfile.load(MATH, [*SGLANG, *overrides])
    return await build.engine(config, "rollout-0", folder, 0, pushed)


def logprobs(made: Any, prompt: np.ndarray, tokens: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """transformers' log-probs [T] of `tokens` after `prompt`."""
    text = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    with torch.no_grad():
        logits = made(text).logits[0, len(prompt) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, text[0, len(prompt) :, None])[:, 0].numpy()


def continued(before: Any, after: Any, prompt: np.ndarray, tokens: np.ndarray, at: int) -> np.ndarray:
    """Log-probs of tokens[at:] by `after`, on the KV cache of `before` for all tokens before tokens[at - 1]."""
    text = torch.from_numpy(np.concatenate([prompt, tokens]).astype(np.int64))[None]
    cached = len(prompt) + at - 1
    cache = DynamicCache(config=before.config)
    with torch.no_grad():
        before(text[:, :cached], past_key_values=cache, use_cache=True)
        logits = after(text[:, cached:-1], past_key_values=cache, use_cache=True).logits[0].float()
    return logits.log_softmax(-1).gather(-1, text[0, cached + 1 :, None])[:, 0].numpy()


def prompts(count: int, seed: int = 0) -> list[np.ndarray]:
    """Prompts of 1 to 30 tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(2, 64, int(generator.integers(1, 30))).astype(np.int32) for _ in range(count)]


async def swapped(made: Any, given: list[np.ndarray], length: int, version: int, pushed: Any) -> list[Completion]:
    """Completions of `length` tokens with a swap to `pushed` after `BEGUN_S`."""
    begun = [asyncio.ensure_future(made.generate(prompt, Sampling(length))) for prompt in given]
    await asyncio.sleep(BEGUN_S)
    await made.update_weights(version, pushed)
    return list(await asyncio.gather(*begun))


class Setting(NamedTuple):
    """An engine, its initial model and folder, and `run`, which runs a coroutine in the engine's event loop."""

    engine: Any
    model: Any
    folder: str
    run: Run


@pytest.fixture(scope="session")
def run() -> Iterator[Run]:
    """One event loop for all tests: an engine belongs to the loop in which it was opened."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def setting(run: Run, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """The shared engine of most tests: Qwen2 in float32, with in-flight swaps that keep the KV cache."""
    made = model()
    folder = save(made, tmp_path_factory.mktemp("qwen2"))
    opened = run(engine(folder, tensors(made)))
    yield Setting(opened, made, folder, run)
    run(opened.stop())


def alive(process: int) -> bool:
    """True if `process` exists and is not a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_serves(setting: Setting, model: Any, version: int) -> None:
    prompt = prompts(1, seed=11)[0]
    completion = setting.run(setting.engine.generate(prompt, Sampling(20)))
    assert (completion.versions == version).all()
    np.testing.assert_allclose(completion.logprobs, logprobs(model, prompt, completion.tokens), atol=CLOSE)
