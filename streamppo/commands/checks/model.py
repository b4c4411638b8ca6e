"""Checks of the model's folder, its tokenizer and the critic."""

from pathlib import Path
from typing import NamedTuple

from transformers import AutoConfig, PretrainedConfig

from streamppo.commands.checks.finding import Finding, Findings, first_line
from streamppo.config.algorithm import Critic
from streamppo.config.sections import BUILTIN, Config
from streamppo.errors import JournalError, TaskError
from streamppo.learner import tiny
from streamppo.queue import archive
from streamppo.tasks.tokenizer import Tokenizer

OWN_CRITICS = ("head", "policy", "scratch")
"""Values of critic.model that name no folder."""


class Loaded(NamedTuple):
    """Configuration and tokenizer of the model, as far as they are on this machine."""

    hf_config: PretrainedConfig | None = None
    tokenizer: Tokenizer | None = None


def load(config: Config) -> tuple[Loaded, list[Finding]]:
    """Read the model's configuration and its tokenizer, without weights."""
    if config.model.path == BUILTIN:
        made = Finding("model", "ok", f"{BUILTIN} is made when the run starts")
        return Loaded(tiny.settings(config.model)), [made]
    folder, finding = find(config.model.path, "model")
    if folder is None:
        return Loaded(), [finding]
    try:
        hf_config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        return Loaded(), [finding, Finding("model", "error", first_line(error))]
    try:
        tokenizer = Tokenizer(folder)
    except (OSError, ValueError, TaskError) as error:
        return Loaded(hf_config), [finding, Finding("model", "error", first_line(error))]
    return Loaded(hf_config, tokenizer), [finding, _vocabulary(tokenizer, hf_config)]


def find(path: str, subject: str) -> tuple[str | None, Finding]:
    """Find a model's folder on this machine, or in the hub's cache."""
    from huggingface_hub import snapshot_download

    if Path(path).is_dir():
        return path, Finding(subject, "ok", path)
    try:
        cached = snapshot_download(path, local_files_only=True)
    except (OSError, ValueError):
        return None, Finding(subject, "not here", f"{path!r} is no folder here, and not in the hub's cache")
    return cached, Finding(subject, "ok", f"{path}, in the hub's cache")


def _vocabulary(tokenizer: Tokenizer, hf_config: PretrainedConfig) -> Finding:
    written, known = tokenizer.vocabulary, hf_config.get_text_config().vocab_size
    if written > known:
        return Finding("tokenizer", "error", f"it writes {written:,} tokens, and the model knows {known:,}")
    return Finding("tokenizer", "ok", f"{written:,} tokens")


def critic(critic: Critic) -> Findings:
    """Check the critic's own model, and the run that it learns from before it begins."""
    if critic.model not in OWN_CRITICS:
        yield find(critic.model, "critic")[1]
    if critic.pretrain:
        yield _pretraining(critic.pretrain)


def _pretraining(run: str) -> Finding:
    if not Path(run).is_dir():
        return Finding("critic", "not here", f"{run!r}, whose batches are to teach it, is no folder here")
    try:
        batches = len(archive.open(Path(run)).versions())
    except JournalError as error:
        return Finding("critic", "error", str(error))
    if not batches:
        return Finding("critic", "error", f"{run} has no archived batch to teach it")
    return Finding("critic", "ok", f"learns from the {batches} batches of {run}")
