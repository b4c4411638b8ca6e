"""Ends a process that has called user code: its threads have `GRACE_S` seconds, everything else `HOOKS_S`."""

import multiprocessing
import os
import sys
import threading
from typing import NoReturn

from streamppo.commands.console import flush, print_error
from streamppo.tasks import user_traceback

GRACE_S, HOOKS_S = 2.0, 5.0


def leave(code: int) -> NoReturn:
    """End this process with the exit code `code` after its output is written."""
    located = ((thread, user_traceback.locate_thread(thread.ident or 0)) for thread in _lasting())
    user_threads = {thread: place for thread, place in located if place}
    for thread in user_threads:
        thread.join(GRACE_S / len(user_threads))
    endless = [place for thread, place in user_threads.items() if thread.is_alive()]
    if endless:
        _end(code, f"a thread at {', '.join(endless)} continues and is not waited for: make it a daemon, or end it")
    timer = threading.Timer(HOOKS_S, _end_late, [code])
    timer.daemon = True
    timer.start()
    sys.exit(code)


def _lasting() -> list[threading.Thread]:
    current = threading.current_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not current]


def _end_late(code: int) -> None:
    # The main thread waits for the threads and processes in `names`, or is in an exit hook.
    names = [thread.name for thread in _lasting() if thread is not threading.main_thread()]
    names += [child.name for child in multiprocessing.active_children()]
    cause = f"by {', '.join(names)}" if names else "by an exit hook (atexit)"
    _end(code, f"the process is held up {cause}, and is not waited for")


def _end(code: int, reason: str) -> NoReturn:
    print_error(reason)
    for child in multiprocessing.active_children():
        child.kill()
    flush()
    os._exit(code)
