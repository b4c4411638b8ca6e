"""The names of Prometheus gauges, derived from the catalogue's.

reward          streamppo_reward{run="math"}
ess_lag_3-4     streamppo_ess_lag_of{run="math", of="3-4"}
"""

from typing import NamedTuple

from streamppo.telemetry import catalogue

PREFIX = "streamppo_"
VERSION = "version"
"""The version of the newest point, as a metric."""
RUN, OF = "run", "of"
"""Labels: the run's name; the bucket, component or actor of a catalogue name that ends in _."""
TEXTS = {**catalogue.ENTRIES, VERSION: "updates that were made"}
"""Every metric, by its name in the catalogue."""


class Gauge(NamedTuple):
    """A gauge: its name, its help text, and the value of its label `of`, if it has one."""

    name: str
    text: str
    of: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of its labels."""
        return (RUN, OF) if self.of else (RUN,)


def gauge(metric: str) -> Gauge | None:
    """Find the gauge of a metric; None for one that is not in the catalogue."""
    if metric == VERSION:
        return Gauge(name(VERSION), TEXTS[VERSION], "")
    entry = catalogue.find(metric)
    return Gauge(name(entry.name), entry.text, entry.of) if entry else None


def name(entry: str) -> str:
    """The gauge's name for a name of the catalogue."""
    return f"{PREFIX}{entry}{OF if entry.endswith('_') else ''}"
