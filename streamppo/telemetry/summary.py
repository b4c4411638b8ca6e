"""summary.json: the numbers of a whole run over all its parts. Each start of the driver begins a part.

The lines of metrics.jsonl and the queue's counters in the journal survive a kill -9, so numbers from them cover the
whole run. The numbers under `engines` cover only the engines that ran at the end, each since its start.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NotRequired, TypedDict

import msgspec

from streamppo.telemetry import context_reuse, metrics_file, progress
from streamppo.telemetry.attempts import AttemptTable
from streamppo.telemetry.context_reuse import ReuseNumbers
from streamppo.telemetry.metrics_file import Line, RemadeLine, UpdateLine
from streamppo.terminal import counted
from streamppo.types import EngineReport, QueueReport

STAGES = ("rollout", "queue", "learner")
"""The stages that are restarted when they die."""
WINDOW = 10
"""Number of updates whose mean is the "start" or the "final" reward."""


class StartAndEnd(TypedDict):
    """The value of a number at the start and at the end of a run."""

    start: float | None
    final: float | None


class LagSummary(TypedDict):
    """Tokens by lag in versions, and mean, 99th percentile and maximum of the lag, which are None without tokens."""

    mean: float | None
    p99: int | None
    max: int | None
    histogram: dict[int, int]


class LineTotals(TypedDict):
    """Numbers from the lines of metrics.jsonl.

    `phases` has the newest calls, wall seconds and CPU seconds of each phase by process (`telemetry.catalogue.PHASES`).
    `lag` covers all sampled tokens, and `trained_lag` the tokens within `max_lag`. `evaluations` is ordered by version.
    `eval_accuracy` has the accuracy of the first and of the last version, and `verdict` compares them.
    """

    verdict: str
    eval_accuracy: StartAndEnd
    evaluations: list[tuple[int, float | None]]
    reward: StartAndEnd
    updates: int
    redone: int
    parts: int
    restarts: dict[str, int]
    wall_s: float
    first_update_s: float | None
    tokens_trained: float
    lag: LagSummary
    trained_lag: LagSummary
    learner_idle_share: float
    pushes: int
    push_ms: float
    phases: dict[str, dict[str, tuple[int, float, float]]]


class QueueTotals(TypedDict):
    """The queue's counts since the start of the run. Each is None if the run ended before the queue's first report."""

    trajectories: int | None
    dropped: dict[str, int] | None
    failed: dict[str, int] | None
    dead_letters: int | None
    mean_tokens: dict[str, float] | None
    tokens: dict[str, int] | None
    skipped_prompts: int | None


class EngineTotals(ReuseNumbers):
    """Sums over the engines that ran at the end, each since its start, and their cache reuse (context_reuse.py).

    `tokens_per_s` adds up the engines' tokens per second. `restarts` counts engine processes that an actor restarted.
    `stalls` counts environment steps that blocked an actor, by file and line. `agents` counts requests by outcome.
    """

    actors: list[dict[str, str | int]]
    tokens: int
    tokens_per_s: float
    seconds: float
    idle_share: float
    swaps: int
    swap_ms: float
    restarts: int
    scorers: list[dict[str, object]]
    too_long: dict[str, int]
    stalls: dict[str, int]
    agents: NotRequired[dict[str, int]]


class Summary(LineTotals, QueueTotals):
    """The content of summary.json. `attempts` is absent if the journal or the archive could not be read."""

    outcome: str
    engines: EngineTotals | None
    checksum: str
    seed: int
    versions: dict[str, str]
    attempts: NotRequired[AttemptTable]


def line_totals(lines: Sequence[Line]) -> LineTotals:
    """Return the numbers of a whole run from its lines."""
    updates = sorted((line for line in lines if "update" in line), key=lambda line: line["update"])
    all_updates = updates_in_order(lines)
    evaluations = [(line["evaluation"], line["accuracy"]) for line in lines if "evaluation" in line]
    # The sort is stable, so the newest of several results for a version comes last.
    evaluations.sort(key=lambda evaluation: evaluation[0])
    restarts = Counter(line["restart"] for line in lines if "restart" in line)
    update_s = sum(line["update_s"] for line in updates)
    return {
        "verdict": progress.verdict([line for line in lines if "evaluation" in line]),
        "eval_accuracy": _ends([accuracy for _, accuracy in evaluations if accuracy is not None], 1),
        "evaluations": evaluations,
        "reward": _ends([line["reward"] for line in all_updates if "reward" in line], WINDOW),
        "updates": max(metrics_file.recorded_versions(lines), default=0),
        "redone": sum("redone" in line for line in lines),
        "parts": sum("part" in line for line in lines),
        "restarts": {stage: restarts[stage] for stage in STAGES},
        "wall_s": max((line["wall_s"] for line in lines), default=0.0),
        "first_update_s": updates[0]["wall_s"] if updates else None,
        "tokens_trained": sum(line["tokens_trained"] for line in all_updates),
        "lag": _lag([line["lag_histogram"] for line in all_updates]),
        "trained_lag": _lag([_youngest(line["lag_histogram"], round(line["tokens_too_old"])) for line in all_updates]),
        "learner_idle_share": sum(line["wait_s"] for line in updates) / max(update_s, 1e-9),
        "pushes": len(all_updates),
        "push_ms": sum(line["push_ms"] for line in updates) / max(len(updates), 1),
        "phases": {line["phases"]: line["spent"] for line in lines if "phases" in line},
    }


def updates_in_order(lines: Sequence[Line]) -> list[UpdateLine | RemadeLine]:
    """Return one line for each update, original or remade, ordered by version."""
    by_version: dict[int, UpdateLine | RemadeLine] = {line["remade"]: line for line in lines if "remade" in line}
    by_version |= {line["update"]: line for line in lines if "update" in line}
    return [by_version[version] for version in sorted(by_version)]


def final_line(summary: Summary) -> str:
    """Return the last log line of a run that made all its updates."""
    accuracy, sampled, trained = summary["eval_accuracy"], summary["lag"], summary["trained_lag"]
    parts = [f"{counted(summary['updates'], 'update')} in {summary['wall_s']:.0f} s"]
    if summary["parts"] > 1:
        parts[0] += f" in {summary['parts']} parts"
    if accuracy["start"] is None or accuracy["final"] is None:
        parts[0] += ": no held-out prompt has a score"
    else:
        same = f"{accuracy['final']:.3f}"
        parts[0] += f": accuracy {summary['verdict'] or same}"
    if trained["mean"] is not None:
        parts.append(f"lag of trained tokens {trained['mean']:.2f} (max {trained['max']})")
        if sampled["max"] != trained["max"]:
            parts.append(f"of sampled ones max {sampled['max']}")
    return ", ".join([*parts, f"learner idle {summary['learner_idle_share']:.0%}"])


def queue_totals(queue: QueueReport | None) -> QueueTotals:
    """Return the queue's counts under the names of `QueueTotals`."""
    return {
        "trajectories": queue and queue.consumed,
        "dropped": queue and queue.dropped,
        "failed": queue and queue.failed,
        "dead_letters": queue and queue.dead_letters,
        "mean_tokens": queue and {"consumed": queue.mean_tokens_consumed, "dropped": queue.mean_tokens_dropped},
        "tokens": queue and queue.tokens,
        "skipped_prompts": queue and queue.skipped_prompts,
    }


