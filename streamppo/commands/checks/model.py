"""Checks models with transformers: settings, tokenizer, ends of completions, files, export. Loads no weights."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from transformers import PretrainedConfig

from streamppo.commands.checks.finding import Finding, Findings, first_line
from streamppo.commands.checks.folder import find
from streamppo.config.algorithm import CRITICS
from streamppo.config.model import BUILTIN
from streamppo.config.rollout import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ModelError, TaskError
from streamppo.learner.model import hf_files, tiny
from streamppo.rollout import positions
from streamppo.rollout.embedded import decoder
from streamppo.rollout.weight_checks import Architecture
from streamppo.tasks import stop
from streamppo.tasks.tokenizer import SPECIALS, Tokenizer
from streamppo.tasks.warmup_data import Lesson
from streamppo.types import Message
from streamppo.weights.models import classes, fit, headers
from streamppo.weights.models.classes import Kind
from streamppo.weights.models.settings import settings

SHOWN = 3
"""Maximum number of tokens, or of strings of rollout.stop, that a note lists."""
NO_TOKEN = -1
"""A number that no token has. `observation` gets it as the last token of a turn that lacks its end token."""
READ_MIB = 2048
"""Weights up to this size are checked for NaN and infinity. Larger weights are checked when they are loaded."""
REMEDY = "load it with transformers' AutoModelForCausalLM, and save that with save_pretrained beside its tokenizer"
"""Advice for weights whose names differ from the names in transformers' model."""


class ModelFiles(NamedTuple):
    """Settings and tokenizer of the model; None if they are not on this machine."""

    hf_config: PretrainedConfig | None = None
    tokenizer: Tokenizer | None = None


def load(config: Config, lesson: Lesson | None) -> tuple[ModelFiles, list[Finding]]:
    """Read the model's settings and tokenizer. The settings of builtin:tiny follow from its warm-up data `lesson`."""
    if lesson is not None:
        return ModelFiles(tiny.settings(config.model, SPECIALS + len(lesson.alphabet))), []
    folder, _ = find(config.model.path, "model")
    if folder is None:
        return ModelFiles(), []
    try:
        hf_config = settings(folder)
    except ModelError as error:
        return ModelFiles(), [Finding("model", "error", first_line(error))]
    try:
        tokenizer = Tokenizer(folder, config.model.clock)
    except (OSError, ValueError, TaskError) as error:
        return ModelFiles(hf_config), [Finding("model", "error", first_line(error))]
    return ModelFiles(hf_config, tokenizer), [_vocabulary(tokenizer, hf_config), *_text_model(hf_config)]


def _text_model(hf_config: PretrainedConfig) -> Findings:
    made = classes.causal_class(hf_config)
    if made is not None and made is not classes.causal_class(hf_config, whole=True):
        text = "it also reads pictures or sounds: its text model is trained, and an export has the other parts "
        yield Finding("model", "note", f"{text}unchanged")


def _vocabulary(tokenizer: Tokenizer, hf_config: PretrainedConfig) -> Finding:
    count, model_count = tokenizer.vocabulary, hf_config.get_text_config().vocab_size
    beyond = tokenizer.tokens_beyond(model_count)
    if beyond and all(map(tokenizer.is_spare, beyond)):
        names = ", ".join(beyond[:SHOWN])
        text = f"{count:,} tokens; the model has {model_count:,}, without {names}: a prompt with one of these fails"
        return Finding("tokenizer", "note", text)
    if beyond:
        return Finding("tokenizer", "error", f"the tokenizer has {count:,} tokens, but the model only {model_count:,}")
    return Finding("tokenizer", "ok", f"{count:,} tokens")


def ends(config: Config, hf_config: PretrainedConfig, tokenizer: Tokenizer) -> Findings:
    """Report the tokens and strings that end a completion, and the rows of the vocabulary that are never sampled."""
    folder, _ = find(config.model.path, "model")
    try:
        ending = stop.read(folder or config.model.path, hf_config, tokenizer.hf, config.rollout.stop)
    except ModelError as error:
        yield Finding("stop", "error", str(error))
        return
    if ending.ids or ending.strings:
        yield Finding("stop", "ok", f"completions end at {ending.describe(tokenizer.name)}")
    else:
        text = "only its length ends a completion: name tokens or strings in rollout.stop"
        yield Finding("stop", "note", text)
    yield from _ordinary_ends(ending, tokenizer)
    yield from _open_turn(ending, tokenizer)
    # These strings look like names of tokens.
    named = (string for string in ending.strings if string.startswith("<|") and string.endswith("|>"))
    for string in islice(named, SHOWN):
        text = f"rollout.stop has {string!r}, which is no token of the tokenizer: a completion ends with this text"
        yield Finding("stop", "note", text)
    if unknown := tokenizer.unknown_ids(hf_config.get_text_config().vocab_size):
        text = f"{len(unknown):,} rows of the model's vocabulary are not tokens of the tokenizer: never sampled"
        yield Finding("vocabulary", "ok", text)


