"""Journal and archive keep of every attempt what became of it, how long it was, how old, and of which source."""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from conftest import trajectory
from msgspec import structs
from report_case import deliver, run_folder

from streamppo import cli
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import report
from streamppo.queue import attempts
from streamppo.queue.rules.records import EndedAttempt
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueState, queue_settings
from streamppo.queue.store import snapshot
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.telemetry.attempts import AttemptTable
from streamppo.types import Batch, Failure, Ticket, decode, encode

SMALL = ("queue.batch_size=4", "queue.samples_per_prompt=2", "queue.max_lag=1", "queue.max_failure_rate=1.0")
GROUPS = "algorithm.advantage={kind='grpo'}"


def ended(rules: QueueRules) -> list[EndedAttempt]:
    """What the journal would have: through its bytes."""
    return [decode(encode(one), EndedAttempt) for one in snapshot.take_changes(rules.settings, rules.state).ended]


def failure(ticket: Ticket, tokens: int = 9) -> Failure:
    return Failure(
        identity=ticket.identity, actor="a", stage="reward", reason="no", tokens=tokens, version=0, source="sums"
    )


def known(one: EndedAttempt) -> tuple[str, str, int, int, int, str]:
    return one.state, one.stage, one.version, one.tokens, one.oldest, one.source


def test_every_ending_keeps_the_length_the_age_and_the_source(math_config: Callable[..., Config]) -> None:
    rules = QueueRules(queue_settings(math_config(*SMALL, "queue.too_old=drop", "queue.max_attempts=2")), QueueState())
    tickets = rules.issue("a", 0, 5, 0)
    made = [
        structs.replace(trajectory([5] * 3, versions=[0] * 3), identity=one.identity, source="sums") for one in tickets
    ]
    rules.fail(failure(tickets[0]))
    rules.put([structs.replace(made[1], logprobs=b"")])
    for one in made[2:]:
        rules.put([one])
    rules.mark_dead("a")
    rules.issue("b", 0, 2, 0)
    again = [structs.replace(one, identity=structs.replace(one.identity, attempt=1)) for one in made[:2]]
    rules.put([again[0]])
    assert [known(one) for one in ended(rules)] == [
        ("failed", "reward", 0, 9, 0, "sums"),
        ("dead_letter", "engine", 0, 3, -1, "sums"),
    ]
    assert rules.take(0) is not None
    rules.publish(1)
    ticket, *_ = rules.issue("b", 1, 1, 1)
    rules.mark_dead("b")
    state = rules.state
    assert [known(one) for one in ended(rules)] == [("lost", "", 1, 0, -1, "")] * 2 and ticket.identity.prompt
    state.version = 2
    for one in rules.issue("c", 2, 4, 0):
        rules.put([structs.replace(trajectory([5] * 4, versions=[0] * 4), identity=one.identity, source="late")])
    rules.take(2)
    assert set(map(known, ended(rules))) == {("too_old", "", 2, 4, 0, "late")}


def test_of_a_group_that_is_given_up_the_one_that_failed_is_told_from_the_others(
    math_config: Callable[..., Config],
) -> None:
    rules = QueueRules(queue_settings(math_config(*SMALL, GROUPS, "queue.max_attempts=1")), QueueState())
    first, second = rules.issue("a", 0, 2, 0)
    rules.put([structs.replace(trajectory([5] * 3), identity=first.identity)])
    rules.fail(failure(second))
    both = [known(one) for one in ended(rules)]
    assert both == [("abandoned", "", 0, 3, 0, ""), ("abandoned", "reward", 0, 9, 0, "sums")]


def test_a_source_is_in_the_archive_where_a_prompt_has_one(tmp_path: Path) -> None:
    rows = [structs.replace(trajectory([5], number=n), source=source) for n, source in enumerate(("", "b", "a"))]
    for version, chosen in ((0, rows), (1, rows[:1])):
        batch = Batch(version=version, min_version=0, trajectories=tuple(chosen))
        written = Archive(tmp_path, {})
        record = written.write(batch)
        path = next(tmp_path.glob("*.tmp"))
        path.rename(written.path(version))
        found = Archive(tmp_path, {version: record.files})
        assert found.batch(version) == batch
        assert ("source" in found.columns(version)) == (version == 0)


@pytest.fixture
def run(tmp_path: Path, math_config: Callable[..., Config]) -> Path:
    return run_folder(tmp_path / "run", math_config())


def table(run: Path) -> AttemptTable:
    return attempts.table(run, configfile.load(run / configfile.CONFIG), metrics_file.read(run))


def test_a_run_has_the_table_in_its_summary_and_on_its_page(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["summary", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["attempts"]
    whole, reason = found["rows"][:2]
    assert (whole["attempts"], whole["failed"]) == (97, pytest.approx(1 / 97))
    assert (whole["reward"], whole["as_zero"]) == (0.5, pytest.approx(0.5 * 96 / 97))
    assert (reason["name"], reason["attempts"]) == ("reward: <no> answer", 1)
    assert found["length_test"]["failed"] == 1
    page = report.write([run], run / "page.html").read_text()
    section = page.partition('id="attempts"')[2].partition("<h2")[0]
    assert (
        "reason reward: &lt;no&gt; answer" in section and "the mean reward would be 0.4948, and not 0.5000" in section
    )


def test_of_a_long_run_batches_are_read_that_are_evenly_spaced(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "MOST_BATCHES", 10)
    found = table(run)
    assert (found["read"], found["batches"]) == (8, 24)
    assert found["rows"][0]["attempts"] == 97, "each stands for three"
    text = report.page.view.attempts(report._run_view(run))  # pyright: ignore[reportPrivateUsage]
    assert text and "counted in 8 of 24 batches" in text[0]


def test_a_batch_that_is_damaged_is_told_and_the_rest_of_the_page_is_there(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "archive" / "00000003.zarr.zip").write_bytes(b"damaged")
    page = report.write([run], run / "page.html").read_text()
    assert "00000003.zarr.zip: damaged" in page and "The run has no journal to read them from" in page
    assert cli.main(["summary", str(run), "--json"]) == 0
    assert "attempts" not in json.loads(capsys.readouterr().out)


def test_hours_are_those_of_the_lines(run: Path) -> None:
    lines = [json.loads(line) for line in (run / metrics_file.METRICS).read_text().splitlines()]
    slow = [{**line, "wall_s": 1000.0 * line["update"]} if "update" in line else line for line in lines]
    (run / metrics_file.METRICS).write_text("".join(json.dumps(line) + "\n" for line in slow))
    hours = {row["name"]: row["attempts"] for row in table(run)["rows"] if row["by"] == "hour"}
    assert hours == {"0": 17, "1": 16, "2": 12, "3": 16, "4": 12, "5": 16, "6": 8}


def test_the_journal_of_a_run_that_was_only_begun_has_a_table(
    tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    config = math_config(*SMALL)
    rules = QueueRules(queue_settings(config), QueueState())
    deliver(rules, 0, 2)
    with closing(Journal(tmp_path / "journal.sqlite")) as journal:
        journal.write(snapshot.take_changes(rules.settings, rules.state))
    assert attempts.table(tmp_path, config, ())["rows"][0]["attempts"] == 1, "the failed one"
