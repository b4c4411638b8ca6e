"""Replays versions for `streamppo bisect`, with as few updates as possible.

question                   examined versions                                          replayed updates
a metric, a test of data   every line, or every batch                                 none
a test of the weights      every checkpoint; then the versions before the first       from the checkpoint before
                           checkpoint that holds, up to one that holds                them to the answer
the same with --set        each version from the first, under the changes             from the first to the answer
"""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import closing
from itertools import pairwise
from pathlib import Path

from msgspec import structs

from streamppo.commands import bisection, replay
from streamppo.commands.bisection import Answer, ExaminedVersion, Metrics, Question, UserTest
from streamppo.commands.models import weights
from streamppo.config import file as configfile
from streamppo.config.sections import model_path
from streamppo.errors import CheckpointError, JournalError
from streamppo.learner.checkpoint import history, manifest
from streamppo.learner.checkpoint.history import History
from streamppo.learner.model import hf_files
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal


def find(run: Path, question: Question, test: UserTest | None) -> Answer:
    """Find the first version at which a test of weights holds, or at which the condition holds in a changed replay."""
    if question.changes or test is None:
        return _changed(run, question, test)
    return _by_weights(run, question, test)


def _by_weights(run: Path, question: Question, test: UserTest) -> Answer:
    """Examine every checkpoint, then the versions before the first checkpoint at which the test holds."""
    lines, past = bisection.lines_of(run), _past(run)
    examined: list[ExaminedVersion] = []
    checkpoints = [path for path in manifest.complete(run / "checkpoints") if manifest.is_of(path, past)]
    for path in list(checkpoints):
        with tempfile.TemporaryDirectory() as folder:
            model = Path(folder) / "model"
            if not _export_checkpoint(run, path, model):
                checkpoints.remove(path)
                continue
            examined.append(_examine(test, run, int(path.name), lines, model))
    holding = next((number for number, version in enumerate(examined) if version.holds), None)
    last = examined[holding].version if holding is not None else max(past.digests)
    before = checkpoints[: holding if holding is not None else len(checkpoints)]
    end = last if holding is None else last - 1

    def use(begin: Path | None) -> tuple[list[ExaminedVersion], int]:
        remade = _replay(run, past, begin, end, lambda version, _, model: _examine(test, run, version, lines, model))
        return remade, manifest.version_of(begin)

    def choose() -> Path | None:
        return next((path for path in reversed(before) if path.is_dir()), None)

    remade, start = replay.from_checkpoint(choose, use)
    # The test may already hold between two earlier checkpoints, where no version is examined.
    certain = all(later - earlier == 1 for earlier, later in pairwise(map(manifest.version_of, [None, *before])))
    versions = sorted([*examined, *remade])
    return bisection.conclude(question, versions, len(remade), certain=certain, subjects="versions", begin=start)


def _changed(run: Path, question: Question, test: UserTest | None) -> Answer:
    past, present, changes = _past(run), configfile.load(run / configfile.CONFIG), question.changes
    configs = {version: replay.with_changes(config, present, changes) for version, config in past.configs.items()}
    last = min(max(past.digests), max(config.updates for config in configs.values()))

    def examine(version: int, metrics: Metrics, model: Path | None) -> ExaminedVersion:
        if test is None:
            if question.metric not in metrics:
                bisection.refuse_metric(question.metric, sorted(metrics), f"a replay has no metric {question.metric!r}")
            return ExaminedVersion(version, question.holds(metrics[question.metric]), metrics[question.metric])
        return _examine(test, run, version, {version: metrics}, model)

    def use(begin: Path | None) -> tuple[list[ExaminedVersion], int]:
        model = test is not None and "model" in test.parameters
        remade = _replay(run, structs.replace(past, configs=configs), begin, last, examine, model=model)
        return remade, manifest.version_of(begin)

    remade, start = replay.from_checkpoint(lambda: replay.oldest_start(run, past), use)
    return bisection.conclude(question, remade, len(remade), certain=start == 0, subjects="versions", begin=start)


def _replay(
    run: Path,
    past: History,
    begin: Path | None,
    last: int,
    examine: Callable[[int, Metrics, Path | None], ExaminedVersion],
    *,
    model: bool = True,
) -> list[ExaminedVersion]:
    examined: list[ExaminedVersion] = []
    if last <= manifest.version_of(begin):
        return examined
    archived, needed = set(archive.open(run).versions()), range(manifest.version_of(begin), last)
    if (missing := next((version for version in needed if version not in archived), None)) is not None:
        raise JournalError(f"{run}: version {missing + 1} cannot be replayed: its batch was not kept")

    def until(report: replay.UpdateReport, export: replay.Export) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            exported = Path(folder) / "model" if model else None
            if exported is not None:
                export(exported)
            examined.append(examine(report.version, report.metrics, exported))
        return examined[-1].holds

    replay.remake(run, past, begin, last, until=until)
    return examined


def _past(run: Path) -> History:
    with closing(Journal.open_run(run)) as journal:
        if not journal.versions():
            raise JournalError(f"{run}: no version was made yet")
    return history.read_history(run, configfile.load(run / configfile.CONFIG))


def _examine(
    test: UserTest, run: Path, version: int, lines: Mapping[int, Metrics], model: Path | None
) -> ExaminedVersion:
    batch = archive.open(run).batch(version - 1) if "batch" in test.parameters else None
    holds = test.holds(version=version, metrics=lines.get(version, {}), batch=batch, model=model)
    return ExaminedVersion(version, holds)


def _export_checkpoint(run: Path, path: Path, to: Path) -> bool:
    """Export the checkpoint at `path`. Returns False if the run has deleted the checkpoint while it was read."""
    config = configfile.load(run / configfile.CONFIG)
    try:
        policy = weights.checkpoint_weights(config, run, int(path.name))
    except CheckpointError:
        if path.is_dir():
            raise
        return False
    hf_files.export(policy.tensors, model_path(config, run), to, config.model.dtype)
    return True
