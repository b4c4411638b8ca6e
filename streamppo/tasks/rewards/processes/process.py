"""The actor's side of one forked process, and the calls in it."""

import asyncio
import os
import signal
import time
from contextlib import suppress

from streamppo.tasks import user_traceback
from streamppo.tasks.rewards.outcome import Outcome
from streamppo.tasks.rewards.processes.shared_page import LOCATE, SharedPage
from streamppo.tasks.rewards.processes.wire import Call, Outbox, ScoringAnswer, frame, receive_async

LOCATE_S, LOOKS = 0.5, 20
"""Time limit for a blocked process to write its stack, and the number of looks at it."""

Answers = asyncio.Future[tuple[Outcome, ...]]


class CallLost(Exception):
    """The process ended, or was abandoned, during this call. `innocent` is true if another call is the known cause."""

    def __init__(self, *, innocent: bool) -> None:
        super().__init__()
        self.innocent = innocent


class Orphaned(Exception):
    """The process ended because its template ended."""


class Process:
    """A forked process, and its unfinished calls by number."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, page: SharedPage) -> None:
        self.pid = pid
        self.reader = reader
        self.writer = writer
        self._outbox = Outbox(writer)
        self.page = page
        self.calls: dict[int, Answers] = {}
        self.ended = False
        """True if the process gets no more calls."""
        self.killed = False
        self.held = False
        """True if one call holds the event loop; the process gets no other calls."""

    async def ask(self, call: Call, *, grace_s: float) -> tuple[Outcome, ...] | None:
        """Send a call and wait for its answer; None if there is none `grace_s` after the call's time limit.

        Without an answer `held` becomes true if no step began or ended during `grace_s` and no other call's step is
        running. Raises `CallLost` and `Orphaned`, and one of `UNSENDABLE`.
        """
        message = frame(call)
        answer: Answers = asyncio.get_running_loop().create_future()
        self.calls[call.number] = answer
        try:
            self._outbox.put(message)
            await asyncio.wait((answer,), timeout=call.timeout_s)
            if answer.done():
                return answer.result()
            step = self.page.read()
            if grace_s:
                await asyncio.wait((answer,), timeout=grace_s)
            if answer.done():
                return answer.result()
            # A free event loop would have run the call's timeout, which counts as a step. While another call's step is
            # running, this call does not hold the loop.
            self.held |= self.page.read() == step and step.call in (0, call.number)
            return None
        finally:
            del self.calls[call.number]

    async def locate(self) -> str:
        """Return "file:line" of the user code that a blocked process runs; "" if it is unknown after `LOCATE_S`."""
        if not self.ended:
            with suppress(ProcessLookupError):
                os.kill(self.pid, LOCATE)
        stack, end_s = "", time.monotonic() + LOCATE_S
        while time.monotonic() < end_s and not (stack and stack == self.page.read_stack()):
            stack = self.page.read_stack()
            await asyncio.sleep(LOCATE_S / LOOKS)
        return user_traceback.locate_in_stack(stack)

    async def listen(self) -> None:
        try:
            while True:
                answer = await receive_async(self.reader, ScoringAnswer)
                waiting = self.calls.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer.outcomes)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def leave_to(self, culprit: int) -> None:
        """Give this process no new calls, and fail all calls except `culprit` with `CallLost(innocent=True)`."""
        self.held = True
        for number, waiting in self.calls.items():
            if number != culprit and not waiting.done():
                waiting.set_exception(CallLost(innocent=True))

    def fail_calls(self, status: int) -> None:
        """Fail an ended process's calls: the call that ended it, if known, with the reason, others with `CallLost`."""
        culprit = self.page.read().call
        if culprit not in self.calls and len(self.calls) == 1 and not self.killed:
            (culprit,) = self.calls
        ending = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
        for number, waiting in self.calls.items():
            if waiting.done():
                continue
            if number == culprit and not self.killed:
                waiting.set_result((Outcome(reason=f"its process died: {ending}", whole=True),))
            else:
                waiting.set_exception(CallLost(innocent=culprit != 0))

    def orphan_calls(self) -> None:
        for waiting in self.calls.values():
            if not waiting.done():
                waiting.set_exception(Orphaned())
