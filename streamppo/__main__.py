"""`python -m streamppo`, and the command `streamppo`."""

import os
import sys
import threading
from typing import NoReturn

from streamppo import cli
from streamppo.commands.echo import complain, flush
from streamppo.tasks import places

GRACE_S = 2.0
"""Time for threads of a plug-in to end by themselves."""


def main() -> NoReturn:
    """Run one command and end the process, also beside threads of a plug-in that never end."""
    code = cli.main()
    theirs = {thread: place for thread in _lasting() if (place := places.of_thread(thread.ident or 0))}
    for thread in theirs:
        thread.join(GRACE_S / len(theirs))
    endless = [place for thread, place in theirs.items() if thread.is_alive()]
    if endless:
        complain(f"a thread at {', '.join(endless)} goes on and is not waited for: make it a daemon, or end it")
        flush()
        os._exit(code)
    sys.exit(code)


def _lasting() -> list[threading.Thread]:
    """List the threads, besides this one, that Python waits for at its end."""
    return [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]


if __name__ == "__main__":
    main()
