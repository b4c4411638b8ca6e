"""Calls to actors: the driver waits for some of them, and handles the answers to all others meanwhile.

    pending -> answered              `on_value` gets the value, inside a later `wait` or `drain`
            -> its actor has died    `on_death` replaces the actor or raises; `repeat` calls another actor
            -> its rank lost another LearnerLost; Ray may find the death of the other rank's node a minute later
            -> failed                RunError
            -> forgotten             its actor was removed

While the driver waits, `on_tick` is called at least every `TICK_S`. If more time passes between two calls, this process
was stopped (Ctrl-Z, SIGSTOP of a scheduler), and that time does not count as a stall of an actor.
"""

import re
import time
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError

from streamppo.driver.ray.cluster import Call, death, describe
from streamppo.errors import LearnerLost, RunError

TICK_S = 0.5
LOOK_S = 5.0
"""The maximum number of seconds that a call of `check_stall` adds. After a longer pause, the driver was stopped."""
DISCONNECTED = re.compile(
    r"gloo/transport.*(Connection |Broken pipe|abort|unreachable|No route)"
    r"|remote process exited or there was a network error|^DistNetworkError: "
)
"""Parts of the errors of gloo, NCCL and torch's store for a rank whose connection to another rank has ended."""
T = TypeVar("T")


class RunStage(StrEnum):
    """The part of a run to which a call or a restart belongs."""

    QUEUE = "queue"
    ROLLOUT = "rollout"
    LEARNER = "learner"
    EVALUATION = "evaluation"
    REPORT = "report"
    CHECKPOINT = "checkpoint"


class WatchedCall(NamedTuple):
    """A watched call. In messages, `name` names its actor or stage. `repeat` makes the same call to another actor."""

    stage: RunStage
    name: str
    on_value: Callable[[Any], None]
    repeat: Callable[[], Call] | None


class WatchedCalls:
    """The unfinished calls. `on_death` gets a call's name and the error, `on_tick` what the driver waits for."""

    def __init__(self, on_death: Callable[[str, RayActorError], None], on_tick: Callable[[str], None]) -> None:
        self._on_death = on_death
        self._on_tick = on_tick
        self._watched: dict[Call, WatchedCall] = {}
        self.reset_stall()

    def wait(self, refs: Sequence[ObjectRef[T]], doing: str) -> list[T]:
        """Return the values of `refs`; handle other calls meanwhile. `doing` describes the wait. Raises `RunError`."""
        pending = list(refs)
        while pending:
            ready = self._look(doing, pending)
            pending = [ref for ref in pending if ref not in ready]
        self.reset_stall()
        return ray.get(list(refs))

    def watch(
        self,
        ref: ObjectRef[T],
        stage: RunStage,
        on_value: Callable[[T], None],
        *,
        name: str = "",
        repeat: Callable[[], ObjectRef[T]] | None = None,
    ) -> None:
        """Call `on_value` with the value of `ref` during a later `wait`. A call that fails ends the run."""
        self._watched[ref] = WatchedCall(stage, name or stage, on_value, repeat)

    def watch_all(self, refs: Sequence[ObjectRef[T]], stage: RunStage) -> None:
        for ref in refs:
            self.watch(ref, stage, lambda _: None)

    def drain(self, stage: RunStage) -> None:
        while any(watched.stage == stage for watched in self._watched.values()):
            self._look(stage, [])
        self.reset_stall()

    def forget(self, stage: RunStage, name: str = "") -> None:
        """Stop watching the calls of `stage` with this `name`; without `name`, the calls that were given no name."""
        forgotten = (stage, name or stage)
        self._watched = {ref: call for ref, call in self._watched.items() if (call.stage, call.name) != forgotten}

    def reset_stall(self) -> None:
        self._stalled_s, self._checked = 0.0, time.monotonic()

    def check_stall(self, limit_s: float, doing: str, explain: Callable[[], str]) -> None:
        """Raise `RunError` with the text of `explain` if there was no progress for `limit_s` seconds."""
        present = time.monotonic()
        self._stalled_s += min(present - self._checked, LOOK_S)
        self._checked = present
        if self._stalled_s >= limit_s:
            raise RunError(f"no progress for {limit_s:g} s: the driver waits for {doing}; {explain()}")

    def _look(self, doing: str, pending: Sequence[Call]) -> list[Call]:
        # A watched call may also be pending, and `ray.wait` accepts each reference only once.
        ready, _ = ray.wait(list({*pending, *self._watched}), num_returns=1, timeout=TICK_S)
        for ref in ready:
            self._handle(ref, doing, pending)
        self._on_tick(doing)
        return ready

    def _handle(self, ref: Call, doing: str, group: Sequence[Call]) -> None:
        watched = self._watched.pop(ref, None)
        name = watched.name if watched else doing
        try:
            value = ray.get(ref)
        except RayActorError as error:
            self._on_death(name, error)
            if watched and watched.repeat:
                self._watched[watched.repeat()] = watched
            return
        except RayError as error:
            if died := death(group):
                self._on_death(name, died)
            kind = LearnerLost if DISCONNECTED.search(describe(error)) else RunError
            raise kind(f"{name}: {describe(error)}") from error
        if watched:
            watched.on_value(value)
