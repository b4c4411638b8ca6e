"""A head that is the embedding, or is not: learner, engines and export decide as transformers does at the load."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import learner_case as case
import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from streamppo.config.sections import Config
from streamppo.errors import ModelError
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import hf_files, policy, weight_files
from streamppo.rollout import build
from streamppo.rollout.engine import Completion, Sampling
from streamppo.rollout.sglang import wire
from streamppo.rollout.weight_checks import Architecture
from streamppo.weights.models.settings import as_pushed, is_tied, read_settings, settings

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Tensors = dict[str, torch.Tensor]


def _both(held: Tensors) -> Tensors:
    return {**held, HEAD: held[EMBEDDING].clone()}


def _zeros_of_other_signs(held: Tensors) -> Tensors:
    held[EMBEDDING][:2] = 0.0
    return {**held, HEAD: -held[EMBEDDING] * (held[EMBEDDING] == 0) + held[EMBEDDING] * (held[EMBEDDING] != 0)}


def _other_head(held: Tensors) -> Tensors:
    return {**held, HEAD: held[EMBEDDING].flip(0).contiguous()}


def _head_alone(held: Tensors) -> Tensors:
    return {HEAD if name == EMBEDDING else name: one for name, one in held.items()}


WAYS: dict[str, tuple[bool, Callable[[Tensors], Tensors], bool]] = {
    "tied, embedding alone": (True, lambda held: held, True),
    "tied, head alone": (True, _head_alone, True),
    "tied, both and equal": (True, _both, True),
    "tied, both and equal but for signs of zeros": (True, _zeros_of_other_signs, True),
    "tied, both and other values": (True, _other_head, False),
    "apart, both": (False, lambda held: held, False),
    "apart, both and equal": (False, _both, False),
}
"""The entry of config.json, the weights in the file, and if one shared weight is trained."""


def folder_of(folder: Path, way: str, *, pickle: bool = False) -> Path:
    says, change, _ = WAYS[way]
    torch.manual_seed(5)
    sizes = {**case.SMALL, "max_position_embeddings": 64, "initializer_range": 0.3}
    lm = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=says))
    lm.save_pretrained(folder)
    path = folder / "model.safetensors"
    held = change(load_file(path))
    path.unlink()
    if pickle:
        torch.save(held, folder / "pytorch_model.bin")
    else:
        save_file(held, path, {"format": "pt"})
    return folder


def assert_scores(lm: Any, trained: Any, atol: float = 2e-5) -> None:
    """Log-probs of the learner's policy are those of a model of transformers."""
    rows = pad(case.batch())
    scored = trained(rows, "policy").logprobs_BT.detach()
    for row in range(len(rows.start_B)):
        start, width = int(rows.start_B[row]), int(rows.length_B[row])
        text_1L = rows.inputs_BL[row : row + 1, : start + width]
        with torch.no_grad():
            logp_LV = (lm(text_1L, use_cache=False).logits[0].float() / trained.temperature).log_softmax(-1)
        own_T = logp_LV[start - 1 : -1].gather(1, text_1L[0, start:, None])[:, 0]
        torch.testing.assert_close(scored[row, :width], own_T, rtol=1e-4, atol=atol)


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("pickle", [False, True], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("way", WAYS)
def test_the_learner_scores_trains_and_exports_what_transformers_loads(tmp_path: Path, way: str, pickle: bool) -> None:
    folder, one_weight = folder_of(tmp_path / "model", way, pickle=pickle), WAYS[way][2]
    config = case.config_of(f"model.path={folder}")
    updater = case.updater(config, folder)
    own: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert (own.lm_head.weight is own.model.embed_tokens.weight) == one_weight
    assert_scores(own, updater.policy)
    before = {name: one.clone() for name, one in case.whole(updater.policy).items()}
    updater.update(pad(case.batch()))
    after = case.whole(updater.policy)
    assert all(not torch.equal(before[name], one) for name, one in after.items() if "lm_head" in name)
    hf_files.export(policy.gather_weights(updater.policy, "float32"), str(folder), tmp_path / "final", "float32")
    again: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "final").eval()
    assert_scores(again, updater.policy)
    # SGLang believes config.json alone.
    assert json.loads((tmp_path / "final" / "config.json").read_text())["tie_word_embeddings"] == one_weight
    held = load_file(tmp_path / "final" / "model.safetensors")
    assert (HEAD in held) == (not one_weight)


