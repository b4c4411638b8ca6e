"""report.html has the whole run, escaped, and names missing parts; no report ever ends a run."""

import errno
import json
import logging
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from report_case import BATCH, LENGTH, run_folder

from streamppo import durable
from streamppo.commands.look import views
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import report
from streamppo.errors import RunError
from streamppo.telemetry import metrics_file
from streamppo.telemetry.diagnosis import Sign
from streamppo.telemetry.record import SUMMARY
from streamppo.telemetry.report import page, view
from streamppo.telemetry.report.view import View
from streamppo.telemetry.summary import line_totals, queue_totals


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    return run_folder(tmp_path / "math", math_config())


def text(run: Path) -> str:
    return report.write([run], run / report.REPORT).read_text()


def plain(html: str) -> str:
    """The text of a page in one line."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_every_sampled_token_is_in_the_ledger_and_the_sum_is_exact(run: Path) -> None:
    found = plain(text(run))
    assert f"trained on {24 * (BATCH * LENGTH - 1)} " in found
    assert "left out 24 in a batch, but not in its loss" in found
    assert "failed 2 sampled, but without a score" in found
    assert f"duplicates {LENGTH} " in found
    assert f"waiting {LENGTH} ready in the queue" in found
    delivered = 24 * BATCH * LENGTH + 2 + 2 * LENGTH
    assert f"{delivered} tokens were delivered up to version 24: exactly the sum of the" in found


def test_tokens_of_an_update_whose_line_is_lost_are_told_apart(run: Path) -> None:
    path = run / metrics_file.METRICS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line).get("update") != 7))
    found = plain(text(run))
    assert f"trained on or not {BATCH * LENGTH} in batches of updates that have no line in metrics.jsonl" in found
    assert "exactly the sum. The line of 1 update is missing" in found


def test_a_run_that_ended_before_it_sampled_has_no_attempts_and_a_lost_journal_is_named(
    tmp_path: Path, math_config: Callable[..., Config], logged: pytest.LogCaptureFixture
) -> None:
    """Ctrl-C while Ray starts: a sentence about a missing journal would be no news."""
    (tmp_path / metrics_file.METRICS).write_text('{"part":1,"wall_s":1,"version":0}\n{"end":"stopped","wall_s":2}\n')
    assert report.count_attempts(tmp_path, math_config()) is None
    assert logged.messages == []
    lost = run_folder(tmp_path / "math", math_config())
    (lost / "journal.sqlite").unlink()
    assert report.count_attempts(lost, math_config()) is None
    assert "attempts are not counted" in logged.text


def test_samples_are_escaped_and_show_the_lag_of_their_tokens(run: Path) -> None:
    html = text(run)
    assert html.count('class="card sample"') == 3 * report.SAMPLES
    assert '<span class="prompt">1+1=</span>' in html
    assert re.search(r'title="lag 1">1</span><span[^>]*title="lag 0">&lt;2</span>', html)
    assert "&lt;no&gt; answer" in html and "<no>" not in html


def test_what_was_reused_its_age_and_what_became_of_agents_requests_are_tables(run: Path) -> None:
    assert "Computed once" not in text(run) and "Agents" not in text(run), "its lines say nothing of either"
    with (run / "metrics.jsonl").open("a") as file:
        for name, ages in (("a", {"0": 90, "3": 9}), ("b", {str(age): 1 for age in range(15)})):
            told = {"version": 24, "tokens": 9, "busy_s": 1.0, "idle_s": 0.0, "sampled": None, "kv_ages": ages}
            counts = {"requests": 3, "undelivered tokens": 1000, "<b>": 1}
            told |= {"prefix_reused": 0.5, "context_reused": 0.9, "agents": counts}
            file.write(json.dumps({"engine": name, "wall_s": 1e4, **told}) + "\n")
    html = text(run)
    rows = dict(re.findall(r'<tr><td>([^<]*)</td><td class="number">([^<]*)</td>', html))
    assert (rows["contexts of turns"], rows["computed 0 versions before"]) == ("90%", "91")
    assert (rows["computed 3 versions before"], rows["computed earlier"]) == ("10", "3")
    assert (rows["requests"], rows["undelivered tokens"], rows["&lt;b&gt;"]) == ("6", "2,000", "2")


def test_curves_have_a_point_for_each_update_and_the_catalogues_sentences(run: Path) -> None:
    html = text(run)
    reward = re.search(r'<polyline [^>]*data-label="reward" points="([^"]*)"', html)
    assert reward is not None and len(reward[1].split()) == 24
    assert "mean reward of completions" in plain(html)
    assert "<h3>Held-out accuracy</h3>" in html
    # Clip fraction of the critic is nobody's chart, and no run here has a teacher.
    assert "teacher_kl" not in html


def test_the_axes_of_every_chart_say_what_they_count(run: Path) -> None:
    curves, _, rest = text(run).partition("Timeline")
    units = {panel.title: panel.unit for panel in page.PANELS}
    figures = re.findall(r"<figure>\s*<h3>([^<]*)</h3>(.*?)</figure>", curves, re.S)
    assert len(figures) > 5
    for title, figure in figures:
        names = re.findall(r"<text[^>]*>([^<]*)</text>", figure)
        assert "update" in names and (not units[title] or units[title] in names), title
    assert re.search(r"<text[^>]*>[0-9.]+ s</text>", rest)


def test_curves_in_which_nothing_moves_come_last(run: Path) -> None:
    titles = re.findall(r"<figure>\s*<h3>([^<]*)</h3>", text(run).partition("Timeline")[0])
    assert titles[0] == "Reward" and titles.index("Clip fraction") > titles.index("Seconds of an update")


def finding(*, holds: bool) -> Sign:
    return Sign("entropy collapse", "entropy 0.01", "raise it", 3, 4, holds)


@pytest.mark.parametrize("holds", [True, False])
def test_a_sign_that_is_over_is_no_warning_any_more(run: Path, holds: bool) -> None:
    html = page.render([View("math", metrics_file.read(run), config="x", findings=[finding(holds=holds)])])
    assert ('class="card finding"' in html) is holds
    assert ("signs that have ended: entropy collapse" in html) is not holds
    assert ("All signs have ended." in html) is not holds


@pytest.mark.parametrize(
    ("outcome", "kind"),
    [
        ("finished", "finished"),
        ("Interrupted: stopped by SIGINT", "stopped"),
        ("RunError: a stall", "failed"),
        ("KeyError('x')", "failed"),
        ("killed", "killed"),
        ("running, or killed", "running"),
    ],
)
def test_an_outcome_has_the_colour_of_its_kind(run: Path, outcome: str, kind: str) -> None:
    lines = [*metrics_file.read(run), {"end": outcome, "wall_s": 99.0}]
    assert f'<div class="{kind}"><span class="soft">outcome' in page.render([View("math", lines)])  # pyright: ignore
    assert view.condition_class(outcome) == kind


def test_nothing_is_loaded_from_anywhere(run: Path) -> None:
    html = text(run)
    assert "default-src 'none'" in html
    assert not re.search(r'(?:src|href)="(?!data:)', html)
    assert "url(" not in html and "@import" not in html


def test_several_runs_and_a_replay_are_in_the_same_curves(
    run: Path, tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    other = run_folder(tmp_path / "other", math_config(), updates=20)
    replay = run / "replays" / "1.json"
    replay.parent.mkdir()
    updates = [line for line in metrics_file.updates(run)]
    curves = [{"version": one["update"], "recorded": one, "replayed": {**one, "reward": 0.9}} for one in updates]
    replay.write_text(json.dumps({"set": ["learner.lr=1e-3"], "updates": curves}))
    html = report.write([run, other, replay], tmp_path / "all.html").read_text()
    labels = re.findall(r'data-label="([^"]*) reward|data-label="([^"]*)" points', html.partition("Held-out")[0])
    assert [one or two for one, two in labels] == ["math", "other", "math replay 1: learner.lr=1e-3"]
    told = html.partition('<table class="beside">')[2].partition("</table>")[0]
    (updates,) = re.findall(r'<td class="soft">updates</td>(.*?)</tr>', told)
    assert re.findall(r">([^<]+)<", updates) == ["24", "20", "24"] and 'class="tiles"' not in html


def test_a_part_that_cannot_be_read_is_named_and_the_rest_is_there(run: Path) -> None:
    (run / "journal.sqlite").write_bytes(b"nonsense" * 1000)
    found = plain(text(run))
    assert "journal.sqlite" in found
    assert "Reward" in found and "exactly the sum" not in found


def test_a_run_that_made_nothing_has_a_report(tmp_path: Path) -> None:
    found = plain(text(tmp_path))
    assert "No update has been made." in found and "running, or killed" in found
    assert "No rule was checked" in found


def test_a_file_that_is_no_replay_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a file of `streamppo replay`"):
        report.write([run, run / "config.toml"], tmp_path / "x.html")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyError("a bug of ours")])
def test_a_report_that_cannot_be_made_is_a_warning_after_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    def refuse(*_: object) -> str:
        raise error

    monkeypatch.setattr(page, "render", refuse)
    report.write_after(run)
    (warning,) = [one for one in caplog.records if one.levelno == logging.WARNING]
    assert f"{run / report.REPORT}: not written: {type(error).__name__}" in warning.getMessage()
    assert not (run / report.REPORT).exists()


def test_a_summary_adds_what_only_engines_know(run: Path) -> None:
    engines = {"actors": [], "scorers": [], "too_long": {}, "stalls": {}, "swaps": 0, "restarts": 0}
    engines |= {"seconds": 1.0, "swap_ms": 0.0, "idle_share": 0.25, "tokens_per_s": 1234.0, "tokens": 999}
    content = {
        **line_totals(metrics_file.read(run)),
        **queue_totals(None),
        "outcome": "finished",
        "engines": engines,
        "checksum": "",
        "seed": 1,
        "versions": {},
    }
    (run / SUMMARY).write_text(json.dumps(content))
    found = plain(text(run))
    assert "engines idle 25%" in found and "had sampled 999" in found
    table = report.count_attempts(run, configfile.load(run / configfile.CONFIG))
    assert table is not None and "in 5 of 24 batches" not in found
    (run / SUMMARY).write_text(json.dumps({**content, "attempts": {**table, "read": 5}}))
    assert "Trained attempts are counted in 5 of 24 batches" in plain(text(run)), "not counted again"


def test_a_report_of_a_run_on_a_read_only_disk_names_the_option_that_writes_it_elsewhere(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = durable.write

    def refuse(path: Path, data: bytes) -> None:
        if path.parent == run:
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        write(path, data)

    monkeypatch.setattr(durable, "write", refuse)
    monkeypatch.setattr(os, "access", lambda path, mode: path != run)
    with pytest.raises(RunError, match=r"Read-only file system.*; --to FILE writes it elsewhere"):
        views.report([run], None)
    assert views.report([run], tmp_path / "elsewhere.html") == 0
