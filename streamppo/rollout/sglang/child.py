"""The main function of SGLang's processes: it sends their output to a file, so that a death can be explained.

Runs in those processes: they find this function by its name, before anything of SGLang is loaded.
"""

import importlib
import os


def run(log: str, target: str, *arguments: object) -> object:
    """Call SGLang's own `target` ("module:function") with this process's output in the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(*arguments)
