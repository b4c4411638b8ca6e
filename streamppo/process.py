"""How a process of ours behaves: when Python looks for reference cycles in it, and where its log lines go.

Cycles: a trajectory that waits a second for its reward survives the cheap passes, and so Python makes a full one every
second. It walks every object there is, 0.3 s beside torch and transformers, and nothing else happens meanwhile. Nothing
that a trajectory consists of makes cycles.

Log lines: every module logs to `logging.getLogger(__name__)`; each process of ours calls `log_to_stdout` once. Ray
brings an actor's standard output to the driver's.
"""

import gc
import logging
import sys

MORE_OBJECTS = 200_000
"""A pass comes when so many objects more are alive than at the last one: tens of MiB that cycles may hold."""
CLEAR_LINE = "\r\033[K"
"""On a terminal: back to the line's beginning, and the live line that stands there is wiped."""


def collect_rarely() -> None:
    """Freeze what is loaded, so that it is never walked again, and let the rest grow before it is.

    To be called once everything is loaded.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(MORE_OBJECTS)


def log_to_stdout(who: str = "") -> None:
    """Write the package's log lines to standard output, each behind `who: ` where it is given. Again: no change."""
    ours = logging.getLogger("streamppo")
    if any(isinstance(handler, _Lines) for handler in ours.handlers):
        return
    handler = _Lines()
    handler.setFormatter(logging.Formatter(f"{who}: %(message)s" if who else "%(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


class _Lines(logging.Handler):
    """One lasting line for each record, above the live line where there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write to whatever standard output is at this moment; a reader that went away stops nothing."""
        try:
            clear = CLEAR_LINE if sys.stdout.isatty() else ""
            sys.stdout.write(f"{clear}{self.format(record)}\n")
            sys.stdout.flush()
        except OSError:
            self.handleError(record)
