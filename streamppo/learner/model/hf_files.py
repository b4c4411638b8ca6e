"""Reads models from Hugging Face folders or hub names in float32, and writes them as Hugging Face folders."""

import logging
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from streamppo import durable
from streamppo.config import file as configfile
from streamppo.config.sections import model_path
from streamppo.errors import ConfigError, ModelError, TaskError
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.weights.models import generation
from streamppo.weights.models import loading as models
from streamppo.weights.models import tokenizer as tokenizers
from streamppo.weights.models.classes import Kind
from streamppo.weights.models.settings import naming, settings

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)
PART = "5GB"
"""The size above which weights are split into several files with an index, as in published models."""


class CriticStart(NamedTuple):
    """A critic's separate transformer, and the weights of its value head if its model has a score head."""

    transformer: Any = None
    head_1D: Tensor | None = None


def read(
    path: str | Path,
    attention: str,
    kind: Kind = "AutoModelForCausalLM",
    *,
    weights: bool = True,
    body: bool = False,
    untied: bool = False,
) -> Any:
    """Read the model at `path`; without `weights` only its modules, for which config.json is enough.

    With `body` the files may lack all tensors that are not the transformer's. `untied` (see `settings`) has an effect
    only without `weights`. Raises `ModelError` if the model cannot be loaded or lacks a tensor.
    """
    if weights:
        return models.load(path, kind, attention=attention, body=body).model
    return models.empty(path, kind, attention=attention, untied=untied)


def write(
    lm: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase | None", folder: Path, start: str | None = None
) -> tuple[str, ...]:
    """Write a model and its tokenizer to `folder`, which appears only when it is complete.

    A generation_config.json that transformers refuses to write is left out. A tokenizer that transformers would change
    is copied from the model at `start`, and so are the tokenizer's files if `tokenizer` is None. Each of these cases
    has a sentence in the result. The settings of a multimodal model's processor are copied. Raises `ModelError` if a
    file cannot be written.
    """
    aside = durable.aside(folder)
    with durable.naming(folder, ModelError):
        shutil.rmtree(aside, ignore_errors=True)
        notes = _write_model(lm, aside)
        if tokenizer is not None:
            notes += [tokenizers.write(tokenizer, start, aside)]
        elif start is not None:
            notes += [tokenizers.copy(start, aside, "transformers does not read them")]
        if start is not None:
            tokenizers.copy_processor(start, aside)
        for path in aside.rglob("*"):
            durable.flush(path)
        shutil.rmtree(folder, ignore_errors=True)
        durable.settle(folder)
    return tuple(note for note in notes if note)


def _write_model(lm: "PreTrainedModel", folder: Path) -> list[str]:
    from transformers import GenerationConfig

    # The model's own code is not copied, so config.json must not name its class; transformers' class fits the files.
    vars(lm.config).pop("auto_map", None)
    for has_settings in (True, False):
        try:
            lm.save_pretrained(folder, max_shard_size=PART)
            return [] if has_settings else ["generation_config.json is left out: transformers does not save it"]
        except SafetensorError as error:
            raise OSError(str(error)) from error
        except ValueError:
            if not has_settings:
                raise
            lm.generation_config = GenerationConfig()
    raise AssertionError("the second try returns or raises")


def export(weights: Mapping[str, Tensor], start: str, folder: Path, dtype: str) -> tuple[str, ...]:
    """Write the model and the tokenizer of `start` to `folder`, with `weights` by their Hugging Face names.

    Returns a sentence about each setting or file, other than weights, that differs from `start`. Raises `ModelError`
    unless the names in `weights` are the model's; names of parameters that transformers does not train may be missing.
    """
    lm = models.load(start, dtype=getattr(torch, dtype), whole=True).model
    parameters: dict[str, Tensor] = dict(lm.named_parameters())
    missing = parameters.keys() - weights.keys()
    if missing:
        with torch.device("meta"):
            modules = dict(read(start, "eager", weights=False).named_parameters())
        missing = {name for name in missing if name in modules and modules[name].requires_grad}
    if differing := sorted(missing | (weights.keys() - parameters.keys())):
        raise ModelError(f"the weights do not fit the model {start!r}: {differing[0]!r} is in only one of them")
    with torch.no_grad():
        for name, tensor in weights.items():
            parameters[name].copy_(tensor)
    return (*generation.read_settings(start).notes, *write(lm, _tokenizer(start), folder, start))


def _tokenizer(start: str) -> "PreTrainedTokenizerBase | None":
    try:
        return tokenizers.load(start)
    except ModelError:
        return None


