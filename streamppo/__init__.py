"""streamppo: asynchronous, off-policy-tolerant streaming PPO for language models.

    import streamppo

    run = streamppo.run("configs/math.toml", ["learner.lr=3e-4"])       trains, and returns the run
    run = streamppo.open("runs/math")                                   opens a finished or running run
    run = streamppo.resume("runs/math", ["updates=2000"])               continues a run
    run = streamppo.fork("runs/math", 100, ["learner.lr=1e-4"])         a new one that begins as it was at a version
    streamppo.bisect("runs/math", "entropy", below=0.1).version         the first version at which a condition holds
    streamppo.try_versions("runs/math", [20, 80], 7, at=2).difference   two versions that continue a completion
    streamppo.verify("runs/math").faults                                what is not as it was recorded
    file = streamppo.bundle("runs/math", 120)                           one update in a file
    streamppo.replay(file).tokens["ratio"]                              replayed alone, with the numbers of its tokens

docs/python.md explains them. Importing the package imports no other module of it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamppo.api.bundles import bundle, replay
    from streamppo.api.runs import Run, bisect, fork, open, resume, run, try_versions, verify

__version__ = "0.1.0"
__all__ = ["Run", "bisect", "bundle", "fork", "open", "replay", "resume", "run", "try_versions", "verify"]


def __getattr__(name: str) -> object:
    """Import the Python API at its first use: every process of a run imports this package and needs no API."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "bundles" if name in ("bundle", "replay") else "runs"
    return getattr(import_module(f"streamppo.api.{module}"), name)
