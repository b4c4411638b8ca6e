"""Checks model folders by file names, first bytes and JSON settings, without torch and transformers."""

import json
from collections.abc import Mapping
from pathlib import Path

from streamppo import durable
from streamppo.commands.checks.finding import Finding, Findings, contacted_later, first_line, where_it_was
from streamppo.config.algorithm import CRITICS, Critic
from streamppo.config.model import BUILTIN
from streamppo.config.sections import Config
from streamppo.config.teacher import Teacher
from streamppo.errors import JournalError, ModelError
from streamppo.weights.models import folder as folders
from streamppo.weights.models import headers

EAGER = ("bloom", "gpt_neo", "mpt", "openai-gpt")
"""Values of model_type whose models transformers computes only with eager attention."""
CAP = "attn_logit_softcapping"
"""The field of config.json with the bound (soft cap) of attention logits."""
NEUTRAL: Mapping[str, object] = {
    **dict.fromkeys(("temperature", "top_p", "typical_p", "repetition_penalty", "guidance_scale", "num_beams"), 1),
    **dict.fromkeys(("top_k", "min_p", "epsilon_cutoff", "eta_cutoff", "presence_penalty", "frequency_penalty"), 0),
    **dict.fromkeys(("no_repeat_ngram_size", "min_length", "min_new_tokens", "penalty_alpha"), 0),
    **dict.fromkeys(("top_h", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty"), None),
    **{"bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [], "stop_strings": []},
    **{"encoder_repetition_penalty": 1, "sequence_bias": {}},
}
"""Sampling settings of transformers, each with the value that has no effect."""
NO_VALUES: tuple[object, ...] = (None, [], {}, "")


def model(config: Config) -> Findings:
    """Check that the model exists, has weights, and supports the configured attention."""
    path = config.model.path
    if path == BUILTIN:
        yield Finding("model", "ok", f"{BUILTIN} is made when the run starts")
        return
    folder, finding = find(path, "model")
    yield finding
    if folder is not None:
        problems = list(_content(Path(folder), config))
        yield from problems or weights(path, "model")


def find(path: str, subject: str) -> tuple[str | None, Finding]:
    """Return the folder of a model on this machine or in the hub's cache (else None), and a finding about the model."""
    if Path(path).is_dir():
        return path, Finding(subject, "ok", path)
    if looks_like_path(path):
        return None, Finding(subject, "not here", f"{path!r} is not a folder here{where_it_was(path)}")
    # huggingface_hub is slow to import, and most models are folders.
    from huggingface_hub import constants, snapshot_download

    try:
        cached = snapshot_download(path, local_files_only=True)
    except (OSError, ValueError):
        text = f"{path!r} is not a folder here{where_it_was(path)}, and not in the hub's cache"
        return None, Finding(subject, "not here" if constants.HF_HUB_OFFLINE else "later", text)
    return cached, Finding(subject, "ok", f"{path}, in the hub's cache")


def looks_like_path(name: str) -> bool:
    """True if `name` cannot be a hub name, which has at most one slash and begins with a letter or digit."""
    return name.count("/") > 1 or not name[:1].isalnum() or name.endswith("/")


def _content(folder: Path, config: Config) -> Findings:
    try:
        content = folders.kind(folder)
    except ModelError as error:
        yield Finding("model", "error", str(error))
        return
    kind = content.get("model_type")
    if kind in EAGER and config.model.attention not in ("auto", "eager"):
        text = f"{folder} is a {kind}, which transformers computes only with eager attention: "
        yield Finding("model", "error", f'{text}model.attention = "auto" or "eager"')
    elif content.get(CAP) and config.model.attention == "sdpa":
        text = f"{folder} caps its attention scores ({CAP}), and SDPA does not: "
        yield Finding("model", "error", f'{text}model.attention = "auto" or "eager"')


def weights(path: str, subject: str) -> Findings:
    """Check the first bytes of a model's weights, if they are on this machine."""
    folder, _ = find(path, subject)
    if folder is None:
        return
    if not Path(path).is_dir() and not headers.has_weights(Path(folder)):
        text = f"{path}: its weights are not in the hub's cache: the start of a run downloads them"
        yield Finding(subject, "later", text)
        return
    try:
        folders.check(Path(folder))
    except ModelError as error:
        yield Finding(subject, "error", str(error))


def critic(critic: Critic) -> Findings:
    """Check the critic's model if it is a folder or hub name, and the run that `pretrain` names."""
    if critic.model not in CRITICS:
        yield find(critic.model, "critic")[1]
        yield from weights(critic.model, "critic")
    if critic.pretrain:
        yield _pretraining(critic.pretrain)


def teacher(teacher: Teacher) -> Findings:
    """Check that the teacher exists. A run compares the teacher's tokenizer with the policy's when it starts."""
    if teacher.model:
        yield find(teacher.model, "teacher")[1]
        yield from weights(teacher.model, "teacher")
    if teacher.url:
        yield contacted_later("teacher", teacher.url, teacher.key_env)


def _pretraining(run: str) -> Finding:
    if not Path(run).is_dir():
        text = f"pretrain: {run!r} is not a folder here{where_it_was(run)}"
        return Finding("critic", "not here", text)
    # zarr is slow to import, and few runs pretrain their critic.
    from streamppo.queue.store import archive

    try:
        batches = len(archive.open(Path(run)).versions())
    except JournalError as error:
        return Finding("critic", "error", str(error))
    if not batches:
        return Finding("critic", "error", f"pretrain: {run} has no archived batch")
    return Finding("critic", "ok", f"learns from the {batches} batches of {run}")


def ignored_sampling(config: Config) -> Findings:
    """Note the settings in generation_config.json that sampling ignores."""
    if config.model.path == BUILTIN:
        return
    folder, _ = find(config.model.path, "model")
    try:
        settings = {} if folder is None else _generation_config(Path(folder) / "generation_config.json")
    except (OSError, ValueError, RecursionError) as error:
        text = f"generation_config.json cannot be read, so its ends of completions are ignored: {first_line(error)}"
        yield Finding("sampling", "note", text)
        return
    rollout = config.rollout
    sampled = dict(NEUTRAL) | {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}
    ignored = {name: value for name, value in settings.items() if name in sampled and not _equal(value, sampled[name])}
    if ignored:
        values = ", ".join(f"{name} {json.dumps(value)}"[:60] for name, value in ignored.items())
        text = f"the model's generation_config.json has {values}, which sampling ignores: tokens are sampled with "
        text += f"[rollout] temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k} only, "
        yield Finding("sampling", "note", f"{text}because the learner's log-probs are of that distribution")


def _equal(value: object, wanted: object) -> bool:
    is_neutral = value in NO_VALUES and wanted in (*NO_VALUES, 0, 1)
    return value == wanted or is_neutral or (value is False and wanted is None)


def _generation_config(path: Path) -> Mapping[str, object]:
    """Return the file's settings, {} without a file. Raises OSError, ValueError or RecursionError if it is damaged."""
    try:
        settings: object = json.loads(durable.read(path))
    except FileNotFoundError:
        return {}
    if not isinstance(settings, Mapping):
        raise ValueError("it is not a JSON object")
    return settings
