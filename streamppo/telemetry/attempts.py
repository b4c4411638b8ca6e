"""Counts attempts by their ends, and estimates the effect of a reward of 0 for untrained ones. Pure: no disk, no clock.

trained    in a batch; some of its tokens may be masked (too old) or undelivered (sampled but not received)
failed     a stage raised, or the trajectory could not be trained on
dropped    it was too old, or its group was abandoned or had no learning signal
lost       its actor died

Example: two samples of a prompt have the rewards 1 and 0.5, and a third fails. The mean is 0.75; with the third as 0 it
is 0.5, and every advantage of the two is 0.25 larger.

The length test compares the lengths of failed and trained completions: a difference means a biased training set. It is
the rank test of van Elteren (1960) over windows of `WINDOW` versions, so that a drift of lengths or of the failure rate
does not count as dependence. A prompt counts once on either side of a window, by its first attempt: a prompt that
always fails is one failure. With q = P(failed longer) + P(equal) / 2 in a window of n failed and m trained prompts,
N = n + m:

    z = sum (U - n m / 2) / (N + 1)  /  sqrt(sum n m (N + 1 - ties) / 12 / (N + 1)^2)      U = q n m
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from statistics import fmean, pstdev
from typing import Literal, NamedTuple, TypeAlias, TypedDict

End: TypeAlias = Literal["trained", "failed", "dropped", "lost"]
WINDOW = 20
"""Versions of a window of the length test."""
LEAST_FAILED, LEAST_Z, LEAST_SHIFT = 20, 4.0, 0.1
"""Thresholds of the sign: failed prompts, |z|, and the distance of the probability from one half."""
FIRES = (
    f"failed completions are longer than trained ones in more than {0.5 + LEAST_SHIFT:.0%} of the pairs, or in less "
    f"than {0.5 - LEAST_SHIFT:.0%}, at a z beyond ±{LEAST_Z:g} (by chance in one run of 15,000), with {LEAST_FAILED} "
    "failed prompts or more"
)
ADVICE = (
    "the report has failures by length; raise the timeout or limit that long ones meet, or score them: what is left to "
    "train on is a biased choice"
)
MOST_NAMES, MOST_HOURS, EXACT = 12, 24, 8
"""The most rows of reasons and sources, of hours, and of single lags."""


class Attempt(NamedTuple):
    """One attempt. `version` is the first version of its batch, or the queue's at its end.

    `tokens` is the number of sampled tokens, 0 if unknown; `lag` that of the oldest one; `hour` the run's at its end.
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
    """Some attempts: their number, the share of each end, and the shares of the trained ones masked and undelivered.

    `reward` is the mean of the trained ones, `as_zero` the mean of all, with 0 for each untrained one.
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
    """The compared prompts, the statistic, and the probability that a failed completion is the longer one."""

    failed: int
    trained: int
    z: float
    longer: float


class AttemptTable(TypedDict):
    """All attempts of a run, by reason, length, source, lag and hour; trained ones come from `read` of its `batches`.

    `advantage_shift` is the mean rise of advantages of trained completions, `advantage_deviation` their standard
    deviation. An advantage is the reward less the mean of the prompt, or of the batch where samples are not compared.
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
    """Count attempts; the trained ones are of `read` batches of `batches`.

    `compared`: samples of a prompt are compared. `whole_completions`: trained completions are whole; lengths of
    segments are not compared.
    """
    scale = batches / max(read, 1)
    rows = [_row("all", "", attempts, scale), *_reasons(attempts, scale)]
    rows += _rows(
        "length", attempts, scale, lambda attempt: (attempt.tokens, _power(attempt.tokens)) if attempt.tokens else None
    )
    sources = {
        name for name, _ in Counter(attempt.source for attempt in attempts if attempt.source).most_common(MOST_NAMES)
    }
    rows += _rows("source", attempts, scale, lambda attempt: (0, attempt.source) if attempt.source in sources else None)
    rows += _rows(
        "lag",
        attempts,
        scale,
        lambda attempt: None if attempt.lag is None else (attempt.lag, _power(attempt.lag, EXACT)),
    )
    width = 1 + max((attempt.hour or 0 for attempt in attempts), default=0) // MOST_HOURS
    rows += _rows(
        "hour",
        attempts,
        scale,
        lambda attempt: None if attempt.hour is None else (attempt.hour, _hours(attempt.hour, width)),
    )
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
    """Compare the lengths of failed and trained completions; None if no window has both."""
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
    """The first line of a failure's reason, at most 200 characters."""
    return (reason.strip().splitlines() or [""])[0][:200]


def dependence(test: LengthTest | None) -> str | None:
    """The numbers of a significant length test, else None."""
    if test is None or test["failed"] < LEAST_FAILED or abs(test["z"]) < LEAST_Z:
        return None
    if abs(test["longer"] - 0.5) < LEAST_SHIFT:
        return None
    return (
        f"failed completions are longer than trained ones in {test['longer']:.0%} of the pairs (z = {test['z']:.1f}, "
        f"{test['failed']} prompts against {test['trained']})"
    )


def _mann_whitney(failed: Sequence[int], trained: Sequence[int]) -> tuple[float, float]:
    """(pairs with a longer failed completion, equal ones counted half; the ties' share of N + 1 in the variance)."""
    count, rank, ranks, ties = len(failed) + len(trained), 0, 0.0, 0
    ordered = sorted([*((length, True) for length in failed), *((length, False) for length in trained)])
    for _, equal in groupby(ordered, key=lambda pair: pair[0]):
        are_failed = [is_failed for _, is_failed in equal]
        size = len(are_failed)
        ranks += sum(are_failed) * (rank + (size + 1) / 2)
        rank, ties = rank + size, ties + size**3 - size
    return ranks - len(failed) * (len(failed) + 1) / 2, ties / (count * (count - 1))


# --- the pieces ----------------------------------------------------------------------------------------------


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
    """A row for each name, in the order of the numbers; none if all attempts have one name. `key` returns both."""
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
    """A row for each reason, the most frequent first, and one for the others; `as_zero` adds only its attempts."""
    trained = [attempt for attempt in attempts if attempt.end == "trained"]
    counted = Counter(attempt.reason for attempt in attempts if attempt.end != "trained").most_common()
    chosen = [(reason, {reason}) for reason, _ in counted[:MOST_NAMES]]
    if others := {reason for reason, _ in counted[MOST_NAMES:]}:
        chosen.append((f"{len(others)} other reasons", others))
    for name, reasons in chosen:
        untrained = [attempt for attempt in attempts if attempt.end != "trained" and attempt.reason in reasons]
        alone, beside = _row("reason", name, untrained, scale), _row("reason", name, [*trained, *untrained], scale)
        yield {**alone, "as_zero": beside["as_zero"]}


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
    """The range of a number between powers of two: 5 -> "4 to 7"; below `exact` the number alone."""
    if number < exact:
        return f"{number}"
    low = 1 << (number.bit_length() - 1)
    return f"{low} to {2 * low - 1}" if low > 1 else "1"


def _hours(hour: int, width: int) -> str:
    first = hour // width * width
    return f"{first}" if width == 1 else f"{first} to {first + width - 1}"
