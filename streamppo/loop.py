"""The training loop, and the pipeline that it drives.

    rollout --trajectories--> queue --batch--> learner --version + 1--> weights (in the queue's process) --> rollout
                                |                 |
                        journal, archive     checkpoints

    stage    consumes              produces                         waits for                   unblocked by
    -------  --------------------  -------------------------------  --------------------------  ---------------------
    rollout  tickets, weights      trajectories, failures           tickets                     a take, a new version
    queue    trajectories, pushes  tickets, batches, the archive    its disk                    the disk
    learner  a batch               version + 1, report, checkpoint  the batch, prefetched       a delivery
    driver   reports               metrics.jsonl, summary.json      the oldest pending update   the learner

    for every version    update        every rank takes its batch, trains, pushes version + 1
                         checkpoint    if due; written while the next update runs
                         record        the report, `AHEAD - 1` updates later, so that the learner never waits for it
                         evaluate      if due; runs during the next updates

The calls from here to `backward()`: run -> train -> Rank.update -> learner/update.py.
"""

import errno
import logging
from collections import deque
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ray import ObjectRef

from streamppo import durable, process
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.driver import inputs, preflight, rebuild_metrics, report, run_folder, threads
from streamppo.driver.ray.cluster import ray_session
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.driver.stages import Stages
from streamppo.driver.watch.watch import RunStage
from streamppo.errors import Interrupted, LearnerLost, RunError, StreamppoError
from streamppo.learner.checkpoint import manifest, remote
from streamppo.queue.store import database
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.live.display import display
from streamppo.telemetry.metrics_file import FINISHED
from streamppo.telemetry.record import RunRecord
from streamppo.telemetry.summary import final_line
from streamppo.telemetry.tracking.sinks import Sinks
from streamppo.types import EngineReport, QueueReport, UpdateReport, decode

AHEAD = 2
"""The number of updates that are requested from the learner at a time."""

Reports = tuple[QueueReport, list[EngineReport]]

log = logging.getLogger(__name__)


class PendingUpdate(NamedTuple):
    """A requested update: the version that it makes, and one pending call for each rank."""

    version: int
    refs: list[ObjectRef[bytes]]


def run(config: Config, folder: Path, *, started: float, interrupts: Interrupts, accept_changes: bool = False) -> int:
    """Make all missing updates of the run in `folder`; the exit code is 0 if all are made. Raises `StreamppoError`.

    A run with updates continues from a checkpoint. A run that cannot continue, or whose data or model changed without
    `accept_changes`, is refused before its folder is changed. In all other cases summary.json is written. `started` is
    the `time.perf_counter()` at the command's start.
    """
    process.log_to_stdout()
    run_folder.refuse_place(folder)
    config = threads.with_chosen(inputs.with_clock(config, folder), folder)
    preflight.verify(config, folder, accept_changes=accept_changes)
    with durable.naming(folder, RunError):
        durable.folder(folder / "checkpoints")
        findings, sinks = Diagnosis(config), Sinks(config, folder)
        begin = (folder, started, config.seed, config.updates)
        record = RunRecord(*begin, display=display(config, folder, findings), diagnosis=findings, sinks=sinks)
    interrupts.run, interrupts.say = folder, record.display.say
    with ExitStack() as ending:
        ending.enter_context(process.lasting_output(folder / "logs" / "driver.log"))
        ending.callback(database.merge_logs, folder)
        log.info("run folder %s%s", folder, f", after update {record.version}" if record.version else "")
        with _write_summary(record, config) as reports:
            ending.enter_context(ray_session(config, interrupts))
            stages = Stages(config, folder, record, interrupts)
            ending.callback(stages.end)
            reports.append(train(stages, record))
        log.info("model: %s", folder / "final")
    return 0


@contextmanager
def _write_summary(record: RunRecord, config: Config) -> Generator[list[Reports]]:
    """Write summary.json and report.html after the block, also after an error, but before Ray shuts down."""
    outcome = FINISHED
    reports: list[Reports] = []
    try:
        yield reports
    except StreamppoError as error:
        outcome = f"{type(error).__name__}: {error}"
        raise
    except OSError as error:
        outcome = f"RunError: {error}"
        raise RunError(str(error)) from error
    except BaseException as error:
        outcome = repr(error)
        raise
    finally:
        queue, engines = reports[-1] if reports else (None, [])
        summary = record.close(outcome, queue, engines, attempts=report.count_attempts(record.folder, config))
        report.write_after(record.folder)
    log.info(final_line(summary))