def try_export(path: str) -> tuple[str, ...]:
    """Try an export of the model at `path` without its weights; return what would differ. Raises `ModelError`."""
    from transformers import AutoConfig

    generation_settings, settings_of = generation.read_settings(path), settings(path)
    with tempfile.TemporaryDirectory() as folder, naming(path):
        settings_of.save_pretrained(folder)
        AutoConfig.from_pretrained(folder, trust_remote_code=False)
        generation_settings.config.save_pretrained(folder)
        note = tokenizers.write(tokenizers.load(path), path, Path(folder))
    return tuple(sentence for sentence in (*generation_settings.notes, note) if sentence)


def critic(choice: str, policy: str | Path, attention: str, *, weights: bool = True) -> CriticStart:
    """Read the separate transformer of a critic; `choice` is the field algorithm.critic.model.

    "head" has no transformer, "policy" copies the policy's, and "scratch" has random weights in the same architecture.
    A path leads to a causal LM, or to a sequence classification model of one label whose head becomes the value head.
    Raises `ModelError` for a model that cannot be loaded, that has more than one label or no `score` head, or that
    reads other tokens than the policy.
    """
    match choice:
        case "head":
            return CriticStart()
        case "policy":
            return CriticStart(read(policy, attention, weights=weights).base_model)
        case "scratch":
            return CriticStart(read(policy, attention, "AutoModel", weights=False))
        case path:
            if weights:
                _check_critic_tokens(path, policy)
            return _critic_at(path, attention, weights)


def _check_critic_tokens(path: str, policy: str | Path) -> None:
    try:
        check_tokens("critic", path, policy)
    except TaskError as error:
        log.warning(f"it is unknown whether the critic {path!r} reads the policy's tokens: {error}")


def check_tokens(role: str, path: str, policy: str | Path) -> None:
    """Raise `ModelError` unless the model at `path` gives every token of the model at `policy` the same number.

    `role` is the role of `path` in messages. Raises `TaskError` for a model without a tokenizer.
    """
    sizes = [settings(model).get_text_config().vocab_size for model in (path, policy)]
    if sizes[0] < sizes[1]:
        raise ModelError(
            f"the {role} {path!r} has {sizes[0]:,} tokens, and the policy may sample any of its {sizes[1]:,} tokens"
        )
    if difference := _difference(Tokenizer(policy).numbers(), Tokenizer(path).numbers(), "there"):
        raise ModelError(f"the {role} {path!r} must have the policy's tokenizer: {difference}")


def check_archived_tokens(run: str, policy: str | Path) -> None:
    """Raise `ModelError` if the model at `policy` numbers a token of an archived run differently.

    If the run's tokenizer cannot be read, only a warning is logged.
    """
    try:
        archived = Tokenizer(model_path(configfile.load(Path(run) / configfile.CONFIG), Path(run))).numbers()
    except (ConfigError, TaskError) as error:
        log.warning(f"it is unknown whether {run!r} was sampled with the policy's tokenizer: {error}")
        return
    if difference := _difference(archived, Tokenizer(policy).numbers(), "in the policy's"):
        raise ModelError(
            f"the critic cannot be trained on {run!r}, which was sampled with another tokenizer: {difference}; name a "
            "run of this model, or leave algorithm.critic.pretrain out"
        )


def _difference(expected: Mapping[str, int], tokens: Mapping[str, int], where: str) -> str:
    """Describe the first token of `expected` that has another number in `tokens`; "" if there is none."""
    differing = sorted(token for token, number in expected.items() if tokens.get(token) != number)
    if not differing:
        return ""
    token, count = differing[0], f"{len(differing)} of {len(expected)} tokens differ"
    return f"token {expected[token]}, {token!r}, is {tokens.get(token, 'unknown')} {where} ({count})"


def critic_kind(path: str | Path) -> Kind:
    """transformers' auto class for the critic at `path`. Raises `ModelError` if `path` has no configuration."""
    names = settings(path).architectures or []
    is_classifier = any(name.endswith("ForSequenceClassification") for name in names)
    return "AutoModelForSequenceClassification" if is_classifier else "AutoModelForCausalLM"


def _critic_at(path: str, attention: str, weights: bool) -> CriticStart:
    if (kind := critic_kind(path)) == "AutoModelForCausalLM":
        return CriticStart(read(path, attention, weights=weights, body=True).base_model)
    if not weights:
        return CriticStart(read(path, attention, kind, weights=False).base_model)
    loaded = models.load(path, kind, attention=attention, body=True)
    if loaded.model.num_labels != 1:
        raise ModelError(f"the critic {path!r} has {loaded.model.num_labels} labels: a value is one number")
    if not hasattr(loaded.model, "score"):
        raise ModelError(f"the critic {path!r} has no head named 'score', as decoder models have")
    head = None if "score.weight" in loaded.new else loaded.model.score.weight.detach()
    return CriticStart(loaded.model.base_model, head)
