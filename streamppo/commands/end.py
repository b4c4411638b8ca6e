"""Ends a process that has called user code, without waiting for the code's threads, processes and exit hooks.

threads in the user's code      have `GRACE_S` together, then the process ends without them
everything else at exit     threads of libraries, executors, processes of multiprocessing, exit hooks: `HOOKS_S`
"""

import multiprocessing
import os
import sys
import threading
from typing import NoReturn

from streamppo.commands.console import complain, flush
from streamppo.tasks import user_traceback

GRACE_S, HOOKS_S = 2.0, 5.0


def leave(code: int) -> NoReturn:
    """End this process with the exit code `code`, after everything is written."""
    theirs = {thread: place for thread in _lasting() if (place := user_traceback.locate_thread(thread.ident or 0))}
    for thread in theirs:
        thread.join(GRACE_S / len(theirs))
    endless = [place for thread, place in theirs.items() if thread.is_alive()]
    if endless:
        _end(code, f"a thread at {', '.join(endless)} continues and is not waited for: make it a daemon, or end it")
    last = threading.Timer(HOOKS_S, _end_late, [code])
    last.daemon = True
    last.start()
    sys.exit(code)


def _lasting() -> list[threading.Thread]:
    """List the other threads that Python waits for at exit."""
    return [
        thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.current_thread()
    ]


def _end_late(code: int) -> None:
    # The main thread waits for them, or is in an exit hook.
    kept = [thread.name for thread in _lasting() if thread is not threading.main_thread()]
    kept += [child.name for child in multiprocessing.active_children()]
    what = f"by {', '.join(kept)}" if kept else "by an exit hook (atexit)"
    _end(code, f"the process is held up {what}, and is not waited for")


def _end(code: int, reason: str) -> NoReturn:
    complain(reason)
    for child in multiprocessing.active_children():
        child.kill()
    flush()
    os._exit(code)
