"""Computes when a run's events happened, and describes instant events, for the pages' timelines and the trace."""

from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from streamppo.telemetry.metrics_file import EngineLine, Line, UpdateLine


class EngineInterval(NamedTuple):
    """The interval between two consecutive lines of a rollout actor. An engine is idle if it has nothing to decode."""

    before: EngineLine
    line: EngineLine

    @property
    def tokens(self) -> int:
        return self.line["tokens"] - self.before["tokens"]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.line["wall_s"] - self.before["wall_s"], 1e-9)

    @property
    def idle_s(self) -> float:
        return self.line["idle_s"] - self.before["idle_s"]

    @property
    def lived_s(self) -> float:
        """The seconds that the engine was idle or busy."""
        return self.idle_s + self.line["busy_s"] - self.before["busy_s"]

    @property
    def idle(self) -> float:
        """The idle share of `lived_s`."""
        return self.idle_s / max(self.lived_s, 1e-9)


def engine_intervals(lines: Sequence[Line]) -> Iterator[EngineInterval]:
    """Pair each line of a rollout actor with its previous line, or with zero counters at its engine's start."""
    engines: dict[str, EngineLine] = {}
    for line in lines:
        if "part" in line:
            engines = {}
        if "engine" in line:
            yield engine_interval(engines.get(line["engine"]), line)
            engines[line["engine"]] = line


def engine_interval(before: EngineLine | None, line: EngineLine) -> EngineInterval:
    """Return the interval from `before` to `line`; without a `before` of the same engine, from its start."""
    counters: tuple[Literal["tokens", "busy_s", "idle_s"], ...] = ("tokens", "busy_s", "idle_s")
    # An engine that was restarted counts from 0 again.
    if before is not None and all(before[name] <= line[name] for name in counters):
        return EngineInterval(before, line)
    began_s = max(0.0, line["wall_s"] - line["busy_s"] - line["idle_s"])
    return EngineInterval({**line, "wall_s": began_s, "tokens": 0, "busy_s": 0.0, "idle_s": 0.0}, line)


def requested_s(line: UpdateLine) -> float:
    """Return the second of the run at which the update requested its batch, and the previous version's push began."""
    return line["wall_s"] - line["update_s"]


def describe_event(line: Line) -> tuple[str, str] | None:
    """Return the kind and the text of an event without duration; None for other lines."""
    if "evaluation" in line:
        accuracy = "no score" if line["accuracy"] is None else f"accuracy {line['accuracy']:.3f}"
        return "evaluation", f"{line['evaluation']}: {accuracy}"
    if "restart" in line:
        return "restart", f"{line['restart']}: {line['reason']}"
    if "part" in line:
        return "part", f"part {line['part']} begins at version {line['version']}"
    return ("end", f"ends: {line['end']}") if "end" in line else None
