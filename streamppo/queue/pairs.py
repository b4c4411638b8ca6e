"""The difference between two runs with a common beginning, prompt by prompt: both sampled the same prompts.

    d_p         mean reward of prompt p's trained samples in the second run, less that in the first
    difference  mean of d_p over the n prompts that both trained on
    error       standard deviation of d_p / sqrt(n)

A prompt's difficulty cancels in d_p; `unpaired` is the error of the same numbers if the runs had different prompts. A
completion's reward is on its last segment, and counts there.

Example: rewards 1, 0, 1 and 1, 1, 1 of three prompts: the difference is 1/3, the error 1/3, unpaired also 1/3.
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
"""The number of parts of the common updates, each with its own row."""
Rewards: TypeAlias = Mapping[int, tuple[int, float]]
"""By prompt: the update that trained on the last of its samples, and their mean reward."""


class PairedDifference(WireStruct, frozen=True):
    """The second run less the first, over prompts whose last samples were trained on by updates `first` to `last`.

    The error needs two pairs, the difference one.
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
    """The version at which one run was forked from the other, or both from a third; None for runs without a common
    past.

    Both may have been forked: the later fork is where they part if they have the same weights there. Other runs with
    the same first model, task and seed are compared from the newest version that both have.
    """
    ours, theirs = configs
    if ours.task != theirs.task or ours.seed != theirs.seed:
        return None
    first_digests, second_digests = _digests(first_run), _digests(second_run)
    same = {version for version, digest in first_digests.items() if second_digests.get(version) == digest}
    origins = {found.version for found in (ours.origin, theirs.origin) if found and found.version in same}
    return max(origins, default=max(same, default=None))


def differences(first_run: Path, second_run: Path, version: int) -> list[PairedDifference]:
    """The difference over all updates after `version` that both runs have, and in parts of them, in order."""
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


def _rewards(found: archive.Archive, version: int, last: int) -> Rewards:
    rewards: dict[int, list[float]] = defaultdict(list)
    newest: dict[int, int] = {}
    for before in (one for one in found.versions() if version <= one < last):
        for one in (one for one in found.batch(before).trajectories if one.finish != "cut"):
            rewards[one.identity.prompt].append(one.reward)
            newest[one.identity.prompt] = before + 1
    return {prompt: (newest[prompt], statistics.fmean(some)) for prompt, some in rewards.items()}


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
        _error(paired),
        None if count < 2 else math.hypot(_error(before) or 0.0, _error(after) or 0.0),
    )


def _error(values: Sequence[float]) -> float | None:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
