"""Converts lines of metrics.jsonl to points: each point is a version and its named numbers."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from streamppo.telemetry.metrics_file import Line, RemadeLine, UpdateLine, numbers

BY_ENGINE = ("version", "tokens", "busy_s", "idle_s", "prefix_reused", "context_reused", "kv_age")
"""The numbers of a rollout actor's line that trackers get, if the line has them."""


class Point(NamedTuple):
    """The numbers of one line, and their version. The line was written at `at_s`, in seconds since 1970."""

    version: int
    at_s: float
    values: Mapping[str, float]


class Points:
    """Converts lines, in the order of the file, to points. `version` is that of the last line of an update so far."""

    def __init__(self, version: int = 0) -> None:
        self.version = version
        self.outcome = ""
        self._restarts: dict[str, int] = {}

    def make(self, lines: Sequence[Line], written_s: float) -> Iterator[Point]:
        """Yield a point for each line that has numbers for trackers. The last line was written at `written_s`."""
        for line in lines:
            version, values = self._values(line)
            if values:
                yield Point(version, written_s - (lines[-1]["wall_s"] - line["wall_s"]), values)

    def _values(self, line: Line) -> tuple[int, dict[str, float]]:
        if "update" in line:
            self.version = line["update"]
            return self.version, _metrics("update", line)
        if "remade" in line:
            return line["remade"], _metrics("remade", line)
        if "evaluation" in line:
            scores = {} if line["accuracy"] is None else {"evaluation_accuracy": line["accuracy"]}
            return line["evaluation"], {**scores, "evaluation_failed": line["failed"]}
        if "restart" in line:
            self._restarts[line["restart"]] = self._restarts.get(line["restart"], 0) + 1
            return self.version, {f"restarts_{line['restart']}": self._restarts[line["restart"]]}
        if "part" in line:
            self._restarts = {}
        if "end" in line:
            self.outcome = line["end"]
        return self.version, _pipeline_values(line)


def _metrics(kind: str, line: UpdateLine | RemadeLine) -> dict[str, float]:
    return {name: value for name, value in numbers(line).items() if name != kind}


def _pipeline_values(line: Line) -> dict[str, float]:
    if "queue" in line:
        skipped = {"skipped_prompts": line["skipped_prompts"]} if "skipped_prompts" in line else {}
        return {"queue_ready": line["queue"], "queue_in_flight": line["in_flight"], **skipped}
    if "engine" not in line:
        return {}
    counters: Mapping[str, object] = {**line}
    values = {name: counters.get(name) for name in BY_ENGINE}
    return {f"engine_{name}_{line['engine']}": float(n) for name, n in values.items() if isinstance(n, int | float)}
