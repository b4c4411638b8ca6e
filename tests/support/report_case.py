"""The folder of an ended run, made without Ray: journal, archive, metrics, model and configuration."""

import json
from collections.abc import Sequence
from pathlib import Path

from conftest import trajectory
from msgspec import structs

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.queue.rules.records import PublishedVersion
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import QueueState, queue_settings
from streamppo.queue.store import snapshot
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.telemetry import metrics_file
from streamppo.types import Failure

ALPHABET = "0123456789+<=>"
BATCH, LENGTH = 4, 3
LINES = Path(__file__).parents[1] / "unit" / "telemetry" / "default_run.jsonl"
SMALL = (f"queue.batch_size={BATCH}", "queue.samples_per_prompt=1", "queue.max_lag=1")


def run_folder(folder: Path, config: Config, updates: int = 24) -> Path:
    """Make a run of `updates` updates, with a failed attempt, a repeated delivery and a waiting trajectory."""
    folder.mkdir()
    model = folder / "model"
    character_tokenizer(ALPHABET).save_pretrained(model)
    config = configfile.change(config, [*SMALL, f"model.path={model}"])
    configfile.save(config, folder)
    _sample(folder, config, updates)
    lines = [json.loads(line) for line in LINES.read_text().splitlines()]
    kept = [_small(line) for line in lines if line.get("update", 0) <= updates]
    (folder / metrics_file.METRICS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    return folder


def _small(line: dict[str, object]) -> dict[str, object]:
    """A metrics line, with the token counts of the run's batches if it is an update's."""
    tokens = {"tokens": BATCH * LENGTH, "tokens_trained": BATCH * LENGTH - 1, "tokens_too_old": 0}
    return {**line, **tokens, "lag_histogram": {"0": 4, "1": 8}} if "update" in line else line


def line_of(update: int) -> dict[str, object]:
    """The metrics line of update number `update`."""
    return _small({**json.loads(next(line for line in LINES.open() if '"update"' in line)), "update": update})


def _sample(folder: Path, config: Config, updates: int) -> None:
    rules = QueueRules(queue_settings(config), QueueState())
    journal, archive = Journal(folder / "journal.sqlite"), Archive(folder / "archive", {})
    for version in range(updates):
        deliver(rules, version)
        batch = rules.take(version)
        assert batch is not None
        made = PublishedVersion(version=version + 1, digest="", archived=archive.write(batch))
        rules.publish(version + 1)
        journal.write(snapshot.take_changes(rules.settings, rules.state), [made], archive.settle)
    deliver(rules, updates, 1)
    journal.write(snapshot.take_changes(rules.settings, rules.state))
    journal.close()


def deliver(rules: QueueRules, version: int, limit: int = BATCH, calls: int | None = None) -> None:
    """Deliver the trajectories of a batch; at version 0 one attempt fails, and one is delivered twice."""
    tickets = rules.issue("rollout-0", version, limit, 2 * version if calls is None else calls)
    if version == 0:
        failed = Failure(
            identity=tickets[0].identity, actor="rollout-0", stage="reward", reason="<no> answer", tokens=2
        )
        rules.fail(failed)
        tickets = (*tickets[1:], *rules.issue("rollout-0", version, 1, 1))
    for ticket in tickets:
        made = trajectory(_tokens("1<2"), prompt=_tokens("1+1="), versions=[max(0, version - 1), version, version])
        rules.put([structs.replace(made, identity=ticket.identity, reward=0.5)])
    if version == 0:
        rules.put([structs.replace(made, identity=tickets[0].identity)])


def _tokens(text: str) -> Sequence[int]:
    return [3 + ALPHABET.index(letter) for letter in text]
