"""`streamppo fork`: a new run that begins as another one was at a version, whatever became of that one since.

    RUN at version N                      the fork
    the checkpoint of N, or made again    checkpoints/N, with the recorded digest
    journal and archive up to N           the same, and what was to come is to come (queue/rewind.py)
    the lines of its updates up to N      the same
    the configuration that held at N      the same, changed by --set, with an origin

Nothing of RUN is changed, and it may be running. The fork is trained by `resume`, as any run is.
"""

import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from itertools import count
from pathlib import Path
from typing import NamedTuple, cast

import ray
from msgspec import structs
from ray.exceptions import RayError

from streamppo import durable
from streamppo.commands import replay
from streamppo.commands.console import echo, log_to_stderr
from streamppo.commands.models import weights
from streamppo.config import consent, diff
from streamppo.config import file as configfile
from streamppo.config.origin import Origin
from streamppo.config.sections import Config, model_path
from streamppo.driver import inputs
from streamppo.driver.folder import disk
from streamppo.driver.ray import orphans
from streamppo.driver.ray.cluster import describe
from streamppo.errors import CheckpointError, ConfigError, Diverged, JournalError, RunError
from streamppo.learner.checkpoint import history as histories
from streamppo.learner.checkpoint import manifest
from streamppo.learner.checkpoint.distcp import METADATA
from streamppo.learner.checkpoint.history import ANY, History
from streamppo.queue import resume_checks, rewind
from streamppo.queue.rewind import Rewound
from streamppo.queue.rules.state import settings_of
from streamppo.queue.store.archive import checksums
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.telemetry.metrics_file import Line

WAITS = "Interrupted: a fork that was not resumed yet"
"""The end of its lines, so that it is not taken for a run that was killed."""
REWARD = "reward.py"
"""The source of a reward of a script or notebook, in the run's folder."""

log = logging.getLogger(__name__)


class Fork(NamedTuple):
    """A fork, and how it came to be: `begin` is the checkpoint that the `remade` updates were made of."""

    folder: Path
    version: int
    digest: str
    begin: int
    remade: int
    seconds: float


class Past(NamedTuple):
    """The run as it was at a version: the digests of its versions, its batches, and all that it was configured with."""

    run: Path
    version: int
    digests: dict[int, str]
    archived: set[int]
    history: History


def fork(run: Path, at: int, changes: Sequence[str], name: str, runs: Path, *, as_json: bool) -> int:
    """Make the fork, and say how it is gone on with. Raises the errors of `make`."""
    with log_to_stderr():
        made = make(run, at, changes, name, runs)
    if as_json:
        echo(json.dumps({**made._asdict(), "folder": str(made.folder)}))
        return 0
    again = f"{made.remade} updates made again from version {made.begin}" if made.remade else "its checkpoint was there"
    echo(f"{made.folder}: as {run.name} was at version {at} ({made.digest[:12]}); {again}, {made.seconds:.1f} s")
    echo(f"go on: streamppo resume {shlex.quote(str(made.folder))}")
    echo(f"compare: streamppo report {shlex.quote(str(run))} {shlex.quote(str(made.folder))}")
    return 0


def make(run: Path, at: int, changes: Sequence[str], name: str, runs: Path) -> Fork:
    """Make a fork of `run` at version `at` under runs/NAME, with `changes` to the configuration.

    Raises `JournalError` for a version that was never made, or whose batches were not kept; `ConfigError` for changes
    that no fork can have; `CheckpointError` for damage; `Diverged` if the version has other weights than it had.
    """
    began = time.perf_counter()
    past = look(run, at)
    config = _configuration(past, changes, name)
    _refuse(past, config, runs, name)
    aside = durable.aside(runs / f"{config.name}.{os.getpid()}")
    with durable.naming(runs / config.name, RunError):
        runs.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        durable.folder(aside)
        durable.folder(aside / "checkpoints")
    try:
        begin = _fill(past, config, aside)
        folder = _settle(past, config, aside, taken_is_error=bool(name))
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Fork(folder, at, past.digests[at], begin, at - begin, time.perf_counter() - began)


# --- what there is -------------------------------------------------------------------------------------------


