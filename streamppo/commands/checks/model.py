"""Checks of the model's configuration and tokenizer, as transformers reads them."""

from typing import NamedTuple

from transformers import PretrainedConfig

from streamppo.commands.checks.finding import Finding, first_line
from streamppo.commands.checks.folder import find
from streamppo.config.sections import Config
from streamppo.errors import ModelError, TaskError
from streamppo.learner.model import tiny
from streamppo.tasks.tokenizer import SPECIALS, Tokenizer
from streamppo.tasks.warmup_data import Lesson
from streamppo.weights.models.settings import settings

NAMED = 3
"""Tokens that a note names."""


class ModelFiles(NamedTuple):
    """Configuration and tokenizer of the model, as far as they are on this machine."""

    hf_config: PretrainedConfig | None = None
    tokenizer: Tokenizer | None = None


def load(config: Config, lesson: Lesson | None) -> tuple[ModelFiles, list[Finding]]:
    """Read the model's configuration and its tokenizer, without weights; for builtin:tiny from its warm-up data."""
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
    return ModelFiles(hf_config, tokenizer), [_vocabulary(tokenizer, hf_config)]


def _vocabulary(tokenizer: Tokenizer, hf_config: PretrainedConfig) -> Finding:
    written, known = tokenizer.vocabulary, hf_config.get_text_config().vocab_size
    beyond = tokenizer.beyond(known)
    if beyond and all(map(tokenizer.is_spare, beyond)):
        names = ", ".join(beyond[:NAMED])
        text = f"{written:,} tokens; the model knows {known:,}, without {names}: a prompt that spells one of them fails"
        return Finding("tokenizer", "note", text)
    if beyond:
        return Finding("tokenizer", "error", f"it writes {written:,} tokens, and the model knows {known:,}")
    return Finding("tokenizer", "ok", f"{written:,} tokens")
