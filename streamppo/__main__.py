"""`python -m streamppo`, and the command `streamppo`."""

import sys
import traceback
from types import TracebackType
from typing import NoReturn

from streamppo import cli
from streamppo.commands import end
from streamppo.terminal import lines


def main() -> NoReturn:
    """Run one command and end the process, also beside threads of a plug-in that never end."""
    sys.excepthook = _show
    end.leave(cli.main())


def _show(kind: type[BaseException], error: BaseException, place: TracebackType | None) -> None:
    """Write the traceback of an error that nobody foresaw; its words may be of anybody."""
    sys.stderr.write(lines("".join(traceback.format_exception(kind, error, place)).rstrip("\n")) + "\n")


if __name__ == "__main__":
    main()
