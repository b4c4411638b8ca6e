"""Records SIGINT, SIGTERM and SIGHUP in a handler, and raises `Interrupted` when the driver checks for them.

An exception in a signal handler could be raised anywhere: in an import that swallows it, or in Ray, which converts it.
If SIGHUP (a closed terminal) was ignored when the run started (`nohup`), it stays ignored.
"""

import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from streamppo.errors import Interrupted
from streamppo.process import SIGNALS
from streamppo.telemetry.live.display import PlainLines
from streamppo.terminal import harmless

TOGETHER_S = 0.2
"""Signals within this time count as one: `timeout` signals the process and then its group, which the process is in."""


class Interrupts:
    """Records the first signal. A second signal ends this process and local Ray processes at once."""

    def __init__(self) -> None:
        self.run: Path | None = None
        self.say: Callable[[str], None] = PlainLines().say
        self._noted: int | None = None
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = SIGNALS[:2] if ignored else SIGNALS
        self.catch()

    def catch(self) -> None:
        """Install the handlers, at the start and again after a library has installed its own."""
        if self._noted is None:
            for number in self._signals:
                signal.signal(number, self._note)

    def check(self) -> None:
        if self._noted is not None:
            raise Interrupted(self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
        self._handle(signal.SIG_IGN)
        time.sleep(TOGETHER_S)
        self._handle(signal.SIG_DFL)
        # A terminal that is closed sends SIGHUP more than once.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        # The driver may check for signals only seconds later.
        resume = f"; continue with: streamppo resume {harmless(shlex.quote(str(self.run)))}" if self.run else ""
        self.say(f"{signal.Signals(number).name}: stopping, a second signal stops at once{resume}\n")

    def _handle(self, action: signal.Handlers) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, action)