def _ordinary_ends(ending: stop.Stop, tokenizer: Tokenizer) -> Findings:
    """Note tokens in the model's files that end a completion, but are tokens of ordinary text."""
    special = {*tokenizer.hf.all_special_ids, *tokenizer.hf.get_added_vocab().values()}
    for token in sorted(ending.ids - special):
        if sources := [place for place in ending.origins[token] if place in stop.FILES]:
            text = f"{tokenizer.name(token)!r} ({token}), a token of ordinary text, ends completions: correct "
            text += f"eos_token_id in the {' and the '.join(sources)} if they end too early"
            yield Finding("stop", "note", text)


def _open_turn(ending: stop.Stop, tokenizer: Tokenizer) -> Findings:
    """If the chat template ends a turn without a token (GLM's), note if the next turn's first token is not a stop."""
    if not tokenizer.hf.chat_template or tokenizer.turn_end() is not None:
        return
    try:
        first = int(tokenizer.observation((Message(role="user", content="?"),), last=NO_TOKEN)[0])
        name = tokenizer.name(first)
    except TaskError:
        return
    if first not in ending.ids and name not in ending.strings:
        text = f"the chat template writes no token after an assistant's turn, and {name!r}, the first token of the "
        text += f"next turn, is not a stop: the policy writes the next message too; rollout.stop = [{name!r}] prevents "
        yield Finding("stop", "note", f"{text}that")


def longest_rows(config: Config, hf_config: PretrainedConfig) -> Findings:
    """Check that the engine computes the same positions as transformers in the longest rows."""
    longest = longest_row(config)
    if isinstance(config.rollout.engine, EmbeddedEngine):
        return
    if refusal := positions.refusal(hf_config, min(longest, positions.longest(hf_config, longest))):
        yield Finding("model", "error", refusal)


class NamedModel(NamedTuple):
    """A model in a configuration: the subject of findings, its path and class. With `body`, the head is not loaded."""

    subject: str
    path: str
    kind: Kind = "AutoModelForCausalLM"
    body: bool = False


def files(config: Config) -> Findings:
    """Compare the weights of every model on this machine with its config.json, and try an export of settings."""
    is_readable = True
    for model in _models(config):
        folder, _ = find(model.path, model.subject)
        if folder is not None and headers.has_weights(Path(folder)):
            finding = _weights(model, Path(folder))
            is_readable &= finding.state != "error"
            yield finding
    if config.model.path != BUILTIN and (folder := find(config.model.path, "model")[0]) is not None:
        yield from _export(folder)
        if is_readable and isinstance(config.rollout.engine, SGLangEngine):
            yield from _names(folder)
        if is_readable and isinstance(config.rollout.engine, EmbeddedEngine):
            yield from _embedded(folder, longest_row(config))


def _embedded(folder: str, longest: int) -> Findings:
    hf_config = settings(folder)
    if reason := decoder.refusal(hf_config, longest):
        yield Finding("engine", "error", f"{folder}: {reason}")
    elif not decoder.is_fused(hf_config, longest):
        text = f"transformers' modules compute this {hf_config.model_type}: a tiny one decodes at half the speed"
        yield Finding("engine", "ok", text)


def _models(config: Config) -> Iterator[NamedModel]:
    if config.model.path != BUILTIN:
        yield NamedModel("model", config.model.path)
    if (critic := config.algorithm.critic.model) not in CRITICS:
        yield NamedModel("critic", critic, body=True)
    if teacher := config.algorithm.teacher.model:
        yield NamedModel("teacher", teacher)
    for name, scorer in config.reward.models().items():
        yield NamedModel(f"reward {name}", scorer.path, "AutoModelForSequenceClassification")


def _weights(model: NamedModel, folder: Path) -> Finding:
    try:
        kind = hf_files.critic_kind(folder) if model.body else model.kind
        count = fit.check(folder, settings(folder), kind, body=model.body)
        mib = sum(file.stat().st_size for file in headers.weight_files(folder)) / 2**20
        name = fit.find_not_finite(folder) if mib <= READ_MIB else ""
    except ModelError as error:
        return Finding(model.subject, "error", str(error))
    if name:
        return Finding(model.subject, "error", f"{folder}: {name!r} has NaN or infinity, as after a run that diverged")
    values = "all numbers finite" if mib <= READ_MIB else "values are checked when they are loaded"
    return Finding(model.subject, "ok", f"{count} tensors with the names and shapes of config.json; {values}")


def _export(folder: str) -> Findings:
    try:
        notes = hf_files.try_export(folder)
    except ModelError as error:
        yield Finding("export", "error", f"the model's settings cannot be saved: {error}")
        return
    yield from (Finding("export", "note", note) for note in notes)
    if not notes:
        yield Finding("export", "ok", "settings, tokenizer and chat template are the same after an export")


def _names(folder: str) -> Findings:
    """Check that the policy's tensors have the names in the model's files, because SGLang expects the files' names."""
    try:
        Architecture(settings(folder)).check_names(folder)
    except ModelError as error:
        yield Finding("model", "error", f"{folder}: {error}: {REMEDY}")
