"""One forked process as the actor sees it, and the calls in it."""

import asyncio
import signal

from streamppo.tasks.rewards.outcome import Outcome
from streamppo.tasks.rewards.processes.shared_page import SharedPage
from streamppo.tasks.rewards.processes.wire import Call, Outbox, ScoringAnswer, frame, receive_async

Answers = asyncio.Future[tuple[Outcome, ...]]


class CallLost(Exception):
    """The process ended, or was given up, with this call in it. `innocent`: another call is known to be the cause."""

    def __init__(self, *, innocent: bool) -> None:
        super().__init__()
        self.innocent = innocent


class Orphaned(Exception):
    """The process ended because its template did."""


class Process:
    """One forked process, and the calls on their way to it, by number."""

    def __init__(self, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, page: SharedPage) -> None:
        self.pid = pid
        self.reader = reader
        self.writer = writer
        self._outbox = Outbox(writer)
        self.page = page
        self.calls: dict[int, Answers] = {}
        self.ended = False
        """No call goes to it any more."""
        self.killed = False
        self.held = False
        """It is left to the one call that holds its loop."""

    async def ask(self, call: Call, *, grace_s: float) -> tuple[Outcome, ...] | None:
        """Send a call and wait for its answer; None if there is none `grace_s` after the call's own time is over.

        The process is held then, unless steps of other calls kept it busy.

        Raises `Lost` and `Orphaned`, and one of `UNSENDABLE`.
        """
        message = frame(call)
        answer: Answers = asyncio.get_running_loop().create_future()
        self.calls[call.number] = answer
        try:
            self._outbox.put(message)
            await asyncio.wait((answer,), timeout=call.timeout_s)
            if answer.done():
                return answer.result()
            seen = self.page.read()
            if grace_s:
                await asyncio.wait((answer,), timeout=grace_s)
            if answer.done():
                return answer.result()
            # Without a step: the end of the call's time alone would have been one. A step of another is its own affair.
            self.held |= self.page.read() == seen and seen.call in (0, call.number)
            return None
        finally:
            del self.calls[call.number]

    async def listen(self) -> None:
        """Hand answers to the calls that wait for them, until the process is gone."""
        try:
            while True:
                answer = await receive_async(self.reader, ScoringAnswer)
                waiting = self.calls.get(answer.number)
                if waiting is not None and not waiting.done():
                    waiting.set_result(answer.outcomes)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def leave_to(self, culprit: int) -> None:
        """Tell every call but one to go elsewhere."""
        self.held = True
        for number, waiting in self.calls.items():
            if number != culprit and not waiting.done():
                waiting.set_exception(CallLost(innocent=True))

    def fail_calls(self, status: int) -> None:
        """Fail the calls that still wait in a process that is gone: the guilty one with the reason, if it is known."""
        culprit = self.page.read().call
        if culprit not in self.calls and len(self.calls) == 1 and not self.killed:
            (culprit,) = self.calls
        for number, waiting in self.calls.items():
            if waiting.done():
                continue
            if number == culprit and not self.killed:
                waiting.set_result((Outcome(reason=f"its process died: {_ending(status)}", whole=True),))
            else:
                waiting.set_exception(CallLost(innocent=culprit != 0))

    def orphan_calls(self) -> None:
        """Fail the calls that still wait in a process whose template has died."""
        for waiting in self.calls.values():
            if not waiting.done():
                waiting.set_exception(Orphaned())


def _ending(status: int) -> str:
    return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"
