"""Folders of models as people bring them: whole ones are loaded as transformers does, others named and refused."""

import base64
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folder_faults
import model_families
import model_folders
import pytest
import tokenizer_kinds
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Florence2Config,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen2ForSequenceClassification,
)

from streamppo.errors import ModelError
from streamppo.weights.models import fit, folder, headers, loading, tokenizer
from streamppo.weights.models.settings import is_tied, read_settings, settings

QUICK = {
    "wrapped_compile": "'_orig_mod.' in their names .* which torch.compile adds",
    "wrapped_parallel": "'module.' in their names .* which DistributedDataParallel or DeepSpeed adds",
    "wrapped_peft": r"'base_model.model.' in their names .* which peft adds",
    "missing_shard": "model-00002-of-00002.safetensors of the 2 parts are missing: copy or download them again",
    "index_beyond_shard": "is in model-00002-of-00002.safetensors, which has no such tensor",
    "lfs_pointer": "model.safetensors: a git-LFS pointer and not the file: `git lfs pull`",
    "cut_file": "bytes, but its header says .*: copy or download it again",
    "no_weights": "no weights: neither model.safetensors nor parts of it with an index",
    "lora_adapter": "is a LoRA adapter of Qwen/Qwen3-0.6B, not a model: merge it",
    "gguf": "is in GGUF, llama.cpp's format: name the folder or hub name of the model that it was made from",
    "fp8": r"is quantised \(quantization_config of config.json says fp8\)",
    "awq": r"is quantised \(quantization_config of config.json says awq\)",
    "no_config": "has weights and no config.json: copy or download that too",
    "broken_config": "config.json: not the configuration of a model",
    "in_a_subfolder": "no config.json: it is not a model's folder; .*snapshots/0a1b2c may be meant",
}
"""Sentences about faults that are found without torch."""
SLOW = {
    "missing_tensor": r"'.*\.1\..*' is missing \(the nearest name in them is '.*'\)",
    "missing_head": "'lm_head.weight' is missing. Set tie_word_embeddings = true in config.json if",
    "unexpected_tensor": "'model.layers.1.extra.weight' is not a tensor of the model",
    "wrong_shape": r"'.*\.1\..*' has shape \[\d+, 32\] in the files and \[\d+, 32\] in the model",
    "fewer_layers": "num_hidden_layers = 1, but the files have 2 layers",
    "more_layers": "num_hidden_layers = 3, but the files have 2 layers",
    "not_a_number": r"has NaN or infinity in '.*\.1\..*'",
    "auto_map": "needs code that comes with it .*, which streamppo does not run",
    "unknown_type": r"is of model_type '[a-z0-9_]+' that the installed transformers \([0-9.]+\) lacks",
}
"""Sentences about faults that transformers' own reading shows."""
FAMILIES = ("qwen3", "gpt2", "qwen3_moe")


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of a family, made once."""
    made = dict[str, Path]()

    def of(family: str) -> Path:
        if family not in made:
            usual, path = model_folders.usual(family), tmp_path_factory.mktemp(family) / "model"
            kind = {"tokenizer": usual.tokenizer, "template": usual.template, "tied": usual.tied}
            made[family] = model_folders.make(path, family=family, **kind)
        return made[family]

    return of


@pytest.mark.sampled(50)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fault", QUICK | SLOW)
def test_a_folder_that_is_no_whole_model_is_refused_in_a_sentence_by_each_loader(
    healthy: Callable[[str], Path], tmp_path: Path, fault: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: pytest.fail("a question on standard input"))
    path = tmp_path / "model"
    shutil.copytree(healthy(family), path)
    folder_faults.apply(path, fault)
    if fault in QUICK:
        with pytest.raises(ModelError, match=QUICK[fault]):
            folder.check(path)
    with pytest.raises(ModelError, match=(QUICK | SLOW)[fault]):
        loading.load(path)


def test_the_faults_that_a_folder_shows_are_found_without_torch(healthy: Callable[[str], Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from streamppo.weights.models import folder;"
        "found = folder.check(Path(sys.argv[1])); heavy = {'torch', 'transformers'} & {*sys.modules};"
        "sys.exit(not found or bool(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", code, str(healthy("qwen3"))], check=False).returncode == 0


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", model_folders.LAYOUTS)
@pytest.mark.parametrize("family", ["gemma3_pictures", "gpt2", "mistral3", "qwen3"])
def test_a_whole_model_is_what_transformers_loads_however_it_lies(tmp_path: Path, family: str, layout: str) -> None:
    usual = model_folders.usual(family)
    if not model_folders.fits(family, usual.tokenizer, layout):
        return
    kind = {"tokenizer": usual.tokenizer, "template": usual.template, "tied": usual.tied, "layout": layout}
    path = model_folders.make(tmp_path / "model", family=family, **kind)
    assert fit.check(path, settings(path)) == len(folder.check(path) or headers.pickle_tensors(path))
    own = model_families.read(path, dtype=torch.float32)
    ours = dict(loading.load(path, whole=True).model.named_parameters())
    assert ours.keys() == {name for name, _ in own.named_parameters()}
    assert all(torch.equal(ours[name], one) for name, one in own.named_parameters())


@pytest.mark.parametrize("family", ["gemma3_pictures", "mistral3"])
def test_a_multimodal_folder_with_a_separate_head_and_no_word_of_ties_has_its_head(tmp_path: Path, family: str) -> None:
    """As Mistral Small 3 is published: transformers' default is a tied head, and the files have another one."""
    usual = model_folders.usual(family)
    kind = {"tokenizer": usual.tokenizer, "template": usual.template, "tied": False}
    path = model_folders.make(tmp_path / "model", family=family, **kind)
    config = json.loads((path / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.pop("tie_word_embeddings", None)
    (path / "config.json").write_text(json.dumps(config))
    assert is_tied(read_settings(path)) and not is_tied(settings(path))
    whole, text = model_families.read(path), loading.load(path).model
    assert torch.equal(text.get_parameter("lm_head.weight"), whole.get_parameter("lm_head.weight"))
    assert not torch.equal(text.get_parameter("lm_head.weight"), text.get_input_embeddings().weight)


@pytest.mark.parametrize("family", model_families.NAMES)
def test_the_files_of_every_family_are_whole(tmp_path: Path, family: str) -> None:
    model_families.make(family, tmp_path)
    fit.check(tmp_path, settings(tmp_path))


# --- experts, which transformers joins ------------------------------------------------------------------------

EXPERT = "model.layers.0.mlp.experts.2.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.pop(EXPERT), f"'{EXPERT}' is missing"),
        (
            lambda held: [held.pop(EXPERT), held.pop(EXPERT.replace("up", "gate"))],
            "experts.2.gate_proj.weight' is missing",
        ),
        (
            lambda held: held.update({EXPERT: torch.ones(15, 32)}),
            r"experts.2.up_proj.weight' has shape \[15, 32\] in the files and \[16, 32\] in",
        ),
        (
            lambda held: held.update({EXPERT.replace(".2.", ".4."): torch.ones(16, 32)}),
            "experts.4.up_proj.weight' is not a tensor",
        ),
    ],
)
def test_an_expert_that_is_missing_or_of_another_shape_is_named_as_in_the_file(
    healthy: Callable[[str], Path], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], said: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(healthy("qwen3_moe"), path)
    held = load_file(path / "model.safetensors")
    change(held)
    save_file(held, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        fit.check(path, settings(path))


# --- settings that transformers answers with an exception of any kind -----------------------------------------

WRONG: dict[str, Any] = {
    "a text for a number": {"hidden_size": "32"},
    "null": {"num_attention_heads": None},
    "no heads": {"num_attention_heads": 0},
    "heads that do not divide": {"num_attention_heads": 5, "head_dim": None},
    "other heads": {"num_attention_heads": 8},
    "layer types of another number": {"layer_types": ["full_attention"]},
    "layer types that nobody knows": {"layer_types": ["full_attention", "no_attention"]},
    "an activation": {"hidden_act": "nope"},
    "a rotary embedding": {"rope_parameters": {"rope_type": "nope", "rope_theta": 1.0}},
    "a scaling": {"rope_parameters": None, "rope_scaling": {"type": "nope"}},
    "layers below zero": {"num_hidden_layers": -1},
    "a type of numbers": {"dtype": "float99"},
    "a vocabulary of another size": {"vocab_size": 7},
    "no type of model": {"model_type": None},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_settings_that_fit_no_model_are_refused_and_never_by_an_exception_of_a_library(
    healthy: Callable[[str], Path], tmp_path: Path, wrong: str
) -> None:
    path = tmp_path / "model"
    shutil.copytree(healthy("qwen3"), path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **WRONG[wrong]}))
    for look in (lambda: loading.load(path), lambda: fit.check(path, settings(path))):
        with pytest.raises(ModelError, match=str(path)):
            look()


