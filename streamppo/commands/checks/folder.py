"""Checks of model folders by the names and first bytes of their files and by config.json: no torch, no transformers."""

import os
from pathlib import Path

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.algorithm import Critic
from streamppo.config.model import BUILTIN
from streamppo.config.rollout import FAMILIES, EmbeddedEngine
from streamppo.config.sections import Config
from streamppo.config.teacher import Teacher
from streamppo.errors import CheckpointError, JournalError, ModelError
from streamppo.weights.models import folder as folders
from streamppo.weights.models import headers

OWN_CRITICS = ("head", "policy", "scratch")
"""Values of critic.model that are not folders."""
EAGER = ("bloom", "gpt_neo", "mpt", "openai-gpt")
"""Values of model_type for which transformers has only eager attention."""
CAP = "attn_logit_softcapping"
"""The entry of config.json that bounds scores of attention."""


def model(config: Config) -> Findings:
    """Check that the model exists, has its weights, and is of a family that learner and engine compute."""
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
    """Find a model's folder on this machine, or in the hub's cache."""
    if Path(path).is_dir():
        return path, Finding(subject, "ok", path)
    if looks_like_path(path):
        return None, Finding(subject, "not here", f"{path!r} is not a folder here (looked at {Path(path).absolute()})")
    # Slow to import, and most models are folders.
    from huggingface_hub import constants, snapshot_download

    try:
        cached = snapshot_download(path, local_files_only=True)
    except (OSError, ValueError):
        text = f"{path!r} is not a folder here (looked at {Path(path).absolute()}), and not in the hub's cache"
        return None, Finding(subject, "not here" if constants.HF_HUB_OFFLINE else "later", text)
    return cached, Finding(subject, "ok", f"{path}, in the hub's cache")


def copies(config: Config) -> Findings:
    """Check that checkpoint.remote takes a file, gives it back and deletes it."""
    if not (address := config.checkpoint.remote):
        return
    # Slow to import, and most runs have none.
    from streamppo.weights.store import Store

    try:
        Store(address).prove()
    except CheckpointError as error:
        yield Finding("copies", "error", f"checkpoint.remote: {error}")
    else:
        yield Finding("copies", "ok", f"checkpoints are copied to {address}")


def looks_like_path(name: str) -> bool:
    """True for a name that the hub cannot have: its names have at most one slash, and begin with a letter or digit."""
    return name.count("/") > 1 or not name[:1].isalnum() or name.endswith("/")


def _content(folder: Path, config: Config) -> Findings:
    try:
        content = folders.kind(folder)
    except ModelError as error:
        yield Finding("model", "error", str(error))
        return
    kind = content.get("model_type")
    if isinstance(config.rollout.engine, EmbeddedEngine) and kind not in FAMILIES:
        text = f"{folder} is a {kind}; the embedded engine runs {', '.join(FAMILIES)}: use another rollout.engine"
        yield Finding("model", "error", text)
    elif kind in EAGER and config.model.attention not in ("auto", "eager"):
        text = f"{folder} is a {kind}, which transformers computes only with eager attention: "
        yield Finding("model", "error", f'{text}model.attention = "auto" or "eager"')
    elif content.get(CAP) and config.model.attention == "sdpa":
        text = f"{folder} caps the scores of its attention ({CAP}), which SDPA leaves out: "
        yield Finding("model", "error", f'{text}model.attention = "auto" or "eager"')


def weights(path: str, subject: str) -> Findings:
    """Check the first bytes of a model's files. Files of a hub name may be loaded when the run starts."""
    folder, _ = find(path, subject)
    if folder is None:
        return
    if not Path(path).is_dir() and not headers.has_weights(Path(folder)):
        yield Finding(
            subject, "later", f"{path}: its weights are not in the hub's cache; they come when the run starts"
        )
        return
    try:
        folders.check(Path(folder))
    except ModelError as error:
        yield Finding(subject, "error", str(error))


def critic(critic: Critic) -> Findings:
    """Check the critic's own model, and the run of `pretrain`."""
    if critic.model not in OWN_CRITICS:
        yield find(critic.model, "critic")[1]
        yield from weights(critic.model, "critic")
    if critic.pretrain:
        yield _pretraining(critic.pretrain)


def teacher(teacher: Teacher) -> Findings:
    """Check that the teacher exists; its tokenizer is compared with the policy's when the run starts."""
    if teacher.model:
        yield find(teacher.model, "teacher")[1]
        yield from weights(teacher.model, "teacher")
    if teacher.url:
        missing = teacher.key_env and not os.environ.get(teacher.key_env)
        key = f"; the environment has no {teacher.key_env} here" if missing else ""
        yield Finding("teacher", "later", f"{teacher.url} is contacted when the run starts{key}")


def _pretraining(run: str) -> Finding:
    if not Path(run).is_dir():
        text = f"{run!r}, whose batches are to train it, is not a folder here (looked at {Path(run).absolute()})"
        return Finding("critic", "not here", text)
    # zarr is slow to import, and few runs pretrain their critic on another run.
    from streamppo.queue.store import archive

    try:
        batches = len(archive.open(Path(run)).versions())
    except JournalError as error:
        return Finding("critic", "error", str(error))
    if not batches:
        return Finding("critic", "error", f"{run} has no archived batch to train it on")
    return Finding("critic", "ok", f"learns from the {batches} batches of {run}")