def look(run: Path, at: int) -> Past:
    """The run as it was at version `at`. Raises `JournalError` if that was never made."""
    present = configfile.load(run / configfile.CONFIG)
    with closing(Journal.open_run(run)) as journal:
        made = journal.versions()
    if at not in made:
        raise JournalError(f"{run}: version {at} was never made; the newest is {max(made, default=0)}")
    archived = set(checksums(made.values()))
    digests = {version: one.digest for version, one in made.items()}
    return Past(run, at, digests, archived, histories.read_history(run, present))


def _configuration(past: Past, changes: Sequence[str], name: str) -> Config:
    """The configuration that held at the version, with `changes`, a name and the origin."""
    before = past.history.at(past.version)
    named = f"name={json.dumps(name or f'{before.name}-at-{past.version}')}"
    config = configfile.change(inputs.with_clock(before, past.run), [*changes, named])
    origin = Origin(run=str(past.run), version=past.version, digest=past.digests[past.version])
    return structs.replace(config, origin=origin)


def _refuse(past: Past, config: Config, runs: Path, name: str) -> None:
    """Refuse what no resume could go on with, before anything is written."""
    before = past.history.at(past.version)
    resume_checks.refuse_other(before, config)
    if settings_of(config).shape != settings_of(before).shape:
        raise ConfigError(
            "a fork keeps task.kind, queue.samples_per_prompt and whether samples of a prompt are compared: prompts to "
            "come are numbered by them"
        )
    if config.updates <= past.version:
        raise ConfigError(
            f"nothing is left to do: updates = {config.updates}, and the fork begins at version {past.version}: "
            f"--set updates={past.version + 50}"
        )
    disk.refuse_network(runs)
    if name and (runs / name).exists():
        raise ConfigError(f"{runs / name}: something is there already; take another --name")


# --- what is written -----------------------------------------------------------------------------------------


def _fill(past: Past, config: Config, aside: Path) -> int:
    """Write all files of the fork but its configuration; returns the version that the rest was made again from."""
    begin = past.version and checkpoint_of(past, aside)
    lines = list(_lines(past))
    state = manifest.read(aside / "checkpoints" / f"{past.version:08d}").state if past.version else None
    tokens = round(sum(cast(dict[str, float], line).get("tokens", 0.0) for line in lines))
    told = Rewound(past.version, tokens, state.lag[0] if state and state.lag else None)
    with durable.naming(aside, RunError):
        rewind.rewind(past.run, aside, past.history.at(past.version), told)
        if Path(model_path(config, past.run)).is_relative_to(past.run):
            _bring_model(past.run / "model", aside / "model")
        with suppress(FileNotFoundError), durable.reading(past.run / inputs.INPUTS) as file:
            durable.write(aside / inputs.INPUTS, file.read())
        durable.write(aside / metrics_file.METRICS, "".join(json.dumps(line) + "\n" for line in lines).encode())
    if past.version:
        # The weights themselves, whatever the manifest says of them.
        weights.checkpoint_weights(past.history.at(past.version), aside, past.version)
    return begin


def _settle(past: Past, config: Config, aside: Path, *, taken_is_error: bool) -> Path:
    """Give the folder its name, with a number behind it if that is taken, and write its configuration.

    Until then no command takes it for a run.
    """
    for number in count(1):
        folder = aside.parent / (config.name if number == 1 else f"{config.name}-{number}")
        named = _with_reward(past.run, structs.replace(config, name=folder.name), aside, folder)
        configfile.save(named, aside)
        if not _claim(aside, folder):
            if taken_is_error:
                raise ConfigError(f"{folder}: something is there already; take another --name")
            continue
        # Paths into the run are relative to its name.
        configfile.save(named, folder)
        for agreed in (named, *past.history.configs.values()):
            consent.give(folder, agreed)
        return folder
    raise AssertionError("numbers do not end")


def _claim(aside: Path, folder: Path) -> bool:
    """Give the folder `aside` its name, unless the name is taken. Raises `RunError`."""
    try:
        durable.rename(aside, folder)
    except OSError as error:
        if not folder.exists():
            raise RunError(f"{folder}: cannot be written: {error}") from error
        return False
    return True


