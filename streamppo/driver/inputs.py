"""Fingerprints of a run's input files, except its configuration: data, models and the user's functions.

    RUN/inputs.json    the SHA-256 of every file, as computed by the newest driver

A prompt's number selects a data row, so a run keeps its data and models unless the user accepts a change. A change of a
reward or of a custom function of `[algorithm]` is only logged. Inputs on a hub are not checked.
"""

import hashlib
import logging
import os
import shlex
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import structs

from streamppo import durable
from streamppo.config import diff
from streamppo.config import file as configfile
from streamppo.config.algorithm import CRITICS
from streamppo.config.reward import FunctionScorer, ModelScorer
from streamppo.config.sections import Config, model_path
from streamppo.config.task import DataTask
from streamppo.errors import UNREADABLE, CheckpointError, ConfigError, RunError

INPUTS = "inputs.json"
PACKAGE = "__init__.py"
WHOLE_BYTES = 2**30
PLACES, PIECE = 64, 2**20

log = logging.getLogger(__name__)


class Input(msgspec.Struct, frozen=True):
    """A file or folder: the path that the configuration names, and the fingerprint of each of its files."""

    path: str
    files: dict[str, str]


class NamedInput(NamedTuple):
    """A file or folder that the configuration names in `field`. A change of an input that `is_fixed` is refused."""

    field: str
    path: str
    is_fixed: bool


def with_clock(config: Config, folder: Path) -> Config:
    """Set an empty `model.clock` to the clock of the run in `folder`; a new run gets the present time."""
    if config.model.clock:
        return config
    saved = configfile.load(folder / configfile.CONFIG).model.clock if (folder / configfile.CONFIG).is_file() else ""
    clock = saved or datetime.now().isoformat(timespec="minutes")
    return structs.replace(config, model=structs.replace(config.model, clock=clock))


def refuse_missing(config: Config, folder: Path) -> None:
    """Raise `ConfigError`, with the overrides to correct it, if inputs outside the run in `folder` are missing."""
    missing = {
        entry.field: entry.path
        for entry in _named_inputs(config, folder)
        if os.path.isabs(entry.path) and not Path(entry.path).is_relative_to(folder) and not os.path.exists(entry.path)
    }
    if missing:
        values = diff.fields(config)
        names = {field: Path(path).name for field, path in missing.items()}
        moved = {field: name if os.path.exists(name) else f"FOLDER/{name}" for field, name in names.items()}
        overrides = [
            f"{field}={moved[field]}{str(values[field]).removeprefix(path)}" for field, path in missing.items()
        ]
        raise ConfigError(
            "\n".join(f"{field}: {path} does not exist" for field, path in missing.items())
            + f"\nif it was moved: {shlex.join(['streamppo', 'resume', str(folder), *overrides])}"
        )


def verify(config: Config, folder: Path, *, accept_changes: bool) -> None:
    """Record the inputs of the run in `folder`. Raises `CheckpointError` for changed data or models unless accepted."""
    entries, before, present, changed = _compare(config, folder)
    refused = [f"{entry.field}: {changed[entry.field]}" for entry in entries if entry.is_fixed and changed[entry.field]]
    if refused and not accept_changes:
        raise CheckpointError(
            "\n".join(refused) + "\na run keeps its data and its models: the numbers of its prompts would select other "
            "rows, and held-out rows could be trained on. Restore them, or accept the change: "
            f"streamppo resume {shlex.quote(str(folder))} --accept-changes"
        )
    for field, change in changed.items():
        if change:
            log.info("%s: %s; the run continues with it", field, change)
    to_record = {field: present_input for field, present_input in present.items() if present_input.files}
    if to_record != before:
        with durable.naming(folder / INPUTS, RunError):
            durable.write(folder / INPUTS, msgspec.json.format(msgspec.json.encode(to_record)))


def changes(config: Config, folder: Path) -> dict[str, str]:
    """Return how the recorded inputs of the run in `folder` have changed, by field; "" for an unchanged input."""
    return _compare(config, folder)[3]


def _compare(
    config: Config, folder: Path
) -> tuple[list[NamedInput], dict[str, Input], dict[str, Input], dict[str, str]]:
    """Return the inputs that `config` names, and by field: the recorded inputs, the present inputs, the changes."""
    named, before = list(_named_inputs(config, folder)), _recorded_inputs(folder)
    present = {entry.field: _find_input(entry) for entry in named}
    changed = {entry.field: _change(before.get(entry.field), present[entry.field]) for entry in named}
    return named, before, present, changed


