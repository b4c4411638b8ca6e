"""An exported folder is whole: transformers reads it, it scores as the learner does, and no setting can prevent it."""

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folder_oracle as oracle
import learner_case as case
import model_families
import model_folders
import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from streamppo.errors import ModelError
from streamppo.learner.batch.padded import pad
from streamppo.learner.device import mesh_of
from streamppo.learner.model import hf_files, load_policy, policy
from streamppo.learner.parallel import tensor_parallel
from streamppo.types import flags, ints
from streamppo.weights.models import generation
from streamppo.weights.models import loading as models

FAMILIES = ("gemma2", "gpt2", "llama3", "mistral", "mistral3", "qwen3", "qwen3_moe", "qwen3_vl")
"""One for each kind of names, ties, numbers of tokens and templates."""


def folder_of(path: Path, family: str = "qwen3", **wanted: Any) -> Path:
    usual = model_folders.usual(family)
    kind = {"tokenizer": usual.tokenizer, "template": usual.template, "tied": usual.tied}
    return model_folders.make(path, family=family, **{**kind, **wanted})


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as Qwen3's are."""
    return folder_of(tmp_path_factory.mktemp("qwen3") / "model", dtype="bfloat16")


def trained(path: Path, dtype: str) -> dict[str, torch.Tensor]:
    """The weights of a model after something was added to each of them."""
    found = {name: one.detach() for name, one in models.load(path).model.named_parameters()}
    return {name: (one + 0.01).to(getattr(torch, dtype)) for name, one in found.items()}


def assert_scores_as(folder: Path, held: policy.Policy, rounding: float) -> None:
    """Compare log-probs of transformers, in float32, with those of the learner in its own type."""
    loaded, batch = oracle.load(folder), case.batch()
    with torch.no_grad():
        ours_BT = held(pad(batch), "policy").logprobs_BT.numpy()
    for ours_T, one in zip(ours_BT, batch.trajectories, strict=True):
        tokens, mask = ints(one.tokens).tolist(), flags(one.mask)
        theirs = oracle.logprobs(loaded, ints(one.prompt_tokens).tolist(), tokens, words=len(loaded.tokenizer))
        assert oracle.furthest(ours_T[: len(tokens)][mask], theirs[mask]) < rounding


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_exported_is_read_by_transformers_and_scores_as_the_learner(
    tmp_path: Path, family: str, dtype: str
) -> None:
    path = folder_of(tmp_path / "model", family, generation="greedy_with_temperature")
    config = case.config_of(f"model.dtype={dtype}").model
    held = load_policy.load(config, path, 1.0, mesh_of("cpu", case.config_of().learner.mesh))
    with torch.no_grad():
        for one in held.lm.parameters():
            one.add_(0.01)
    hf_files.export(policy.gather_weights(held, dtype), str(path), tmp_path / "final", dtype)
    own = model_families.read(tmp_path / "final")
    assert own.dtype == getattr(torch, dtype) == model_families.read(tmp_path / "final", dtype="auto").dtype
    assert_scores_as(tmp_path / "final", held, 1e-5 if dtype == "float32" else 0.03)
    before, after = (AutoTokenizer.from_pretrained(one) for one in (path, tmp_path / "final"))
    assert (
        after.chat_template == before.chat_template
        and after("2 + 2 = 4, é")["input_ids"] == before("2 + 2 = 4, é")["input_ids"]
    )
    (file,) = (tmp_path / "final").glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        assert opened.metadata()["format"] == "pt"
    for processor in path.glob("preprocessor_config.json"):
        assert (tmp_path / "final" / processor.name).read_text() == processor.read_text()
    assert (tmp_path / "final" / "preprocessor_config.json").exists() == (family in model_folders.MULTIMODAL)
    # It can be exported again.
    hf_files.export(trained(tmp_path / "final", dtype), str(tmp_path / "final"), tmp_path / "again", dtype)


def test_an_export_names_no_code_that_is_not_in_it(start: Path, tmp_path: Path) -> None:
    shutil.copytree(start, tmp_path / "model")
    for file, name in (("config.json", "AutoConfig"), ("tokenizer_config.json", "AutoTokenizer")):
        path = tmp_path / "model" / file
        entries = json.loads(path.read_text()) | {"auto_map": {name: "own_code.Own"}}
        path.write_text(json.dumps(entries))
    hf_files.export(trained(tmp_path / "model", "float32"), str(tmp_path / "model"), tmp_path / "final", "float32")
    for path in (tmp_path / "final").glob("*.json"):
        assert "auto_map" not in path.read_text(), path


