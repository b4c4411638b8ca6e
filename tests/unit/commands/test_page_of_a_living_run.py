"""A page about a run that continues: a writer commits, and is killed, beside every look into its journal."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest
from living_run import at_work
from report_case import run_folder

from streamppo.commands.look.watching import run_tail
from streamppo.commands.look.watching.run_tail import WatchedRun
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import report
from streamppo.driver.run_folder import driver_lock
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.telemetry.report import view
from streamppo.telemetry.report.view import View

READS, KILLS = 2000, 10
VERSIONS = 12
"""Least number of seen versions: a busy machine delays the writer."""


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    return run_folder(tmp_path / "math", math_config())


@pytest.mark.slow
def test_thousands_of_reads_beside_a_writer_that_is_killed_find_one_transaction_each(run: Path) -> None:
    config, notes, versions = configfile.load(run / configfile.CONFIG), list[str](), set[int]()
    with at_work(run, config) as writer:
        for read in count():
            if read >= READS and len(versions) >= VERSIONS:
                break
            if read % (READS // KILLS) == READS // KILLS // 2:
                writer.die_and_go_on()
            queue, failures = report.read_counters(config, run, notes)
            assert notes == [] and queue is not None and len(failures) == 1
            tokens = queue.tokens
            assert sum(tokens.values()) == 2 * tokens["delivered"], "parts of two versions"
            assert tokens["consumed"] == 12 * queue.version
            versions.add(queue.version)


def test_a_reader_sees_one_transaction_however_long_it_reads(run: Path) -> None:
    config = configfile.load(run / configfile.CONFIG)
    with at_work(run, config):
        while (before := Journal.open_run(run)).counters() == (after := Journal.open_run(run)).counters():
            pass
        assert before.counters() != after.counters()
        first = before.read(), before.ended_attempts(), before.versions()
        assert (before.read(), before.ended_attempts(), before.versions()) == first


def test_the_ledger_of_a_running_run_adds_up_at_one_version_at_every_look(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tail, "JOURNAL_S", 0.0)
    page, versions = WatchedRun(run, "math"), set[str]()
    with driver_lock(run), at_work(run, configfile.load(run / configfile.CONFIG)):
        while len(versions) < VERSIONS:
            page.tag()
            if page.view.queue is None:
                continue
            rows, told = view.ledger(page.view)
            assert page.view.notes == []
            assert "exactly the sum of the learner's and the queue's counts" in told
            assert not [row for row in rows if row.value.startswith("-") or row.name == "trained on or not"]
            versions.add(told)


def test_a_report_of_a_running_run_leaves_lines_of_later_versions_out(run: Path) -> None:
    config = configfile.load(run / configfile.CONFIG)
    queue, _ = report.read_counters(config, run, [])
    later = View(
        "math", [*metrics_file.read(run), *({"update": 25 + n, "tokens": 12.0} for n in range(9))], queue=queue
    )  # pyright: ignore[reportArgumentType]
    assert view.ledger(later) == view.ledger(View("math", metrics_file.read(run), queue=queue))


@pytest.mark.parametrize(("metric", "words"), [("tokens", "the sum has 5 more"), ("", "exactly the sum of the")])
def test_a_learner_that_counts_otherwise_than_the_queue_is_seen_in_the_sum(run: Path, metric: str, words: str) -> None:
    queue, _ = report.read_counters(configfile.load(run / configfile.CONFIG), run, [])
    lines = [
        {**line, metric: line["tokens"] + 5} if metric and line.get("update") == 7 else line  # pyright: ignore
        for line in metrics_file.read(run)
    ]
    assert words in view.ledger(View("math", lines, queue=queue))[1]  # pyright: ignore[reportArgumentType]
