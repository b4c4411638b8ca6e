"""`streamppo fork`: a new run that begins with a version of another run.

    RUN at version N                      the fork
    the checkpoint of N, or replayed    checkpoints/N, with the recorded digest
    journal and archive up to N           the same, and later prompts in their order (queue/rewind.py)
    the lines of its updates up to N      the same
    the configuration that held at N      the same, changed by --set, with an origin

Nothing of RUN is changed, and it may be running. The fork is trained by `resume`, as any run is.
"""

import json
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple, cast

from msgspec import structs

from streamppo import durable
from streamppo.commands import versions
from streamppo.commands.console import echo, log_to_stderr
from streamppo.commands.models import weights
from streamppo.commands.versions import Past
from streamppo.config import consent, diff
from streamppo.config import file as configfile
from streamppo.config.sections import Config, Origin, model_path
from streamppo.driver import inputs, run_folder
from streamppo.errors import ConfigError, RunError
from streamppo.learner.checkpoint import manifest
from streamppo.queue import resume_checks, rewind
from streamppo.queue.rewind import RewindPoint
from streamppo.queue.rules.state import queue_settings
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.telemetry.metrics_file import Line
from streamppo.types import encode

WAITS = "Interrupted: a fork that was not resumed yet"
"""The last line of a fork, so that it does not count as a killed run."""
REWARD = "reward.py"
"""The file in the run's folder with the source of a reward from a script or notebook."""


class Fork(NamedTuple):
    """A fork, and its origin: `begin` is the checkpoint from which `remade` updates were replayed."""

    folder: Path
    version: int
    digest: str
    begin: int
    remade: int
    seconds: float


def fork(run: Path, at: int, changes: Sequence[str], name: str, runs: Path, *, as_json: bool) -> int:
    """Make the fork, and print the command that continues it. Raises the errors of `make`."""
    with log_to_stderr():
        forked = make(run, at, changes, name, runs)
    if as_json:
        echo(json.dumps({**forked._asdict(), "folder": str(forked.folder)}))
        return 0
    start = f"{forked.remade} updates replayed from version {forked.begin}" if forked.remade else "from its checkpoint"
    echo(f"{forked.folder}: as {run.name} was at version {at} ({forked.digest[:12]}); {start}, {forked.seconds:.1f} s")
    echo(f"continue: streamppo resume {shlex.quote(str(forked.folder))}")
    echo(f"compare: streamppo report {shlex.quote(str(run))} {shlex.quote(str(forked.folder))}")
    return 0


def make(run: Path, at: int, changes: Sequence[str], name: str, runs: Path) -> Fork:
    """Make a fork of `run` at version `at` under runs/NAME, with `changes` to the configuration.

    Raises `JournalError` for a version that was never made, or without its batches; `ConfigError` for changes that are
    impossible in a fork; `CheckpointError` for damage; `Diverged` if the version's weights differ from the recorded
    ones.
    """
    began = time.perf_counter()
    past = versions.read_past(run, at)
    config = _configuration(past, changes, name)
    _refuse(past, config, runs, name)
    with durable.naming(runs / config.name, RunError):
        runs.mkdir(parents=True, exist_ok=True)
        with durable.scratch_folder(runs / config.name) as aside:
            durable.folder(aside / "checkpoints")
            begin = _fill(past, config, aside)
            folder = _settle(past, config, aside, taken_is_error=bool(name))
    return Fork(folder, at, past.digests[at], begin, at - begin, time.perf_counter() - began)


def _configuration(past: Past, changes: Sequence[str], name: str) -> Config:
    """The configuration of the version, with `changes`, a name and the origin."""
    before = past.history.at(past.version)
    name_change = f"name={json.dumps(name or f'{before.name}-at-{past.version}')}"
    config = configfile.change(inputs.with_clock(before, past.run), [*changes, name_change])
    origin = Origin(run=str(past.run), version=past.version, digest=past.digests[past.version])
    return structs.replace(config, origin=origin)


def _refuse(past: Past, config: Config, runs: Path, name: str) -> None:
    """Refuse a fork that `resume` could not continue, before anything is written."""
    before = past.history.at(past.version)
    resume_checks.refuse_changed_settings(before, config)
    if queue_settings(config).shape != queue_settings(before).shape:
        raise ConfigError(
            "a fork keeps task.kind, queue.samples_per_prompt and whether samples of a prompt are compared: these "
            "number the later prompts"
        )
    if config.updates <= past.version:
        raise ConfigError(
            f"nothing is left to do: updates = {config.updates}, and the fork begins at version {past.version}: "
            f"--set updates={past.version + 50}"
        )
    run_folder.refuse_network(runs)
    if name and (runs / name).exists():
        raise ConfigError(f"{runs / name}: already exists; choose another --name")


