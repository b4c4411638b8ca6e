"""The difference between two runs with a common beginning, prompt by prompt: both sampled the same prompts.

    d_p         mean reward of prompt p's trained samples in the second run, minus that in the first run
    difference  mean of d_p over the n prompts that both runs trained on
    error       standard deviation of d_p / sqrt(n)

A prompt's difficulty cancels in d_p. `unpaired` is the error that two runs with different prompts would have. A
completion in segments counts once, with its last segment.

Example: three prompts have rewards 1, 0, 1 in one run and 1, 1, 1 in the other. The difference is 1/3, the error 1/3,
and `unpaired` also 1/3.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from streamppo.config.sections import Config
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.types import WireStruct

WINDOWS = 4
Rewards: TypeAlias = Mapping[int, tuple[int, float]]
"""For each prompt: the last update that trained on any of its samples, and the mean reward of its samples."""


class PairedDifference(WireStruct, frozen=True):
    """The second run minus the first, over the `pairs` prompts that belong to updates `first` to `last`.

    A prompt belongs to the update after which both runs have trained on all its samples. `before` and `after` are the
    mean rewards in the first and in the second run. `difference` needs one pair, `error` needs two.
    """

    first: int
    last: int
    pairs: int
    before: float | None
    after: float | None
    difference: float | None
    error: float | None
    unpaired: float | None


def common_version(first_run: Path, second_run: Path, configs: tuple[Config, Config]) -> int | None:
    """The version after which two runs differ; None if task or seed differ, or if no version has equal weights.

    If a run is a fork, this is the version of the fork (of two forks, the later one), else the newest with equal
    weights.
    """
    ours, theirs = configs
    if ours.task != theirs.task or ours.seed != theirs.seed:
        return None
    first_digests, second_digests = _digests(first_run), _digests(second_run)
    same = {version for version, digest in first_digests.items() if second_digests.get(version) == digest}
    origins = {origin.version for origin in (ours.origin, theirs.origin) if origin and origin.version in same}
    return max(origins, default=max(same, default=None))


def differences(first_run: Path, second_run: Path, version: int) -> list[PairedDifference]:
    """Compare the updates after `version` that both runs have: first all of them, then `WINDOWS` equal parts."""
    archives = archive.open(first_run), archive.open(second_run)
    last = min(max(run.versions(), default=-1) + 1 for run in archives)
    first, second = (_rewards(run, version, last) for run in archives)
    common = sorted(first.keys() & second.keys())
    rows = [_difference(common, first, second, version + 1, last)] if last > version else []
    size = (last - version) / WINDOWS
    if size < 1:
        return rows
    ends = [version + round(size * number) for number in range(WINDOWS + 1)]
    for begin, end in pairwise(ends):
        in_part = [prompt for prompt in common if begin < max(first[prompt][0], second[prompt][0]) <= end]
        rows.append(_difference(in_part, first, second, begin + 1, end))
    return rows


def _digests(run: Path) -> dict[int, str]:
    with closing(Journal.open_run(run)) as journal:
        return {version: made.digest for version, made in journal.versions().items()}


def _rewards(run: archive.Archive, version: int, last: int) -> Rewards:
    rewards: dict[int, list[float]] = defaultdict(list)
    newest: dict[int, int] = {}
    for before in (number for number in run.versions() if version <= number < last):
        for trajectory in run.batch(before).trajectories:
            if trajectory.finish != "cut":
                rewards[trajectory.identity.prompt].append(trajectory.reward)
                newest[trajectory.identity.prompt] = before + 1
    return {prompt: (newest[prompt], statistics.fmean(samples)) for prompt, samples in rewards.items()}


def _difference(prompts: Sequence[int], first: Rewards, second: Rewards, begin: int, end: int) -> PairedDifference:
    before, after = ([rewards[prompt][1] for prompt in prompts] for rewards in (first, second))
    count = len(prompts)
    if not count:
        return PairedDifference(begin, end, 0, None, None, None, None, None)
    paired = [y - x for x, y in zip(before, after, strict=True)]
    return PairedDifference(
        begin,
        end,
        count,
        statistics.fmean(before),
        statistics.fmean(after),
        statistics.fmean(paired),
        standard_error(paired),
        None if count < 2 else math.hypot(standard_error(before) or 0.0, standard_error(after) or 0.0),
    )


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of a mean, from the unbiased variance; None for fewer than two values."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