@pytest.mark.parametrize("content", [b"", b"\x80\x04", b"version https://git-lfs.github.com/spec/v1\n", bytes(64)])
def test_a_pickle_that_is_none_is_refused(healthy: Callable[[str], Path], tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model"
    shutil.copytree(healthy("qwen3"), path)
    (path / "model.safetensors").unlink()
    (path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match=r"pytorch_model\.bin: (not a pickle of tensors|a git-LFS pointer)"):
        loading.load(path)


@pytest.mark.parametrize("content", [{"model": {"w": torch.ones(1)}}, [1, 2], {"a": 1}])
def test_a_pickle_of_more_than_tensors_is_refused(
    healthy: Callable[[str], Path], tmp_path: Path, content: object
) -> None:
    path = tmp_path / "model"
    shutil.copytree(healthy("qwen3"), path)
    (path / "model.safetensors").unlink()
    torch.save(content, path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="a pickle with more than tensors by name"):
        loading.load(path)


# --- heads ---------------------------------------------------------------------------------------------------


def classifier(path: Path, **changed: torch.Tensor | None) -> Path:
    """A reward model, some of whose tensors are others."""
    torch.manual_seed(5)
    sizes: dict[str, Any] = {**model_folders.SIZES, "vocab_size": 40, "num_labels": 1, "pad_token_id": 0}
    Qwen2ForSequenceClassification(Qwen2Config(**sizes)).save_pretrained(path)
    held = {
        **load_file(path / "model.safetensors"),
        **{name.replace("_", ".", 1): one for name, one in changed.items()},
    }
    kept = {name: one for name, one in held.items() if one is not None}
    save_file(kept, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_reward_model_needs_its_score_head_and_a_critic_may_begin_with_a_new_one(tmp_path: Path) -> None:
    path = classifier(tmp_path / "headless", score_weight=None)
    with pytest.raises(ModelError, match=r"'score.weight' is missing"):
        loading.load(path, "AutoModelForSequenceClassification")
    assert loading.load(path, "AutoModelForSequenceClassification", body=True).new == {"score.weight"}
    assert not loading.load(classifier(tmp_path / "whole"), "AutoModelForSequenceClassification", body=True).new


def test_the_head_of_the_language_model_that_a_reward_model_was_is_no_fault(tmp_path: Path) -> None:
    old = {"lm_head.weight": torch.ones(40, 32)}
    path = classifier(tmp_path / "model")
    save_file({**load_file(path / "model.safetensors"), **old}, path / "model.safetensors", {"format": "pt"})
    loading.load(path, "AutoModelForSequenceClassification")
    with pytest.raises(ModelError, match=r"'score.weight' is not a tensor of the model"):
        loading.load(path)
    loading.load(path, body=True)


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("pickle", [False, True])
def test_a_number_that_is_none_is_found_in_files_and_at_the_load(
    healthy: Callable[[str], Path], tmp_path: Path, number: float, pickle: bool
) -> None:
    path = tmp_path / "model"
    shutil.copytree(healthy("qwen3"), path)
    held = load_file(path / "model.safetensors")
    held["model.norm.weight"][-1] = number
    if pickle:
        (path / "model.safetensors").unlink()
        torch.save(held, path / "pytorch_model.bin")
    else:
        save_file(held, path / "model.safetensors", {"format": "pt"})
    assert fit.find_not_finite(path) == "model.norm.weight"
    with pytest.raises(ModelError, match=r"has NaN or infinity in 'model.norm.weight'"):
        loading.load(path)
    assert fit.find_not_finite(healthy("qwen3")) == ""


# --- what is not this learner's, or not this transformers' ----------------------------------------------------

BODY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}


def edit(folder: Path, **entries: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}))