def _with_reward(run: Path, config: Config, aside: Path, folder: Path) -> Config:
    """Have the source of a script's reward in the fork, if the run has one in its folder."""
    source = f"{run / REWARD}:"
    named = {
        name: value
        for name, value in diff.fields(config).items()
        if isinstance(value, str) and value.startswith(source)
    }
    if not named:
        return config
    with suppress(FileExistsError), durable.reading(run / REWARD) as file:
        durable.write(aside / REWARD, file.read())
    own = {name: f"{folder / REWARD}:{value.removeprefix(source)}" for name, value in named.items()}
    return configfile.change(config, [f"{name}={json.dumps(value)}" for name, value in own.items()])


def _bring_model(source: Path, target: Path) -> None:
    """The model that was made for the run; its seed makes the same again where it is missing."""
    if not source.is_dir():
        return
    durable.folder(target)
    for path in sorted(source.iterdir()):
        if path.is_file():
            rewind.bring(path, target / path.name)


def _lines(past: Past) -> Iterator[Line]:
    """The lines of updates up to the version, of evaluations of those versions, and of phases in between."""
    wall_s = 0.0
    for line in metrics_file.read(past.run):
        version = line.get("update", line.get("remade"))
        if isinstance(version, int) and version <= past.version:
            wall_s = max(wall_s, line["wall_s"])
            yield line
        elif "evaluation" in line and max(line["evaluation"], line["versions"][1]) <= past.version:
            yield line
    yield {"end": WAITS, "wall_s": wall_s}


# --- the checkpoint ------------------------------------------------------------------------------------------


def checkpoint_of(past: Past, aside: Path) -> int:
    """Have the checkpoint of the version under `aside`; returns the version that it was made of, which may be its own.

    Raises `JournalError`, `CheckpointError` or `Diverged`, as `make` does.
    """
    begin = _newest_whole(past)
    start = int(begin.name) if begin else 0
    if begin and start == past.version:
        _bring_checkpoint(begin, aside / "checkpoints" / begin.name)
        return start
    if missing := [one for one in range(start, past.version) if one not in past.archived]:
        raise JournalError(
            f"{past.run}: version {past.version} cannot be made again: the batch of version {missing[0]} was not kept. "
            f"It can be had at a checkpoint ({_checkpoints(past.run)}), or behind one whose batches are kept"
        )
    log.info("version %d is made again from version %d: %d updates", past.version, start, past.version - start)
    try:
        with ExitStack() as ending:
            mark = ending.enter_context(orphans.ends())
            ending.callback(ray.shutdown)
            configs = {version: _without_copies(config) for version, config in past.history.configs.items()}
            history = structs.replace(past.history, configs=configs)
            digests, _ = replay.remake(past.run, history, begin, past.version, mark, checkpoints=aside / "checkpoints")
    except RayError as error:
        raise RunError(f"the learner: {describe(error)}") from error
    if past.history.digests[past.version] not in (ANY, digests[past.version]):
        raise Diverged(
            f"version {past.version} was made again and has other weights ({digests[past.version][:12]}, first "
            f"{past.digests[past.version][:12]}): the software, the device or the number of ranks is another one"
        )
    past.digests[past.version] = digests[past.version]
    return start


def _without_copies(config: Config) -> Config:
    """A configuration of ranks that copy no checkpoint to the run's address."""
    cluster = structs.replace(config.cluster, own_disks=False)
    return structs.replace(config, cluster=cluster, checkpoint=structs.replace(config.checkpoint, remote=""))


def _newest_whole(past: Past) -> Path | None:
    """The newest checkpoint up to the version whose files are all there and as the manifest says; None without one."""
    for path in reversed(manifest.complete(past.run / "checkpoints")):
        if int(path.name) <= past.version:
            try:
                manifest.verify_whole(path, past.history)
            except CheckpointError as error:
                log.info("%s: passed over", error)
            else:
                return path
    return None


def _checkpoints(run: Path) -> str:
    return ", ".join(str(int(path.name)) for path in manifest.complete(run / "checkpoints")) or "there is none"


def _bring_checkpoint(source: Path, target: Path) -> None:
    files = manifest.read(source).files
    named = {name: sha256 for some in (files.shared, *files.ranks) for name, sha256 in some.items()}
    with durable.naming(target, RunError):
        durable.folder(target)
        for name, sha256 in named.items():
            rewind.bring(source / name, target / name, sha256)
        if METADATA not in named:
            rewind.bring(source / METADATA, target / METADATA)
        rewind.bring(source / manifest.MANIFEST, target / manifest.MANIFEST)