# --- what is written -----------------------------------------------------------------------------------------


def _fill(past: Past, config: Config, aside: Path) -> int:
    """Write the files of the fork except its configuration; return the version from which its version was replayed."""
    begin = past.version and versions.make_checkpoint(past, aside / "checkpoints")
    lines = list(_lines(past))
    state = manifest.read(aside / "checkpoints" / f"{past.version:08d}").state if past.version else None
    tokens = round(sum(cast(dict[str, float], line).get("tokens", 0.0) for line in lines))
    trajectories = sum(past.history.at(version).queue.batch_size for version in range(past.version))
    rewound = RewindPoint(past.version, trajectories, tokens, state.lag[0] if state and state.lag else None)
    with durable.naming(aside, RunError):
        rewind.rewind(past.run, aside, past.history.at(past.version), rewound)
        if Path(model_path(config, past.run)).is_relative_to(past.run):
            _copy_model(past.run / "model", aside / "model")
        with suppress(FileNotFoundError), durable.reading(past.run / inputs.INPUTS) as file:
            durable.write(aside / inputs.INPUTS, file.read())
        durable.write(aside / metrics_file.METRICS, "".join(json.dumps(line) + "\n" for line in lines).encode())
    if past.version:
        # Compares the digest of the weights, not only the manifest's.
        weights.checkpoint_weights(past.history.at(past.version), aside, past.version)
    return begin


def _settle(past: Past, config: Config, aside: Path, *, taken_is_error: bool) -> Path:
    """Give the folder its name, with a number if the name is taken, and write its configuration.

    Without a configuration a folder is not a run.
    """
    for number in count(1):
        folder = aside.parent / (config.name if number == 1 else f"{config.name}-{number}")
        forked = _with_reward(past.run, structs.replace(config, name=folder.name), aside, folder)
        configfile.save(forked, aside)
        _configure(past, forked, aside)
        if not _claim(aside, folder):
            if taken_is_error:
                raise ConfigError(f"{folder}: already exists; choose another --name")
            continue
        # Paths into the run are relative to its name.
        configfile.save(forked, folder)
        for consented in (forked, *past.history.configs.values()):
            consent.give(folder, consented)
        return folder
    raise AssertionError("numbers do not end")


def _configure(past: Past, config: Config, aside: Path) -> None:
    """Record that `config` holds from the version on, if it is not the run's there."""
    if diff.differ(past.history.at(past.version), config):
        with closing(Journal(aside / "journal.sqlite")) as journal:
            journal.configure(past.version, encode(config))


def _claim(aside: Path, folder: Path) -> bool:
    """Rename the folder `aside`; return False if the name is taken. Raises `RunError`."""
    try:
        durable.rename(aside, folder)
    except OSError as error:
        if not folder.exists():
            raise RunError(f"{folder}: cannot be written: {error}") from error
        return False
    return True


def _with_reward(run: Path, config: Config, aside: Path, folder: Path) -> Config:
    """Copy the source of a script's reward into the fork, if the run's folder has one."""
    source = f"{run / REWARD}:"
    rewards = {
        name: value
        for name, value in diff.fields(config).items()
        if isinstance(value, str) and value.startswith(source)
    }
    if not rewards:
        return config
    with suppress(FileExistsError), durable.reading(run / REWARD) as file:
        durable.write(aside / REWARD, file.read())
    moved = {name: f"{folder / REWARD}:{value.removeprefix(source)}" for name, value in rewards.items()}
    return configfile.change(config, [f"{name}={json.dumps(value)}" for name, value in moved.items()])


def _copy_model(source: Path, target: Path) -> None:
    """Copy the model that was made for the run; without a copy, its seed makes the same model."""
    if not source.is_dir():
        return
    durable.folder(target)
    for path in sorted(source.iterdir()):
        if path.is_file():
            rewind.link_or_copy(path, target / path.name)


def _lines(past: Past) -> Iterator[Line]:
    """The lines of updates up to the version, of evaluations of those versions, and of phases in between."""
    wall_s = 0.0
    for line in metrics_file.read(past.run):
        version = line.get("update", line.get("remade"))
        if "evaluation" in line:
            version = max(line["evaluation"], line["versions"][1])
        if isinstance(version, int) and version <= past.version:
            wall_s = max(wall_s, line["wall_s"])
            yield line
    yield {"end": WAITS, "wall_s": wall_s}
