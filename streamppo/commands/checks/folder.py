"""Checks of model folders by the names of their files and by config.json alone: no torch, no transformers."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.algorithm import Critic
from streamppo.config.engine import FAMILIES, EmbeddedEngine
from streamppo.config.sections import BUILTIN, Config
from streamppo.config.teacher import Teacher
from streamppo.errors import CheckpointError, JournalError

OWN_CRITICS = ("head", "policy", "scratch")
"""Values of critic.model that name no folder."""
ELSEWHERE = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "openai-gpt", "opt")
"""Values of model_type whose decoders keep their layers elsewhere than under `layers`: the learner refuses them."""
WEIGHTS = ("model.safetensors", "pytorch_model.bin")


def model(config: Config) -> Findings:
    """Check that the model is there, has its weights, and is of a family that learner and engine compute."""
    path = config.model.path
    if path == BUILTIN:
        yield Finding("model", "ok", f"{BUILTIN} is made when the run starts")
        return
    folder, finding = find(path, "model")
    yield finding
    if folder is not None:
        yield from _content(Path(folder), embedded=isinstance(config.rollout.engine, EmbeddedEngine))


def find(path: str, subject: str) -> tuple[str | None, Finding]:
    """Find a model's folder on this machine, or in the hub's cache."""
    if Path(path).is_dir():
        return path, Finding(subject, "ok", path)
    if looks_like_path(path):
        return None, Finding(subject, "not here", f"{path!r} is no folder here (looked at {Path(path).absolute()})")
    # Slow to import, and most models are folders.
    from huggingface_hub import constants, snapshot_download

    try:
        cached = snapshot_download(path, local_files_only=True)
    except (OSError, ValueError):
        text = f"{path!r} is no folder here (looked at {Path(path).absolute()}), and not in the hub's cache"
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
    """Tell if a name can be no name on the hub: these have one slash at most, and begin with a letter or digit."""
    return name.count("/") > 1 or not name[:1].isalnum() or name.endswith("/")


def _content(folder: Path, *, embedded: bool) -> Findings:
    path = folder / "config.json"
    try:
        settings: object = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        yield Finding("model", "error", f"{path}: not the configuration of a model: {error}")
        return
    kind = settings.get("model_type") if isinstance(settings, Mapping) else None
    if kind in ELSEWHERE:
        text = f"{folder} is a {kind}, whose layers are elsewhere than under `layers`: the learner does not run it"
        yield Finding("model", "error", text)
    elif embedded and kind not in FAMILIES:
        text = f"{folder} is a {kind}; the embedded engine runs {', '.join(FAMILIES)}: use another rollout.engine"
        yield Finding("model", "error", text)
    yield from _weights(folder)


def _weights(folder: Path) -> Findings:
    indices = [path for name in WEIGHTS if (path := folder / f"{name}.index.json").is_file()]
    if not indices and not any((folder / name).is_file() for name in WEIGHTS):
        yield Finding("model", "error", f"{folder}: no weights: neither {WEIGHTS[0]} nor parts of it with an index")
    for index in indices[:1]:
        try:
            parts = sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, AttributeError) as error:
            yield Finding("model", "error", f"{index}: not an index of weights: {error!r}")
            return
        missing = [part for part in parts if not (folder / part).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            yield Finding("model", "error", f"{folder}: {missing[0]}{more} of the {len(parts)} parts are missing")


def critic(critic: Critic) -> Findings:
    """Check the critic's own model, and the run that it learns from before it begins."""
    if critic.model not in OWN_CRITICS:
        yield find(critic.model, "critic")[1]
    if critic.pretrain:
        yield _pretraining(critic.pretrain)


def teacher(teacher: Teacher) -> Findings:
    """Check that the teacher is there; its tokenizer is compared with the policy's when the run starts."""
    if teacher.model:
        yield find(teacher.model, "teacher")[1]
    if teacher.url:
        missing = teacher.key_env and not os.environ.get(teacher.key_env)
        key = f"; the environment has no {teacher.key_env} here" if missing else ""
        yield Finding("teacher", "later", f"{teacher.url} is asked when the run starts{key}")


def _pretraining(run: str) -> Finding:
    if not Path(run).is_dir():
        text = f"{run!r}, whose batches are to teach it, is no folder here (looked at {Path(run).absolute()})"
        return Finding("critic", "not here", text)
    # zarr is slow to import, and few runs have another one teach their critic.
    from streamppo.queue import archive

    try:
        batches = len(archive.open(Path(run)).versions())
    except JournalError as error:
        return Finding("critic", "error", str(error))
    if not batches:
        return Finding("critic", "error", f"{run} has no archived batch to teach it")
    return Finding("critic", "ok", f"learns from the {batches} batches of {run}")
