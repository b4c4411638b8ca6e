"""`python -m streamppo`, and the command `streamppo`."""

from typing import NoReturn

from streamppo import cli
from streamppo.commands import end


def main() -> NoReturn:
    """Run one command and end the process, also beside threads of a plug-in that never end."""
    end.leave(cli.main())


if __name__ == "__main__":
    main()
