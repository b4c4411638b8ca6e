"""The transformers classes of models, and the text model of a model that also reads pictures or sounds.

    Qwen3_5ForConditionalGeneration          the whole model, as published
        model.visual          removed        an encoder of pictures; other models have `vision_tower` or `audio_tower`
        model.projector       frozen         some models have it beside their encoder
        model.language_model  trained        the decoder, which `base_model` returns
        lm_head               trained

Names of parameters are those of the whole model. An engine that serves the whole model loads them by these names, and
an export takes all other tensors from the model's files.
"""

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel

Kind: TypeAlias = Literal["AutoModel", "AutoModelForCausalLM", "AutoModelForSequenceClassification"]
"""What a model computes, by the transformers class that makes it: hidden states, logits, or scores of rows."""
AXES = 3
WIDTHS = ("head_dim", "qk_head_dim", "v_head_dim", "global_head_dim")
"""transformers' fields that may hold the width of a head."""
TEXT_ALONE = (
    "it also reads pictures or sounds, and its text model cannot be told apart: save the text model, with its "
    "tokenizer, as a separate folder"
)


def causal_class(config: "PretrainedConfig", *, whole: bool = False) -> "type[PreTrainedModel] | None":
    """Return the class of a causal LM; None if transformers has none. Without `whole` it has only the text model."""
    if is_multimodal(config):
        made = _mapped(config, "AutoModelForMultimodalLM")
        if made is not None and made.base_model_prefix and not config.is_encoder_decoder:
            return made if whole else _text_class(made)
    return _mapped(config, "AutoModelForCausalLM")


def is_multimodal(config: "PretrainedConfig") -> bool:
    """Return whether `config` is of a model with more parts than a text model."""
    return config.get_text_config() is not config


def model_class(config: "PretrainedConfig", kind: Kind, *, whole: bool = False) -> "type[PreTrainedModel]":
    """Return the class that makes a model of this `kind`. Raises ValueError if transformers has none."""
    if kind == "AutoModelForCausalLM":
        made = causal_class(config, whole=whole)
    else:
        made = _mapped(config.get_text_config() if kind == "AutoModel" else config, kind)
    if made is None:
        remedy = f": {TEXT_ALONE}" if is_multimodal(config) else ""
        raise ValueError(f"transformers has no {kind} of model_type {config.model_type!r}{remedy}")
    return made


def head_widths(text: "PretrainedConfig") -> list[int]:
    """Return the widths of the attention heads in `text`, which may differ for keys, values and layers; [] if unknown.

    Example: 192 for keys, of which 64 with positions, and 128 for values -> [64, 192, 128].
    """
    widths = [width for name in WIDTHS if (width := getattr(text, name, None))]
    if not widths and isinstance(heads := getattr(text, "num_attention_heads", None), int):
        return [text.hidden_size // heads]
    return widths


def fitting(made: "type[PreTrainedModel]", config: "PretrainedConfig") -> "PretrainedConfig":
    """Return the configuration that the class `made` takes: `config`, or the configuration of its text model."""
    text = config.get_text_config()
    return text if made.config_class is type(text) else config


def make(
    config: "PretrainedConfig", kind: Kind = "AutoModelForCausalLM", *, whole: bool = False, **options: object
) -> Any:
    """Make a model with random weights; `options` are those of transformers' `from_config`. Raises its errors."""
    made: Any = model_class(config, kind, whole=whole)
    model = made._from_config(fitting(made, config), **options)
    prepare(model)
    return model


def prepare(model: Any) -> None:
    """Prepare a new or loaded `model` for text: freeze its other parts, and give each text token one position.

    Some models have positions in time, height and width. With rows end to end, they find the rows only if these three
    come after the usual position.
    """
    for part in getattr(model, "other_parts", ()):
        part.requires_grad_(False)
    decoder = model.base_model
    if "mrope_section" in (getattr(decoder.config, "rope_parameters", None) or {}):
        decoder.register_forward_pre_hook(_repeat_positions, with_kwargs=True)


def _repeat_positions(decoder: object, arguments: object, named: Mapping[str, Any]) -> tuple[object, object]:
    positions_BL = named.get("position_ids")
    if positions_BL is not None and positions_BL.dim() == 2:
        named = {**named, "position_ids": positions_BL.expand(1 + AXES, *positions_BL.shape)}
    return arguments, named


def _mapped(config: "PretrainedConfig", auto: str) -> "type[PreTrainedModel] | None":
    import transformers

    mapping: Mapping[type, type[PreTrainedModel]] = getattr(transformers, auto)._model_mapping
    # `_model_mapping` is lazy: it imports a class when the class is accessed.
    return mapping[type(config)] if type(config) in mapping else None  # noqa: SIM401


@cache
def _text_class(whole: "type[PreTrainedModel]") -> "type[PreTrainedModel]":
    """Return a subclass of `whole` that deletes the encoders; its logits for text are those of `whole`."""
    from transformers import PreTrainedModel

    prefix, base = whole.base_model_prefix, cast("Any", whole)

    class TextModel(base):
        def __init__(self, config: "PretrainedConfig", *arguments: object, **named: object) -> None:
            super().__init__(config, *arguments, **named)
            body, decoder = getattr(self, prefix), self.base_model
            models = {name: part for name, part in body.named_children() if isinstance(part, PreTrainedModel)}
            self.encoders = [name for name, part in models.items() if decoder not in part.modules()]
            for name in self.encoders:
                delattr(body, name)

        @property
        def base_model(self) -> "nn.Module":
            return getattr(self, prefix).get_decoder()

        @property
        def other_parts(self) -> "list[nn.Module]":
            return [part for part in getattr(self, prefix).children() if self.base_model not in part.modules()]

    # transformers finds conversions of tensor names by the name of the class.
    TextModel.__name__, TextModel.__qualname__ = whole.__name__, whole.__qualname__
    TextModel.__module__ = whole.__module__
    return TextModel
