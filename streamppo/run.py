"""The loop.

    for every version:   learner.update()    takes a batch, trains, publishes version + 1
                         evaluate, save      when they are due, beside the next update

Rollout, queue and learner talk to each other; the driver starts them, watches them and counts. It keeps one more update
in the learner's mailbox, so that the learner never waits for the driver.
"""

from collections import deque
from pathlib import Path
from typing import Any

from streamppo import durable
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver.interrupts import Interrupts
from streamppo.driver.stages import Stages
from streamppo.errors import Interrupted, LearnerLost, RunError, StreamppoError
from streamppo.learner import manifest
from streamppo.telemetry.record import FINISHED, Record
from streamppo.types import EngineReport, QueueReport, UpdateReport, decode

AHEAD = 2
"""Updates in the learner's mailbox: the one that runs and the one after it."""


def run(config: Config, folder: Path, *, started: float, interrupts: Interrupts) -> int:
    """Make all updates; the exit code is 0 only then. `started` is when the command began (perf_counter).

    A `folder` that holds a part of the run already is gone on with. That, to survive a learner's death and to replay
    are the same: load a checkpoint, redo the archived batches, arrive at the same weights.
    """
    with durable.naming(folder, RunError):
        durable.folder(folder / "checkpoints")
        record = Record(folder, started, config.seed, config.updates)
    record.say(f"run folder {folder}" + (f": {record.version} updates are there" if record.version else ""))
    outcome, reports = FINISHED, (None, [])
    try:
        with Stages(config, folder, record, interrupts) as stages:
            reports = _train(config, stages, record)
    except StreamppoError as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    except OSError as error:
        outcome = f"RunError: {error}"
        raise RunError(str(error)) from error
    except BaseException as error:
        outcome = repr(error)
        raise
    finally:
        summary = record.close(outcome, *reports)
    _farewell(record, summary)
    return 0


def _train(config: Config, stages: Stages, record: Record) -> tuple[QueueReport, list[EngineReport]]:
    """All updates, with as many groups of learner ranks as it takes."""
    checkpoints = record.folder / "checkpoints"
    # Updates whose reports died with the driver are redone, so that metrics.jsonl has no gap.
    checkpoint = manifest.newest(checkpoints, record.say, at_most=record.version)
    newest = stages.start(_version(checkpoint))
    configfile.save(config, record.folder)
    _evaluate(stages, record, newest)
    while True:
        try:
            stages.start_learner(checkpoint)
            _loop(config, stages, record, _version(checkpoint))
            return stages.reports()
        except LearnerLost as lost:
            stages.note("learner", str(lost))
            checkpoint = manifest.newest(checkpoints, record.say, at_most=record.version)


def _loop(config: Config, stages: Stages, record: Record, version: int) -> None:
    """From `version` to `config.updates`, then the last evaluation, checkpoint and export."""
    checkpoints = str(record.folder / "checkpoints")
    updates: deque[list[Any]] = deque()
    try:
        _update(config, stages, record, version, updates)
    except Interrupted:
        stages.save(checkpoints)
        for report in stages.finished(updates):
            record.update(report)
        raise
    stages.wait([*stages.learner.save(checkpoints), *stages.learner.settle()], "the last checkpoint")
    exported = stages.wait(stages.learner.export(str(record.folder / "final")), "exporting the model")
    record.checksum = exported[0]
    _evaluate(stages, record, config.updates)
    stages.drain("evaluation")


def _update(config: Config, stages: Stages, record: Record, version: int, updates: deque[list[Any]]) -> None:
    """From `version` to `config.updates`; `updates` are those in the learner's mailbox."""
    checkpoints = str(record.folder / "checkpoints")
    while version < config.updates:
        while (asked := version + len(updates) + 1) <= config.updates and len(updates) < AHEAD:
            updates.append(stages.learner.update())
            if _due(config.checkpoint.every, asked) and asked < config.updates:
                stages.watch_all(stages.learner.save(checkpoints), "checkpoint")
        report = decode(stages.wait(updates[0], f"update {version + 1}")[0], UpdateReport)
        updates.popleft()
        version = report.version
        fresh = record.update(report)
        if fresh and _due(config.evaluation.every, version) and version < config.updates:
            _evaluate(stages, record, version)


def _version(checkpoint: Path | None) -> int:
    return int(checkpoint.name) if checkpoint else 0


def _evaluate(stages: Stages, record: Record, version: int) -> None:
    stages.evaluate(version, lambda parts: record.evaluation(version, parts))


def _due(every: int, version: int) -> bool:
    return every > 0 and version % every == 0


def new_folder(config: Config, runs: Path) -> Path:
    """runs/NAME, with a number if the name is taken."""
    folder, number = runs / config.name, 1
    while folder.exists():
        number += 1
        folder = runs / f"{config.name}-{number}"
    with durable.naming(folder, RunError):
        runs.mkdir(parents=True, exist_ok=True)
        durable.folder(folder)
    return folder


def _farewell(record: Record, summary: dict[str, Any]) -> None:
    accuracy, lag = summary["eval_accuracy"], summary["lag"]
    parts = f" in {summary['parts']} parts" if summary["parts"] > 1 else ""
    record.say(
        f"{summary['updates']} updates in {summary['wall_s']:.0f} s{parts}: accuracy {accuracy['start']:.3f} -> "
        f"{accuracy['final']:.3f}, mean lag {lag['mean']:.2f} (max {lag['max']}), "
        f"learner idle {summary['learner_idle_share']:.0%}\nmodel: {record.folder / 'final'}"
    )
