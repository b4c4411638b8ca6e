"""`check`'s estimate of a rank's memory, beside the peak of live bytes in an update."""

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import learner_case as case
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

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
    options = (
        "model.dtype=bfloat16",
        f"queue.batch_size={ROWS}",
        "queue.samples_per_prompt=1",
        "learner.minibatches=1",
    )
    config = case.config_of(*options, "learner.micro_batch_tokens=1024", *overrides)
    updater = case.updater(config, tmp_path)
    updater.optimizer = optimizer.adamw(updater.policy, config)
    trained = branched(batch()) if config.environment else batch()
    updater.update(pad(trained))
    updater.optimizer.zero_grad(set_to_none=True)
    rows = pad(trained)
    with Alive(held(updater)) as seen:
        updater.update(rows)
    said = memory.rank(config, memory.sizes(MODEL, config.model), LENGTH)
    assert seen.peak == pytest.approx(said.total, rel=0.05), said
