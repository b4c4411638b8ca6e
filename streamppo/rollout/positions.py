"""The longest row of a model, and the longest row that an engine computes like transformers.

default, linear, llama3, yarn   equal at every position
dynamic                         equal within max_position_embeddings; SGLang scales at every length
longrope                        equal within original_max_position_embeddings; beyond, one long row changes the others
sliding window                  equal within the window; beyond, SGLang has no window for some models
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FULL = ("llama",)
"""Model types without sliding windows, even if their configurations set one."""
SLIDING = ("afmoe", "exaone4", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "gpt_oss", "olmo3")
"""Model types whose sliding windows SGLang 0.5.21 applies. In others, such as mistral, SGLang attends to whole rows."""


def longest(hf_config: "PreTrainedConfig", default: int) -> int:
    """Return the maximum number of tokens in a row (prompt and completion); `default` if the model has no bound."""
    text_config = hf_config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or default
    for rope in _ropes(hf_config):
        if rope.get("rope_type") == "longrope":
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return context


def window(hf_config: "PreTrainedConfig") -> int | None:
    """Return the width of the sliding window in tokens; None if no layer has one shorter than the context."""
    text_config = hf_config.get_text_config()
    layers = getattr(text_config, "layer_types", None)
    # Some families have the setting `sliding_window` and do not use it.
    slides = "sliding_attention" in layers if layers is not None else text_config.model_type not in FULL
    width = getattr(text_config, "sliding_window", None) if slides else None
    return None if width is None or width >= longest(hf_config, width) else width


def refusal(hf_config: "PreTrainedConfig", longest_row: int) -> str:
    """Return what SGLang computes differently from transformers in rows of `longest_row` tokens; "" if nothing."""
    kind, width = hf_config.get_text_config().model_type, window(hf_config)
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(hf_config)):
        return (
            "the model's rope type is 'dynamic', which SGLang scales in rows of every length, and transformers "
            "only in rows beyond max_position_embeddings: log-probs would differ; use the embedded engine"
        )
    for rope in _ropes(hf_config):
        if rope.get("rope_type") == "yarn" and not _scales_alike(rope):
            return (
                f"the model's rope type is 'yarn' with attention_factor {rope.get('attention_factor')} and attn_factor "
                f"{rope.get('attn_factor')}: transformers reads only the former, and SGLang the latter; use the "
                "embedded engine"
            )
    if width is not None and width < longest_row and kind not in SLIDING:
        return (
            f"layers of a {kind} attend to {width} tokens, but in SGLang to all of up to {longest_row}: log-probs "
            f"would differ; keep prompt and completion within {width}"
        )
    return ""


def _scales_alike(rope: Mapping[str, Any]) -> bool:
    """True if yarn's attention scale in SGLang, default * attn_factor, equals transformers', attention_factor."""
    attention_factor, multiplier = rope.get("attention_factor"), rope.get("attn_factor") or 1.0
    factor = rope.get("factor") or 1.0
    default = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return math.isclose(default * multiplier, default if attention_factor is None else attention_factor, rel_tol=1e-6)


def _ropes(hf_config: "PreTrainedConfig") -> Iterator[Mapping[str, Any]]:
    """Yield the parameters of rotary embeddings; some models have a set for each kind of layer."""
    rope = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    yield rope
    yield from (parameters for parameters in rope.values() if isinstance(parameters, Mapping))
