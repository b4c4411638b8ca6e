"""Counts attempts by their ends, and estimates the effect of a reward of 0 for attempts that were not trained on.

Pure: no disk, no clock. An attempt has one of four ends:

    trained    its batch was trained on; some of its tokens may be masked (too old) or undelivered (not received)
    failed     a stage raised, or the trajectory could not be trained on
    dropped    it was too old, or its group was abandoned or had no learning signal
    lost       its actor died

Example: two samples of a prompt have the rewards 1 and 0.5, and a third sample fails. The mean reward is 0.75. If the
third counted as 0, the mean would be 0.5, and the advantage of each trained sample would be 0.25 larger.

The length test compares the lengths of failed and trained completions. If the lengths differ, the training set is
biased. The test is the rank test of van Elteren (1960). Only attempts of the same window of `WINDOW` versions are
compared, so that a drift over the run does not look like a difference. In each window, only the first failed and the
first trained attempt of each prompt are compared. A window has n failed and m trained prompts, and N = n + m.

    q = P(failed is longer) + P(equal) / 2      U = q n m
    z = sum (U - n m / 2) / (N + 1)  /  sqrt(sum n m (N + 1 - ties) / 12 / (N + 1)^2)
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import fmean, pstdev
from typing import Literal, NamedTuple, TypeAlias, TypedDict

End: TypeAlias = Literal["trained", "failed", "dropped", "lost"]
WINDOW = 20
"""Number of versions in a window of the length test."""
LEAST_FAILED, LEAST_Z, LEAST_SHIFT = 20, 4.0, 0.1
"""Least values of a significant length test: failed prompts, |z|, and |`longer` - 1/2|."""
FIRES = (
    f"failed completions are longer than trained ones in more than {0.5 + LEAST_SHIFT:.0%} of the pairs, or in less "
    f"than {0.5 - LEAST_SHIFT:.0%}, at a z beyond ±{LEAST_Z:g} (by chance in one run of 15,000), with {LEAST_FAILED} "
    "failed prompts or more"
)
ADVICE = (
    "the report has failures by length; raise the timeout or limit that ends long completions, or score them: the "
    "remaining training set is biased"
)
MOST_NAMES, MOST_HOURS, EXACT = 12, 24, 8
"""Maximum number of rows for reasons, for sources, and for hours. Each lag below `EXACT` has a row."""


class Attempt(NamedTuple):
    """One attempt. `version` is the version that its update trained, or the queue's version when the attempt ended.

    `tokens` is the number of sampled tokens, 0 if unknown. `lag` is the lag of the oldest token. `hour` is the hour of
    the run in which the attempt ended.
    """

    end: End
    prompt: int
    version: int
    tokens: int = 0
    reason: str = ""
    lag: int | None = None
    source: str = ""
    hour: int | None = None
    reward: float = 0.0
    masked: bool = False
    undelivered: bool = False


class AttemptRow(TypedDict):
    """A row of the table: the attempts whose property `by` (such as "length") has the value `name`.

    `failed`, `dropped` and `lost` are shares of all attempts. `masked` and `undelivered` are the shares of trained
    attempts with such tokens. `reward` is the mean reward of the trained attempts. `as_zero` is the mean over all
    attempts if each untrained attempt had a reward of 0.
    """

    by: str
    name: str
    attempts: int
    failed: float
    dropped: float
    lost: float
    masked: float
    undelivered: float
    reward: float | None
    as_zero: float | None


class LengthTest(TypedDict):
    """The numbers of `failed` and `trained` prompts, the statistic `z`, and `longer`, the mean q of all pairs."""

    failed: int
    trained: int
    z: float
    longer: float


class AttemptTable(TypedDict):
    """All attempts of a run, by reason, length, source, lag and hour.

    The run has `batches`. Only `read` of them were read, and the numbers of trained attempts are scaled up to all
    batches. An advantage is the reward minus the mean reward of the prompt (of the batch if samples are not compared).
    `advantage_shift` is the mean rise of the trained attempts' advantages if each untrained attempt had a reward of 0.
    `advantage_deviation` is the standard deviation of the advantages.
    """

    batches: int
    read: int
    rows: list[AttemptRow]
    advantage_shift: float | None
    advantage_deviation: float | None
    length_test: LengthTest | None


def table(
    attempts: Sequence[Attempt], batches: int, read: int, *, compared: bool, whole_completions: bool
) -> AttemptTable:
    """Make the table. The trained attempts among `attempts` come from `read` of the run's `batches`.

    `compared` is true if the algorithm compares the samples of a prompt. `whole_completions` is
    false for a run with segments, for which the length test is not made.
    """
    scale = batches / max(read, 1)
    rows = [_row("all", "", attempts, scale), *_reasons(attempts, scale)]
    frequent = Counter(attempt.source for attempt in attempts if attempt.source).most_common(MOST_NAMES)
    sources = {name for name, _ in frequent}
    width = 1 + max((attempt.hour or 0 for attempt in attempts), default=0) // MOST_HOURS
    keys: dict[str, Callable[[Attempt], tuple[int, str] | None]] = {
        "length": lambda attempt: (attempt.tokens, _power(attempt.tokens)) if attempt.tokens else None,
        "source": lambda attempt: (0, attempt.source) if attempt.source in sources else None,
        "lag": lambda attempt: None if attempt.lag is None else (attempt.lag, _power(attempt.lag, EXACT)),
        "hour": lambda attempt: None if attempt.hour is None else (attempt.hour, _hours(attempt.hour, width)),
    }
    for by, key in keys.items():
        rows += _rows(by, attempts, scale, key)
    shift, deviation = _advantages(attempts, lambda attempt: attempt.prompt if compared else attempt.version)
    return {
        "batches": batches,
        "read": read,
        "rows": rows,
        "advantage_shift": shift,
        "advantage_deviation": deviation,
        "length_test": length_test(attempts) if whole_completions else None,
    }


def length_test(attempts: Iterable[Attempt]) -> LengthTest | None:
    """Compare the lengths of failed and trained completions; None if no window has a failed and a trained one."""
    windows: dict[int, tuple[dict[int, int], dict[int, int]]] = defaultdict(lambda: ({}, {}))
    for attempt in attempts:
        if attempt.tokens and attempt.end in ("failed", "trained"):
            windows[attempt.version // WINDOW][attempt.end == "trained"].setdefault(attempt.prompt, attempt.tokens)
    total = variance = wins = 0.0
    pairs = failed = trained = 0
    for failed_lengths, trained_lengths in windows.values():
        n, m = len(failed_lengths), len(trained_lengths)
        if not n or not m:
            continue
        u, ties = _mann_whitney([*failed_lengths.values()], [*trained_lengths.values()])
        weight = 1 / (n + m + 1)
        total += weight * (u - n * m / 2)
        variance += weight**2 * n * m * (n + m + 1 - ties) / 12
        wins, pairs, failed, trained = wins + u, pairs + n * m, failed + n, trained + m
    if not pairs:
        return None
    z = total / math.sqrt(variance) if variance else 0.0
    return {"failed": failed, "trained": trained, "z": z, "longer": wins / pairs}


def first_line(reason: str) -> str:
    """Return the first line of a failure's reason, at most 200 characters."""
    return (reason.strip().splitlines() or [""])[0][:200]


