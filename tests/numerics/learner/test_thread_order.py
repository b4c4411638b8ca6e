"""The bits of an update on a CPU with several threads do not depend on which thread is first."""

from collections.abc import Iterator
from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch
from msgspec import structs
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.learner import device
from streamppo.learner.batch.padded import PaddedBatch, pad

REPEATS, ROWS, PROMPT = 6, 256, 8


@pytest.fixture
def exact() -> Iterator[None]:
    """The settings that a rank on a CPU has."""
    threads, filled = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    device.acquire(0.0, exact=True)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled


def one_prompt() -> PaddedBatch:
    """Samples of one token each, whose log-probs all come from the last token of one prompt."""
    generator = np.random.default_rng(0)
    drawn = [case.drawn_row(generator, row, 3, PROMPT, np.ones(1, bool)) for row in range(ROWS)]
    rows = [
        structs.replace(row, prompt_tokens=drawn[0].prompt_tokens, identity=structs.replace(row.identity, prompt=0))
        for row in drawn
    ]
    return pad(structs.replace(case.batch(), trajectories=tuple(rows)))


@pytest.mark.usefixtures("alone", "exact")
def test_large_tensors_are_added_up_in_one_order(tmp_path: Path) -> None:
    # torch divides an addition of more than 2^15 entries among threads.
    torch.manual_seed(5)
    sizes = case.SMALL | {"hidden_size": 512, "intermediate_size": 256, "vocab_size": 4096, "num_hidden_layers": 1}
    Qwen2ForCausalLM(Qwen2Config(**sizes, initializer_range=0.05)).save_pretrained(tmp_path)
    settings = (f"queue.batch_size={ROWS}", "algorithm.advantage=grpo", "model.share_prompts=true")
    batch = one_prompt()
    torch.set_num_threads(2)
    expected, _ = case.updated(tmp_path, batch, *settings)
    for _ in range(REPEATS):
        weights, _ = case.updated(tmp_path, batch, *settings)
        assert [name for name, tensor in weights.items() if not tensor.equal(expected[name])] == []
