"""Entry point of `python -m streamppo` and of the command `streamppo`."""

import sys
import traceback
from types import TracebackType
from typing import NoReturn

from streamppo import cli, process
from streamppo.commands import end
from streamppo.terminal import lines


def main() -> NoReturn:
    """Run one command and end the process, even if threads of a plug-in never end."""
    process.open_closed_streams()
    sys.excepthook = _show
    end.leave(cli.main())


def _show(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Write the traceback of an unexpected error, made safe for a terminal: its text may be untrusted."""
    sys.stderr.write(lines("".join(traceback.format_exception(kind, error, place)).rstrip("\n")) + "\n")


if __name__ == "__main__":
    main()
