"""Writes examples/grafana.json from the catalogue: `python -m tests.grafana`. Ray's names begin with ray_."""

import json

from streamppo.telemetry.tracking import gauges
from tests.architecture import REPOSITORY

FILE = REPOSITORY / "examples" / "grafana.json"
ROWS = {
    "Learning": ("evaluation_accuracy", "reward", "reward_", "entropy", "length", "truncated", "version"),
    "Off-policy": ("lag_mean", "lag_max", "ess", "ess_lag_", "behavior_kl", "behavior_kl_lag_", "mismatch"),
    "Update": (
        "policy_loss",
        "value_loss",
        "explained_variance",
        "clip_fraction_high",
        "clip_fraction_low",
        "grad_norm",
        "lr",
    ),
    "Pipeline": ("queue_ready", "queue_in_flight", "engine_tokens_", "engine_idle_s_", "wait_s", "update_s", "push_ms"),
}
"""The open rows, and the metrics with a panel in each. One more row is closed, and has all other metrics."""
LAST_ROW = "Everything else"
COUNTERS = ("engine_tokens_", "engine_busy_s_", "engine_idle_s_")
"""Gauges that only grow. The panels of these gauges show the increase per second."""
WIDTH, HEIGHT, COLUMNS = 8, 7, 3


def dashboard() -> dict[str, object]:
    """Return the dashboard, in which the user chooses a data source and runs."""
    open_entries = {entry for row in ROWS.values() for entry in row}
    closed_entries = tuple(entry for entry in gauges.TEXTS if entry not in open_entries)
    panels: list[dict[str, object]] = []
    top = 0
    for title, entries in [*ROWS.items(), (LAST_ROW, closed_entries)]:
        row, below = _row(title, entries, top, len(panels) + 1)
        panels += [row, *below]
        top += 1 + HEIGHT * -(-len(entries) // COLUMNS)
    source = {"name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "title": "streamppo",
        "uid": "streamppo",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [source, _runs()]},
        "panels": panels,
    }


def text() -> str:
    """Return the dashboard as JSON for Grafana's import."""
    return json.dumps(dashboard(), indent=1) + "\n"


def _row(
    title: str, entries: tuple[str, ...], top: int, number: int
) -> tuple[dict[str, object], list[dict[str, object]]]:
    """Return a row, and the list of panels below it. A closed row contains its panels, and the list is empty."""
    panels = [_panel(entry, at, top + 1, number + 1 + at) for at, entry in enumerate(entries)]
    closed = title == LAST_ROW
    place = {"h": 1, "w": COLUMNS * WIDTH, "x": 0, "y": top}
    row: dict[str, object] = {"id": number, "type": "row", "title": title, "gridPos": place, "collapsed": closed}
    return row | {"panels": panels if closed else []}, [] if closed else panels


def _panel(entry: str, at: int, top: int, number: int) -> dict[str, object]:
    begin = f'{{__name__=~"(ray_)?{gauges.name(entry)}", {gauges.RUN}=~"$run"}}'
    legend = f"{{{{{gauges.RUN}}}}}" + (f" {{{{{gauges.OF}}}}}" if entry.endswith("_") else "")
    expression = f"rate({begin}[1m])" if entry in COUNTERS else begin
    return {
        "id": number,
        "type": "timeseries",
        "title": f"{entry.rstrip('_')}{' a second' if entry in COUNTERS else ''}",
        "description": gauges.TEXTS[entry],
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": at % COLUMNS * WIDTH, "y": top + at // COLUMNS * HEIGHT},
        "targets": [{"refId": "A", "expr": expression, "legendFormat": legend}],
    }


def _runs() -> dict[str, object]:
    query = f'label_values({{__name__=~"(ray_)?{gauges.name(gauges.VERSION)}"}}, {gauges.RUN})'
    return {
        "name": "run",
        "label": "Run",
        "type": "query",
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "query": query,
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    FILE.write_text(text())
