"""Every rank reads its own rows of a model's files, whatever the family's names and layouts."""

import logging
from pathlib import Path
from typing import Any

import learner_case as case
import model_families as families
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from streamppo.errors import ModelError
from streamppo.learner.model import load_policy, weight_files
from streamppo.learner.model.policy import Policy
from streamppo.learner.model.weight_files import ParameterSource, TensorFiles

LAYERS = 5
BY_RANK_0 = {"DeepseekV3", "FalconH1", "Gemma3nText", "Gemma4", "Gemma4Text", "Nemotron"}
"""Families whose layers have buffers, or that are cut otherwise: rank 0 reads all of them."""
RANKS = 3


@pytest.fixture(autouse=True)
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every model as a large one."""
    monkeypatch.setattr(weight_files, "LARGE", 0)


@pytest.mark.sampled(4)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("family", families.NAMES)
def test_rows_are_those_that_transformers_loads(family: str, tmp_path: Path) -> None:
    families.make(family, tmp_path, layers=LAYERS, max_shard_size="20KB")
    plan = weight_files.plan(str(tmp_path), "policy", adapted=False)
    assert (plan is None) == (family in BY_RANK_0)
    if plan is None:
        return
    whole = families.read(tmp_path)
    transformer = whole.get_decoder()
    assert len(plan.first_layers.base_model.state_dict()) < len(transformer.state_dict()), "first layers alone"
    for name in plan.sources:
        one = whole.get_parameter(name)
        assert torch.equal(plan.read(f"lm.{name}", 1, 3), one[1:3]), name  # pyright: ignore
    assert {id(one) for one in transformer.parameters()} <= {id(whole.get_parameter(name)) for name in plan.sources}
    for name, one in transformer.named_parameters():
        assert torch.equal(plan.read(f"critic.{name}", 0, len(one)), one), name  # pyright: ignore
    assert plan.read("value_head.weight", 0, 1) is None


def loaded(ranks: int, folder: Path, critic: str) -> dict[str, Any]:
    """The weights and buffers of all ranks, and the rows that each has read beyond the first layers."""
    weight_files.LARGE = load_policy.SHARD_LAYERS_ABOVE = 0
    read, reader = [0], ParameterSource.read

    def count(source: ParameterSource, files: TensorFiles, begin: int, end: int) -> torch.Tensor:
        made = reader(source, files, begin, end)
        name = source.rows[0][0]
        read[0] += made.numel() * ("layers.3." in name or "layers.4." in name)
        return made

    ParameterSource.read = count
    before = torch.get_rng_state()
    policy = load_policy.load(case.config_of().model, folder, 1.0, init_device_mesh("cpu", (ranks,)), critic)
    assert torch.equal(torch.get_rng_state(), before), "random numbers moved on"
    counts: list[int] = [0] * ranks
    dist.all_gather_object(counts, read[0])
    return {"weights": case.whole(policy), "buffers": dict(policy.named_buffers()), "read": counts}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("critic", ["head", "policy"])
def test_every_rank_reads_a_share_and_has_the_model(critic: str, tmp_path: Path) -> None:
    families.make("Qwen3Moe", tmp_path / "model", layers=LAYERS)
    whole, shares = (case.by_ranks(loaded, n, tmp_path, tmp_path / "model", critic) for n in (1, RANKS))
    case.assert_same_weights(whole["weights"], shares["weights"], atol=0)
    own: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    for name, one in own.named_parameters():
        assert torch.equal(shares["weights"][f"lm.{name}"], one), name
    assert not shares["weights"]["value_head.weight"].any()
    for name, one in own.named_buffers():
        assert torch.equal(shares["buffers"][f"lm.{name}"], one), name
    (everything,) = whole["read"]
    assert sum(shares["read"]) == everything > 0 and max(shares["read"]) < 0.5 * everything


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("critic", "adapted"), [("scratch", False), ("head", True)])
def test_what_is_in_no_file_comes_from_rank_0(critic: str, adapted: bool, folder: Path) -> None:
    assert weight_files.plan(str(folder), "head", adapted=False) is not None
    assert weight_files.plan(str(folder), critic, adapted=adapted) is None


@pytest.mark.usefixtures("alone")
def test_files_that_would_be_read_wrongly_are_read_by_rank_0_which_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = ParameterSource.read
    monkeypatch.setattr(ParameterSource, "read", lambda *arguments: reader(*arguments) * 2)
    caplog.set_level(logging.INFO)
    policy = load_policy.load(case.config_of().model, folder, 1.0, init_device_mesh("cpu", (1,)))
    own: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(case.whole(policy)["lm.lm_head.weight"], own.lm_head.weight)
    assert "rank 0 reads the whole model" in caplog.text


def without(ranks: int, folders: list[str]) -> dict[str, torch.Tensor]:
    weight_files.LARGE = 0
    policy: Policy = load_policy.load(
        case.config_of().model, folders[dist.get_rank()], 1.0, init_device_mesh("cpu", (ranks,))
    )
    return case.whole(policy)


@pytest.mark.slow
@pytest.mark.parametrize("others", [False, True])
def test_a_rank_that_does_not_see_the_files_or_has_another_models_is_sent_its_rows(
    others: bool, folder: Path, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    if others:
        whole: Any = AutoModelForCausalLM.from_pretrained(folder)
        for one in whole.parameters():
            one.data += 1e-3
        whole.save_pretrained(elsewhere)
    else:
        elsewhere.mkdir()
        (elsewhere / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = case.by_ranks(without, 2, tmp_path, [str(folder), str(elsewhere)])
    own: Any = AutoModelForCausalLM.from_pretrained(folder)
    assert all(torch.equal(weights[f"lm.{name}"], one) for name, one in own.named_parameters())


@pytest.mark.usefixtures("alone")
def test_a_damaged_file_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(ModelError, match="not a file of safetensors"):
        weight_files.plan(str(tmp_path), "head", adapted=False)
