"""The reuse of engines' caches: tokens of prompts from a cache, by the age of the weights that computed them.

prefix_reused     share of all prompts' tokens from a cache
context_reused    share of earlier turns' contexts from a cache; 1 is possible
kv_ages           tokens from a cache, by versions since their computation; above 0 with kv = "keep"
kv_age            their mean
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple, NotRequired, TypedDict

from streamppo.telemetry.metrics_file import EngineLine, Line
from streamppo.types import EngineReport


class ReuseNumbers(TypedDict):
    """The numbers of one engine or several; each is present once its count is not 0."""

    prefix_reused: NotRequired[float]
    context_reused: NotRequired[float]
    kv_age: NotRequired[float]
    kv_ages: NotRequired[dict[str, int]]


class ContextShares(NamedTuple):
    """The numbers of all rollout actors at present: shares are means over them."""

    prefixes: float | None
    contexts: float | None
    ages: dict[int, int]

    @property
    def age(self) -> float | None:
        """The mean age in versions."""
        return mean_age(self.ages)


def sum_reports(reports: Sequence[EngineReport]) -> ReuseNumbers:
    """The reuse of rollout actors since they started."""
    prompted, context = sum(report.prompted for report in reports), sum(report.context for report in reports)
    numbers: ReuseNumbers = {}
    if prompted:
        numbers["prefix_reused"] = sum(report.reused for report in reports) / prompted
    if context:
        numbers["context_reused"] = sum(report.context_reused for report in reports) / context
    ages: Counter[int] = Counter()
    for report in reports:
        ages.update(report.kv_ages)
    if (age := mean_age(ages)) is not None:
        numbers["kv_age"] = age
        numbers["kv_ages"] = {str(versions): ages[versions] for versions in sorted(ages) if ages[versions]}
    return numbers


def mean_shares(lines: Sequence[EngineLine]) -> ContextShares:
    """The mean shares and all ages in the newest lines of rollout actors, one line of each."""
    prefixes = [line["prefix_reused"] for line in lines if "prefix_reused" in line]
    contexts = [line["context_reused"] for line in lines if "context_reused" in line]
    ages: Counter[int] = Counter()
    for line in lines:
        ages.update({int(age): count for age, count in line.get("kv_ages", {}).items()})
    return ContextShares(_mean(prefixes), _mean(contexts), dict(sorted(ages.items())))


def newest_lines(lines: Sequence[Line]) -> list[EngineLine]:
    """The newest line of each rollout actor in the newest part of a run."""
    by_engine: dict[str, EngineLine] = {}
    for line in lines:
        if "part" in line:
            by_engine = {}
        if "engine" in line:
            by_engine[line["engine"]] = line
    return list(by_engine.values())


def mean_age(ages: Mapping[int, int]) -> float | None:
    """The mean of ages by their counts; None without any."""
    count = sum(ages.values())
    return sum(age * tokens for age, tokens in ages.items()) / count if count else None


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None
