"""The main function of SGLang's processes: it sends their output to a file, so that a death can be explained.

It also lets them die with the actor from the start: SGLang does so once it is loaded, which may take seconds.

Runs in those processes: they find this function by its name, before anything of SGLang is loaded.
"""

import importlib
import multiprocessing
import os

from streamppo.process import die_with_parent


def run(log: str, target: str, *arguments: object) -> object:
    """Call SGLang's own `target` ("module:function") with this process's output in the file `log`."""
    parent = multiprocessing.parent_process()
    die_with_parent()
    if parent is not None and os.getppid() != parent.pid:
        # It ended before the signal was asked for.
        os._exit(1)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
