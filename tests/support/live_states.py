"""Made-up states of a run, for the live view."""

from typing import cast

from streamppo.telemetry.live.state import RunState
from streamppo.telemetry.metrics_file import Line, UpdateLine

NASTY = "x = [red]1[/red]\n\x1b[2J\x07\u202e # 答え: 42 " + "日本語" * 200


def empty() -> RunState:
    """A run that has just begun."""
    return RunState("math", "/home/someone/runs/math", updates=100, lag_bound="2", batch_size=512)


def update(version: int, wall_s: float) -> UpdateLine:
    """The line of an update that took 2 s, a quarter of them waiting."""
    metrics = {"reward": version / 100, "entropy": 1.0, "ess": 0.9, "length": 3.0, "lag_mean": 1.0}
    more = {"tokens_trained": 1000.0, "tokens_too_old": 0.0, "wait_s": 0.5, "update_s": 2.0, "push_ms": 1.0}
    lags = {"lag_histogram": {"0": 250, "1": 500, "2": 245, "7": 5}}
    return cast(UpdateLine, {"update": version, "wall_s": wall_s, **metrics, **more, **lags})


def engine(name: str, tokens: int, lived_s: float, wall_s: float, completion: str = "46") -> Line:
    """The line of an engine that has been idle for a tenth of its life."""
    seconds = {"busy_s": 0.9 * lived_s, "idle_s": 0.1 * lived_s}
    sampled = {"prompt": "12+34=", "completion": completion, "reward": 1.0, "version": 39}
    line = {"engine": name, "wall_s": wall_s, "version": 40, "tokens": tokens, **seconds, "sampled": sampled}
    return cast(Line, line)


def busy(versions: int = 40, completion: str = NASTY) -> RunState:
    """A run in progress, with everything that can be shown, and text with markup and control characters."""
    state = empty()
    state.add({"part": 1, "wall_s": 0.0, "version": 0})
    for version in range(1, versions + 1):
        state.add(update(version, 10.0 + 2 * version))
        if version % 10 == 0:
            held_out = {"evaluation": version, "accuracy": version / 200, "count": 10, "failed": 0, "versions": (0, 0)}
            state.add(cast(Line, {"wall_s": 10.0 + 2 * version, **held_out}))
    state.add({"queue": 128, "wall_s": 90.0, "in_flight": 320})
    state.add(engine("rollout-0", 1000, 10.0, 91.0))
    state.add(engine("rollout-0", 3000, 20.0, 101.0, completion))
    state.add({"restart": "learner", "wall_s": 102.0, "reason": "it was killed"})
    state.warn("[bold]learner-0[/bold]: killed by the kernel, out of memory\x1b[31m " + "and so on " * 40)
    state.memory, state.doing, state.line = (5.0, 16.0), "update 41", "[ 102.0s] update   40/100  reward 0.400"
    return state
