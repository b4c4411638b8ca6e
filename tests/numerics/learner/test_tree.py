"""A row whose tokens are a tree: the numbers of its paths, each token computed and trained once."""

from collections.abc import Callable
from pathlib import Path

import fake_flash
import learner_case as case
import model_families
import numpy as np
import pytest
import torch
import tree_rows
from fake_flash import Call
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_update import CHOICES
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.errors import ModelError
from streamppo.learner import attention, pretrained, tree
from streamppo.learner.batch import Host, PaddedBatch, pad
from streamppo.learner.division import Division
from streamppo.learner.policy import Policy, Scored
from streamppo.types import Batch, branches

ROWS = pad(tree_rows.batch())


def policy(folder: Path, implementation: str = "sdpa", temperature: float = 0.7) -> Policy:
    """The model in `folder` with a critic that is not zero, in float32."""
    torch.manual_seed(9)
    made = Policy(pretrained.read(folder, implementation), temperature, layout=attention.layout(implementation))
    torch.nn.init.normal_(made.value_head.weight)
    return made


def gradients(made: Policy, rows: PaddedBatch) -> tuple[Scored, dict[str, torch.Tensor]]:
    """The scores of sampled tokens, and the gradient of a weighted sum of them."""
    scored, weights = made(rows, "both"), torch.Generator().manual_seed(1)
    own = [column.masked_fill(~rows.mask_BT, 0.0) for column in scored[:3]]
    total = sum((column * torch.rand(column.shape, generator=weights)).sum() for column in (*own, scored.bootstrap_B))
    assert isinstance(total, torch.Tensor)
    total.backward()
    found = {name: one.grad for name, one in made.named_parameters() if one.grad is not None}
    return Scored(*(one.detach() for one in (*own, scored.bootstrap_B))), found


def assert_scores_paths(made: Policy, plain: Policy, rows: PaddedBatch) -> None:
    scored, own = gradients(made, rows)
    expected, gradient = gradients(tree_rows.unroll(plain), rows)
    for name, column in expected._asdict().items():
        torch.testing.assert_close(
            getattr(scored, name), column, rtol=0, atol=5e-5, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert own.keys() == gradient.keys()
    for name, one in gradient.items():
        torch.testing.assert_close(own[name], one, rtol=0, atol=1e-5 * one.abs().max().item() + 1e-7, msg=name)


# --- a pass ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "flash_attention_2"])
def test_a_tree_has_the_scores_and_gradients_of_its_paths(
    folder: Path, implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Call] = fake_flash.install(monkeypatch)
    made = policy(folder, implementation)
    assert made.masks_trees is (implementation == "sdpa")
    assert_scores_paths(made, policy(folder), ROWS)
    assert bool(calls) is (implementation == "flash_attention_2")


@pytest.mark.parametrize("family", ["sliding", "FalconH1", "Qwen3Next", "Qwen3Moe", "Llama", "Gemma3Text", "Mistral"])
def test_every_kind_of_attention_reads_a_tree_as_its_paths(family: str, tmp_path: Path) -> None:
    if family == "sliding":
        sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
        Qwen2ForCausalLM(Qwen2Config(**case.SMALL, **sliding, initializer_range=0.3)).save_pretrained(tmp_path)
    else:
        model_families.make(family, tmp_path)
    made = policy(tmp_path)
    assert made.masks_trees is (family in ("Qwen3Moe", "Llama"))
    assert_scores_paths(made, policy(tmp_path), ROWS)
