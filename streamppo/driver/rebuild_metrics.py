"""Rebuilds lost lines of metrics.jsonl from archived batches, except losses, gradients and times."""

import logging
from collections.abc import Mapping
from pathlib import Path

from streamppo.config.sections import Config
from streamppo.errors import JournalError
from streamppo.queue import resume_checks
from streamppo.queue.store.archive import Archive, checksums
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.telemetry.record import RunRecord
from streamppo.types import Batch

log = logging.getLogger(__name__)


def write_lost_lines(record: RunRecord, folder: Path) -> None:
    """Write the missing line of each update up to `record.version`, and log which lines were lost."""
    recorded = metrics_file.recorded_versions(metrics_file.read(folder))
    lost_versions = [version for version in range(1, int(record.version) + 1) if version not in recorded]
    if not lost_versions:
        return
    try:
        journal = Journal.open_run(folder)
        archive = Archive(folder / "archive", checksums(journal.versions().values()))
        configs = resume_checks.configs(journal)
        journal.close()
    except JournalError as error:
        log.info("%s: the lines of updates %s are lost: %s", metrics_file.METRICS, _ranges(lost_versions), error)
        return
    remade = [version for version in lost_versions if _rebuild_line(record, archive, configs, version)]
    if remade:
        log.info(
            "%s: the lines of updates %s were lost and are recomputed from their batches, without losses and times",
            metrics_file.METRICS,
            _ranges(remade),
        )


def _rebuild_line(record: RunRecord, archive: Archive, configs: Mapping[int, Config], version: int) -> bool:
    try:
        batch = archive.batch(version - 1)
    except JournalError as error:
        log.info("%s: the line of update %d is lost: %s", metrics_file.METRICS, version, error)
        return False
    record.remade(version, *batch_numbers(configs[max(first for first in configs if first < version)], batch))
    return True


def batch_numbers(config: Config, batch: Batch) -> tuple[dict[str, float], dict[int, int]]:
    """Return the metrics that an update's batch and its configuration determine, and the number of tokens by lag."""
    # These imports are slow, because the modules import torch, and this function is rarely called.
    from streamppo.learner.batch.fetch import lag_histogram
    from streamppo.learner.batch.padded import pad
    from streamppo.learner.objective.metrics import describe
    from streamppo.learner.objective.objective import trained_tokens

    padded = pad(batch)
    return describe(padded, trained_tokens(config.algorithm, padded)), lag_histogram(padded)


def _ranges(versions: list[int]) -> str:
    """Return ranges of versions in words: [1, 3, 4, 5] -> "1, 3 to 5"."""
    ends = [version for version in versions if version + 1 not in versions]
    begins = [version for version in versions if version - 1 not in versions]
    pairs = zip(begins, ends, strict=True)
    return ", ".join(f"{first}" if first == last else f"{first} to {last}" for first, last in pairs)
