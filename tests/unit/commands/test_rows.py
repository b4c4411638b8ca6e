"""The row behind a trajectory, in `inspect` and on the live page: the answer first, or the reason for having none."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bring_case as case
import httpx
import pytest
from report_case import run_folder

from streamppo.cli import main
from streamppo.commands.look.rows import SHOWN
from streamppo.commands.look.watching import server
from streamppo.config.sections import Config

ROW = {"prompt": "1+1=", "level": 3, "answer": "2", "note": "x" * 2 * SHOWN}


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    data = case.rows(tmp_path / "rows.jsonl", [ROW] * 40)
    return run_folder(tmp_path / "math", math_config("task=data", f"task.data={data}", "task.held_out=0"), updates=2)


def inspected(run: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert main(["inspect", str(run), "--n", "1"]) == 0
    return capsys.readouterr().out.splitlines()


def opened(run: Path) -> dict[str, Any]:
    async def answer() -> dict[str, Any]:
        app = httpx.ASGITransport(app=server.application(run, [], None))
        async with httpx.AsyncClient(verify=False, transport=app, base_url="http://127.0.0.1:8484") as client:
            return (await client.get("/batch/2/0")).json()

    return asyncio.run(answer())


def test_inspect_and_the_page_show_the_answer_and_then_the_other_columns(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = inspected(run, capsys)
    answer = lines.index("  answer      '2'")
    assert lines[answer + 1 : answer + 3] == [
        "  row         level = 3",
        f"  row         note = '{'x' * (SHOWN - 1)}... ({SHOWN + 2:,} characters more)",
    ]
    found = opened(run)
    assert found["row_missing"] == ""
    assert [name for name, _ in found["row_columns"]] == ["answer", "level", "note"]
    assert found["row_columns"][0][1] == "'2'"


def test_data_that_have_changed_or_gone_give_a_reason_and_no_answer_of_another_row(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.rows(tmp_path / "rows.jsonl", [{**ROW, "prompt": "2+2="}] * 40)
    (line,) = [line for line in inspected(run, capsys) if line.startswith(("  row", "  answer"))]
    assert line == "  row         its row is unknown: the task's data differ from the run's"
    assert opened(run)["row_columns"] == []
    (tmp_path / "rows.jsonl").unlink()
    (line,) = [line for line in inspected(run, capsys) if line.startswith(("  row", "  answer"))]
    assert line.startswith("  row         rows cannot be read: ") and "rows.jsonl" in line
    assert "rows cannot be read: " in opened(run)["row_missing"]
