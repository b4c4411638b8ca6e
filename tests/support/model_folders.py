"""Tiny model folders like published ones: a family's model, a kind of tokenizer, a chat template, a layout."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import model_families
import tokenizer_kinds
import torch
import transformers
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
}


class Family(NamedTuple):
    """A family: the prefix of its classes in transformers, its settings, and its usual tokenizer and template."""

    prefix: str
    settings: dict[str, Any]
    tokenizer: str
    template: str | None
    tied: bool


_FAMILIES = {
    "gpt2": Family("GPT2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}, "pad_is_eos", None, True),
    "gemma2": Family(
        "Gemma2",
        {"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8, "final_logit_softcapping": 30.0},
        *("spm_bpe", "gemma2", True),
    ),
    "gemma3": Family(
        "Gemma3Text",
        {
            **{"head_dim": 8, "sliding_window": 16, "query_pre_attn_scalar": 8},
            "layer_types": ["sliding_attention", "full_attention"],
        },
        *("spm_bpe", "gemma3", True),
    ),
    "phi3": Family("Phi3", {"sliding_window": 256}, "spm_bpe", "phi", False),
    "mistral": Family("Mistral", {"sliding_window": None, "head_dim": 8}, "spm_bpe", "mistral", False),
    "llama3": Family("Llama", {"rope_parameters": LLAMA3}, "double_bos", "llama3", True),
    "qwen2": Family("Qwen2", {}, "byte_bpe", "qwen2.5", True),
    "qwen3": Family("Qwen3", {"head_dim": 8}, "added", "qwen3", True),
    "qwen3_moe": Family("Qwen3Moe", {"head_dim": 8, **MOE}, "no_bos", "qwen3", False),
    "olmo2": Family("Olmo2", {}, "no_pad", None, False),
    "smollm3": Family("SmolLM3", {"rope_parameters": YARN}, "adds_eos", "llama3", True),
    "glm4": Family("Glm4", {"head_dim": 8}, "added", "glm", False),
    "gemma3_pictures": Family("Gemma3", model_families.MULTIMODAL["Gemma3"], "spm_bpe", "gemma3", True),
    "mistral3": Family("Mistral3", model_families.MULTIMODAL["Mistral3"], "spm_bpe", "mistral", False),
    "qwen2_5_vl": Family("Qwen2_5_VL", model_families.MULTIMODAL["Qwen2_5_VL"], "added", "qwen2.5", False),
    "qwen3_vl": Family("Qwen3VL", model_families.MULTIMODAL["Qwen3VL"], "added", "qwen3", True),
}
FAMILIES = tuple(_FAMILIES)
MULTIMODAL = ("gemma3_pictures", "mistral3", "qwen2_5_vl", "qwen3_vl")
"""Families that also read pictures: their folders have an encoder, and the settings of a processor."""
PROCESSOR = "preprocessor_config.json"
TOKENIZERS = tuple(tokenizer_kinds.KINDS)
TEMPLATES = tuple(tokenizer_kinds.CONTROLS)
"""Names of chat templates, and None for a model without one."""
DTYPES = ("float32", "bfloat16", "float16")
LAYOUTS = ("single", "sharded", "bin", "head_in_file", "bare_names", "extras", "version_4")
"""Layouts of the weights in the folder.

    single        model.safetensors
    sharded       several safetensors files and their index
    bin           pytorch_model.bin, a pickle
    head_in_file  model.safetensors with lm_head and the embeddings that it is tied to
    bare_names    names without "model." or "transformer.", as in the first published GPT-2
    extras        additional files: original/, consolidated.safetensors, README.md, .gitattributes
    version_4     config.json and tokenizer_config.json in the format of transformers 4
