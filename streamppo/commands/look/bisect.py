"""`streamppo bisect`: finds the first version at which a condition holds, in records or by bisect_replay.py."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from streamppo.commands import bisection
from streamppo.commands.bisection import Answer, ExaminedVersion, Metrics, Question, UserTest
from streamppo.commands.console import echo, log_to_stderr
from streamppo.errors import ConfigError, RunError
from streamppo.queue.store import archive
from streamppo.queue.store.archive import Archive
from streamppo.tasks import plugins
from streamppo.telemetry import metrics_file, progress
from streamppo.terminal import counted
from streamppo.types import Batch


def bisect(run: Path, question: Question, *, as_json: bool) -> int:
    """Find and print the first version at which the condition holds. Raises the errors of `find`."""
    with log_to_stderr():
        answer = find(run, question)
    if as_json:
        echo(json.dumps(answer._asdict()))
        return 0
    value = "" if answer.value is None else f" ({answer.value:.6g})"
    first = f"first holds at version {answer.version}{value}" if answer.version is not None else "holds nowhere"
    echo(f"{answer.condition}: {first}")
    echo(f"{answer.sure}; {counted(answer.remade, 'update')} replayed")
    return 0


def find(run: Path, question: Question) -> Answer:
    """Find the first version at which the condition of `question` holds.

    Raises `ConfigError` for an unknown metric or an invalid test, `JournalError` if needed batches were not kept, and
    `TaskError` if the test fails.
    """
    test = _load(question.test) if question.test is not None else None
    if not question.changes and (test is None or "model" not in test.parameters):
        return _examine_records(run, question, test)
    # bisect_replay.py imports torch and Ray.
    from streamppo.commands.look import bisect_replay

    return bisect_replay.find(run, question, test)


def _load(path: Path) -> UserTest:
    plugins.export_path()
    function = plugins.function(f"{path}:test", "--test")
    parameters = frozenset(plugins.parameters_of(function, f"--test {path.name}: `test`"))
    if unknown := sorted(parameters - set(bisection.PARAMETERS)):
        allowed = f"its parameters may be {', '.join(bisection.PARAMETERS)}"
        raise ConfigError(f"--test {path.name}: `test` asks for {unknown[0]!r}; {allowed}")
    return UserTest(path.name, function, parameters)


def _examine_records(run: Path, question: Question, test: UserTest | None) -> Answer:
    lines = bisection.lines_of(run)
    if not lines and question.metric != "accuracy":
        raise RunError(f"{run}: no update was made yet")
    if test is None:
        values = _values(run, lines, question.metric)
        examined = [ExaminedVersion(version, question.holds(value), value) for version, value in sorted(values.items())]
    else:
        batches = archive.open(run)
        examined = [
            ExaminedVersion(version, test.holds(version=version, metrics=lines.get(version, {}), batch=batch))
            for version, batch in _batches(batches, sorted(lines), wanted="batch" in test.parameters)
        ]
    versions = {version.version for version in examined if version.version > 0}
    certain = len(versions) == max(versions, default=0) or question.metric == "accuracy"
    subjects = "evaluations" if question.metric == "accuracy" else "versions"
    return bisection.conclude(question, examined, 0, certain=certain, subjects=subjects)


def _values(run: Path, lines: Mapping[int, Metrics], metric: str) -> dict[int, float]:
    if metric == "accuracy":
        evaluations = [line for line in metrics_file.read(run) if "evaluation" in line]
        scored = progress.evaluations_with_score(evaluations)
        if not scored:
            raise RunError(f"{run}: no evaluation has a score yet")
        return {one.version: one.accuracy for one in scored}
    values = {version: line[metric] for version, line in lines.items() if metric in line}
    if not values:
        known = sorted({name for line in lines.values() for name in line} | {"accuracy"})
        bisection.refuse_metric(metric, known, f"{run}: no update has a metric {metric!r}")
    return values


def _batches(batches: Archive, versions: Sequence[int], *, wanted: bool) -> Iterator[tuple[int, Batch | None]]:
    """Yield (version, batch) of every archived batch if batches are `wanted`, else (version, None) of `versions`."""
    archived = set(batches.versions())
    for version in sorted({version + 1 for version in archived} if wanted else versions):
        yield version, batches.batch(version - 1) if wanted else None