def engine_totals(engines: Sequence[EngineReport]) -> EngineTotals | None:
    """Return the sums over the engines' reports; None without a report."""
    if not engines:
        return None
    idle_s, swaps = sum(engine.idle_s for engine in engines), sum(engine.swaps for engine in engines)
    seconds = [engine.busy_s + engine.idle_s for engine in engines]
    return {
        "actors": [
            {"actor": report.actor, "version": report.version, "checksum": report.checksum} for report in engines
        ],
        "tokens": sum(engine.tokens for engine in engines),
        "tokens_per_s": sum(
            report.tokens / max(lived_s, 1e-9) for report, lived_s in zip(engines, seconds, strict=True)
        ),
        "seconds": sum(seconds),
        "idle_share": idle_s / max(sum(seconds), 1e-9),
        "swaps": swaps,
        "swap_ms": sum(engine.swap_s for engine in engines) * 1e3 / max(swaps, 1),
        "restarts": sum(engine.restarts for engine in engines),
        "scorers": [{"actor": report.actor, **msgspec.to_builtins(s)} for report in engines for s in report.scorers],
        "too_long": dict(engines[0].too_long),
        "stalls": dict(sum((Counter(engine.stalls) for engine in engines), Counter[str]())),
        "agents": dict(sum((Counter(engine.agents) for engine in engines), Counter[str]())),
        **context_reuse.sum_reports(engines),
    }


def _youngest(histogram: Mapping[str, int], too_old: int) -> dict[str, int]:
    """Remove the `too_old` tokens with the largest lags, which `max_lag` excludes from the loss."""
    remaining: dict[str, int] = {}
    for lag in sorted(histogram, key=int, reverse=True):
        excluded = min(too_old, histogram[lag])
        too_old -= excluded
        if histogram[lag] > excluded:
            remaining[lag] = histogram[lag] - excluded
    return remaining


def _lag(histograms: Sequence[Mapping[str, int]]) -> LagSummary:
    histogram: Counter[int] = Counter()
    for counts in histograms:
        histogram.update({int(lag): count for lag, count in counts.items()})
    total = sum(histogram.values())
    if not total:
        return {"mean": None, "p99": None, "max": None, "histogram": {}}
    ordered = sorted(histogram.items())
    mean = sum(lag * count for lag, count in ordered) / total
    counts = accumulate(count for _, count in ordered)
    p99 = next(lag for (lag, _), count in zip(ordered, counts, strict=True) if count >= 0.99 * total)
    return {"mean": mean, "p99": p99, "max": max(histogram), "histogram": dict(ordered)}


def _ends(values: Sequence[float], window: int) -> StartAndEnd:
    if not values:
        return {"start": None, "final": None}
    first, last = values[:window], values[-window:]
    return {"start": sum(first) / len(first), "final": sum(last) / len(last)}
