"""The arguments and the result of `streamppo bisect`. This module imports neither Ray nor torch."""

import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, TypeAlias

import numpy as np

from streamppo.errors import ConfigError
from streamppo.tasks import plugins
from streamppo.telemetry import metrics_file, summary


class Question(NamedTuple):
    """A condition on versions: a bound on `metric`, or the test in the file `test`. `changes` require a replay."""

    metric: str = ""
    above: float | None = None
    below: float | None = None
    test: Path | None = None
    changes: tuple[str, ...] = ()

    def refuse(self) -> None:
        """Raise `ConfigError` unless there is exactly one valid condition."""
        bounds = [bound for bound in (self.above, self.below) if bound is not None]
        if bool(self.metric) == (self.test is not None):
            raise ConfigError("`streamppo bisect` needs --metric NAME with a bound, or --test FILE.py, and not both")
        if self.metric and len(bounds) != 1:
            raise ConfigError(f"--metric {self.metric} needs one of --above and --below")
        if self.test is not None and bounds:
            raise ConfigError("--above and --below are bounds of a --metric: a --test returns whether it holds")
        if bounds and math.isnan(bounds[0]):
            raise ConfigError("a bound must be a number")

    def holds(self, value: float) -> bool:
        """True if `value` is above or below the bound, as the condition says; False for NaN."""
        return value > self.above if self.above is not None else value < (self.below or 0.0)

    def words(self) -> str:
        if self.test is not None:
            return f"the test of {self.test.name}"
        bound = f"above {self.above:g}" if self.above is not None else f"below {self.below or 0.0:g}"
        return f"{self.metric} {bound}"


class Answer(NamedTuple):
    """The first `version` at which the condition holds; None if it holds at no examined version.

    `looked` versions were examined, and the condition holds at `holding` of them. `remade` updates were replayed.
    `certain` is True if every version up to `version` was examined. `monotone` is True if the condition holds at all
    later examined versions; None if there are none. `sure` is both in words.
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
Metrics: TypeAlias = Mapping[str, float]


class ExaminedVersion(NamedTuple):
    """An examined version, whether the condition holds at it, and the metric's value."""

    version: int
    holds: bool
    value: float | None = None


class UserTest(NamedTuple):
    """A user's function, and the names of its parameters."""

    name: str
    function: Callable[..., object]
    parameters: frozenset[str]

    def holds(self, **arguments: object) -> bool:
        """Call the function. Raises `TaskError` if the call fails, and `ConfigError` if the result is not a bool."""
        named = {name: value for name, value in arguments.items() if name in self.parameters}
        answer = plugins.call(f"--test {self.name}", lambda: self.function(**named))
        if not isinstance(answer, bool | np.bool_):
            raise ConfigError(f"--test {self.name}: `test` must return True or False, and returned {answer!r}")
        return bool(answer)


def lines_of(run: Path) -> dict[int, Metrics]:
    """Return the metrics of every update in the run's metrics file, by version."""
    lines = summary.updates_in_order(metrics_file.read(run))
    return {metrics_file.version_of(line): metrics_file.numbers(line) for line in lines}


def refuse_metric(metric: str, known: Sequence[str], begin: str) -> NoReturn:
    """Raise `ConfigError` for an unknown metric; the message begins with `begin` and names the nearest `known` name."""
    near = difflib.get_close_matches(metric, known, 1)
    raise ConfigError(begin + (f"; is {near[0]!r} meant?" if near else f"; it has {', '.join(known) or 'none'}"))


def conclude(
    question: Question,
    examined: Sequence[ExaminedVersion],
    remade: int,
    *,
    certain: bool,
    subjects: str,
    begin: int = 0,
) -> Answer:
    """Return the answer that follows from the `examined` versions, which are in order."""
    first = next((version for version in examined if version.holds), None)
    later = [version.holds for version in examined if first is not None and version.version > first.version]
    holding = sum(version.holds for version in examined)
    monotone = all(later) if later else None
    count = f"{len(examined)} {subjects} examined"
    if first is None:
        sure = f"{count}, and it holds at none of them"
    elif certain:
        sure = f"{count}, including all before it: it is the first"
    else:
        sure = f"{count}: it is the first after version {begin}; it may hold at earlier, unexamined versions"
    if monotone:
        sure += f"; it also holds at all {len(later)} after it"
    elif later:
        sure += f"; it does not hold throughout: of the {len(later)} after it, it holds at {sum(later)}"
    if not examined:
        sure = "nothing was examined"
    version = None if first is None else first.version
    value = None if first is None or first.value is None or math.isnan(first.value) else first.value
    is_certain = certain and first is not None
    counts = len(examined), holding, remade
    return Answer(question.words(), version, value, *counts, is_certain, monotone, sure)