def dependence(test: LengthTest | None) -> str | None:
    """Describe a significant length test in words; None if the test is not significant."""
    if test is None or test["failed"] < LEAST_FAILED or abs(test["z"]) < LEAST_Z:
        return None
    if abs(test["longer"] - 0.5) < LEAST_SHIFT:
        return None
    return (
        f"failed completions are longer than trained ones in {test['longer']:.0%} of the pairs (z = {test['z']:.1f}, "
        f"{test['failed']} prompts against {test['trained']})"
    )


def _mann_whitney(failed: Sequence[int], trained: Sequence[int]) -> tuple[float, float]:
    """Return U, and `ties` in the formula at the top of this file."""
    count, rank, ranks, ties = len(failed) + len(trained), 0, 0.0, 0
    ordered = sorted([*((length, True) for length in failed), *((length, False) for length in trained)])
    for _, equal in groupby(ordered, key=lambda pair: pair[0]):
        are_failed = [is_failed for _, is_failed in equal]
        size = len(are_failed)
        ranks += sum(are_failed) * (rank + (size + 1) / 2)
        rank, ties = rank + size, ties + size**3 - size
    return ranks - len(failed) * (len(failed) + 1) / 2, ties / (count * (count - 1))


# --- rows and advantages -------------------------------------------------------------------------------------


