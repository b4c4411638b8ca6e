"""The result of a scorer's call: a reward, no score, or a failure with its reason. A failure never scores 0."""

import math
from collections.abc import Iterable, Mapping
from decimal import Decimal
from numbers import Real

from streamppo.errors import Retryable
from streamppo.tasks import user_traceback
from streamppo.terminal import counted
from streamppo.types import Reward, ScoredText, WireStruct, utf8_safe

QUOTED = 200
"""Number of characters of a bad value or an error that a reason quotes."""
LARGEST = 1e16
"""Bound on rewards, so that the squares of a batch's rewards and the sum of the squares fit float32."""


class Outcome(WireStruct, frozen=True):
    """A `reward`, or the `reason` for a failure. Without `reward` and `reason`, the scorer does not score the text."""

    reward: Reward | None = None
    reason: str = ""
    retryable: bool = False
    whole: bool = False
    """True if the whole call raised, died or took too long: in a batch, another trajectory may be the cause."""
    after_s: float = 0.0
    """Seconds until a retry may succeed."""
    late_at: str | None = None
    """The place ("file:line", "" if unknown) of a call that exceeded its time limit; None for any other outcome."""


def failure_of(error: BaseException) -> Outcome:
    """Convert an exception to a failure, with file and line of the user's code if known."""
    causes = list(user_traceback.errors_of(error))
    retryable = all(getattr(cause, "retryable", False) for cause in causes)
    after_s = max((cause.after_s for cause in causes if isinstance(cause, Retryable)), default=0.0)
    reason = utf8_safe(user_traceback.format_user_error(error)[:QUOTED])
    return Outcome(reason=reason, retryable=retryable, whole=True, after_s=after_s)


def too_late(timeout_s: float, place: str = "", *, held: bool = False) -> Outcome:
    """Return the failure of a call that exceeded its time limit at `place` ("file:line", if known).

    `held` is true for an async call that did not await.
    """
    where = f" (at {place})" if place else ""
    advice = ", in which it blocked the event loop: await, or use asyncio.to_thread" if held else ""
    return Outcome(reason=f"no score after {timeout_s:g} s{where}{advice}", whole=True, late_at=place)


def check(value: object, text: ScoredText) -> Outcome:
    """Convert a number or a `Reward` to an outcome. Any other value becomes a failure, which quotes the value."""
    if isinstance(value, Reward):
        return _check_reward(value, text)
    try:
        return Outcome(reward=Reward(score=number(value)))
    except ValueError as error:
        return _refusal(value, str(error))


def check_batch(values: object, texts: tuple[ScoredText, ...]) -> tuple[Outcome, ...]:
    """Convert a list with one value for each text to outcomes; None means that the text is not scored."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        return (_refusal(values, f"not a list of {len(texts)} numbers"),) * len(texts)
    items = list(values)
    if len(items) != len(texts):
        values, completions = counted(len(items), "value"), counted(len(texts), "completion")
        return (Outcome(reason=f"returned {values} for {completions}"),) * len(texts)
    return tuple(
        Outcome() if value is None else check_scored(value, text) for value, text in zip(items, texts, strict=True)
    )


def check_scored(value: object, text: ScoredText) -> Outcome:
    """Convert a number, `Reward`, or dict with `score` or `rewards` (OpenRLHF); its other numbers become components."""
    if not isinstance(value, Mapping):
        return check(value, text)
    scored = next((name for name in ("score", "rewards") if name in value), None)
    if scored is None:
        return _refusal(value, "a dict without `score`")
    logs = value.get("extra_logs")
    named = [*value.items(), *(logs.items() if isinstance(logs, Mapping) else ())]
    extras = {utf8_safe(name): _number_or_none(extra) for name, extra in named if name != scored}
    components = {name: extra for name, extra in extras.items() if extra is not None}
    try:
        return Outcome(reward=Reward(score=number(value[scored]), components=components))
    except ValueError as error:
        return _refusal(value, f"whose {scored} is {error}")


def _check_reward(reward: Reward, text: ScoredText) -> Outcome:
    try:
        checked = plain(reward)
    except ValueError as error:
        return _refusal(reward, str(error))
    for name, numbers, expected in (
        ("tokens", checked.tokens, text.num_tokens),
        ("turns", checked.turns, max(1, len(text.turns))),
    ):
        if numbers and len(numbers) != expected:
            return Outcome(reason=f"returned {len(numbers)} rewards for {expected} {name}")
    return Outcome(reward=checked)


def plain(reward: Reward) -> Reward:
    """Return `reward` with plain floats and texts, for other processes. Raises `ValueError` with the reason."""
    if not isinstance(reward.components, Mapping) or not all(isinstance(name, str) for name in reward.components):
        raise ValueError("whose components are not numbers by name")
    return Reward(
        score=_number_within(reward.score),
        tokens=tuple(map(_number_within, reward.tokens)),
        turns=tuple(map(_number_within, reward.turns)),
        components={utf8_safe(name): _number_within(extra) for name, extra in reward.components.items()},
        explanation=utf8_safe(reward.explanation),
    )


def number(value: object) -> float:
    """Return a number of any library as a float. Raises `ValueError` for any other value, and above `LARGEST`."""
    try:
        # `item` converts numbers of numpy, torch and jax, and arrays with one element.
        item = getattr(value, "item", None)
        plain = item() if callable(item) else value
        converted = float(plain) if isinstance(plain, Real | Decimal) else math.nan
    except (TypeError, ValueError, RuntimeError, ArithmeticError):
        converted = math.nan
    if not math.isfinite(converted):
        raise ValueError("not a finite number")
    if abs(converted) > LARGEST:
        raise ValueError(f"beyond {LARGEST:.0e}, and the learner squares rewards in float32: scale it down")
    return converted


def _number_within(value: object) -> float:
    try:
        return number(value)
    except ValueError as error:
        raise ValueError(f"with a value that is {error}") from error


def _number_or_none(value: object) -> float | None:
    try:
        return number(value)
    except ValueError:
        return None


def _refusal(value: object, why: str) -> Outcome:
    return Outcome(reason=f"returned {user_traceback.describe(value)[:QUOTED]}, {why}")
