"""Derives the names of Prometheus gauges from the names of the catalogue.

reward          streamppo_reward{run="math"}
ess_lag_3-4     streamppo_ess_lag_of{run="math", of="3-4"}
"""

from typing import NamedTuple

from streamppo.telemetry import catalogue

PREFIX = "streamppo_"
VERSION = "version"
"""The metric whose value is the version of the newest point."""
RUN, OF = "run", "of"
"""The labels of a gauge: the run's name, and the rest of the metric's name after a prefix such as `ess_lag_`."""
TEXTS = {**catalogue.ENTRIES, VERSION: "updates that were made"}
"""The help text of each metric, by its name in the catalogue."""


class Gauge(NamedTuple):
    """A gauge: its name, its help text, and the value of its label `of`; "" for a gauge without this label."""

    name: str
    text: str
    of: str

    @property
    def labels(self) -> tuple[str, ...]:
        return (RUN, OF) if self.of else (RUN,)


def gauge(metric: str) -> Gauge | None:
    """Return the gauge of a metric; None if the catalogue lacks the metric."""
    if metric == VERSION:
        return Gauge(name(VERSION), TEXTS[VERSION], "")
    entry = catalogue.find(metric)
    return Gauge(name(entry.name), entry.text, entry.of) if entry else None


def name(entry: str) -> str:
    """Return the gauge's name for the catalogue's name `entry`."""
    return f"{PREFIX}{entry}{OF if entry.endswith('_') else ''}"
