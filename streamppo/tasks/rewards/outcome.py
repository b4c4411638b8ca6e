"""What came of a call: a reward, no opinion, or a failure with its reason. Never a silent 0."""

import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, SupportsFloat

from streamppo.types import Crossing, Reward, ScoredText, utf8_safe

QUOTED = 200
"""Characters of a bad value or of an error that a reason quotes."""


class Outcome(Crossing, frozen=True):
    """`reward`, or else `reason`; neither means that the scorer has no opinion on this trajectory."""

    reward: Reward | None = None
    reason: str = ""
    retryable: bool = False


NO_OPINION = Outcome()


def failed(error: BaseException) -> Outcome:
    """The failure that an exception stands for."""
    text = f"{type(error).__name__}: {error}"[:QUOTED]
    return Outcome(reason=utf8_safe(text), retryable=bool(getattr(error, "retryable", False)))


def too_late(timeout_s: float) -> Outcome:
    """The failure of a call that did not end in time."""
    return Outcome(reason=f"no score after {timeout_s:g} s")


def check(value: Any, text: ScoredText) -> Outcome:
    """A number or a `Reward` as an outcome; anything else is a failure that quotes it."""
    if isinstance(value, Reward):
        return _check_reward(value, text)
    number = _finite(value)
    return _refused(value, "not a finite number") if number is None else Outcome(reward=Reward(score=number))


def check_batch(values: Any, texts: tuple[ScoredText, ...]) -> tuple[Outcome, ...]:
    """One value for each text, None where the function has no opinion."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return (_refused(values, f"not a list of {len(texts)} numbers"),) * len(texts)
    listed = list(values)
    if len(listed) != len(texts):
        return (Outcome(reason=f"returned {len(listed)} scores for {len(texts)} trajectories"),) * len(texts)
    return tuple(NO_OPINION if value is None else check(value, text) for value, text in zip(listed, texts, strict=True))


def check_verl(value: Any, text: ScoredText) -> Outcome:
    """A number, or a dict with `score` whose other numbers become components."""
    if not isinstance(value, Mapping):
        return check(value, text)
    if "score" not in value:
        return _refused(value, "a dict without `score`")
    numbers = {str(name): _finite(extra) for name, extra in value.items() if name != "score"}
    components = {name: number for name, number in numbers.items() if number is not None}
    score = _finite(value["score"])
    if score is None:
        return _refused(value, "whose score is not a finite number")
    return Outcome(reward=Reward(score=score, components=components))


def _check_reward(reward: Reward, text: ScoredText) -> Outcome:
    for name, numbers, wanted in (
        ("tokens", reward.tokens, text.num_tokens),
        ("turns", reward.turns, max(1, len(text.turns))),
    ):
        if numbers and len(numbers) != wanted:
            return Outcome(reason=f"returned {len(numbers)} rewards for {wanted} {name}")
    try:
        return Outcome(reward=plain(reward))
    except ValueError as error:
        return _refused(reward, str(error))


def plain(reward: Reward) -> Reward:
    """`reward` as it can cross a process: in plain floats and texts. Raises `ValueError` that says what cannot be."""
    if not isinstance(reward.components, Mapping) or not all(isinstance(name, str) for name in reward.components):
        raise ValueError("whose components are no numbers by name")
    columns = [[reward.score], reward.tokens, reward.turns, reward.components.values()]
    checked = [[_finite(number) for number in column] for column in columns]
    if any(number is None for column in checked for number in column):
        raise ValueError("with a number that is not finite")
    (score,), tokens, turns, components = checked
    return Reward(
        score=score,  # pyright: ignore[reportArgumentType]
        tokens=tuple(tokens),  # pyright: ignore[reportArgumentType]
        turns=tuple(turns),  # pyright: ignore[reportArgumentType]
        components=dict(zip(map(utf8_safe, reward.components), components, strict=True)),  # pyright: ignore[reportArgumentType]
        explanation=utf8_safe(reward.explanation),
    )


def _finite(value: Any) -> float | None:
    """`value` as a plain finite float, or None. Numbers of numpy and torch are numbers too; texts are not."""
    if (
        type(value) is not float
        and not isinstance(value, Real)
        and not (isinstance(value, SupportsFloat) and hasattr(value, "item"))
    ):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _refused(value: Any, why: str) -> Outcome:
    return Outcome(reason=f"returned {repr(value)[:QUOTED]}, {why}")