def loaded(ranks: int, folders: list[Path]) -> Tensors:
    weight_files.LARGE = 0
    return case.whole(case.updater(case.config_of(f"learner.ranks={ranks}"), folders[dist.get_rank()]).policy)


@pytest.mark.slow
@pytest.mark.parametrize("sees", [False, True], ids=["sent by rank 0", "read by each"])
def test_every_rank_has_the_head_that_rank_0_has_with_files_or_without(tmp_path: Path, sees: bool) -> None:
    folder = folder_of(tmp_path / "0" / "model", "tied, both and other values")
    other = tmp_path / "1" / "model"
    other.mkdir(parents=True)
    shutil.copy(folder / "config.json", other)
    own = load_file(folder / "model.safetensors")
    weights = case.by_ranks(loaded, 2, tmp_path, [folder, folder if sees else other])
    assert torch.equal(weights[f"lm.{HEAD}"], own[HEAD]) and torch.equal(weights[f"lm.{EMBEDDING}"], own[EMBEDDING])


async def _generated(config: Config, folder: Path, tensors: Tensors) -> Completion:
    engine = await build.engine(config, "rollout-0", str(folder), 0, tensors)
    return await engine.generate(np.array([3, 4, 5], np.int32), Sampling(6, 1.0, 1.0, 0))


@pytest.mark.parametrize("way", WAYS)
def test_the_embedded_engine_samples_from_the_pushed_model_without_its_files(tmp_path: Path, way: str) -> None:
    folder = folder_of(tmp_path / "model", way)
    own: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tensors = {name: one.detach() for name, one in own.named_parameters()}
    (folder / "model.safetensors").unlink()
    made = asyncio.run(_generated(case.config_of(f"model.path={folder}"), folder, tensors))
    ids_1L = torch.tensor([[3, 4, 5, *made.tokens.tolist()]])
    with torch.no_grad():
        logp_LV = own(ids_1L).logits[0].log_softmax(-1)
    theirs = logp_LV[2:-1].gather(1, ids_1L[0, 3:, None])[:, 0].numpy()
    np.testing.assert_allclose(made.logprobs, theirs, atol=2e-5)


@pytest.mark.parametrize("way", WAYS)
def test_an_sglang_of_our_own_is_told_of_a_head_that_its_config_json_denies(tmp_path: Path, way: str) -> None:
    folder = folder_of(tmp_path / "model", way)
    own: Any = AutoModelForCausalLM.from_pretrained(folder)
    written, pushed = read_settings(folder), dict(own.named_parameters())
    model = as_pushed(read_settings(folder), pushed)
    assert Architecture(model).shapes.keys() == pushed.keys()
    assert is_tied(settings(folder)) == is_tied(model) == WAYS[way][2]
    untied = is_tied(written) and not is_tied(model)
    assert untied == (way == "tied, both and other values")
    engine: Any = case.config_of("rollout.engine={kind='sglang'}").rollout.engine
    assert bool(wire.head(engine, untied=untied)) == untied


def test_the_argument_for_sglang_keeps_what_the_configuration_gives() -> None:
    engine: Any = case.config_of("rollout.engine={kind='sglang'}").rollout.engine
    chosen = replace(engine, args={"json_model_override_args": '{"rope_theta": 2.0}'})
    (text,) = wire.head(chosen, untied=True).values()
    assert json.loads(str(text)) == {"rope_theta": 2.0, "tie_word_embeddings": False}


def test_a_server_whose_config_json_denies_the_head_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", "tied, both and other values")
    own: Any = AutoModelForCausalLM.from_pretrained(folder)
    server = "rollout.engine={kind='sglang', urls=['http://127.0.0.1:1'], transport='group'}"
    config = case.config_of(f"model.path={folder}", server)
    with pytest.raises(ModelError, match="set tie_word_embeddings = false there, and start the server with it"):
        asyncio.run(build.engine(config, "rollout-0", str(folder), 0, dict(own.named_parameters())))