"""
GENERATION = ("published", "absent", "no_eos", "greedy_with_temperature")
"""Contents of generation_config.json: stop tokens and sampling of a published model, or a common fault."""


def usual(family: str) -> Family:
    """The settings of a family, its usual tokenizer and template, and whether its embeddings are tied."""
    return _FAMILIES[family]


def fits(family: str, tokenizer: str, layout: str = "single") -> bool:
    """True for realistic combinations: transformers reads every tokenizer of a Qwen2 model as a byte-level BPE."""
    if layout == "bare_names" and family != "gpt2":
        return False
    return family != "qwen2" or tokenizer_kinds.KINDS[tokenizer].model == "byte_bpe"


def make(  # noqa: PLR0913  The draws of a folder.
    folder: Path,
    *,
    family: str = "qwen2",
    tokenizer: str = "byte_bpe",
    template: str | None = "qwen2.5",
    tied: bool = True,
    dtype: str = "float32",
    layout: str = "single",
    generation: str = "published",
    spare: int = 0,
    seed: int = 0,
    settings: Mapping[str, Any] | None = None,
    stop_chance: float = 0.0,
) -> Path:
    """Write a model with random weights and its tokenizer to `folder`.

    `spare` is the number of embedding rows beyond the tokenizer's tokens; `settings` change the model's configuration.
    `stop_chance` is the mean probability of the token that ends the assistant's turn.
    """
    made = tokenizer_kinds.make(tokenizer, template)
    controls = tokenizer_kinds.CONTROLS[template]
    config = config_of(family, made, tied=tied, spare=spare, settings=settings or {})
    torch.manual_seed(seed)
    lm = model_families.new(config)
    if stop_chance:
        _teach_stop(lm, made.convert_tokens_to_ids(controls.turn_end), stop_chance)
    lm.to(getattr(torch, dtype))
    lm.config.dtype = lm.dtype
    _set_generation(lm, made, controls.stops, generation)
    folder.mkdir(parents=True, exist_ok=True)
    lm.save_pretrained(folder, max_shard_size="20KB" if layout == "sharded" else "5GB")
    made.save_pretrained(folder)
    _write_generation(folder, made, generation)
    if family in MULTIMODAL:
        (folder / PROCESSOR).write_text('{"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14}')
    _ARRANGE.get(layout, lambda folder, lm: None)(folder, lm)
    return folder


def config_of(
    family: str, tokenizer: "PreTrainedTokenizerFast", *, tied: bool, spare: int, settings: Mapping[str, Any]
) -> "PretrainedConfig":
    """The configuration of a family's tiny model for that tokenizer."""
    chosen = usual(family)
    sizes = {} if family == "gpt2" else SIZES
    text: dict[str, Any] = {
        **sizes,
        # transformers adds <|endoftext|> to a Qwen2 model's tokenizer if it is missing.
        "vocab_size": len(tokenizer) + spare + (family == "qwen2" and "<|endoftext|>" not in tokenizer.get_vocab()),
        "initializer_range": 0.1,
        "tie_word_embeddings": tied,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        **chosen.settings,
        **settings,
    }
    if family in MULTIMODAL:
        return model_families.multimodal(chosen.prefix, text, tie_word_embeddings=tied)
    return getattr(transformers, f"{chosen.prefix}Config")(**text)


@torch.no_grad()
def _teach_stop(lm: "PreTrainedModel", token: int, chance: float) -> None:
    """Add a common vector to all embeddings, and a multiple of it to the head's row of `token`.

    The multiple is found by bisection: the mean probability of `token` is then `chance`.
    """
    embeddings, head = lm.get_input_embeddings().weight, lm.get_output_embeddings().weight
    common = torch.sin(torch.arange(embeddings.shape[1]) * 1.7)
    common = (common - common.mean()) * embeddings.std()
    embeddings += 1.5 * common
    words = torch.randint(0, len(embeddings), (4, 16), generator=torch.Generator().manual_seed(0))
    row, low, high = head[token].clone(), 0.0, 50.0
    for _ in range(20):
        middle = (low + high) / 2
        head[token] = row + middle * common
        drawn = lm(words, use_cache=False).logits.softmax(-1)[:, :, token].mean()
        low, high = (middle, high) if drawn < chance else (low, middle)


