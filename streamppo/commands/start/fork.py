"""`streamppo fork`: makes a new run that begins with a version of another run.

    RUN at version N                      the fork
    its checkpoint, or a replay           checkpoints/N, with the recorded digest
    journal and archive up to N           the same, and later prompts in their order (queue/rewind.py)
    the lines of its updates up to N      the same
    the configuration that held at N      the same, changed by --set, with an origin

RUN may be in progress, and it does not change. The fork is continued by `resume`, in the same way as any run.
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
from streamppo.terminal import counted
from streamppo.types import encode

WAITS = "Interrupted: a fork that was not resumed yet"
"""Text in the last metrics line of a fork. Without this line the fork would be shown as a killed run."""


class Fork(NamedTuple):
    """A fork at `version`. `remade` updates were replayed for it from the checkpoint of version `begin`."""

    folder: Path
    version: int
    digest: str
    begin: int
    remade: int
    seconds: float


def fork(run: Path, at: int, changes: Sequence[str], name: str, runs: Path, *, as_json: bool) -> int:
    """Make the fork, and print the command with which it is continued. Raises the errors of `make`."""
    with log_to_stderr():
        forked = make(run, at, changes, name, runs)
    if as_json:
        echo(json.dumps({**forked._asdict(), "folder": str(forked.folder)}))
        return 0
    replayed = f"{counted(forked.remade, 'update')} replayed from version {forked.begin}"
    start = replayed if forked.remade else "from its checkpoint"
    echo(f"{forked.folder}: as {run.name} was at version {at} ({forked.digest[:12]}); {start}, {forked.seconds:.1f} s")
    echo(f"continue: streamppo resume {shlex.quote(str(forked.folder))}")
    echo(f"compare: streamppo report {shlex.quote(str(run))} {shlex.quote(str(forked.folder))}")
    return 0


def make(run: Path, at: int, changes: Sequence[str], name: str, runs: Path) -> Fork:
    """Make a fork of `run` at version `at` under runs/NAME, with `changes` to the configuration.

    Raises `JournalError` if the version was never made or its batches are missing, `ConfigError` for changes that are
    impossible in a fork, `CheckpointError` for damage, and `Diverged` if a replay has other weights than recorded.
    """
    began = time.perf_counter()
    past = versions.read_past(run, at)
    before = past.history.at(at)
    name_change = f"name={json.dumps(name or f'{before.name}-at-{at}')}"
    config = configfile.change(inputs.with_clock(before, past.run), [*changes, name_change])
    origin = Origin(run=str(past.run), version=at, digest=past.digests[at])
    config = structs.replace(config, origin=origin)
    _refuse(past, config, runs, name)
    with durable.naming(runs / config.name, RunError):
        runs.mkdir(parents=True, exist_ok=True)
        with durable.scratch_folder(runs / config.name) as aside:
            durable.folder(aside / "checkpoints")
            begin = _fill(past, config, aside)
            folder = _settle(past, config, aside, taken_is_error=bool(name))
    return Fork(folder, at, past.digests[at], begin, at - begin, time.perf_counter() - began)


def _refuse(past: Past, config: Config, runs: Path, name: str) -> None:
    before = past.history.at(past.version)
    resume_checks.refuse_changed_settings(before, config)
    if queue_settings(config).shape != queue_settings(before).shape:
        raise ConfigError(
            "a fork keeps task.kind, queue.samples_per_prompt and whether samples of a prompt are compared: "
            "the numbers of later prompts depend on them"
        )
    if config.updates <= past.version:
        raise ConfigError(
            f"nothing is left to do: updates = {config.updates}, and the fork begins at version {past.version}: "
            f"--set updates={past.version + 50}"
        )
    run_folder.refuse_bytes(past.run)
    run_folder.refuse_place(runs)
    if name and (runs / name).exists():
        raise ConfigError(f"{runs / name}: already exists; choose another --name")


def _fill(past: Past, config: Config, aside: Path) -> int:
    """Write all files except the configuration. Returns the version from which the fork's version was replayed."""
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
        # `checkpoint_weights` compares the digest of the weights, not only the manifest's checksums.
        weights.checkpoint_weights(past.history.at(past.version), aside, past.version)
    return begin


def _settle(past: Past, config: Config, aside: Path, *, taken_is_error: bool) -> Path:
    """Rename `aside` to the fork's name, with a number if it is taken, and write the configuration last."""
    for number in count(1):
        folder = aside.parent / (config.name if number == 1 else f"{config.name}-{number}")
        forked = _with_reward(past.run, structs.replace(config, name=folder.name), aside, folder)
        configfile.save(forked, aside)
        if diff.differ(past.history.at(past.version), forked):
            with closing(Journal(aside / "journal.sqlite")) as journal:
                journal.configure(past.version, encode(forked))
        if not _claim(aside, folder):
            if taken_is_error:
                raise ConfigError(f"{folder}: already exists; choose another --name")
            continue
        # Saved again: paths into the fork become relative when the fork has its final name.
        configfile.save(forked, folder)
        for consented in (forked, *past.history.configs.values()):
            consent.give(folder, consented)
        return folder
    raise AssertionError("numbers do not end")


def _claim(aside: Path, folder: Path) -> bool:
    try:
        durable.rename(aside, folder)
    except OSError as error:
        if not folder.exists():
            raise RunError(f"{folder}: cannot be written: {error}") from error
        return False
    return True


def _with_reward(run: Path, config: Config, aside: Path, folder: Path) -> Config:
    """Copy the source of a script's or notebook's reward into the fork, and let the configuration refer to the copy."""
    source = f"{run / configfile.REWARD}:"
    texts = {name: value for name, value in diff.fields(config).items() if isinstance(value, str)}
    rewards = {name: value for name, value in texts.items() if value.startswith(source)}
    if not rewards:
        return config
    with suppress(FileExistsError), durable.reading(run / configfile.REWARD) as file:
        durable.write(aside / configfile.REWARD, file.read())
    moved = {name: f"{folder / configfile.REWARD}:{value.removeprefix(source)}" for name, value in rewards.items()}
    return configfile.change(config, [f"{name}={json.dumps(value)}" for name, value in moved.items()])


def _copy_model(source: Path, target: Path) -> None:
    """Copy the model that was made for the run. If there is none, the fork makes the same model from the seed."""
    if not source.is_dir():
        return
    durable.folder(target)
    for path in sorted(source.iterdir()):
        if path.is_file():
            rewind.link_or_copy(path, target / path.name)


def _lines(past: Past) -> Iterator[Line]:
    """Yield the lines of the metrics file about updates and evaluations up to the version, then an "end" line."""
    wall_s = 0.0
    for line in metrics_file.read(past.run):
        version = line.get("update", line.get("remade"))
        if "evaluation" in line:
            version = max(line["evaluation"], line["versions"][1])
        if isinstance(version, int) and version <= past.version:
            wall_s = max(wall_s, line["wall_s"])
            yield line
    yield {"end": WAITS, "wall_s": wall_s}
