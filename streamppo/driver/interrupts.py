"""SIGINT and SIGTERM: noted whenever they come, raised where the driver looks for them.

An exception out of a signal handler surfaces anywhere: inside an import that swallows it, or inside Ray, which makes
another exception of it.
"""

import signal
from types import FrameType

from streamppo.errors import Interrupted

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """The first signal is noted; the next one ends the process at once, and local Ray processes die with it."""

    def __init__(self) -> None:
        self._noted: int | None = None
        self.catch()

    def catch(self) -> None:
        """Install the handlers: at the start, and again after a library has installed its own."""
        if self._noted is None:
            for number in SIGNALS:
                signal.signal(number, self._note)

    def check(self) -> None:
        """Raise `Interrupted` if there was a signal."""
        if self._noted is not None:
            raise Interrupted(self._noted)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = number
        for other in SIGNALS:
            signal.signal(other, signal.SIG_DFL)
