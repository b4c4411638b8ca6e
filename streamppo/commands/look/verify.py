"""`streamppo verify`: compares the records of a run with each other, and replays some of its updates.

record                  compared with
----------------------  --------------------------------------------------------------------------------------
journal.sqlite          the checksums of its rows, and the chain of its versions (queue/rules/records.py)
archive/                the journal's SHA-256; the versions of its tokens; the trajectories of other batches
checkpoints/, final/    the manifest's SHA-256; the journal's digest, computed again from the weights
metrics.jsonl           the rewards, lengths and lags of the batches; one line an update, in the order of time
summary.json            the lines, and the journal
config.toml             the journal's configuration of the newest version
inputs.json             the files that it names
K updates, at random    the recorded digests of their versions, and their lines

The digest of a run is the SHA-256 of the chain's last link and of the files outside the chain. The run is not changed.
"""

import hashlib
import json
import logging
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import msgspec
import torch

from streamppo import durable
from streamppo.commands import replay
from streamppo.commands.console import echo, log_to_stderr
from streamppo.commands.models import weights
from streamppo.commands.verification import Fault, Verification
from streamppo.config import diff
from streamppo.config import file as configfile
from streamppo.driver import inputs, rebuild_metrics, run_folder
from streamppo.errors import JournalError, RunError, StreamppoError
from streamppo.learner.checkpoint import history, manifest
from streamppo.learner.checkpoint.history import ANY, History
from streamppo.queue import resume_checks
from streamppo.queue.rules.records import chain_breaks
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import catalogue, metrics_file, record, summary
from streamppo.telemetry.metrics_file import FINISHED, METRICS
from streamppo.terminal import counted
from streamppo.types import Batch, Identity, UpdateReport, ints

PENDING = 3
"""Number of newest updates whose lines a running or killed driver may not have written yet."""
NEAR = 1e-5
"""Relative tolerance for equal metrics. A replay may add the ranks' sums in another order."""
MEASURED = ("_s", "_ms", "_mib")
"""Endings of the names of metrics that measure time or memory. A replay does not reproduce these metrics."""
MACHINE_METRICS = ("learner_tflops", "mfu")
FILES = (configfile.CONFIG, inputs.INPUTS, METRICS, record.SUMMARY)
"""Files that the digest of a run covers in addition to the chain."""

log = logging.getLogger(__name__)


def verify(run: Path, updates: int, expect: str, *, as_json: bool) -> int:
    """Verify a run, and print the faults. Returns the exit code, 1 if there is a fault."""
    with log_to_stderr():
        result = check(run, updates, expect)
    if as_json:
        echo(json.dumps({**result._asdict(), "faults": [fault._asdict() for fault in result.faults]}))
        return bool(result.faults)
    for row in [f"note: {note}" for note in result.notes] + [f"fault: {': '.join(fault)}" for fault in result.faults]:
        echo(row)
    counts = f"{result.versions} versions, {result.batches} batches, {counted(result.checkpoints, 'checkpoint')}"
    replayed = f", replayed {', '.join(map(str, result.remade))}" if result.remade else ""
    echo(f"{run.name}: {counts}{replayed}: {counted(len(result.faults), 'fault') if result.faults else 'as recorded'}")
    echo(f"digest: {result.digest or 'none'}")
    return bool(result.faults)


def check(run: Path, updates: int, expect: str = "") -> Verification:
    """Compare a run's records, and replay `updates` random updates. `expect` may be its digest or a chain's link."""
    try:
        records = Records(run)
    except StreamppoError as error:
        return Verification("", "", 0, 0, 0, (), [_fault(run, error)], ())
    records.check_batches()
    records.check_lines()
    records.check_summary()
    records.check_settings()
    checkpoints = records.check_checkpoints()
    remade = records.check_updates(checkpoints, updates)
    link = records.published[records.newest].link
    digest = records.digest(link)
    if expect and expect not in (digest, *(version.link for version in records.published.values())):
        records.faults.append(Fault(".", f"its digest is {digest}, not {expect}"))
    counts = len(records.published), len(records.archive.versions()), len(checkpoints)
    return Verification(digest, link, *counts, remade, records.faults, records.notes)


