"""summary.json: a whole run in numbers, over all its parts; a part is one life of its driver.

The lines of metrics.jsonl and the queue's counters, which are in the journal, outlive a kill -9: what is made of them
is of the whole run. What only engines know is that of those at work at the end, and stands under `engines`.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from streamppo.telemetry.metrics_file import Line
from streamppo.types import EngineReport, QueueReport

STAGES = ("rollout", "queue", "learner")
"""What is started again when it dies."""
WINDOW = 10
"""Updates that "start" and "final" rewards are averaged over."""


def of_lines(lines: Sequence[Line]) -> dict[str, Any]:
    """What the lines of a run, at least one, say together. `wall_s` is that of the last of them."""
    updates = [line for line in lines if "update" in line]
    evaluations = [(line["evaluation"], line["accuracy"]) for line in lines if "evaluation" in line]
    restarts = Counter(line["restart"] for line in lines if "restart" in line)
    return {
        "eval_accuracy": _ends([accuracy for _, accuracy in evaluations], 1),
        "evaluations": evaluations,
        "reward": _ends([line["reward"] for line in updates], WINDOW),
        "updates": updates[-1]["update"] if updates else 0,
        "redone": sum("redone" in line for line in lines),
        "parts": sum("part" in line for line in lines),
        "restarts": {stage: restarts[stage] for stage in STAGES},
        "wall_s": lines[-1]["wall_s"],
        "first_update_s": updates[0]["wall_s"] if updates else None,
        "tokens_trained": _total(updates, "tokens_trained"),
        "lag": _lag([line["lag_histogram"] for line in updates]),
        "learner_idle_share": _total(updates, "wait_s") / max(_total(updates, "update_s"), 1e-9),
        "pushes": len(updates),
        "push_ms": _total(updates, "push_ms") / max(len(updates), 1),
    }


def of_queue(queue: QueueReport | None) -> dict[str, Any]:
    """What the queue has counted since the run began; None where it was not asked, because the run ended early."""
    return {
        "trajectories": queue and queue.consumed,
        "dropped": queue and queue.dropped,
        "failed": queue and queue.failed,
        "dead_letters": queue and queue.dead_letters,
        "mean_tokens": queue and {"consumed": queue.mean_tokens_consumed, "dropped": queue.mean_tokens_dropped},
    }


def of_engines(engines: Sequence[EngineReport]) -> dict[str, Any] | None:
    """What the engines of the end have counted, each since it started; None where none was asked.

    `tokens_per_s` is what they make together, each over its own `seconds`. `restarts` are deaths of an engine's own
    processes that its actor has survived.
    """
    if not engines:
        return None
    idle_s, swaps = sum(engine.idle_s for engine in engines), sum(engine.swaps for engine in engines)
    seconds = [engine.busy_s + engine.idle_s for engine in engines]
    return {
        "actors": [{"actor": one.actor, "version": one.version, "checksum": one.checksum} for one in engines],
        "tokens": sum(engine.tokens for engine in engines),
        "tokens_per_s": sum(one.tokens / max(lived_s, 1e-9) for one, lived_s in zip(engines, seconds, strict=True)),
        "seconds": sum(seconds),
        "idle_share": idle_s / max(sum(seconds), 1e-9),
        "swaps": swaps,
        "swap_ms": sum(engine.swap_s for engine in engines) * 1e3 / max(swaps, 1),
        "restarts": sum(engine.restarts for engine in engines),
        "scorers": [{"actor": one.actor, **msgspec.to_builtins(s)} for one in engines for s in one.scorers],
        "too_long": dict(engines[0].too_long),
    }


def _lag(histograms: Sequence[Mapping[str, int]]) -> dict[str, Any]:
    """Mean, 99th percentile and maximum, in versions, over all tokens; and the histogram itself."""
    histogram: Counter[int] = Counter()
    for one in histograms:
        histogram.update({int(lag): count for lag, count in one.items()})
    total = sum(histogram.values())
    if not total:
        return {"mean": None, "p99": None, "max": None, "histogram": {}}
    seen, p99 = 0, 0
    for p99 in sorted(histogram):
        seen += histogram[p99]
        if seen >= 0.99 * total:
            break
    mean = sum(lag * count for lag, count in histogram.items()) / total
    return {"mean": mean, "p99": p99, "max": max(histogram), "histogram": dict(sorted(histogram.items()))}


def _ends(values: Sequence[float], window: int) -> dict[str, float | None]:
    if not values:
        return {"start": None, "final": None}
    first, last = values[:window], values[-window:]
    return {"start": sum(first) / len(first), "final": sum(last) / len(last)}


def _total(updates: Sequence[Line], name: str) -> float:
    return sum(line[name] for line in updates)
