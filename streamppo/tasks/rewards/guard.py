"""Bounds on the calls of a scorer or a teacher: concurrency, rate, retries, and a circuit breaker.

closed -> open      after `breaker_failures` retryable failures without a success: calls wait
open -> closed      one call at a time is tried, every `breaker_s`; the first success lets the others continue
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Generic, ParamSpec, Protocol, TypeVar

from streamppo.config.base import Calls
from streamppo.types import ScorerReport

KINDS = 8
"""Number of distinct reasons of failure that are counted separately and logged."""
OTHERS = "other reasons"
LONGEST_S = 120.0
"""A server that asks to wait longer (Retry-After) is called again after this time."""

log = logging.getLogger(__name__)


class CallResult(Protocol):
    """The result of a call. A failed call has a `reason`, and is `retryable` if a retry after `after_s` may succeed."""

    @property
    def reason(self) -> str: ...

    @property
    def retryable(self) -> bool: ...

    @property
    def after_s(self) -> float: ...


P = ParamSpec("P")
E = TypeVar("E", bound=CallResult)


class Guard(Generic[P, E]):
    """Bounds the concurrent calls of one scorer. The first failure with each reason is logged."""

    def __init__(self, name: str, limits: Calls, call: Callable[P, Awaitable[E]]) -> None:
        self._name = name
        self._limits = limits
        self._call = call
        self._places = asyncio.Semaphore(limits.concurrency)
        self._is_open = False
        self._probe = asyncio.Lock()
        self._failures = 0
        self._next_s = 0.0
        self._calls = self._retries = 0
        self._total_s = self._max_s = 0.0
        self._reasons: Counter[str] = Counter()

    async def score(self, *arguments: P.args, **named: P.kwargs) -> E:
        """Try at most `attempts` times until the outcome is not retryable; return the last outcome."""
        outcome = await self._call_in_turn(*arguments, **named)
        for attempt in range(1, self._limits.attempts):
            if not outcome.retryable:
                break
            self._retries += 1
            backoff_s = self._limits.backoff_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.5)
            await asyncio.sleep(max(backoff_s, min(outcome.after_s, LONGEST_S)))
            outcome = await self._call_in_turn(*arguments, **named)
        self._calls += 1
        if reason := outcome.reason:
            is_known = reason in self._reasons
            if not is_known and len(self._reasons) < KINDS:
                log.warning("%s failed: %s", self._name, reason)
                is_known = True
            self._reasons[reason if is_known else OTHERS] += 1
        return outcome

    def report(self, respawns: int) -> ScorerReport:
        """Return the counters since the start; seconds are per try."""
        tries = self._calls + self._retries
        return ScorerReport(
            name=self._name,
            calls=self._calls,
            failed=self._reasons.total(),
            retries=self._retries,
            respawns=respawns,
            mean_s=self._total_s / max(1, tries),
            max_s=self._max_s,
            reasons=dict(self._reasons),
        )

    async def _call_in_turn(self, *arguments: P.args, **named: P.kwargs) -> E:
        async with self._places:
            call = self._call_alone if self._is_open else self._try
            return await call(*arguments, **named)

    async def _call_alone(self, *arguments: P.args, **named: P.kwargs) -> E:
        async with self._probe:
            # If the call before this one has succeeded, the waiting calls run concurrently again.
            if self._is_open:
                await asyncio.sleep(self._limits.breaker_s)
                return await self._try(*arguments, **named)
        return await self._try(*arguments, **named)

    async def _try(self, *arguments: P.args, **named: P.kwargs) -> E:
        if self._limits.calls_per_s:
            await self._wait_for_rate()
        begin = time.perf_counter()
        outcome = await self._call(*arguments, **named)
        duration_s = time.perf_counter() - begin
        self._total_s += duration_s
        self._max_s = max(self._max_s, duration_s)
        self._count_failures(outcome)
        return outcome

    async def _wait_for_rate(self) -> None:
        now = time.perf_counter()
        self._next_s = max(self._next_s, now) + 1 / self._limits.calls_per_s
        await asyncio.sleep(self._next_s - 1 / self._limits.calls_per_s - now)

    def _count_failures(self, outcome: CallResult) -> None:
        if not outcome.reason:
            self._failures, self._is_open = 0, False
            return
        self._failures += outcome.retryable
        if self._failures >= self._limits.breaker_failures and not self._is_open:
            self._is_open = True
            log.warning(
                "%s: %d calls failed and none succeeded; calls wait: %s", self._name, self._failures, outcome.reason
            )