def _set_generation(
    lm: "PreTrainedModel", tokenizer: "PreTrainedTokenizerFast", stops: tuple[str, ...], generation: str
) -> None:
    wanted = lm.generation_config
    wanted.bos_token_id, wanted.pad_token_id = tokenizer.bos_token_id, tokenizer.pad_token_id
    ids = [tokenizer.convert_tokens_to_ids(one) for one in stops]
    wanted.eos_token_id = ids if len(ids) > 1 else ids[0]
    if generation == "published":
        wanted.do_sample, wanted.temperature, wanted.top_p, wanted.top_k = True, 0.6, 0.95, 20


def _write_generation(folder: Path, tokenizer: "PreTrainedTokenizerFast", generation: str) -> None:
    """Write generation_config.json, also with faults that transformers refuses to save."""
    path = folder / "generation_config.json"
    entries = json.loads(path.read_text())
    # Published files lack this entry; with it transformers would derive the settings from config.json.
    entries.pop("_from_model_config", None)
    match generation:
        case "absent":
            path.unlink()
            return
        case "no_eos":
            entries.pop("eos_token_id")
        case "greedy_with_temperature":
            entries |= {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "top_k": 20}
    path.write_text(json.dumps(entries, indent=2))


def _as_pickle(folder: Path, lm: "PreTrainedModel") -> None:
    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()


def _with_head(folder: Path, lm: "PreTrainedModel") -> None:
    path = folder / "model.safetensors"
    held = load_file(path)
    inner = "language_model." if any(name.startswith("language_model.") for name in held) else ""
    held.setdefault(f"{inner}lm_head.weight", lm.get_output_embeddings().weight.detach().clone())
    save_file(held, path, metadata={"format": "pt"})


def _bare(folder: Path, lm: "PreTrainedModel") -> None:
    path = folder / "model.safetensors"
    prefix = f"{lm.base_model_prefix}."
    save_file({name.removeprefix(prefix): tensor for name, tensor in load_file(path).items()}, path)


def _with_extras(folder: Path, lm: "PreTrainedModel") -> None:
    (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
    (folder / "original").mkdir(exist_ok=True)
    (folder / "original" / "params.json").write_text('{"dim": 32}')
    save_file({"tok_embeddings.weight": torch.zeros(4, 4)}, folder / "consolidated.safetensors")


def _as_version_4(folder: Path, lm: "PreTrainedModel") -> None:
    path = folder / "config.json"
    entries = json.loads(path.read_text())
    entries["torch_dtype"] = entries.pop("dtype")
    rope = entries.pop("rope_parameters", None) or {}
    if "rope_theta" in rope:
        entries["rope_theta"] = rope.pop("rope_theta")
        entries["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
    entries["transformers_version"] = "4.51.0"
    path.write_text(json.dumps(entries, indent=2))
    _tokenizer_as_version_4(folder)


def _tokenizer_as_version_4(folder: Path) -> None:
    path = folder / "tokenizer_config.json"
    entries, words = json.loads(path.read_text()), json.loads((folder / "tokenizer.json").read_text())
    added = [(str(one["id"]), one) for one in words["added_tokens"]]
    entries["added_tokens_decoder"] = {number: {k: v for k, v in one.items() if k != "id"} for number, one in added}
    entries["tokenizer_class"] = "PreTrainedTokenizerFast"
    template = folder / "chat_template.jinja"
    if template.exists():
        entries["chat_template"] = template.read_text(encoding="utf-8")
        template.unlink()
    named = {name: token for name, token in entries.items() if name in ("bos_token", "eos_token", "pad_token")}
    (folder / "special_tokens_map.json").write_text(json.dumps(named, indent=2))
    entries.pop("backend", None)
    path.write_text(json.dumps(entries, indent=2))


_ARRANGE: dict[str, Callable[[Path, "PreTrainedModel"], None]] = {
    "bin": _as_pickle,
    "head_in_file": _with_head,
    "bare_names": _bare,
    "extras": _with_extras,
    "version_4": _as_version_4,
}
