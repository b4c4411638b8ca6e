"""A queue and a driver at work on a run of `report_case`, without Ray: a process that commits until it is killed."""

import json
import multiprocessing
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from report_case import deliver, line_of

from streamppo.config.sections import Config
from streamppo.queue.rules.records import PublishedVersion
from streamppo.queue.rules.rules import QueueRules
from streamppo.queue.rules.state import settings_of
from streamppo.queue.store import snapshot
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file


class Writer:
    """The process; one that was killed can be begun again."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._given = (folder, config)
        self._begin()

    def _begin(self) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=_write, args=self._given, daemon=True)
        self._process.start()

    def kill(self) -> None:
        """Kill it as a kernel does, wherever it is."""
        assert self._process.is_alive(), "the writer has failed"
        self._process.kill()
        self._process.join()

    def die_and_go_on(self) -> None:
        """Kill it, and begin the next one."""
        self.kill()
        self._begin()


@contextmanager
def at_work(folder: Path, config: Config) -> Generator[Writer]:
    """Have a writer at work during the block."""
    writer = Writer(folder, config)
    try:
        yield writer
    finally:
        writer.kill()


def _write(folder: Path, config: Config) -> None:
    """Go on with the run: three transactions for a version, and its line after the next one, as the driver does."""
    journal, settings = Journal(folder / "journal.sqlite"), settings_of(config)
    journal.fence()
    saved = journal.read()
    assert saved is not None
    rules = QueueRules(settings, snapshot.rebuild(settings, saved, journal.path))

    def commit(*made: PublishedVersion) -> None:
        journal.write(snapshot.take_changes(settings, rules.state), made)

    metrics_file.mend(folder)
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