def _recorded_inputs(folder: Path) -> dict[str, Input]:
    path = folder / INPUTS
    try:
        return msgspec.json.decode(durable.read(path), type=dict[str, Input])
    except FileNotFoundError:
        return {}
    except (OSError, *UNREADABLE) as error:
        raise RunError(f"{path}: cannot be read: {error}") from error


def _named_inputs(config: Config, folder: Path) -> Iterator[NamedInput]:
    yield NamedInput("model.path", model_path(config, folder), is_fixed=True)
    if config.algorithm.critic.model not in CRITICS:
        yield NamedInput("algorithm.critic.model", config.algorithm.critic.model, is_fixed=True)
    if config.algorithm.teacher.model:
        yield NamedInput("algorithm.teacher.model", config.algorithm.teacher.model, is_fixed=True)
    for field, function in config.algorithm.custom_functions.items():
        yield NamedInput(f"algorithm.{field}.function", _source(function), is_fixed=False)
    if isinstance(config.task, DataTask):
        for name, source in config.task.sources.items():
            yield NamedInput(f"task.sources.{name}.data", source.data, is_fixed=True)
            if source.evaluation is not None:
                yield NamedInput(f"task.sources.{name}.evaluation", source.evaluation, is_fixed=True)
    for name, scorer in config.reward.scorers.items():
        match scorer:
            case FunctionScorer(function=function):
                yield NamedInput(f"reward.scorers.{name}.function", _source(function), is_fixed=False)
            case ModelScorer(path=path):
                yield NamedInput(f"reward.scorers.{name}.path", path, is_fixed=False)
            case _:
                pass
    environment = config.environment.module if config.environment else ""
    plugged = {"environment.name": environment, "rollout.limit": config.rollout.limit}
    yield from (NamedInput(field, _source(name), is_fixed=False) for field, name in plugged.items() if name)


def _source(name: str) -> str:
    """Return the file of `package.module:name`, `package:name` or `path/file.py:name` without importing it."""
    where = name.rpartition(":")[0]
    module = where.replace(".", "/")
    # If a folder has a package and a module of the same name, an import takes the package.
    relative = [where] if where.endswith(".py") else [f"{module}/{PACKAGE}", f"{module}.py"]
    candidates = (Path(folder) / name for folder in ("", *sys.path) for name in relative)
    return str(next((path for path in candidates if path.is_file()), relative[-1]))


def _find_input(named: NamedInput) -> Input:
    path = Path(named.path)
    if path.is_file():
        return Input(named.path, {path.name: fingerprint(path)})
    names = [file.relative_to(path) for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    # Hidden files are left out: they belong to tools such as git.
    visible = sorted(str(name) for name in names if not any(part.startswith(".") for part in name.parts))
    return Input(named.path, {name: fingerprint(path / name) for name in visible})


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, or of the size and `PLACES` pieces of a file above `WHOLE_BYTES`."""
    size = path.stat().st_size
    if size <= WHOLE_BYTES:
        return durable.sha256(path)
    digest = hashlib.sha256(str(size).encode())
    with durable.reading(path) as file:
        for place in range(PLACES):
            file.seek((size - PIECE) * place // (PLACES - 1), os.SEEK_SET)
            digest.update(file.read(PIECE))
    return f"pieces {digest.hexdigest()}"


def _name(path: str) -> str:
    return Path(path).parent.name if Path(path).name == PACKAGE else Path(path).name


def _change(before: Input | None, present: Input) -> str:
    """Describe the change of an input; "" if it is unchanged, or if the configuration names another file."""
    if before is None or _name(before.path) != _name(present.path):
        return ""
    if not present.files:
        return f"{present.path} does not exist"
    common_files = before.files.keys() & present.files.keys()
    kinds = {
        "changed": {name for name in common_files if before.files[name] != present.files[name]},
        "new": present.files.keys() - before.files.keys(),
        "missing": before.files.keys() - present.files.keys(),
    }
    text = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in kinds.items() if names)
    return f"{present.path} has changed since the run began: {text}" if text else ""
