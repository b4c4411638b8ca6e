"""Refuses folders without a trainable model: other formats, quantised weights, wrapped names. Needs no torch."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from streamppo import durable
from streamppo.errors import ModelError
from streamppo.weights.models import headers
from streamppo.weights.models.headers import Headers

WRAPPERS = {
    "_orig_mod": "torch.compile",
    "_fsdp_wrapped_module": "FSDP",
    "_checkpoint_wrapped_module": "activation checkpointing",
    "_forward_module": "Lightning",
    "pretrained_model": "TRL's AutoModelForCausalLMWithValueHead",
}
"""Parts of tensor names that come from a wrapper around a module, with the wrapper's name."""
FIRST = {"module": "DistributedDataParallel or DeepSpeed", "base_model": "peft"}
"""Like `WRAPPERS`, for parts that indicate a wrapper only at the start of a name."""
QUANTISED = ("qweight", "qzeros", "weight_scale", "weight_scale_inv", "weight_packed", "absmax", "quant_map", "g_idx")
"""Last parts of the names of tensors that belong to quantised weights."""
NARROW = ("F8", "F4", "F6")
"""Prefixes of the names that safetensors gives to dtypes with less than 16 bits."""
INSIDE = ("*/config.json", "*/*/config.json", "snapshots/*/config.json")
NOTES_OF_QUANTISERS = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files next to config.json that describe how weights are quantised."""


def check(folder: Path) -> Headers | None:
    """Return the headers of the tensors in a model's folder; None if it has only pickles. Raises `ModelError`."""
    kind(folder)
    stored = headers.folder_headers(folder)
    if stored is not None:
        refuse_names(folder, stored)
        quantised = [
            name for name, header in stored.items() if header.dtype.startswith(NARROW) or name.endswith(QUANTISED)
        ]
        if quantised:
            dtype = stored[quantised[0]].dtype
            raise ModelError(_quantisation(folder, f"{quantised[0]!r} has the type {dtype} of quantised weights"))
    return stored


def kind(folder: Path) -> Mapping[str, object]:
    """Read config.json. Raises `ModelError` if it is missing or invalid, and for adapters and quantised weights."""
    adapter, path = folder / "adapter_config.json", folder / "config.json"
    if adapter.is_file():
        base = _base_of(adapter)
        raise ModelError(
            f"{folder} is a LoRA adapter{base}, not a model: merge it into its model first "
            "(peft: `merge_and_unload()`, then `save_pretrained`) and name that folder; if the folder has a whole "
            "model, remove adapter_config.json"
        )
    if not path.is_file():
        raise ModelError(_other_format(folder))
    headers.refuse_pointer(path)
    try:
        content: object = json.loads(durable.read(path))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not the configuration of a model: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path}: not the configuration of a model: it is not a table of names")
    settings = cast("dict[str, object]", content)
    refuse_quantised(folder, settings)
    return settings


def refuse_quantised(folder: Path | str, settings: Mapping[str, object]) -> None:
    """Raise `ModelError` if the configuration, or a file next to it, describes quantised weights."""
    for name in ("quantization_config", "compression_config"):
        if value := settings.get(name):
            method = cast("dict[str, object]", value).get("quant_method") if isinstance(value, dict) else None
            raise ModelError(_quantisation(folder, f"{name} of config.json says {method or 'so'}"))
    for name in NOTES_OF_QUANTISERS:
        if Path(folder, name).is_file():
            raise ModelError(_quantisation(folder, f"{name} says so"))


def refuse_names(folder: Path, names: Iterable[str]) -> None:
    """Raise `ModelError` if most `names` come from a wrapped module, or any from an adapter that was not merged."""
    parts = [name.split(".") for name in names]
    inside = Counter(part for path in parts for part in set(path) & WRAPPERS.keys())
    inside.update(path[0] for path in parts if path[0] in FIRST)
    for part, count in inside.most_common(1):
        if 2 * count > len(parts):
            example = next(".".join(path) for path in parts if part in path)
            prefix = "base_model.model." if part == "base_model" else f"{part}."
            raise ModelError(
                f"{folder}: its tensors have {prefix!r} in their names ({example!r}), which {(WRAPPERS | FIRST)[part]} "
                f"adds: save the model inside of the wrapper (its own `save_pretrained`), or remove {prefix!r} there"
            )
    adapted = [".".join(path) for path in parts if "lora_A" in path or "base_layer" in path]
    if adapted:
        raise ModelError(
            f"{folder}: {adapted[0]!r} belongs to an adapter that was not merged: `merge_and_unload()`, then save"
        )


def _base_of(adapter: Path) -> str:
    try:
        content: object = json.loads(durable.read(adapter))
    except (OSError, ValueError, RecursionError):
        return ""
    base = cast("dict[str, object]", content).get("base_model_name_or_path") if isinstance(content, dict) else None
    return f" of {base}" if base else ""


def _other_format(folder: Path) -> str:
    for pattern, text in (
        ("*.gguf", "is in GGUF, llama.cpp's format: name the folder or hub name of the model that it was made from"),
        ("consolidated*", "is in its author's own format: convert it with transformers, or name its converted folder"),
        ("model_index.json", "is a pipeline of diffusers, not a language model"),
        (".metadata", "is a checkpoint of torch.distributed: `streamppo export` makes a model's folder of a run's own"),
        ("*.safetensors*", "has weights and no config.json: copy or download that too"),
        ("*.bin", "has weights and no config.json: copy or download that too"),
    ):
        if next(folder.glob(pattern), None) is not None:
            return f"{folder} {text}"
    inner = next((path.parent for subfolder in INSIDE for path in sorted(folder.glob(subfolder))), None)
    return f"{folder}: no config.json: it is not a model's folder" + (f"; {inner} may be meant" if inner else "")


def _quantisation(folder: Path | str, why: str) -> str:
    return (
        f"{folder} is quantised ({why}): weights are trained in 16 or 32 bits; name the model that it was made from, "
        "or write it in bfloat16 first (transformers: `dequantize()`, then `save_pretrained`)"
    )