def _row(by: str, name: str, attempts: Sequence[Attempt], scale: float) -> AttemptRow:
    trained = [attempt for attempt in attempts if attempt.end == "trained"]
    ends = Counter(attempt.end for attempt in attempts)
    trained_count = scale * len(trained)
    count = trained_count + len(attempts) - len(trained)
    rewards = scale * sum(attempt.reward for attempt in trained)
    return {
        "by": by,
        "name": name,
        "attempts": round(count),
        "failed": ends["failed"] / max(count, 1),
        "dropped": ends["dropped"] / max(count, 1),
        "lost": ends["lost"] / max(count, 1),
        "masked": sum(attempt.masked for attempt in trained) / max(len(trained), 1),
        "undelivered": sum(attempt.undelivered for attempt in trained) / max(len(trained), 1),
        "reward": rewards / trained_count if trained_count else None,
        "as_zero": rewards / count if count else None,
    }


def _rows(
    by: str, attempts: Iterable[Attempt], scale: float, key: Callable[[Attempt], tuple[int, str] | None]
) -> Iterable[AttemptRow]:
    """Return a row for each name that `key` returns, ordered by its number; no rows for a single name."""
    by_name: dict[str, list[Attempt]] = defaultdict(list)
    places: dict[str, int] = {}
    for attempt in attempts:
        if (place_and_name := key(attempt)) is not None:
            by_name[place_and_name[1]].append(attempt)
            places[place_and_name[1]] = place_and_name[0]
    if len(by_name) < 2:
        return []
    return [_row(by, name, by_name[name], scale) for name in sorted(by_name, key=lambda name: (places[name], name))]


def _reasons(attempts: Sequence[Attempt], scale: float) -> Iterable[AttemptRow]:
    """Yield a row for each frequent reason. `as_zero` is the mean over the trained attempts and those of the reason."""
    trained = [attempt for attempt in attempts if attempt.end == "trained"]
    counted = Counter(attempt.reason for attempt in attempts if attempt.end != "trained").most_common()
    chosen = [(reason, {reason}) for reason, _ in counted[:MOST_NAMES]]
    if rare_reasons := {reason for reason, _ in counted[MOST_NAMES:]}:
        chosen.append((f"{len(rare_reasons)} other reasons", rare_reasons))
    for name, reasons in chosen:
        untrained = [attempt for attempt in attempts if attempt.end != "trained" and attempt.reason in reasons]
        with_trained = _row("reason", name, [*trained, *untrained], scale)
        yield {**_row("reason", name, untrained, scale), "as_zero": with_trained["as_zero"]}


def _advantages(attempts: Iterable[Attempt], group: Callable[[Attempt], int]) -> tuple[float | None, float | None]:
    rewards: dict[int, list[float]] = defaultdict(list)
    untrained = Counter[int]()
    for attempt in attempts:
        if attempt.end == "trained":
            rewards[group(attempt)].append(attempt.reward)
        else:
            untrained[group(attempt)] += 1
    if not rewards:
        return None, None
    means = {key: fmean(group_rewards) for key, group_rewards in rewards.items()}
    shifts = [
        means[key] * untrained[key] / (len(group_rewards) + untrained[key])
        for key, group_rewards in rewards.items()
        for _ in group_rewards
    ]
    advantages = (reward - means[key] for key, group_rewards in rewards.items() for reward in group_rewards)
    return fmean(shifts), pstdev(advantages)


def _power(number: int, exact: int = 1) -> str:
    """Return the range of powers of two that contains `number`: 5 -> "4 to 7". Below `exact`, return the number."""
    if number < exact:
        return f"{number}"
    low = 1 << (number.bit_length() - 1)
    return f"{low} to {2 * low - 1}" if low > 1 else "1"


def _hours(hour: int, width: int) -> str:
    first = hour // width * width
    return f"{first}" if width == 1 else f"{first} to {first + width - 1}"
