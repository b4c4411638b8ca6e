"""`streamppo replay`: repeats a run's updates on its archived batches, with the learner's code and without an engine.

without changes       every version must have its recorded digest, if learner.exact was always true
with changes          the same batches are trained on under another configuration
RUN/replays/1.json    the recorded and the new numbers, for each version
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from itertools import count
from pathlib import Path
from typing import TypeAlias, TypedDict, TypeVar

import ray
from msgspec import structs
from ray.exceptions import RayError

from streamppo import durable
from streamppo.commands.console import console, echo, table, to_json
from streamppo.config import file as configfile
from streamppo.config.diff import moved_paths
from streamppo.config.sections import Config, model_path
from streamppo.driver import threads
from streamppo.driver.ray import placement
from streamppo.driver.ray.actors import make_ranks
from streamppo.driver.ray.cluster import call_in_actor, command_ray, describe, started_ray, this_node
from streamppo.driver.ray.placement import Placement
from streamppo.errors import DIVERGENCE_CAUSES, Diverged, JournalError, RunError, StreamppoError
from streamppo.learner.checkpoint import history, manifest, remote
from streamppo.learner.checkpoint.history import History
from streamppo.queue import resume_checks
from streamppo.queue.batch_source import ArchiveSource, as_source
from streamppo.queue.rules.records import PublishedVersion
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.types import UpdateReport, decode, encode

SHOWN = ("policy_loss", "entropy", "proximal_kl", "behavior_kl", "ess", "grad_norm")
"""The metrics in the printed table. The report has all metrics."""
SHOWN_VERSIONS = 20
HORIZONS = {"entropy": 64, "proximal_kl": 8, "behavior_kl": 4, "ess": 4, "grad_norm": 2}
"""For each metric, the last update at which a replay with changes predicts a fork (benchmarks/learning/what_if.py)."""
T = TypeVar("T")
log = logging.getLogger(__name__)


class ReplayedUpdate(TypedDict):
    """The metrics of one update in the run (None if they were not recorded) and in the replay."""

    version: int
    recorded: Mapping[str, object] | None
    replayed: Mapping[str, float]


def replay(run: Path, to: int | None, changes: Sequence[str]) -> int:
    """Replay versions 1 to `to`, with `changes` to the configuration. Returns the exit code 0.

    If the first batches were not kept, the replay begins with the oldest checkpoint after which all batches were kept.
    Raises `Diverged` if there are no `changes`, the run was exact, and a version has other weights than recorded.
    """
    with closing(Journal.open_run(run)) as journal:
        recorded, configs = journal.versions(), resume_checks.configs(journal)
    last = max(recorded, default=0) if to is None else to
    if last not in recorded:
        raise JournalError(f"{run}: version {last} was never made; the newest is {max(recorded, default=0)}")
    if not configs:
        raise JournalError(f"{run}: the journal has no configuration of any version: nothing can be replayed")
    present = configfile.load(run / configfile.CONFIG)
    changed = {version: with_changes(config, present, changes) for version, config in configs.items()}
    if changes:
        # The learning rate is defined only for the configured number of updates.
        last = min(last, max(config.updates for config in changed.values()))
    past = History(changed, history.digests(configs, recorded))

    def use(begin: Path | None) -> tuple[dict[int, str], list[UpdateReport]]:
        if begin and last < int(begin.name):
            early = f"versions before {int(begin.name)}"
            raise JournalError(f"{run}: {early} cannot be replayed: their batches were not kept")
        return remake(run, past, begin, last)

    digests, reports = from_checkpoint(lambda: oldest_start(run, past), use)
    exact = all(config.learner.exact for config in configs.values())
    different = [] if changes else _compare(recorded, digests, exact=exact)
    if changes or not exact:
        _print_curves(_curves(run, reports))
    if changes:
        reach = ", ".join(f"{updates} ({name})" for name, updates in HORIZONS.items())
        echo(
            "these batches were sampled without the changes: for 20 changes of configs/math.toml, a fork behaved as "
            f"its replay up to update {reach}; for later updates, and for reward and accuracy, use `streamppo fork`"
        )
    try:
        echo(f"report: {_report(run, changes, recorded, digests, reports)}")
    except RunError as error:
        # Without changes the printed comparison is the result, and a report is not required.
        if changes:
            raise
        echo(f"no report: {error}")
    if different and exact:
        raise Diverged(
            f"{len(different)} of {len(digests)} versions differ from the recorded weights, first version "
            f"{different[0]}: " + DIVERGENCE_CAUSES
        )
    return 0


def with_changes(recorded: Config, present: Config, changes: Sequence[str]) -> Config:
    """Return the configuration `recorded` with `changes`. The paths of moved files are taken from `present`."""
    places = [f"{name}={json.dumps(place)}" for name, place in moved_paths(recorded, present).items()]
    return threads.with_number(configfile.change(recorded, [*places, *changes]), recorded.learner.threads)


Export: TypeAlias = Callable[[Path], object]
"""A function that writes the newest version as a Hugging Face model to a new folder."""


def remake(
    run: Path,
    past: History,
    begin: Path | None,
    last: int,
    *,
    checkpoints: Path | None = None,
    until: Callable[[UpdateReport, Export], bool] = lambda *_: False,
) -> tuple[dict[int, str], list[UpdateReport]]:
    """Replay the versions after the checkpoint `begin` (None: version 0) up to `last`, or until `until` returns True.

    Returns the digest of every version, and the report of every update. A checkpoint of the last version is saved in
    the folder `checkpoints`, if given. The learner's ranks run on a new Ray cluster. Raises `RunError` if a rank fails.
    """
    configs = {version: remote.at_rest(config, run) for version, config in past.configs.items()}
    past = structs.replace(past, configs=configs)
    first = past.at(manifest.version_of(begin))
    try:
        with command_ray(lambda mark: started_ray(first, mark)):
            return _remake(run, past, begin, last, checkpoints, until)
    except RayError as error:
        raise RunError(f"the learner: {describe(error)}") from error


def _remake(
    run: Path,
    past: History,
    begin: Path | None,
    last: int,
    checkpoints: Path | None,
    until: Callable[[UpdateReport, Export], bool],
) -> tuple[dict[int, str], list[UpdateReport]]:
    first = past.at(manifest.version_of(begin))
    options = {"num_cpus": 0, "max_concurrency": 100, "scheduling_strategy": this_node()}
    source = ray.remote(ArchiveSource).options(**options).remote(str(run))
    ranks = make_ranks(first, as_source(source), Placement(first, rollout=False))
    ranks = placement.in_order(ranks, ray.get([call_in_actor(rank, placement.locate) for rank in ranks]))
    address = ranks[0].rendezvous.remote()
    arguments = address, model_path(first, run), str(begin) if begin else None, encode(past)
    start = ray.get([rank.setup.remote(number, *arguments) for number, rank in enumerate(ranks)])[0]
    reports: list[UpdateReport] = []
    for _ in range(start, last):
        reports.append(decode(ray.get([rank.update.remote() for rank in ranks])[0], UpdateReport))
        if until(reports[-1], lambda to: ray.get([rank.export.remote(str(to)) for rank in ranks])):
            break
    if checkpoints is not None:
        ray.get([rank.save.remote(str(checkpoints)) for rank in ranks])
    ray.get([rank.settle.remote() for rank in ranks])
    return ray.get(source.digests.remote()), reports


def from_checkpoint(choose: Callable[[], Path | None], use: Callable[[Path | None], T]) -> T:
    """Call `use` with a checkpoint from `choose` (None: version 0). Repeat both if the run deletes the checkpoint."""
    while True:
        begin = choose()
        # A checkpoint may exist only at checkpoint.remote.
        is_here = begin is not None and begin.is_dir()
        try:
            return use(begin)
        except (StreamppoError, OSError):
            if begin is None or not is_here or begin.is_dir():
                raise
            log.info("%s: the run has deleted it meanwhile (checkpoint.keep): another checkpoint is taken", begin)


def oldest_start(run: Path, past: History) -> Path | None:
    """Return the run's oldest checkpoint after which all batches were kept; None if all batches of the run were kept.

    Raises `JournalError` if there is no such checkpoint.
    """
    if not (first := min(archive.open(run).versions(), default=0)):
        return None
    folder, address = run / "checkpoints", remote.known_address(run)
    copies = remote.CheckpointStore(address).versions(past) if address else []
    local = [path for path in manifest.complete(folder) if manifest.is_of(path, past)]
    checkpoints = {*(int(path.name) for path in local), *copies}
    if not (covered := sorted(version for version in checkpoints if version >= first)):
        raise JournalError(f"{run}: the archive begins with version {first}, but no checkpoint is of it or later")
    path = folder / f"{covered[0]:08d}"
    echo(f"batches before version {first} were not kept: beginning with the checkpoint of version {path.name}")
    return path


def _compare(recorded: Mapping[int, PublishedVersion], digests: Mapping[int, str], *, exact: bool) -> list[int]:
    rows = table("version", "weights", "")
    different: list[int] = []
    for version, digest in sorted(digests.items()):
        same = digest == recorded[version].digest
        rows.add_row(f"{version}", digest[:16], "as recorded" if same else f"recorded: {recorded[version].digest[:16]}")
        different += [] if same else [version]
    console().print(rows)
    if not exact:
        same = len(digests) - len(different)
        rest = "the others are only close, because learner.exact = false"
        echo(f"{len(digests)} versions, {same} of them as recorded; {rest}")
    elif not different:
        echo(f"{len(digests)} versions, all of them bit for bit as recorded")
    return different


def _curves(run: Path, reports: Sequence[UpdateReport]) -> list[ReplayedUpdate]:
    recorded = {line["update"]: line for line in metrics_file.updates(run)}
    return [
        {"version": report.version, "recorded": recorded.get(report.version), "replayed": report.metrics}
        for report in reports
    ]


def _print_curves(curves: Sequence[ReplayedUpdate]) -> None:
    rows = table("version", "", *SHOWN)
    for column in rows.columns[2:]:
        column.justify = "right"
    for curve in curves[:: max(1, len(curves) // SHOWN_VERSIONS)]:
        rows.add_row(f"{curve['version']}", "run", *(_number(curve["recorded"] or {}, name) for name in SHOWN))
        rows.add_row("", "replay", *(_number(curve["replayed"], name) for name in SHOWN))
    console().print(rows)


def _number(metrics: Mapping[str, object], name: str) -> str:
    value = metrics.get(name)
    return f"{value:.4g}" if isinstance(value, int | float) else "-"


def _report(
    run: Path,
    changes: Sequence[str],
    recorded: Mapping[int, PublishedVersion],
    digests: Mapping[int, str],
    reports: Sequence[UpdateReport],
) -> Path:
    content = {
        "set": list(changes),
        "same": [version for version, digest in sorted(digests.items()) if digest == recorded[version].digest],
        "digests": digests,
        "updates": _curves(run, reports),
    }
    folder = run / "replays"
    with durable.naming(folder, RunError):
        durable.folder(folder)
        path = _claim_name(folder)
        durable.write(path, to_json(content, indent=1) + b"\n")
    return path


def _claim_name(folder: Path) -> Path:
    """Reserve the next number by creating the report's temporary file (durable.py). Returns the report's path."""
    numbers = [path.name.partition(".")[0] for path in folder.iterdir()]
    for number in count(1 + max((int(name) for name in numbers if name.isdecimal()), default=0)):
        path = folder / f"{number}.json"
        with suppress(FileExistsError):
            durable.aside(path).touch(exist_ok=False)
            # Another replay may have written this report since the folder was listed.
            if not path.exists():
                return path
            durable.aside(path).unlink()
    raise AssertionError("numbers do not end")
