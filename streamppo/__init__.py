"""streamppo: asynchronous, off-policy-tolerant streaming PPO for language models.

    import streamppo

    run = streamppo.run("configs/math.toml", ["learner.lr=3e-4"])       trains, and returns the run
    run = streamppo.open("runs/math")                                   opens a finished or running run
    run = streamppo.resume("runs/math", ["updates=2000"])               continues a run
    run = streamppo.fork("runs/math", 100, ["learner.lr=1e-4"])         a new run that begins with one of its versions
    streamppo.bisect("runs/math", "entropy", below=0.1).version         the first version at which a condition holds
    streamppo.try_versions("runs/math", [20, 80], 7, at=2).difference   two versions that continue a completion
    streamppo.verify("runs/math").faults                                differences between its records
    file = streamppo.bundle("runs/math", 120)                           one update in a file
    streamppo.replay(file).tokens["ratio"]                              the replayed update's numbers of each token

docs/python.md explains them. `import streamppo` imports no other module of the package.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamppo.api.runs import Run, bisect, bundle, fork, open, replay, resume, run, try_versions, verify

__version__ = "0.1.0"
__all__ = ["Run", "bisect", "bundle", "fork", "open", "replay", "resume", "run", "try_versions", "verify"]


def __getattr__(name: str) -> object:
    """Import the Python API at its first use: most processes of a run need none."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("streamppo.api.runs"), name)
