"""SIGINT, SIGTERM and SIGHUP: recorded by the handler, raised when the driver checks for them.

An exception in a signal handler can surface anywhere: in an import that swallows it, or in Ray, which converts it.
SIGHUP (a closed terminal) stays ignored if the run was started that way (`nohup`).
"""

import shlex
import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from streamppo.errors import Interrupted
from streamppo.process import SIGNALS
from streamppo.telemetry.live.display import PlainLines
from streamppo.terminal import harmless


class Interrupts:
    """The first signal is recorded; a second one ends the process at once, and local Ray processes with it.

    `run` is the run's folder, None before it exists; `say` writes a line at once, from the handler.
    """

    def __init__(self) -> None:
        self.run: Path | None = None
        self.say: Callable[[str], None] = PlainLines().say
        self._noted: int | None = None
        ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        self._signals = SIGNALS[:2] if ignored else SIGNALS
        self.catch()

    def catch(self) -> None:
        """Install the handlers: at the start, and again after a library has installed its own."""
        if self._noted is None:
            for number in self._signals:
                signal.signal(number, self._note)

    def check(self) -> None:
        """Raise `Interrupted` if a signal was recorded."""
        if self._noted is not None:
            raise Interrupted(self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        # A closed terminal sends it more than once.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._announce(signal.Signals(number).name)

    def _announce(self, name: str) -> None:
        """Announce the stop at once: the driver may check for signals seconds later."""
        resume = f"; continue with: streamppo resume {harmless(shlex.quote(str(self.run)))}" if self.run else ""
        self.say(f"{name}: stopping, a second signal stops at once{resume}\n")