def test_padding_beyond_the_embeddings_is_named(healthy: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(healthy("qwen3"), tmp_path / "model")
    edit(tmp_path / "model", pad_token_id=10_000)
    with pytest.raises(ModelError, match=r"pad_token_id in its config\.json is not below vocab_size"):
        fit.check(tmp_path / "model", settings(tmp_path / "model"))


def test_an_attention_that_is_not_installed_is_no_reason(healthy: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(healthy("qwen3"), tmp_path / "model")
    edit(tmp_path / "model", attn_implementation="flash_attention_2")
    assert fit.check(tmp_path / "model", settings(tmp_path / "model"))


def test_a_model_whose_head_cannot_be_told_from_its_transformer_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    text = Llama4TextConfig(**BODY, **HEADS, intermediate_size_mlp=48, num_local_experts=2, interleave_moe_layer_step=2)
    Llama4ForCausalLM(text).save_pretrained(tmp_path)
    with pytest.raises(
        ModelError, match="Llama4ForCausalLM of transformers does not separate its transformer from its head"
    ):
        fit.check(tmp_path, settings(tmp_path))


def test_a_model_whose_text_model_cannot_be_told_apart_is_refused_with_what_to_do(tmp_path: Path) -> None:
    Florence2Config().save_pretrained(tmp_path)
    save_file({"lm_head.weight": torch.zeros(300, 32)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        ModelError, match=r"no AutoModelForCausalLM of model_type 'florence2': it also reads pictures .*: save"
    ):
        fit.check(tmp_path, settings(tmp_path))


def tekken(folder: Path, *, special: int) -> None:
    """Mistral's file of a tokenizer: single bytes, and some merges of them."""
    pieces = [bytes([byte]) for byte in range(256)] + [b"th", b"the", b"12"]
    vocabulary = [
        {"rank": rank, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
        for rank, piece in enumerate(pieces)
    ]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    settings = {"pattern": pattern, "num_vocab_tokens": len(pieces), "default_num_special_tokens": special}
    names = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{number}>" for number in range(3, special))]
    control = [{"rank": rank, "token_str": name, "is_control": True} for rank, name in enumerate(names)]
    content = {
        "config": {**settings, "default_vocab_size": len(pieces) + special, "version": "v7"},
        "vocab": vocabulary,
        "special_tokens": control,
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    MistralConfig(**BODY, **HEADS).save_pretrained(folder)


def test_tekken_is_read_as_it_says_or_refused(tmp_path: Path) -> None:
    """transformers 5.12 gives other numbers, without an error; later releases give these: the pattern splits digits."""
    tekken(tmp_path, special=20)
    try:
        made = tokenizer.read(tmp_path)
    except ValueError as error:
        assert "reads its tekken.json wrongly: '\\t' is not the token 29; add the model's tokenizer.json" in str(error)
    else:
        assert made.encode("12\nthe\t+", add_special_tokens=False) == [69, 70, 30, 277, 29, 63]


def test_numbers_that_differ_from_those_of_tekken_are_refused(healthy: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(healthy("qwen3"), tmp_path / "model")
    another = tokenizer.read(tmp_path / "model")
    (tmp_path / "other").mkdir()
    tekken(tmp_path / "other", special=20)
    with pytest.raises(ValueError, match="wrongly"):
        tokenizer._compare_tekken(another, tmp_path / "other")
    (tmp_path / "other" / "tekken.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tekken\.json is damaged: KeyError"):
        tokenizer._compare_tekken(another, tmp_path / "other")


def test_an_older_tekken_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    tekken(tmp_path, special=20)
    content = json.loads((tmp_path / "tekken.json").read_text())
    del content["special_tokens"]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    # transformers 5.12 has a KeyError, 5.24 asks for mistral-common in several lines.
    with pytest.raises(
        ValueError, match=r"cannot read its tekken\.json \(\w+Error: .*; add the model's tokenizer\.json$"
    ):
        tokenizer.read(tmp_path)


def test_a_tokenizer_whose_class_drops_spaces_gets_the_rules_of_its_file(tmp_path: Path) -> None:
    """As DeepSeek R1's Llamas: a byte-level tokenizer.json under the name of the class of Llama 2."""
    made = tokenizer_kinds.make("byte_bpe", "llama3")
    made.save_pretrained(tmp_path)
    entries = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**entries, "tokenizer_class": "LlamaTokenizerFast"}))
    LlamaConfig(**BODY).save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "exported"):
        loaded = tokenizer.read(source)
        assert loaded(tokenizer.PROBE)["input_ids"] == made(tokenizer.PROBE)["input_ids"]
        assert loaded.decode(loaded(" a  b\n")["input_ids"], skip_special_tokens=True) == " a  b\n"
        assert (loaded.eos_token, loaded.chat_template) == (made.eos_token, made.chat_template)
        tokenizer.write(loaded, source, tmp_path / "exported")


def test_a_tokenizer_of_pieces_names_the_library_that_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer, "find_spec", lambda _: None)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x0e\x0a\x05<unk>\x15\x00\x00\x00\x00\x18\x02")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    LlamaConfig(**BODY).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"has tokenizer.model and no tokenizer.json, .* pip install sentencepiece"):
        tokenizer.read(tmp_path)


def test_a_tokenizer_with_code_of_its_own_is_refused_as_such_a_model_is(tmp_path: Path) -> None:
    code = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    entries = {"tokenizer_class": "OwnTokenizer", "auto_map": code}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(entries))
    (tmp_path / "tokenization_own.py").write_text("raise SystemExit('code of the tokenizer ran')\n")
    LlamaConfig(**BODY).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"needs code that comes with it .*, which streamppo does not run"):
        tokenizer.read(tmp_path)
