"""docs/reference.md is the code's: every field with its sentence, every metric with its meaning."""

import re

from conftest import REPOSITORY

from streamppo.telemetry import catalogue
from tests import reference

FROZEN = (REPOSITORY / "tests" / "unit" / "config" / "fields.txt").read_text().splitlines()


def test_the_reference_is_what_the_code_says() -> None:
    assert reference.PAGE.read_text() == reference.page(), "write it again: python -m tests.reference"


def test_the_reference_has_every_field_of_the_frozen_list_once_and_each_has_a_sentence() -> None:
    rows = re.findall(
        r"^- `([^`]+)`(?: \(`.*?`(?:, [^`]*)?\)| \([^`]*\))?: (.*)$",
        reference.page().partition("## Metrics")[0],
        re.MULTILINE,
    )
    assert sorted(name for written, _ in rows for name in reference.names(written)) == sorted(FROZEN)
    assert [name for name, sentence in rows if not sentence] == []


def test_the_reference_has_every_metric() -> None:
    metrics = reference.page().partition("## Metrics")[2]
    names = [*catalogue.LINES, *catalogue.UPDATE, *catalogue.SOMETIMES]
    assert [name for name in names if f"- `{name}`: " not in metrics] == []
