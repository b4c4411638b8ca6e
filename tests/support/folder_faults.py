"""Common faults of model folders: `apply(folder, name)` makes one in a healthy folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor


def apply(folder: Path, name: str) -> None:
    """Make the fault `name` in a model folder with one weights file."""
    FAULTS[name](folder)


def _weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def _save(folder: Path, weights: dict[str, Tensor]) -> None:
    save_file({name: one.contiguous() for name, one in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def _some(weights: dict[str, Tensor]) -> str:
    """The name of a tensor of the last layer."""
    return sorted(name for name in weights if ".1." in name)[-1]


def _edit(folder: Path, file: str, **entries: object) -> None:
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), **entries}, indent=2))


def _missing_tensor(folder: Path) -> None:
    weights = _weights(folder)
    del weights[_some(weights)]
    _save(folder, weights)


def _missing_head(folder: Path) -> None:
    """An untied model without lm_head."""
    weights = _weights(folder)
    weights.pop("lm_head.weight", None)
    _save(folder, weights)
    _edit(folder, "config.json", tie_word_embeddings=False)


def _wrapped(prefix: str) -> Callable[[Path], None]:
    def wrap(folder: Path) -> None:
        _save(folder, {prefix + name: one for name, one in _weights(folder).items()})

    return wrap


def _unexpected_tensor(folder: Path) -> None:
    _save(folder, {**_weights(folder), "model.layers.1.extra.weight": torch.ones(4)})


def _wrong_shape(folder: Path) -> None:
    weights = _weights(folder)
    name = _some(weights)
    weights[name] = torch.cat([weights[name], weights[name]])
    _save(folder, weights)


def _not_a_number(folder: Path) -> None:
    weights = _weights(folder)
    weights[_some(weights)].view(-1)[0] = torch.nan
    _save(folder, weights)


def _fewer_layers(folder: Path) -> None:
    """A config.json with one layer, and weights of two layers."""
    names = json.loads((folder / "config.json").read_text())
    key = "n_layer" if "n_layer" in names else "num_hidden_layers"
    changed: dict[str, object] = {key: 1}
    if names.get("layer_types"):
        changed["layer_types"] = names["layer_types"][:1]
    _edit(folder, "config.json", **changed)


def _more_layers(folder: Path) -> None:
    names = json.loads((folder / "config.json").read_text())
    key = "n_layer" if "n_layer" in names else "num_hidden_layers"
    changed: dict[str, object] = {key: 3}
    if names.get("layer_types"):
        changed["layer_types"] = [*names["layer_types"], names["layer_types"][-1]]
    _edit(folder, "config.json", **changed)


def _shards(folder: Path) -> tuple[str, dict[str, Tensor], dict[str, Tensor]]:
    """Split the weights into two files with an index; return (name of a tensor in the second, first, second)."""
    weights = _weights(folder)
    names = sorted(weights)
    parts = [{name: weights[name] for name in half} for half in (names[::2], names[1::2])]
    (folder / "model.safetensors").unlink()
    index = dict[str, str]()
    for number, part in enumerate(parts, 1):
        file = f"model-0000{number}-of-00002.safetensors"
        save_file(part, folder / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    size = sum(one.numel() * one.element_size() for one in weights.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    return names[1], *parts


def _missing_shard(folder: Path) -> None:
    _shards(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _index_beyond_shard(folder: Path) -> None:
    """An index that lists a tensor that is missing in its shard."""
    name, _, second = _shards(folder)
    del second[name]
    save_file(second, folder / "model-00002-of-00002.safetensors", {"format": "pt"})


def _lfs_pointer(folder: Path) -> None:
    """The pointer file of `git clone` without git-lfs."""
    oid, size = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393", 988097824
    text = f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize {size}\n"
    (folder / "model.safetensors").write_text(text)


def _cut_file(folder: Path) -> None:
    """A truncated download."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def _no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _lora_adapter(folder: Path) -> None:
    """PEFT's format: only the adapter."""
    (folder / "model.safetensors").unlink()
    (folder / "config.json").unlink()
    a, b = torch.zeros(4, 32), torch.zeros(32, 4)
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    entries = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    text = json.dumps({"base_model_name_or_path": "Qwen/Qwen3-0.6B", **entries})
    (folder / "adapter_config.json").write_text(text)


