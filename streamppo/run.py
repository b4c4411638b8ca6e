"""The loop.

    for every version:   learner.update()    takes a batch, trains, publishes version + 1
                         evaluate, save      when they are due, beside the next update

Rollout, queue and learner talk to each other; the driver starts them, watches them and counts. It keeps one more update
in the learner's mailbox, so that the learner never waits for the driver.
"""

import json
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from streamppo.config import Config
from streamppo.errors import CheckpointError, StreamppoError
from streamppo.interrupts import Interrupts
from streamppo.learner import manifest
from streamppo.stages import Stages
from streamppo.telemetry.record import Record
from streamppo.types import UpdateReport, decode

AHEAD = 2
"""Updates in the learner's mailbox: the one that runs and the one after it."""


def run(config: Config, *, runs: Path, resume: bool, started: float, interrupts: Interrupts) -> int:
    """Make all updates; the exit code is 0 only then. `started` is when the command began (perf_counter)."""
    folder = _folder(config, runs.resolve(), resume)
    checkpoint = manifest.latest(folder / "checkpoints") if resume else None
    version = manifest.version(checkpoint) if checkpoint else 0
    record = Record(folder, started, config.seed, config.updates)
    record.say(f"run folder {folder}" + (f", from version {version}" if resume else ""))
    outcome, reports = "finished", (None, [])
    try:
        with Stages(config, folder, interrupts) as stages:
            stages.start(checkpoint, version)
            _loop(config, stages, record, version)
            reports = stages.reports()
    except StreamppoError as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    except BaseException as error:
        outcome = repr(error)
        raise
    finally:
        summary = record.close(outcome, *reports)
    _farewell(record, summary)
    return 0


def _loop(config: Config, stages: Stages, record: Record, version: int) -> None:
    """From `version` to `config.updates`, then the last evaluation, checkpoint and export."""
    _evaluate(stages, record, version)
    stages.generate()
    checkpoints = str(record.folder / "checkpoints")
    updates: deque[list[Any]] = deque(stages.learner.update() for _ in range(min(AHEAD, config.updates - version)))
    while updates:
        report = decode(stages.wait(updates.popleft(), f"update {version + 1}")[0], UpdateReport)
        version = report.version
        if version + len(updates) < config.updates:
            updates.append(stages.learner.update())
        record.update(report)
        if _due(config.evaluation.every, version) and version < config.updates:
            _evaluate(stages, record, version)
        if _due(config.checkpoint.every, version) and version < config.updates:
            for ref in stages.learner.save(checkpoints):
                stages.watch(ref, "checkpoint", lambda _: None)
    stages.wait(stages.learner.save(checkpoints), "the last checkpoint")
    exported = stages.wait(stages.learner.export(str(record.folder / "final")), "exporting the model")
    record.checksum = exported[0]
    _evaluate(stages, record, version)
    stages.drain("evaluation")


def _evaluate(stages: Stages, record: Record, version: int) -> None:
    stages.evaluate(version, lambda parts: record.evaluation(version, parts))


def _due(every: int, version: int) -> bool:
    return every > 0 and version % every == 0


def _folder(config: Config, runs: Path, resume: bool) -> Path:
    """runs/NAME: for a resume the one that is there, else a new one, numbered if the name is taken."""
    folder = runs / config.name
    if resume:
        if not (folder / "config.json").is_file():
            raise CheckpointError(f"{folder}: no run to resume")
        return folder
    number = 1
    while folder.exists():
        number += 1
        folder = runs / f"{config.name}-{number}"
    folder.mkdir(parents=True)
    text = json.dumps(msgspec.to_builtins(config), indent=2)
    (folder / "config.json").write_text(text + "\n")
    return folder


def _farewell(record: Record, summary: dict[str, Any]) -> None:
    accuracy, lag = summary["eval_accuracy"], summary["lag"]
    record.say(
        f"{summary['updates']} updates in {summary['wall_s']:.0f} s: accuracy {accuracy['start']:.3f} -> "
        f"{accuracy['final']:.3f}, mean lag {lag['mean']:.2f} (max {lag['max']}), "
        f"learner idle {summary['learner_idle_share']:.0%}\nmodel: {record.folder / 'final'}"
    )
