"""`streamppo bisect`: its question, its answer, and all that recorded data tell. Needs neither Ray nor torch.

look/bisect.py makes versions again where these do not.
"""

import difflib
import inspect
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np

from streamppo.commands.console import echo, log_to_stderr
from streamppo.errors import ConfigError
from streamppo.queue.store import archive
from streamppo.queue.store.archive import Archive
from streamppo.tasks import plugins
from streamppo.telemetry import metrics_file, summary
from streamppo.types import Batch


class Question(NamedTuple):
    """A bound of a `metric`, or the function `test` of a file; with `changes`, of versions made under them."""

    metric: str = ""
    above: float | None = None
    below: float | None = None
    test: Path | None = None
    changes: tuple[str, ...] = ()

    def refuse(self) -> None:
        """Raise `ConfigError` for a question that asks nothing, or two things."""
        bounds = [bound for bound in (self.above, self.below) if bound is not None]
        if bool(self.metric) == (self.test is not None):
            raise ConfigError("`streamppo bisect` wants --metric NAME with a bound, or --test FILE.py, and not both")
        if self.metric and len(bounds) != 1:
            raise ConfigError(f"--metric {self.metric} wants one of --above and --below")
        if self.test is not None and bounds:
            raise ConfigError("--above and --below are bounds of a --metric: a --test tells by itself where it holds")
        if bounds and math.isnan(bounds[0]):
            raise ConfigError("a bound must be a number")

    def holds(self, value: float) -> bool:
        """Tell if the bound holds of a value; it holds of none that is not a number."""
        return value > self.above if self.above is not None else value < (self.below or 0.0)

    def words(self) -> str:
        """The condition in words."""
        if self.test is not None:
            return f"the test of {self.test.name}"
        bound = f"above {self.above:g}" if self.above is not None else f"below {self.below or 0.0:g}"
        return f"{self.metric} {bound}"


class Answer(NamedTuple):
    """The first `version` at which the condition holds, None if it holds at none that was looked at.

    `looked` versions were looked at, of which it holds at `holding`, and `remade` updates were made again for it. It is
    `certain` if every version up to the first one was looked at, and `monotone` if it holds at all that were looked at
    behind it; None of the latter if none was. `sure` says so in words.
    """

    condition: str
    version: int | None
    value: float | None
    looked: int
    holding: int
    remade: int
    certain: bool
    monotone: bool | None
    sure: str


PARAMETERS = ("version", "metrics", "batch", "model")
"""The names under which a test is given what it asks for."""
Metrics: TypeAlias = Mapping[str, float]


class Looked(NamedTuple):
    """A version that was looked at, whether the condition holds there, and the metric's value."""

    version: int
    holds: bool
    value: float | None = None


class UserTest(NamedTuple):
    """A user's function, and the names of what it asks for."""

    name: str
    function: Callable[..., object]
    wants: frozenset[str]

    def holds(self, **given: object) -> bool:
        """Ask it. Raises `TaskError` if it fails, and `ConfigError` for an answer that is no bool."""
        named = {name: value for name, value in given.items() if name in self.wants}
        answer = plugins.call(f"--test {self.name}", lambda: self.function(**named))
        if not isinstance(answer, bool | np.bool_):
            raise ConfigError(f"--test {self.name}: `test` is to return True or False, and returned {answer!r}")
        return bool(answer)


def bisect(run: Path, question: Question, *, as_json: bool) -> int:
    """Find the answer and print it. Raises the errors of `find`."""
    with log_to_stderr():
        found = find(run, question)
    if as_json:
        echo(json.dumps(found._asdict()))
        return 0
    value = "" if found.value is None else f" ({found.value:.6g})"
    first = f"first holds at version {found.version}{value}" if found.version is not None else "holds nowhere"
    echo(f"{found.condition}: {first}")
    updates = "update" if found.remade == 1 else "updates"
    echo(f"{found.sure}; {found.remade} {updates} made again")
    return 0


def find(run: Path, question: Question) -> Answer:
    """Find the first version at which the condition of `question` holds.

    Raises `ConfigError` for a metric or a test that cannot be asked, `JournalError` for batches that were not kept,
    and `TaskError` for a test that fails.
    """
    question.refuse()
    test = _load(question.test) if question.test is not None else None
    if not question.changes and (test is None or "model" not in test.wants):
        return _of_data(run, question, test)
    # It needs torch and Ray.
    from streamppo.commands.look import bisect

    return bisect.find(run, question, test)


