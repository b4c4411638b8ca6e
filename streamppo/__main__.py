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

    Each of `process.SIGNALS` ends the command in the same way as Ctrl-C. The exit code is then 128 + the signal's
    number.
    """
    process.make_gc_rare()
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
    """Install `handler` for each of `process.SIGNALS` that is not ignored (`nohup` makes a process ignore SIGHUP)."""
    for number in process.SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    # Raising an exception would print a traceback during imports, and a library could replace it by another exception.
    os._exit(128 + number)


def _show(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Write the traceback of an unexpected error, and make untrusted text in it safe for a terminal."""
    sys.stderr.write(lines("".join(traceback.format_exception(kind, error, place)).rstrip("\n")) + "\n")


if __name__ == "__main__":
    main()
