"""A process that acts as queue and driver of a run of `report_case`, without Ray; it commits until it is killed."""

import json
import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from report_case import deliver, line_of

from streamppo.config.sections import Config
from streamppo.queue.rules.records import PublishedVersion
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import queue_settings
from streamppo.queue.store import snapshot
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file


class Writer:
    """The process; a killed one can be started again."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._given = (folder, config)
        self._begin()

    def _begin(self) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_write, args=self._given, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """Kill it with SIGKILL, at any point of its work."""
        assert self._process.is_alive(), "the writer has failed"
        self._process.kill()
        self._process.join()

    def die_and_go_on(self) -> None:
        """Kill it, and start the next one."""
        self.kill()
        self._begin()


@contextmanager
def at_work(folder: Path, config: Config) -> Generator[Writer]:
    """Run a writer during the block."""
    writer = Writer(folder, config)
    try:
        yield writer
    finally:
        writer.kill()


def _write(folder: Path, config: Config) -> None:
    """Continue the run: three transactions for a version, and its metrics line a version later, as in the driver."""
    journal, settings = Journal(folder / "journal.sqlite"), queue_settings(config)
    journal.fence()
    saved = journal.read()
    assert saved is not None
    rules = QueueRules(settings, snapshot.rebuild_state(settings, saved, journal.path))

    def commit(*made: PublishedVersion) -> None:
        journal.write(snapshot.take_changes(settings, rules.state), made)

    metrics_file.drop_truncated_line(folder)
    recorded = max(metrics_file.recorded_versions(metrics_file.read(folder)))
    calls = 2 * rules.state.version + 2
    with (folder / metrics_file.METRICS).open("a", buffering=1) as lines:
        while True:
            version = rules.state.version
            for late in range(recorded + 1, version):
                lines.write(json.dumps(line_of(late)) + "\n")
                recorded = late
            while (batch := rules.take(version)) is None:
                calls += 2
                deliver(rules, version, calls=calls)
                commit()
            commit()
            rules.publish(batch.version + 1)
            commit(PublishedVersion(version=version + 1, digest="", archived=None))
