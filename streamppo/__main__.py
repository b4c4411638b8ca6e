"""Entry point of `python -m streamppo` and of the command `streamppo`."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import NoReturn

from streamppo import process
from streamppo.terminal import lines


def main() -> NoReturn:
    """Run one command and end the process, even if threads of a plug-in never end.

    Each of `process.SIGNALS` ends a command as Ctrl-C does; the exit code is 128 and the number of the signal.
    """
    _handle_signals(_exit)
    from streamppo import cli
    from streamppo.commands import end

    process.open_closed_streams()
    sys.excepthook = _show
    received: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        received.append(number)
        raise KeyboardInterrupt

    _handle_signals(interrupt)
    code = cli.main()
    end.leave(128 + received[0] if received and code == 128 + signal.SIGINT else code)


def _handle_signals(handler: Callable[[int, FrameType | None], None]) -> None:
    """Install a handler of `SIGNALS`; an ignored signal, as by `nohup`, stays ignored."""
    for number in process.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # An exception during imports has a traceback, and a library may replace it by another one.
    os._exit(128 + number)


def _show(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Write the traceback of an unexpected error, made safe for a terminal: its text may be untrusted."""
    sys.stderr.write(lines("".join(traceback.format_exception(kind, error, place)).rstrip("\n")) + "\n")


if __name__ == "__main__":
    main()
