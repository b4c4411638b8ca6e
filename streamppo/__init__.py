"""streamppo: asynchronous, off-policy-tolerant streaming PPO for language models.

    import streamppo

    run = streamppo.run("configs/math.toml", ["learner.lr=3e-4"])       trains, and returns the run
    run = streamppo.run({"model.path": ...}, data=rows, reward=score)   trains without a configuration file
    run = streamppo.open("runs/math")                                   opens a finished or running run
    run = streamppo.resume("runs/math", ["updates=2000"])               continues a run
    run = streamppo.fork("runs/math", 100, ["learner.lr=1e-4"])         starts a new run from the run's version 100
    streamppo.bisect("runs/math", "entropy", below=0.1).version         the first version with an entropy below 0.1
    streamppo.try_versions("runs/math", [20, 80], 7, at=2).difference   compares two versions on completion 7
    streamppo.verify("runs/math").faults                                contradictions between the run's files
    file = streamppo.bundle("runs/math", 120)                           writes update 120 to a file
    streamppo.replay(file).tokens["ratio"]                              replays the update; the ratio of each token

docs/python.md explains these functions. `import streamppo` imports no other module of the package.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING

if sys.platform == "win32":
    raise ImportError("streamppo does not run on Windows: install it in WSL 2, which is Linux")

if TYPE_CHECKING:
    from streamppo.api.runs import Run, bisect, bundle, fork, open, replay, resume, run, try_versions, verify

__version__ = "0.1.0"
__all__ = ["Run", "bisect", "bundle", "fork", "open", "replay", "resume", "run", "try_versions", "verify"]


def __getattr__(name: str) -> object:
    """Import the Python API when it is first used. Most processes of a run do not use it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("streamppo.api.runs"), name)
