"""A fault of a section is that section's sentence, in the page and in the report; all others are there."""

import asyncio
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from report_case import run_folder

from streamppo.commands.look.watching import run_tail, server
from streamppo.config.sections import Config
from streamppo.driver import report
from streamppo.telemetry.report import page, plot, view
from streamppo.telemetry.watch import pipeline, sections

MADE_BY = {
    "head": (sections, "_time_left"),
    "headline": (view, "headline"),
    "curves": (page, "charts"),
    "pipeline": (pipeline, "_queue"),
    "data": (view, "_sum"),
    "trouble": (sections, "_restarts"),
}
"""A function that a section is made by."""
FILES = {
    "a folder": lambda path: (path.unlink(missing_ok=True), path.mkdir()),
    "another kind of JSON": lambda path: path.write_text("[]\n"),
    "JSON with other entries": lambda path: path.write_text('{"engines": 1, "dropped": 2}\n'),
    "no UTF-8": lambda path: path.write_bytes(b"\xff\xfe\x00" * 99),
    "a number beyond all floats": lambda path: path.write_text(
        json.dumps({"update": 10**400, "wall_s": 10**400}) + "\n"
    ),
    "a link to itself": lambda path: (path.unlink(missing_ok=True), path.symlink_to(path)),
    "gone": lambda path: path.unlink(missing_ok=True),
}
"""What may stand in the place of a file."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def run(made: Path, tmp_path: Path, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(run_tail, "JOURNAL_S", 0.0)
    if not (made / "math").exists():
        run_folder(made / "math", math_config())
    return shutil.copytree(made / "math", tmp_path / "math")


def answers(run: Path, *paths: str) -> list[httpx.Response]:
    async def asked() -> list[httpx.Response]:
        transport = httpx.ASGITransport(server.application(run, [], None), raise_app_exceptions=False)
        async with httpx.AsyncClient(verify=False, transport=transport, base_url="http://127.0.0.1") as client:
            return [await client.get(path) for path in paths]

    return asyncio.run(asked())


def broken(*_: object) -> None:
    raise KeyError("<planted>")


@pytest.mark.parametrize("name", MADE_BY)
def test_a_section_that_cannot_be_made_says_why_in_its_place(
    run: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = answers(run, "/sections")
    monkeypatch.setattr(*MADE_BY[name], broken)
    (after,) = answers(run, "/sections")
    assert after.status_code == 200
    assert "KeyError" in after.json()["sections"][name] and "&lt;planted&gt;" in after.json()["sections"][name]
    others = {one for one in before.json()["sections"] if "KeyError" not in after.json()["sections"][one]}
    assert others and all(after.json()["sections"][one] == before.json()["sections"][one] for one in others)


@pytest.mark.parametrize(
    ("section", "function"),
    [
        ("curves", (page, "charts")),
        ("timeline", (view, "events")),
        ("data", (page, "lags")),
        ("data", (view, "ledger")),
    ],
)
def test_a_section_of_the_report_that_cannot_be_made_says_why_in_its_place(
    run: Path, section: str, function: tuple[object, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*function, broken)
    text = report.write([run], run / report.REPORT).read_text()
    assert text.count("&lt;planted&gt;") == 1
    assert "&lt;planted&gt;" in text.partition(f'<h2 id="{section}">')[2].partition("<h2")[0]
    assert "Samples" in text and 'class="card sample"' in text


def test_an_error_that_no_section_has_is_told_to_the_page_as_a_sentence(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.Trajectories, "batch", broken)
    (answer,) = answers(run, "/batch")
    assert answer.status_code == 500 and answer.json() == {"error": "KeyError: '<planted>'"}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("file", ["metrics.jsonl", "summary.json", "journal.sqlite", "journal.tip", "config.toml"])
@pytest.mark.parametrize("kind", FILES)
def test_whatever_stands_in_the_place_of_a_file_there_is_a_page_and_a_report(run: Path, file: str, kind: str) -> None:
    FILES[kind](run / file)
    (answer,) = answers(run, "/sections")
    assert answer.status_code == 200 and "<h1>math</h1>" in answer.json()["sections"]["head"]
    assert "<h1>math</h1>" in report.write([run], run / report.REPORT).read_text()


def test_charts_without_a_finite_number_are_left_out() -> None:
    curve = plot.Curve("x", [(1.0, float("nan")), (2.0, float("inf"))])
    assert plot.curves([curve], "update") == ""
