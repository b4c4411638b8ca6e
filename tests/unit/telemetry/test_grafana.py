"""The dashboard for Grafana is the one that the catalogue makes, and it asks for gauges that there are."""

import json
import re
from typing import Any

from streamppo.telemetry.tracking import gauges
from tests import grafana
from tests.grafana import FILE


def panels() -> list[Any]:
    """All panels of the file but the rows, those of closed rows too."""
    found: list[Any] = json.loads(FILE.read_text())["panels"]
    inside = [panel for row in found for panel in row.get("panels", [])]
    return [panel for panel in [*found, *inside] if panel["type"] != "row"]


def test_the_file_is_the_one_that_the_catalogue_makes() -> None:
    assert FILE.read_text() == grafana.text(), "python -m tests.grafana"


def test_every_gauge_has_one_panel_with_its_help_text() -> None:
    asked = [re.findall(r"streamppo_\w+", panel["targets"][0]["expr"]) for panel in panels()]
    assert sorted(name for found in asked for name in found) == sorted(gauges.name(entry) for entry in gauges.TEXTS)
    assert {panel["description"] for panel in panels()} == set(gauges.TEXTS.values())


def test_no_two_panels_have_one_number_or_one_place() -> None:
    content = json.loads(FILE.read_text())
    ids = [one["id"] for one in [*content["panels"], *panels()] if one["type"] != "row" or one in content["panels"]]
    assert len(set(ids)) == len(content["panels"]) + len(content["panels"][-1]["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels()]
    assert len(set(places)) == len(places)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels())
