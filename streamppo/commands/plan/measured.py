"""Measures costs of stages, and lengths of completions, in runs on this machine.

A cost is the CPU seconds of phases divided by their calls, rows or tokens. A least-squares fit over runs (or parts of a
run) of different sizes separates the cost of a call from the cost of a row.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamppo.commands.plan.workload import StageCosts
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import RunError
from streamppo.queue.store import archive
from streamppo.telemetry import metrics_file, phase_times
from streamppo.telemetry.metrics_file import Line, PhasesLine
from streamppo.telemetry.phase_times import NOTHING, Spending

PASSES = ("forward", "loss", "backward", "optimizer", "targets", "metrics", "snapshot")
"""Phases of an update, which do not overlap."""
ENGINE = ("decode", "prefill", "swap", "unpack")
"""Phases of an engine's thread."""
BATCHES = 8


class Interval(NamedTuple):
    """Calls, wall seconds and CPU seconds by phase, between two lines about one process in the metrics file."""

    begin_s: float
    end_s: float
    spent: Mapping[str, Spending]

    def calls(self, phase: str) -> int:
        return self.spent.get(phase, NOTHING)[0]

    def cpu_s(self, *phases: str) -> float:
        return sum(self.spent.get(phase, NOTHING)[2] for phase in phases)


class MeasuredRun(NamedTuple):
    """A run's folder and configuration, and each process's intervals after the first update.

    `updates` are (second, batch tokens with prompts). `sampled` has each engine's (second, tokens sampled so far).
    """

    folder: Path
    config: Config
    intervals: dict[str, list[Interval]]
    updates: list[tuple[float, float]]
    sampled: dict[str, list[tuple[float, int]]]

    def intervals_of(self, kind: str) -> list[tuple[str, Interval]]:
        """Return (process, interval) for each interval of the processes whose names begin with `kind`."""
        named = ((name, intervals) for name, intervals in self.intervals.items() if name.startswith(kind))
        return [(name, interval) for name, intervals in named for interval in intervals]

    def work(self, interval: Interval) -> tuple[int, float, int]:
        """Return a rank's updates in an interval, the tokens of its rows, and how many updates exchange gradients."""
        rows = [tokens for second, tokens in self.updates if interval.begin_s < second <= interval.end_s]
        ranks = self.config.learner.ranks
        return len(rows), sum(rows) / ranks, len(rows) * (ranks > 1)

    def decoded(self, engine: str, interval: Interval) -> int:
        def at(moment: float) -> int:
            return min(self.sampled[engine], key=lambda sample: abs(sample[0] - moment))[1]

        return at(interval.end_s) - at(interval.begin_s)

    def stored(self, interval: Interval) -> float:
        """Return the trajectories that all actors together finished in an interval of the queue."""
        return sum(
            actor.calls("reward")
            * max(0.0, min(actor.end_s, interval.end_s) - max(actor.begin_s, interval.begin_s))
            / (actor.end_s - actor.begin_s)
            for _, actor in self.intervals_of("rollout-")
        )


def read(folder: Path) -> MeasuredRun:
    """Read a run. Raises `RunError` if the run was too short. Half a minute of updates is enough."""
    config = configfile.load(configfile.existing(folder) / configfile.CONFIG)
    lines = metrics_file.read(folder)
    updates, sampled = list[tuple[float, float]](), dict[str, list[tuple[float, int]]]()
    for line in lines:
        if "engine" in line:
            sampled.setdefault(line["engine"], []).append((line["wall_s"], line["tokens"]))
        elif "update" in line:
            numbers = metrics_file.numbers(line)
            tokens = numbers["learner_tokens_per_s"] * (numbers["score_s"] + numbers["train_s"])
            updates.append((line["wall_s"], tokens))
    intervals = _intervals(lines, updates[0][0] if updates else 0.0)
    for kind, process in {"learner-": "the learner", "rollout-": "an actor", "queue": "the queue"}.items():
        if not any(of_process for name, of_process in intervals.items() if name.startswith(kind)):
            text = f"too short a run to measure: after its first update, {process} wrote its phases less than twice"
            raise RunError(f"{folder}: {text}")
    return MeasuredRun(folder, config, intervals, updates, sampled)


