"""Entry point of `python -m streamppo` and of the command `streamppo`."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from streamppo.terminal import lines

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> NoReturn:
    """Run one command and end the process, even if threads of a plug-in never end.

    Each of `SIGNALS` ends a command as Ctrl-C does: with nothing left behind, and 128 and its number as the exit code.
    """
    _on_signals(_leave)
    from streamppo import cli, process
    from streamppo.commands import end

    process.open_closed_streams()
    sys.excepthook = _show
    noted: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        noted.append(number)
        raise KeyboardInterrupt

    _on_signals(interrupt)
    code = cli.main()
    end.leave(128 + noted[0] if noted and code == 128 + signal.SIGINT else code)


def _on_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Install a handler of `SIGNALS`; those that are ignored, as by `nohup`, stay so."""
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    # During the imports: an exception there would be shown, and a library may turn it into another one.
    os._exit(128 + number)


def _show(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Write the traceback of an unexpected error, made safe for a terminal: its text may be untrusted."""
    sys.stderr.write(lines("".join(traceback.format_exception(kind, error, place)).rstrip("\n")) + "\n")


if __name__ == "__main__":
    main()
