"""Models are read from Hugging Face folders or hub names, in float32, and written as such folders."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from streamppo import durable
from streamppo.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


class CriticStart(NamedTuple):
    """A critic's own transformer, and the weights of its value head where its model has a score head."""

    transformer: Any = None
    head_1D: Tensor | None = None


def read(path: str | Path, attention: str, kind: str = "AutoModelForCausalLM", *, weights: bool = True) -> Any:
    """The model at `path`; without `weights` its modules alone, for which config.json is enough.

    Raises `ModelError` if it cannot be loaded.
    """
    import transformers

    transformers.utils.logging.disable_progress_bar()
    factory, options = getattr(transformers, kind), {"dtype": torch.float32, "attn_implementation": attention}
    try:
        if weights:
            return factory.from_pretrained(str(path), **options)
        return factory.from_config(settings(path), **options).eval()
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        raise ModelError(f"the model {str(path)!r} cannot be loaded: {error}") from error


def write(lm: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", folder: Path) -> None:
    """Put model and tokenizer at `folder`, which exists only when it is complete.

    Raises `ModelError` if the disk refuses.
    """
    aside = durable.aside(folder)
    with durable.naming(folder, ModelError):
        shutil.rmtree(aside, ignore_errors=True)
        try:
            lm.save_pretrained(aside)
        except SafetensorError as error:
            raise OSError(str(error)) from error
        tokenizer.save_pretrained(aside)
        for path in aside.iterdir():
            durable.flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        durable.settle(folder)


def export(weights: Mapping[str, Tensor], start: str, folder: Path, dtype: str) -> None:
    """Write the model and the tokenizer of `start` with other `weights`, by their Hugging Face names, at `folder`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    lm = AutoModelForCausalLM.from_pretrained(start, dtype=getattr(torch, dtype))
    parameters = dict(lm.named_parameters())
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
    write(lm, AutoTokenizer.from_pretrained(start), folder)


def critic(choice: str, policy: str | Path, attention: str, *, weights: bool = True) -> CriticStart:
    """The critic of a configuration: "head", a copy of the "policy", its architecture from "scratch", or a path.

    At a path may be a causal LM or a sequence classification model of one label, whose head becomes the value head.
    `weights` is that of `read`. Raises `ModelError` for a model that cannot be loaded, or has other labels or words.
    """
    match choice:
        case "head":
            return CriticStart()
        case "policy":
            return CriticStart(read(policy, attention, weights=weights).base_model)
        case "scratch":
            return CriticStart(read(policy, attention, "AutoModel", weights=False))
        case path:
            start = _at(path, attention, weights)
    own, wanted = start.transformer.config.vocab_size, settings(policy).vocab_size
    if own < wanted:
        raise ModelError(f"the critic {path!r} knows {own} tokens, and the policy writes {wanted}")
    return start


def _at(path: str, attention: str, weights: bool) -> CriticStart:
    names = settings(path).architectures or []
    if not any(name.endswith("ForSequenceClassification") for name in names):
        return CriticStart(read(path, attention, weights=weights).base_model)
    model = read(path, attention, "AutoModelForSequenceClassification", weights=weights)
    if model.num_labels != 1:
        raise ModelError(f"the critic {path!r} has {model.num_labels} labels: a value is one number")
    if not hasattr(model, "score"):
        raise ModelError(f"the critic {path!r} has no head named 'score', as decoder models have")
    return CriticStart(model.base_model, model.score.weight.detach())


def settings(path: str | Path) -> "PretrainedConfig":
    """The model's configuration. Raises `ModelError` if there is none."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(str(path))
    except (OSError, ValueError) as error:
        raise ModelError(f"the model {str(path)!r} cannot be loaded: {error}") from error