def costs(runs: Sequence[MeasuredRun]) -> StageCosts:
    """Return the costs of the stages from all `runs`, which should have the same model and lengths."""
    engines = [(run, name, interval) for run in runs for name, interval in run.intervals_of("rollout-")]
    ranks = [(run.work(interval), interval) for run in runs for _, interval in run.intervals_of("learner-")]
    queues = [(run, interval) for run in runs for _, interval in run.intervals_of("queue")]
    step_s, row_s = _fit(((at.calls("decode"), run.decoded(name, at)), at.cpu_s("decode")) for run, name, at in engines)
    prefill_s, prompt_s = _fit(((at.calls("prefill"), at.calls("reward")), at.cpu_s("prefill")) for _, _, at in engines)
    (swap_s,) = _fit(((at.calls("swap"),), at.cpu_s("swap", "unpack")) for _, _, at in engines)
    sample_s, idle = _fit(
        ((at.calls("reward"), at.end_s - at.begin_s), at.cpu_s("process") - at.cpu_s(*ENGINE)) for _, _, at in engines
    )
    update_s, token_s, sync_s = _fit((work, interval.cpu_s(*PASSES)) for work, interval in ranks)
    # If there are several ranks, threads other than the main one exchange gradients.
    push_s, exchange_s = _fit(
        ((work[0], work[2]), interval.cpu_s("process") - interval.cpu_s(*PASSES)) for work, interval in ranks
    )
    call_s, stored_s, publish_s = _fit(
        ((interval.calls("store"), run.stored(interval), interval.calls("archive")), interval.cpu_s("process"))
        for run, interval in queues
    )
    waits = [interval.spent["reward"] for _, _, interval in engines if interval.calls("reward")]
    return StageCosts(
        step_s=step_s,
        row_s=row_s,
        cached_s=0.0,
        prefill_s=prefill_s,
        prompt_s=prompt_s,
        swap_s=swap_s,
        sample_s=sample_s,
        reward_s=sum(wall for _, wall, _ in waits) / max(1, sum(calls for calls, _, _ in waits)),
        call_s=call_s,
        stored_s=stored_s,
        publish_s=publish_s,
        update_s=update_s,
        token_s=token_s,
        sync_s=sync_s + exchange_s,
        push_s=push_s,
        actor_cores=idle,
    )


def lengths(folder: Path) -> tuple[float, list[int]]:
    """(mean tokens of a prompt, tokens of each completion) of a run's last archived batches. Raises `RunError`."""
    stored = archive.open(folder)
    prompts, completions = list[int](), list[int]()
    for version in list(stored.versions())[-BATCHES:]:
        for trajectory in stored.batch(version).trajectories:
            prompts.append(len(trajectory.prompt_tokens) // 4)
            completions.append(trajectory.num_tokens)
    if not completions:
        raise RunError(f"{folder}: no archived batch: its completions have no known length")
    return sum(prompts) / len(prompts), completions


def _intervals(lines: Iterable[Line], first_s: float) -> dict[str, list[Interval]]:
    phases = dict[str, list[PhasesLine]]()
    for line in lines:
        if "phases" in line and line["wall_s"] >= first_s:
            phases.setdefault(line["phases"], []).append(line)
    return {
        name: [_interval(*pair) for pair in itertools.pairwise(reports) if phase_times.is_same(*pair)]
        for name, reports in phases.items()
    }


def _interval(before: PhasesLine, after: PhasesLine) -> Interval:
    return Interval(before["wall_s"], after["wall_s"], phase_times.between(before["spent"], after["spent"]))


def _fit(points: Iterable[tuple[tuple[float, ...], float]]) -> tuple[float, ...]:
    """Fit the cost of each cause by least squares without a constant. A cause without a positive cost gets 0."""
    rows = list(points)
    causes, spent = np.array([cause for cause, _ in rows], dtype=float), np.array([seconds for _, seconds in rows])
    best, least = np.zeros(causes.shape[1]), float(np.square(spent).sum())
    for number in range(1, causes.shape[1] + 1):
        for subset in map(list, itertools.combinations(range(causes.shape[1]), number)):
            costs, _, rank, _ = np.linalg.lstsq(causes[:, subset], spent, rcond=None)
            error = float(np.square(causes[:, subset] @ costs - spent).sum())
            if rank == number and (costs > 0).all() and error < least:
                best, least = np.zeros(causes.shape[1]), error
                best[subset] = costs
    return tuple(best.tolist())
