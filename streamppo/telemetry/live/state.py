"""The state that the live view shows, computed from the lines of metrics.jsonl, also from a finished run."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from streamppo.telemetry import progress, timeline
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.metrics_file import Line, SampleLine, UpdateLine, numbers
from streamppo.telemetry.progress import ScoredVersion
from streamppo.telemetry.timeline import EngineInterval

WINDOW = 20
"""Speeds and shares cover this number of newest updates."""
CURVES = ("reward", "entropy", "ess", "length", "lag_mean")
MOST_MEANS = 2048
"""Maximum number of means of a curve, so that a drawing takes as long after 100,000 updates as after 2,000."""


@dataclass(slots=True)
class CurveValues:
    """The finite values of a curve: the newest, the smallest and largest, and means of equally many values.

    When `means` has `MOST_MEANS` entries, each two are merged, and later means cover twice as many values.
    """

    means: list[float] = field(default_factory=list)
    newest: float = math.nan
    low: float = math.inf
    high: float = -math.inf
    _size: int = 1
    _pending: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, values: Sequence[float]) -> "CurveValues":
        """Return a curve with a mean for each of the `values`."""
        return cls(list(values), values[-1], min(values), max(values)) if values else cls()

    def append(self, value: float) -> None:
        if not math.isfinite(value):
            return
        self.newest, self.low, self.high = value, min(self.low, value), max(self.high, value)
        self._pending.append(value)
        if len(self._pending) == self._size:
            self.means.append(fmean(self._pending))
            self._pending = []
        if len(self.means) == MOST_MEANS:
            self.means = [fmean(pair) for pair in zip(self.means[::2], self.means[1::2], strict=True)]
            self._size *= 2


@dataclass(slots=True)
class RunState:
    """The state of one run, for the live view.

    `paces` are the newest updates of this part. `lag_bound` is the bound on the lag in words. `line` describes the
    newest update. `doing` is what the driver waits for. `stopping` is true after a signal. `memory` is (used, total) in
    GiB. `ended` is the outcome, or "". `diagnosis` has the findings; the caller adds the lines to it.
    """

    name: str
    folder: str
    updates: int
    lag_bound: str
    batch_size: int
    version: int = 0
    wall_s: float = 0.0
    curves: dict[str, CurveValues] = field(default_factory=lambda: {name: CurveValues() for name in CURVES})
    held_out: list[ScoredVersion] = field(default_factory=list)
    paces: deque[UpdateLine] = field(default_factory=lambda: deque(maxlen=WINDOW))
    lags: deque[Mapping[str, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    newest: Mapping[str, float] = field(default_factory=dict)
    ready: int = 0
    in_flight: int = 0
    engines: dict[str, EngineInterval] = field(default_factory=dict)
    sampled: SampleLine | None = None
    restarts: int = 0
    warning: str = ""
    warned_s: float = 0.0
    line: str = ""
    doing: str = ""
    stopping: bool = False
    memory: tuple[float, float] | None = None
    ended: str = ""
    diagnosis: Diagnosis | None = None

    def add(self, line: Line) -> None:
        self.wall_s = max(self.wall_s, line["wall_s"])
        if "update" in line:
            self._add_update(line)
        elif "remade" in line:
            if "reward" in line:
                self.curves["reward"].append(line["reward"])
        elif "evaluation" in line:
            progress.insert(self.held_out, line)
        elif "queue" in line:
            self.ready, self.in_flight = line["queue"], line["in_flight"]
        elif "engine" in line:
            previous = self.engines.get(line["engine"])
            self.engines[line["engine"]] = timeline.engine_interval(previous and previous.line, line)
            self.sampled = line["sampled"] or self.sampled
        elif "restart" in line:
            self.restarts += 1
            # The actor that died writes no more lines.
            self.engines = {} if line["restart"] == "rollout" else self.engines
        elif "part" in line:
            # The earlier engines have ended, and the pause between two parts does not count as run time.
            self.engines = {}
            self.paces.clear()
            self.ready = self.in_flight = 0
            self.ended = ""
        elif "end" in line:
            self.ended = line["end"]

    def warn(self, text: str) -> None:
        self.warning, self.warned_s = text, self.wall_s

    @property
    def present_warning(self) -> str:
        """The newest warning, unless it is about a finding that has ended."""
        sign = self.diagnosis and self.diagnosis.findings.get(self.warning.partition(":")[0])
        return "" if sign and not sign.holds else self.warning

    @property
    def seconds_left(self) -> float | None:
        """Seconds of the remaining updates at the speed of the newest updates; None before the second update."""
        update_s = self.update_s
        return None if update_s is None else update_s * max(0, self.updates - self.version)

    @property
    def update_s(self) -> float | None:
        """Mean seconds between two updates, over the newest updates; None before the second update."""
        return None if self._lasted_s is None else self._lasted_s / (len(self.paces) - 1)

    @property
    def learner_waits(self) -> float | None:
        """The share of its time that the learner waited for batches, in the newest updates."""
        update_s = sum(line["update_s"] for line in self.paces)
        return sum(line["wait_s"] for line in self.paces) / update_s if update_s else None

    @property
    def engines_idle(self) -> float | None:
        """The share of time that engines had nothing to decode, between the two newest lines of each."""
        lived_s = sum(engine.lived_s for engine in self.engines.values())
        return sum(engine.idle_s for engine in self.engines.values()) / lived_s if lived_s > 0 else None

    @property
    def sampled_per_s(self) -> float | None:
        """Sum of the engines' sampled tokens per second."""
        rates = [engine.tokens / engine.lived_s for engine in self.engines.values() if engine.lived_s > 0]
        return sum(rates) if rates else None

    @property
    def trained_per_s(self) -> float | None:
        if self._lasted_s is None:
            return None
        return sum(line["tokens_trained"] for line in list(self.paces)[1:]) / max(self._lasted_s, 1e-9)

    @property
    def _lasted_s(self) -> float | None:
        return self.paces[-1]["wall_s"] - self.paces[0]["wall_s"] if len(self.paces) > 1 else None

    @property
    def lag_histogram(self) -> dict[int, int]:
        """The number of tokens with each lag, over the newest batches."""
        totals: Counter[int] = Counter()
        for histogram in self.lags:
            totals.update({int(lag): count for lag, count in histogram.items()})
        return dict(sorted(totals.items()))

    def _add_update(self, line: UpdateLine) -> None:
        self.version = max(self.version, line["update"])
        metrics = numbers(line)
        for name, values in self.curves.items():
            if name in metrics:
                values.append(metrics[name])
        self.newest = metrics
        self.lags.append(line["lag_histogram"])
        self.paces.append(line)