def test_weights_of_a_large_model_are_parts_with_an_index(
    start: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert hf_files.PART == "5GB"
    monkeypatch.setattr(hf_files, "PART", "20KB")
    hf_files.export(trained(start, "float32"), str(start), tmp_path / "final", "float32")
    index = json.loads((tmp_path / "final" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert models.load(tmp_path / "final").model.num_parameters() == index["metadata"]["total_parameters"]


@pytest.mark.usefixtures("alone")
def test_parameters_that_transformers_freezes_are_of_every_version_and_of_the_export(tmp_path: Path) -> None:
    model_families.make("Ernie4_5_Moe", tmp_path / "model")
    path = str(tmp_path / "model")
    held = load_policy.load(case.config_of().model, path, 1.0, mesh_of("cpu", case.config_of().learner.mesh))
    every = dict(held.lm.named_parameters())
    still = {name for name, one in every.items() if not one.requires_grad}
    gathered = policy.gather_weights(held, "float32")
    assert still and gathered.keys() == every.keys() == policy.shards(held, "float32").keys()
    # A checkpoint has what is trained alone.
    hf_files.export({name: gathered[name] for name in every.keys() - still}, path, tmp_path / "final", "float32")
    exported = models.load(tmp_path / "final").model.state_dict()
    for name, one in models.load(path).model.state_dict().items():
        torch.testing.assert_close(exported[name], one, rtol=0, atol=0)


@pytest.mark.usefixtures("alone")
def test_ranks_that_export_nothing_hold_one_whole_weight_at_a_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = mesh_of("cpu", case.config_of().learner.mesh)
    # FSDP shards the weights of a single rank too if they are offloaded.
    held = load_policy.load(case.config_of().model, folder, 1.0, mesh, offload=True)
    whole_of, made, most = tensor_parallel.whole_of, list[weakref.ref[torch.Tensor]](), 0

    def watched(weight: DTensor) -> torch.Tensor:
        nonlocal most
        whole = whole_of(weight)
        made.append(weakref.ref(whole))
        most = max(most, sum(one() is not None for one in made))
        return whole

    monkeypatch.setattr(tensor_parallel, "whole_of", watched)
    monkeypatch.setattr(dist, "get_rank", lambda group=None: 1)
    assert policy.gather_weights(held, "bfloat16") == {}
    assert len(made) > 1 and most == 1


def test_weights_of_another_model_are_not_exported(start: Path, tmp_path: Path) -> None:
    held = trained(start, "float32")
    for wrong in ({**held, "lm_head.weight": torch.ones(1)}, dict(list(held.items())[1:])):
        with pytest.raises(ModelError, match="is in only one of them"):
            hf_files.export(wrong, str(start), tmp_path / "final", "float32")
    assert not (tmp_path / "final").exists()


# --- generation settings -------------------------------------------------------------------------------------

GREEDY = {"do_sample": False, "eos_token_id": [1, 2]}
REFUSED: dict[str, tuple[object, set[str]]] = {
    "a temperature": ({**GREEDY, "temperature": 0.6}, {"temperature"}),
    "top-k": ({**GREEDY, "top_k": 20}, {"top_k"}),
    "top-p": ({**GREEDY, "top_p": 0.9}, {"top_p"}),
    "min-p": ({**GREEDY, "min_p": 0.1}, {"min_p"}),
    "typical-p": ({**GREEDY, "typical_p": 0.5}, {"typical_p"}),
    "a length penalty": ({**GREEDY, "length_penalty": 0.5}, {"length_penalty"}),
    "early stopping": ({**GREEDY, "early_stopping": True}, {"early_stopping"}),
    "scores": ({**GREEDY, "output_scores": True}, {"output_scores"}),
    "padding below zero": ({**GREEDY, "pad_token_id": -1}, {"pad_token_id"}),
    "several samples": ({**GREEDY, "num_return_sequences": 3}, {"num_return_sequences"}),
    "no tokens": ({**GREEDY, "max_new_tokens": 0}, {"max_new_tokens"}),
    "a cache": ({**GREEDY, "cache_implementation": "nope"}, {"cache_implementation"}),
    "a watermark": ({**GREEDY, "watermarking_config": {"a": 1}}, {"watermarking_config"}),
    "all of them": (
        {**GREEDY, "temperature": 0.6, "top_k": 5, "pad_token_id": -1, "num_return_sequences": 2},
        {"temperature", "top_k", "pad_token_id", "num_return_sequences"},
    ),
    "before what they need": ({"temperature": 0.6, "top_p": 0.9, "do_sample": True, "eos_token_id": [1, 2]}, set()),
    "of nobody": ({**GREEDY, "chat_format": "x", "max_window_size": {"a": 1}}, set()),
    "no table": ([1], {"generation_config.json"}),
    "no JSON": ("{nope", {"generation_config.json"}),
    "nothing": ("", {"generation_config.json"}),
}
"""What generation_config.json holds, and what is left out of it."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", REFUSED)
def test_generation_settings_that_transformers_refuses_are_left_out_with_a_note_and_the_weights_come_out(
    start: Path, tmp_path: Path, kind: str
) -> None:
    path, (content, dropped) = tmp_path / "model", REFUSED[kind]
    shutil.copytree(start, path)
    text = content if isinstance(content, str) else json.dumps(content)
    (path / "generation_config.json").write_text(text)
    notes = hf_files.export(trained(path, "float32"), str(path), tmp_path / "final", "float32")
    assert {note.split()[0] for note in notes} == dropped
    assert hf_files.try_export(str(path)) == notes
    made = GenerationConfig.from_pretrained(tmp_path / "final")
    made.save_pretrained(tmp_path / "once more")
    if isinstance(content, dict):
        kept = {name: one for name, one in content.items() if name not in dropped}
        assert {name: getattr(made, name) for name in kept} == kept
    AutoModelForCausalLM.from_pretrained(tmp_path / "final").save_pretrained(tmp_path / "twice")


@pytest.mark.parametrize("content", [None, {}, {"eos_token_id": 3}])
def test_generation_settings_that_are_fine_are_those_of_the_model(start: Path, tmp_path: Path, content: Any) -> None:
    path = tmp_path / "model"
    shutil.copytree(start, path)
    (path / "generation_config.json").unlink()
    if content is not None:
        (path / "generation_config.json").write_text(json.dumps(content))
    made = generation.read_settings(path)
    assert not made.notes and made.config.eos_token_id == (content or {}).get("eos_token_id")


# --- tokenizers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", model_folders.TOKENIZERS)
def test_the_tokenizer_of_an_export_makes_the_same_tokens(tmp_path: Path, kind: str) -> None:
    path = folder_of(tmp_path / "model", "llama3", tokenizer=kind, template="llama3")
    hf_files.export(trained(path, "float32"), str(path), tmp_path / "final", "float32")
    before, after = (AutoTokenizer.from_pretrained(one) for one in (path, tmp_path / "final"))
    for text in ("a word", "  two  ", "<|eot_id|> é 東京 🙂\n"):
        assert after(text)["input_ids"] == before(text)["input_ids"], text
    assert after.get_vocab() == before.get_vocab() and after.chat_template == before.chat_template
    assert after.eos_token_id == before.eos_token_id and after.pad_token_id == before.pad_token_id


def _refuse(*_: object, **__: object) -> None:
    raise TypeError("not JSON serializable")


def _forget_the_template(self: PreTrainedTokenizerFast, folder: Path, **_: object) -> None:
    WRITE(self, folder)
    (Path(folder) / "chat_template.jinja").unlink()


WRITE = PreTrainedTokenizerFast.save_pretrained


@pytest.mark.parametrize(
    ("write", "why"), [(_refuse, "not JSON serializable"), (_forget_the_template, "another chat template")]
)
def test_a_tokenizer_that_transformers_writes_as_another_or_not_at_all_is_copied(
    start: Path, tmp_path: Path, write: Callable[..., None], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", write)
    (note,) = hf_files.export(trained(start, "float32"), str(start), tmp_path / "final", "float32")
    assert note.startswith("the tokenizer's files are copied as they are: ") and why in note
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "final" / name).read_bytes() == (start / name).read_bytes()


def test_weights_come_out_of_a_folder_whose_tokenizer_is_broken(start: Path, tmp_path: Path) -> None:
    path = tmp_path / "model"
    shutil.copytree(start, path)
    (path / "tokenizer.json").write_text("{")
    (note,) = hf_files.export(trained(path, "float32"), str(path), tmp_path / "final", "float32")
    assert "transformers does not read them" in note
    AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    assert (tmp_path / "final" / "tokenizer.json").read_text() == "{"
    with pytest.raises(ModelError, match="cannot be loaded"):
        hf_files.try_export(str(path))
