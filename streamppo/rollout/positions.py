"""The places in a row that a model has positions for, and those that an engine computes as transformers does.

default, linear, llama3, yarn   the same at every place
dynamic                         the same within max_position_embeddings; SGLang scales it at every length
longrope                        the same within original_max_position_embeddings: behind, one long row changes others
a sliding window                a row that is no longer than it sees all of itself
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from streamppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

FULL = ("llama",)
"""Values of model_type without sliding windows, whatever their settings have."""
SLIDING = (
    "afmoe",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma3n_text",
    "gemma4_text",
    "gpt_oss",
    "olmo3",
)
"""Values of model_type whose sliding windows SGLang 0.5.21 computes; in others, such as mistral, it sees whole rows."""


def longest(hf_config: "PreTrainedConfig", otherwise: int) -> int:
    """Tokens that a row may have, prompt and completion; `otherwise` of a model without a bound."""
    text_config = hf_config.get_text_config()
    context = getattr(text_config, "max_position_embeddings", None) or otherwise
    for rope in _ropes(hf_config):
        if rope.get("rope_type") == "longrope":
            context = min(context, rope.get("original_max_position_embeddings") or context)
    return context


def window(hf_config: "PreTrainedConfig") -> int | None:
    """The tokens that a layer with a sliding window looks back on; None if none has one shorter than the context."""
    text_config = hf_config.get_text_config()
    layers = getattr(text_config, "layer_types", None)
    # A family without sliding windows may have one in its settings, which nobody looks at.
    slides = "sliding_attention" in layers if layers is not None else text_config.model_type not in FULL
    width = getattr(text_config, "sliding_window", None) if slides else None
    return None if width is None or width >= longest(hf_config, width) else width


def embedded_limit(hf_config: "PreTrainedConfig", longest_row: int) -> int:
    """Tokens that a row of the embedded engine may have: it sees all of it, and so may no layer look back on less.

    Raises `ModelError` if the configuration's `longest_row` has more than that.
    """
    context, width = longest(hf_config, longest_row), window(hf_config)
    if width is None:
        return context
    if width < min(context, longest_row):
        raise ModelError(
            f"layers look back on {width} tokens, and the embedded engine on all of up to {longest_row}: keep prompt "
            f"and completion within {width}, or use another rollout.engine"
        )
    return min(context, width)


def refusal(hf_config: "PreTrainedConfig", longest_row: int) -> str:
    """Say what SGLang would compute otherwise than transformers in rows of so many tokens; empty if nothing."""
    kind, width = hf_config.get_text_config().model_type, window(hf_config)
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(hf_config)):
        return (
            "the model's rope type is 'dynamic', which SGLang scales in rows of every length, and transformers in "
            "rows beyond max_position_embeddings alone: log-probs would differ; use the embedded engine"
        )
    for rope in _ropes(hf_config):
        if rope.get("rope_type") == "yarn" and not _scales_alike(rope):
            return (
                f"the model's rope type is 'yarn' with attention_factor {rope.get('attention_factor')} and attn_factor "
                f"{rope.get('attn_factor')}: transformers reads the former alone, and SGLang the latter; use the "
                "embedded engine"
            )
    if width is not None and width < longest_row and kind not in SLIDING:
        return (
            f"layers of a {kind} look back on {width} tokens, and in SGLang on all of up to {longest_row}: log-probs "
            f"would differ; keep prompt and completion within {width}"
        )
    return ""


def check(hf_config: "PreTrainedConfig", longest_row: int) -> None:
    """Raise `ModelError` for what SGLang would compute otherwise than transformers."""
    if refused := refusal(hf_config, longest_row):
        raise ModelError(refused)


def _scales_alike(rope: Mapping[str, Any]) -> bool:
    """Compare the scale of yarn's attention: in SGLang the usual one times attn_factor, else attention_factor."""
    told, times = rope.get("attention_factor"), rope.get("attn_factor") or 1.0
    factor = rope.get("factor") or 1.0
    usual = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    return math.isclose(usual * times, usual if told is None else told, rel_tol=1e-6)


def _ropes(hf_config: "PreTrainedConfig") -> Iterator[Mapping[str, Any]]:
    """The parameters of rotary embeddings; some models have others for each kind of layer."""
    rope = getattr(hf_config.get_text_config(), "rope_parameters", None) or {}
    yield rope
    yield from (one for one in rope.values() if isinstance(one, Mapping))
