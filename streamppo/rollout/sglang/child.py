"""The main function of SGLang's processes: it redirects their output to a file, so that a death can be explained.

It also makes them die with the actor from the start; SGLang itself arranges that only after loading, seconds later.

It runs in those processes, which look it up by name before anything of SGLang is loaded.
"""

import importlib
import multiprocessing
import os

from streamppo.process import die_with_parent


def run(log: str, target: str, *arguments: object) -> object:
    """Call SGLang's `target` ("module:function") with this process's output redirected to the file `log`."""
    parent = multiprocessing.parent_process()
    die_with_parent()
    if parent is not None and os.getppid() != parent.pid:
        # The parent ended before the death signal was set up.
        os._exit(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
