"""`check`'s estimate of a rank's memory, beside the peak of live bytes in an update."""

import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import learner_case as case
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from streamppo.config.model import Model
from streamppo.learner import memory
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import optimizer
from streamppo.learner.update import Updater
from streamppo.types import Batch, Identity, Trajectory, branches

ROWS, LENGTH = 8, 256
MODEL = Qwen2Config(
    **case.SMALL | {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 6},
    tie_word_embeddings=True,
)


AGENTS = ("environment.agent=a:b",)


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors until they are freed."""

    def __init__(self, before: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.sizes: dict[int, int] = {}
        self.now = self.peak = 0
        self._count(before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self._count(one for one in tree_leaves(made) if isinstance(one, torch.Tensor))
        return made

    def _count(self, tensors: Iterable[torch.Tensor]) -> None:
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                self.now += storage.nbytes()
                weakref.finalize(storage, self._free, storage._cdata)
        self.peak = max(self.peak, self.now)

    def _free(self, storage: int) -> None:
        self.now -= self.sizes.pop(storage)


def batch() -> Batch:
    """Rows of one length, of which all but a token are sampled."""
    generator = np.random.default_rng(0)

    def row(number: int) -> Trajectory:
        tokens = generator.integers(2, 64, LENGTH).astype(np.int32)
        return Trajectory(
            identity=Identity(task="t", prompt=number, sample=0),
            actor="rollout-0",
            prompt_tokens=tokens[:1].tobytes(),
            tokens=tokens[1:].tobytes(),
            logprobs=np.full(LENGTH - 1, -4.0, np.float32).tobytes(),
            versions=np.full(LENGTH - 1, 3, np.int32).tobytes(),
            mask=np.ones(LENGTH - 1, bool).tobytes(),
            finish="stop",
            reward=float(number % 2),
        )

    return Batch(version=3, min_version=1, trajectories=tuple(row(number) for number in range(ROWS)))


def branched(made: Batch) -> Batch:
    """The same rows, each with eight branches behind one token."""
    starts = range(160, 240, 10)
    mask = np.ones(LENGTH - 1, bool)
    mask[[start - 1 for start in starts]] = False
    column = branches.column([(start, 120) for start in starts])
    rows = (replace(one, branches=column, mask=mask.tobytes()) for one in made.trajectories)
    return Batch(version=made.version, min_version=made.min_version, trajectories=tuple(rows))


def held(updater: Updater) -> list[torch.Tensor]:
    """Weights, their working copy, and moments."""
    states = [one for state in updater.optimizer.state.values() for one in state.values()]
    copy = updater.policy.working_copy
    return [*updater.policy.parameters(), *([] if copy is None else copy._copies), *states]


SHAPE: dict[str, Any] = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 6, "num_attention_heads": 4}
EXPERTS: dict[str, Any] = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
FAMILIES: dict[str, PretrainedConfig] = {
    "experts": MixtralConfig(**SHAPE, **EXPERTS, sliding_window=None),
    "eager attention": GptOssConfig(**SHAPE, **EXPERTS, head_dim=16, max_position_embeddings=512),
    "no number of key heads": GPT2Config(vocab_size=64, n_embd=64, n_head=4, n_layer=6, n_positions=512),
    "parallel residuals": GPTNeoXConfig(**SHAPE, intermediate_size=256),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_another_family_has_sizes_that_grow_with_the_bytes_of_an_element(family: str) -> None:
    sizes = {dtype: memory.sizes(FAMILIES[family], Model(path="x", dtype=dtype)) for dtype in ("float32", "bfloat16")}
    wide, narrow = sizes["float32"], sizes["bfloat16"]
    assert wide.parameters == narrow.parameters and wide.cache_per_token == 2 * narrow.cache_per_token
    assert 1.6 * narrow.activations_per_layer < wide.activations_per_layer <= 2 * narrow.activations_per_layer
    assert (wide.scores, narrow.scores) == ((16, 8) if family == "eager attention" else (0, 0))


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_peak_of_a_rank_of_another_family_is_about_what_check_says(family: str, dtype: str, tmp_path: Path) -> None:
    model = FAMILIES[family]
    AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path)
    options = ("model.gradient_checkpointing=off", "learner.micro_batch_tokens=1024", f"model.dtype={dtype}")
    peak, said = peak_and_estimate(model, tmp_path, options)
    assert peak == pytest.approx(said.total, rel=0.1), said


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "overrides",
    [
        ("model.gradient_checkpointing=off",),
        ("model.gradient_checkpointing=full",),
        ("model.gradient_checkpointing=off", "algorithm.critic.model=policy"),
        ("model.gradient_checkpointing=full", "learner.micro_batch_tokens=256"),
        ("model.gradient_checkpointing=off", *AGENTS),
        ("model.gradient_checkpointing=full", *AGENTS),
    ],
    ids=["all is kept", "computed again", "a critic of its own", "weights are the most", "trees", "trees again"],
)
def test_the_peak_of_a_rank_is_what_check_says(overrides: tuple[str, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    Qwen2ForCausalLM(MODEL).save_pretrained(tmp_path)
    options = ("model.dtype=bfloat16", "learner.micro_batch_tokens=1024", *overrides)
    peak, said = peak_and_estimate(MODEL, tmp_path, options)
    assert peak == pytest.approx(said.total, rel=0.05), said


def peak_and_estimate(model: PretrainedConfig, folder: Path, overrides: Sequence[str]) -> tuple[int, memory.RankMemory]:
    """The most live bytes in the second update of the model in `folder`, and its estimate."""
    options = (f"queue.batch_size={ROWS}", "queue.samples_per_prompt=1", "learner.minibatches=1")
    config = case.config_of(*options, *overrides)
    updater = case.updater(config, folder)
    updater.optimizer = optimizer.adamw(updater.policy, config)
    trained = branched(batch()) if config.environment else batch()
    updater.update(pad(trained))
    updater.optimizer.zero_grad(set_to_none=True)
    rows = pad(trained)
    with Alive(held(updater)) as seen:
        updater.update(rows)
    return seen.peak, memory.rank(config, memory.sizes(model, config.model), LENGTH)