def _gguf(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model-q4_k_m.gguf").write_bytes(b"GGUF" + bytes(60))


def _fp8(folder: Path) -> None:
    """A checkpoint in float8 blocks, as published by DeepSeek and Qwen."""
    weights = _weights(folder)
    for name in [one for one in weights if "_proj" in one and one.endswith("weight")]:
        weights[name] = weights[name].to(torch.float8_e4m3fn)
        weights[name + "_scale_inv"] = torch.ones(1, 1)
    _save(folder, weights)
    entries = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    _edit(folder, "config.json", quantization_config=entries)


def _awq(folder: Path) -> None:
    """A checkpoint in 4 bits."""
    weights = _weights(folder)
    for name in [one for one in weights if "_proj" in one and one.endswith("weight")]:
        rows, columns = weights.pop(name).shape
        stem = name.removesuffix("weight")
        weights[stem + "qweight"] = torch.zeros(columns, rows // 8, dtype=torch.int32)
        weights[stem + "qzeros"] = torch.zeros(1, rows // 8, dtype=torch.int32)
        weights[stem + "scales"] = torch.ones(1, rows, dtype=torch.float16)
    _save(folder, weights)
    entries = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
    _edit(folder, "config.json", quantization_config=entries)


def _auto_map(folder: Path) -> None:
    """A model with custom code, as for families that transformers lacks."""
    entries = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    _edit(folder, "config.json", auto_map=entries, model_type="own_model", architectures=["OwnForCausalLM"])
    (folder / "configuration_own.py").write_text(
        "from transformers import PretrainedConfig\nclass OwnConfig(PretrainedConfig):\n    model_type = 'own_model'\n"
    )
    (folder / "modeling_own.py").write_text("raise SystemExit('code of the model ran')\n")


def _unknown_type(folder: Path) -> None:
    _edit(folder, "config.json", model_type="qwen9", architectures=["Qwen9ForCausalLM"])


def _no_tokenizer(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name.startswith("tokenizer") or path.name == "chat_template.jinja":
            path.unlink()


def _small_embeddings(folder: Path) -> None:
    """A tokenizer with more tokens than the model's embeddings have rows."""
    path = folder / "tokenizer.json"
    entries = json.loads(path.read_text())
    top = max(one["id"] for one in entries["added_tokens"])
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
    entries["added_tokens"] += [{"id": top + n, "content": f"<extra_{n}>", **plain} for n in range(1, 4)]
    path.write_text(json.dumps(entries))


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "qwen2",')


def _different_head(folder: Path) -> None:
    """`tie_word_embeddings` together with a separate lm_head."""
    weights = _weights(folder)
    key = next(name for name in weights if name.endswith(("embed_tokens.weight", "wte.weight")))
    weights["lm_head.weight"] = torch.randn(weights[key].shape, generator=torch.Generator().manual_seed(3)).to(
        weights[key].dtype
    )
    _save(folder, weights)
    _edit(folder, "config.json", tie_word_embeddings=True)


def _in_a_subfolder(folder: Path) -> None:
    """The folder above the model's, as in the hub's cache."""
    inner = folder / "snapshots" / "0a1b2c"
    inner.mkdir(parents=True)
    for path in [one for one in folder.iterdir() if one.is_file()]:
        shutil.move(path, inner / path.name)


FAULTS: dict[str, Callable[[Path], None]] = {
    "missing_tensor": _missing_tensor,
    "missing_head": _missing_head,
    "wrapped_compile": _wrapped("_orig_mod."),
    "wrapped_parallel": _wrapped("module."),
    "wrapped_peft": _wrapped("base_model.model."),
    "unexpected_tensor": _unexpected_tensor,
    "wrong_shape": _wrong_shape,
    "not_a_number": _not_a_number,
    "fewer_layers": _fewer_layers,
    "more_layers": _more_layers,
    "missing_shard": _missing_shard,
    "index_beyond_shard": _index_beyond_shard,
    "lfs_pointer": _lfs_pointer,
    "cut_file": _cut_file,
    "no_weights": _no_weights,
    "lora_adapter": _lora_adapter,
    "gguf": _gguf,
    "fp8": _fp8,
    "awq": _awq,
    "auto_map": _auto_map,
    "unknown_type": _unknown_type,
    "no_tokenizer": _no_tokenizer,
    "small_embeddings": _small_embeddings,
    "no_config": _no_config,
    "broken_config": _broken_config,
    "in_a_subfolder": _in_a_subfolder,
}
"""Faults that make training impossible, by name."""
ODDITIES: dict[str, Callable[[Path], None]] = {"different_head": _different_head}
"""Oddities that must be loaded as transformers loads them."""