def _load(path: Path) -> UserTest:
    plugins.export_path()
    function = plugins.function(f"{path}:test", "--test")
    wants = frozenset(inspect.signature(function).parameters)
    if unknown := sorted(wants - set(PARAMETERS)):
        raise ConfigError(f"--test {path.name}: `test` asks for {unknown[0]!r}, and there are {', '.join(PARAMETERS)}")
    return UserTest(path.name, function, wants)


# --- what is recorded ----------------------------------------------------------------------------------------


def _of_data(run: Path, question: Question, test: UserTest | None) -> Answer:
    """Look at everything that there is: nothing has to be made again."""
    lines = lines_of(run)
    if test is None:
        values = _values(run, lines, question.metric)
        looked = [Looked(version, question.holds(value), value) for version, value in sorted(values.items())]
    else:
        found = archive.open(run)
        looked = [
            Looked(version, test.holds(version=version, metrics=lines.get(version, {}), batch=batch))
            for version, batch in _batches(found, sorted(lines), wanted="batch" in test.wants)
        ]
    versions = {one.version for one in looked}
    lacking = [version for version in range(1, max(versions, default=0) + 1) if version not in versions]
    what = "evaluations" if question.metric == "accuracy" else "versions"
    return conclude(question, looked, 0, certain=not lacking or question.metric == "accuracy", what=what)


def lines_of(run: Path) -> dict[int, Metrics]:
    """The numbers of every update's line, by the version that it made."""
    lines = summary.updates_in_order(metrics_file.read(run))
    return {line["remade"] if "remade" in line else line["update"]: metrics_file.numbers(line) for line in lines}


def _values(run: Path, lines: Mapping[int, Metrics], metric: str) -> dict[int, float]:
    if metric == "accuracy":
        found = {line["evaluation"]: line["accuracy"] for line in metrics_file.read(run) if "evaluation" in line}
        return {version: value for version, value in found.items() if value is not None}
    values = {version: line[metric] for version, line in lines.items() if metric in line}
    if not values:
        known = sorted({name for line in lines.values() for name in line} | {"accuracy"})
        refuse_metric(metric, known, f"{run}: no update has a metric {metric!r}")
    return values


def refuse_metric(metric: str, known: Sequence[str], begin: str) -> NoReturn:
    """Raise `ConfigError`, which begins with `begin`, for a metric that is not `known`, with the nearest name."""
    near = difflib.get_close_matches(metric, known, 1)
    raise ConfigError(begin + (f"; is {near[0]!r} meant?" if near else f"; it has {', '.join(known) or 'none'}"))


def _batches(found: Archive, versions: Sequence[int], *, wanted: bool) -> Iterator[tuple[int, Batch | None]]:
    """Every version with the batch that made it, if batches are `wanted` at all."""
    kept = set(found.versions())
    for version in sorted({one + 1 for one in kept} if wanted else versions):
        yield version, found.batch(version - 1) if wanted else None


# --- how sure it is ------------------------------------------------------------------------------------------


def conclude(
    question: Question,
    looked: Sequence[Looked],
    remade: int,
    *,
    certain: bool,
    what: str,
    begin: int = 0,
) -> Answer:
    """The answer of what was looked at, in order; the rest is what is known of versions in between."""
    first = next((one for one in looked if one.holds), None)
    behind = [one.holds for one in looked if first is not None and one.version > first.version]
    holding = sum(one.holds for one in looked)
    monotone = all(behind) if behind else None
    told = f"{len(looked)} {what} looked at"
    if first is None:
        sure = f"{told}, and it holds at none of them"
    elif certain:
        sure = f"{told}, all before it among them: it is the first"
    else:
        sure = f"{told}: it is the first behind version {begin}, and between earlier ones it may have held"
    if monotone:
        sure += f"; it holds at all {len(behind)} behind it too"
    elif behind:
        sure += f"; it comes and goes: of the {len(behind)} behind it, it holds at {sum(behind)}"
    if not looked:
        sure = "nothing was looked at"
    return Answer(
        question.words(),
        None if first is None else first.version,
        None if first is None or first.value is None or math.isnan(first.value) else first.value,
        len(looked),
        holding,
        remade,
        certain and first is not None,
        monotone,
        sure,
    )