class Records:
    """The records of one run. Each check adds to `faults` and `notes`. Raises errors if the journal cannot be read."""

    def __init__(self, run: Path) -> None:
        self.run, self.faults, self.notes = run, list[Fault](), list[str]()
        self.config = configfile.load(run / configfile.CONFIG)
        # A run in progress writes to the journal first, so the journal is read last.
        self.content = metrics_file.content(run)
        with closing(Journal.open_run(run)) as journal:
            self.published, encoded, configs = journal.versions(), journal.configs(), resume_checks.configs(journal)
            saved, self._ended = journal.read(), msgspec.msgpack.encode(journal.ended_attempts())
            # Reading these rows compares them with their checksums.
            journal.skipped()
        if saved is None or not configs or not self.published:
            raise JournalError(f"{run / 'journal.sqlite'}: no version was made yet")
        self.consumed, self.newest = saved.counters.counts.get("consumed", 0), max(self.published)
        self.archive = Archive(run / "archive", checksums(self.published.values()))
        present = {version: replay.with_changes(config, self.config, ()) for version, config in configs.items()}
        self.past = History(present, history.digests(configs, self.published))
        self._newest_config, self._numbers = configs[max(configs)], dict[int, tuple[dict[str, float], dict[int, int]]]()
        for version in chain_breaks(self.published, encoded):
            self._add("journal.sqlite", f"the chain of versions is broken at version {version}")
        if saved.counters.version != self.newest:
            self._add("journal.sqlite", f"the queue is at version {saved.counters.version}, not {self.newest}")

    def _add(self, place: str, text: str) -> None:
        self.faults.append(Fault(place, text))

    def _add_error(self, error: Exception) -> None:
        self.faults.append(_fault(self.run, error))

    def digest(self, link: str) -> str:
        """Return the digest of the run from its last link, the ends of attempts, and the files outside the chain."""
        present = [name for name in FILES if (self.run / name).is_file()]
        content = [f"link {link}", f"ended {hashlib.sha256(self._ended).hexdigest()}"]
        content += [f"{name} {durable.sha256(self.run / name)}" for name in present]
        return hashlib.sha256("\n".join(content).encode()).hexdigest()

    def check_batches(self) -> None:
        """Compare each batch with the journal and with the other batches."""
        places, names = dict[Identity, int](), set[str]()
        for version in self.archive.versions():
            paths = self.archive.paths(version, len(self.archive.checksums[version]))
            names.update(path.name for path in paths)
            try:
                batch = self.archive.batch(version)
            except JournalError as error:
                if not self._is_forgotten(version):
                    self._add_error(error)
                continue
            if flaw := self._flaw(batch, version, places):
                self._add(f"archive/{paths[0].name}", flaw)
                continue
            places |= {trajectory.identity: version for trajectory in batch.trajectories}
            self._numbers[version + 1] = rebuild_metrics.batch_numbers(self.past.at(version), batch)
        for path in sorted(self.archive.folder.glob("*.zarr.zip")):
            # The file of a batch is written shortly before its version is in the journal.
            if path.name not in names and path.name < f"{self.newest:08d}":
                self._add(f"archive/{path.name}", "a batch that the journal does not have")
        if len(self._numbers) == self.newest and len(places) != self.consumed:
            self._add("journal.sqlite", f"counts {self.consumed} trajectories, and the archive has {len(places)}")

    def _is_forgotten(self, version: int) -> bool:
        """True if a run in progress has dropped the batch of `version` (archive.keep)."""
        with closing(Journal.open_run(self.run)) as journal:
            return journal.versions()[version + 1].archived is None

    def _flaw(self, batch: Batch, version: int, places: Mapping[Identity, int]) -> str:
        size, rows = self.past.at(version).queue.batch_size, len(batch.trajectories)
        newest = max(int(ints(trajectory.versions).max()) for trajectory in batch.trajectories)
        if batch.version != version or newest > version:
            return f"the batch of version {batch.version}, with tokens of version {newest}"
        if others := [places[row.identity] for row in batch.trajectories if row.identity in places]:
            return f"{len(others)} of its trajectories are also in the batch of version {others[0]}"
        return f"{rows} trajectories, and queue.batch_size is {size}" if rows != size else ""

    def check_lines(self) -> None:
        """Compare the lines of metrics.jsonl with the batches and with each other."""
        lines = self.content.lines
        for sentence in self.content.damage:
            self._add(METRICS, sentence.partition(": ")[2])
        if any(later["wall_s"] < line["wall_s"] for line, later in pairwise(lines)):
            self._add(METRICS, "the lines are not in the order of time")
        counts = Counter[int]()
        for line in lines:
            if "update" not in line and "remade" not in line:
                continue
            version = metrics_file.version_of(line)
            counts[version] += 1
            if version in self._numbers and (name := _different(line, *self._numbers[version])):
                self._add(METRICS, f"update {version} and its batch differ in {name}")
        following, is_finished = self.newest + 1, bool(lines) and lines[-1].get("end") == FINISHED
        if counts[following] == 1 and not is_finished:
            self.notes.append(f"update {following} has a line but was not published: a resume repeats it")
            del counts[following]
        for version in (version for version, count in counts.items() if count > 1 or version not in self.published):
            self._add(METRICS, f"{counts[version]} lines of update {version}, which was made once or not at all")
        missing = [version for version in self.published if version and version not in counts]
        is_open = run_folder.is_running(self.run) or not lines or "end" not in lines[-1]
        if missing and is_open and missing[0] > self.newest - PENDING:
            self.notes.append(f"updates {missing} have no line yet, or lost it when the driver was killed")
            return
        for version in missing:
            self._add(METRICS, f"no line of update {version}")

    def check_summary(self) -> None:
        """Compare summary.json, if there is one, with the lines and with the journal."""
        try:
            saved = record.read_summary(self.run)
        except RunError as error:
            self._add_error(error)
            return
        if saved is None:
            return
        # JSON makes strings of integer keys, as in the file.
        expected = json.loads(json.dumps(summary.line_totals(self.content.lines)))
        present = json.loads(json.dumps(saved))
        if (last := (self.content.lines or [None])[-1]) is not None and "end" in last:
            expected |= {"outcome": last["end"]}
        if saved["outcome"] == FINISHED:
            expected |= {"checksum": self.published[self.newest].digest}
            expected |= {} if saved["trajectories"] is None else {"trajectories": self.consumed}
        for name in (name for name in expected if present.get(name) != expected[name]):
            self._add(record.SUMMARY, f"{name} differs from the lines and the journal")

    def check_settings(self) -> None:
        """Compare the configuration with the journal, and inputs.json with the files that it names."""
        recorded, present = diff.learning(self._newest_config), diff.learning(self.config)
        for name in (name for name in {**recorded, **present} if recorded.get(name) != present.get(name)):
            self._add(configfile.CONFIG, f"{name} = {present.get(name)!r}, but {recorded.get(name)!r} in the journal")
        try:
            changed = inputs.changes(self.config, self.run)
        except RunError as error:
            self._add_error(error)
            return
        for field, change in changed.items():
            if change:
                self._add(inputs.INPUTS, f"{field}: {change}")

    def check_checkpoints(self) -> list[Path]:
        """Compare the digest of each checkpoint's weights with the journal. Returns the matching checkpoints."""
        checkpoints: list[Path] = []
        for path in manifest.complete(self.run / "checkpoints"):
            version = int(path.name)
            try:
                policy = weights.checkpoint_weights(self.past.at(version), self.run, version)
                checkpoints.append(path)
                if version == self.newest and (self.run / "final").is_dir():
                    self._check_final(policy.tensors)
            except StreamppoError as error:
                # A run in progress may have deleted the checkpoint while it was read.
                if path.is_dir():
                    self._add_error(error)
        return checkpoints

    def _check_final(self, expected: Mapping[str, torch.Tensor]) -> None:
        final = weights.model_weights(str(self.run / "final"), self.past.at(self.newest).model.dtype)
        names = [name for name in expected if name not in final or not torch.equal(final[name], expected[name])]
        if names or len(final) != len(expected):
            self._add("final", f"{len(names)} tensors differ from those of version {self.newest}")

    def check_updates(self, checkpoints: Sequence[Path], updates: int) -> list[int]:
        """Replay and compare random updates, each from a checkpoint before it. Returns the replayed versions."""
        archived, starts, possible = set(self.archive.versions()), dict[int, Path | None](), list[int]()
        for version in self.published:
            begin = max((path for path in checkpoints if int(path.name) < version), default=None)
            starts[version] = begin
            if version and archived.issuperset(range(manifest.version_of(begin), version)):
                possible.append(version)
        if updates and len(possible) < self.newest:
            self.notes.append(f"{self.newest - len(possible)} versions cannot be replayed: their batches are not kept")
        chosen = sorted(random.SystemRandom().sample(possible, min(updates, len(possible))))
        lasts = {starts[version]: version for version in chosen}
        remade: list[int] = []
        for begin, last in lasts.items():
            start = manifest.version_of(begin)
            log.info("versions %d to %d are replayed", start + 1, last)
            try:
                digests, reports = replay.remake(self.run, self.past, begin, last)
            except StreamppoError as error:
                if begin is not None and not begin.is_dir():
                    # A run in progress has deleted the checkpoint, so other updates are drawn.
                    present = [path for path in checkpoints if path.is_dir()]
                    return remade + self.check_updates(present, max(1, updates - len(remade)))
                self._add("archive", f"versions {start + 1} to {last} cannot be replayed: {error}")
                continue
            remade += range(start + 1, last + 1)
            self._compare(digests, reports)
        return remade

    def _compare(self, digests: Mapping[int, str], reports: Sequence[UpdateReport]) -> None:
        lines = {line["update"]: line for line in self.content.lines if "update" in line}
        for version, digest in sorted(digests.items()):
            recorded = self.past.digests[version]
            if recorded == ANY:
                self.notes.append(f"version {version} is replayed only approximately: learner.exact = false")
            elif recorded != digest:
                self._add("journal.sqlite", f"version {version} is {recorded[:12]}, but {digest[:12]} in a replay")
        for report in reports:
            if report.version not in lines or self.past.digests[report.version] == ANY:
                continue
            metrics = {name: value for name, value in report.metrics.items() if not _is_measured(name)}
            if name := _different(lines[report.version], metrics):
                self._add(METRICS, f"update {report.version} and its replay differ in {name}")


def _fault(run: Path, error: Exception) -> Fault:
    """Return an error as a fault. Its place is the file at the beginning of the message, else "."."""
    place, _, text = str(error).partition(": ")
    return Fault(str(Path(place).relative_to(run)), text) if Path(place).is_relative_to(run) else Fault(".", str(error))


def _different(line: Mapping[str, object], metrics: Mapping[str, float], lags: Mapping[int, int] | None = None) -> str:
    """Return the first metric of an update's line that differs from `metrics` or `lags`; empty if none differs."""
    if lags is not None and line.get("lag_histogram") != {str(lag): count for lag, count in lags.items()}:
        return "lag_histogram"
    return next((name for name, value in metrics.items() if not _is_near(line.get(name), value)), "")


def _is_near(recorded: object, value: float) -> bool:
    if not isinstance(recorded, int | float):
        return False
    return math.isclose(recorded, value, rel_tol=NEAR, abs_tol=1e-8) or (math.isnan(recorded) and math.isnan(value))


def _is_measured(name: str) -> bool:
    return name in MACHINE_METRICS or (name in catalogue.ENTRIES and name.endswith(MEASURED))
