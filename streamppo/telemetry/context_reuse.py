"""How many prompt tokens engines take from their caches, and how old the weights are that computed them.

prefix_reused     share of the tokens of all prompts that came from a cache
context_reused    share of the tokens of earlier turns that came from a cache; 1 is possible
kv_ages           tokens from a cache, by the age of the weights that computed them: 0 unless kv = "keep"
kv_age            mean of kv_ages
"""

from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple, NotRequired, TypedDict

from streamppo.telemetry.metrics_file import EngineLine, Line
from streamppo.types import EngineReport


class ReuseNumbers(TypedDict):
    """`prefix_reused` and so on of one or several rollout actors. A number that no token contributes to is absent."""

    prefix_reused: NotRequired[float]
    context_reused: NotRequired[float]
    kv_age: NotRequired[float]
    kv_ages: NotRequired[dict[str, int]]


class ContextShares(NamedTuple):
    """The newest numbers of all rollout actors: the means of their shares, and tokens from caches by `ages`."""

    prefixes: float | None
    contexts: float | None
    ages: dict[int, int]


def sum_reports(reports: Sequence[EngineReport]) -> ReuseNumbers:
    """Return the cache reuse of rollout actors since their start."""
    prompted, context = sum(report.prompted for report in reports), sum(report.context for report in reports)
    numbers: ReuseNumbers = {}
    if prompted:
        numbers["prefix_reused"] = sum(report.reused for report in reports) / prompted
    if context:
        numbers["context_reused"] = sum(report.context_reused for report in reports) / context
    ages: Counter[int] = Counter()
    for report in reports:
        ages.update(report.kv_ages)
    if reused := ages.total():
        numbers["kv_age"] = sum(age * tokens for age, tokens in ages.items()) / reused
        numbers["kv_ages"] = {str(versions): ages[versions] for versions in sorted(ages) if ages[versions]}
    return numbers


def mean_shares(lines: Sequence[EngineLine]) -> ContextShares:
    """Average the shares over rollout actors, and add up their reused tokens by age, from one line of each actor."""
    prefixes = [line["prefix_reused"] for line in lines if "prefix_reused" in line]
    contexts = [line["context_reused"] for line in lines if "context_reused" in line]
    ages: Counter[int] = Counter()
    for line in lines:
        ages.update({int(age): count for age, count in line.get("kv_ages", {}).items()})
    prefix_mean, context_mean = (fmean(shares) if shares else None for shares in (prefixes, contexts))
    return ContextShares(prefix_mean, context_mean, dict(sorted(ages.items())))


def newest_lines(lines: Sequence[Line]) -> list[EngineLine]:
    """Return the newest line of each rollout actor in the newest part of a run."""
    by_engine: dict[str, EngineLine] = {}
    for line in lines:
        if "part" in line:
            by_engine = {}
        if "engine" in line:
            by_engine[line["engine"]] = line
    return list(by_engine.values())