def train(stages: Stages, record: RunRecord) -> Reports:
    """Make all missing updates. If a learner rank is lost, restart all ranks. Returns the last counters."""
    config, checkpoints = stages.config, stages.folder / "checkpoints"
    # If the driver died, it has not recorded its last updates; they are repeated, so that metrics.jsonl has no gap.
    checkpoint = remote.newest(checkpoints, stages.address, record.complete_to, stages.history())
    newest = stages.begin(manifest.version_of(checkpoint))
    record.drop_unpublished(newest)
    configfile.save(config, stages.folder)
    if newest < config.updates:
        _evaluate(stages, record, newest)
    while True:
        try:
            start = stages.start_learner(checkpoint)
            record.begin(start)
            rebuild_metrics.write_lost_lines(record, stages.folder)
            pending: deque[PendingUpdate] = deque()
            # A resume may ask for fewer updates than the run has made, but engines do not take older weights.
            for version in range(start + 1, max(config.updates, newest) + 1):
                pending.append(PendingUpdate(version, [rank.update.remote() for rank in stages.ranks]))
                _checkpoint(stages, version)
                _record(stages, record, pending, num_left=AHEAD - 1)
            _record(stages, record, pending, num_left=0)
            return _finish(stages, record)
        except LearnerLost as lost:
            stages.note_restart(RunStage.LEARNER, str(lost))
            checkpoint = remote.newest(checkpoints, stages.address, record.complete_to, stages.history())


def _checkpoint(stages: Stages, version: int) -> None:
    if _due(stages.config.checkpoint.every, version) and version < stages.config.updates:
        folder = str(stages.folder / "checkpoints")
        stages.calls.watch_all([rank.save.remote(folder) for rank in stages.ranks], RunStage.CHECKPOINT)
        _drop_batches(stages, version)


def _drop_batches(stages: Stages, version: int) -> None:
    config, complete = stages.config, manifest.complete(stages.folder / "checkpoints")
    if config.archive.keep and len(complete) >= config.checkpoint.keep:
        before = min(version - config.archive.keep, int(complete[-config.checkpoint.keep].name))
        stages.calls.watch_all([stages.queue.forget.remote(before)], RunStage.CHECKPOINT)


def _record(stages: Stages, record: RunRecord, pending: deque[PendingUpdate], *, num_left: int) -> None:
    """Wait for the oldest pending updates until `num_left` are pending. Record each, and evaluate its version if due.

    After a signal: save a last checkpoint, record the finished updates, and raise `Interrupted`.
    """
    while len(pending) > num_left:
        try:
            answers = stages.calls.wait(pending[0].refs, f"update {pending[0].version}")
        except Interrupted:
            stages.save_last(str(stages.folder / "checkpoints"))
            for report in stages.finished_reports(update.refs[0] for update in pending):
                record.update(report)
            raise
        pending.popleft()
        report = decode(answers[0], UpdateReport)
        version, fresh = report.version, record.update(report)
        if fresh and _due(stages.config.evaluation.every, version) and version < stages.config.updates:
            _evaluate(stages, record, version)


def _finish(stages: Stages, record: RunRecord) -> Reports:
    ranks, folder = stages.ranks, stages.folder
    saving = [rank.save.remote(str(folder / "checkpoints")) for rank in ranks]
    stages.calls.wait([*saving, *(rank.settle.remote() for rank in ranks)], "the last checkpoint")
    exporting = [rank.export.remote(str(folder / "final")) for rank in ranks]
    record.checksum = stages.calls.wait(exporting, "exporting the model")[0]
    stages.fetch_final()
    rebuild_metrics.write_lost_lines(record, folder)
    # The newest version may be above `updates`: a run may be resumed with a smaller number of updates.
    _evaluate(stages, record, record.version)
    stages.calls.drain(RunStage.EVALUATION)
    return stages.reports()


def _evaluate(stages: Stages, record: RunRecord, version: int) -> None:
    """Start the evaluation of `version`. A resumed run does not repeat the evaluation of its last version."""
    if version in record.evaluated:
        return
    pool = stages.evaluators if stages.config.evaluation.actors else stages.rollouts
    pool.evaluate(stages.config.evaluation.prompts, version, lambda parts: record.evaluation(version, parts))


def _due(every: int, version: int) -> bool:
    return every > 0 and version % every == 0


def new_folder(config: Config, runs: Path) -> Path:
    """Create the folder runs/NAME with the configuration, or runs/NAME-2 and so on. Raises `RunError`."""
    run_folder.refuse_place(runs)
    folder, number = runs / config.name, 1
    with durable.naming(folder, RunError):
        runs.mkdir(parents=True, exist_ok=True)
        with durable.scratch_folder(folder) as scratch:
            configfile.save(config, scratch)
            consent.give(scratch, config)
            while not _claim_folder(scratch, folder):
                number += 1
                folder = runs / f"{config.name}-{number}"
    return folder


def _claim_folder(scratch: Path, folder: Path) -> bool:
    with durable.naming(folder, RunError):
        try:
            # A rename replaces an empty folder, and raises OSError if the folder has files.
            durable.rename(scratch, folder)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                return False
            raise
    return True
