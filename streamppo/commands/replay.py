"""The run's updates once more, from its archive: the learner's own code, with the archive in the place of the queue.

without changes   every version must come out with the bytes that it had; a what-if otherwise
RUN/replays/1.json    what was recorded and what was made, side by side for each version
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError

from streamppo.config import file as configfile
from streamppo.config.sections import Config, model_path
from streamppo.driver.actors import make_ranks
from streamppo.driver.cluster import describe, init_ray
from streamppo.driver.placement import Placement
from streamppo.errors import Diverged, JournalError, RunError
from streamppo.queue.journal import Journal
from streamppo.queue.records import Made
from streamppo.queue.source import ArchiveSource, as_source
from streamppo.telemetry import metrics_file as lines
from streamppo.types import UpdateReport, decode

SHOWN = ("policy_loss", "entropy", "proximal_kl", "behavior_kl", "ess", "grad_norm")
"""The metrics of the printed table; the report has all of them."""
LINES = 20
"""Versions of the printed table."""


def rerun(run: Path, to: int | None, changes: Sequence[str]) -> int:
    """Make versions 1 to `to` again, with `changes` to the configuration. The exit code is 0 if all were made.

    Raises `Diverged` if there are no changes and a version has other weights than it had.
    """
    journal = Journal.of(run)
    recorded, configs = journal.versions(), journal.configs()
    journal.close()
    last = max(recorded, default=0) if to is None else to
    if last not in recorded:
        raise JournalError(f"{run}: version {last} was never made; the newest is {max(recorded, default=0)}")
    chosen = {version: _changed(config, changes) for version, config in configs.items()}
    if changes:
        # The learning rate's schedule ends with the updates.
        last = min(last, max(config.updates for config in chosen.values()))
    try:
        digests, reports = _remake(run, chosen, last)
    except RayError as error:
        raise RunError(f"the learner: {describe(error)}") from error
    finally:
        ray.shutdown()
    path = _report(run, changes, recorded, digests, reports)
    if changes:
        _print_curves(_curves(run, reports))
    else:
        _compare(recorded, digests)
    print(f"report: {path}")
    return 0


def _changed(encoded: bytes, changes: Sequence[str]) -> Config:
    return configfile.change(msgspec.msgpack.decode(encoded, type=Config), changes)


def _remake(run: Path, configs: Mapping[int, Config], last: int) -> tuple[dict[int, str], list[UpdateReport]]:
    """(digest of every version, report of every update). Each configuration holds from its version on."""
    first = configs[0]
    init_ray(first)
    archive = ray.remote(ArchiveSource).options(num_cpus=0, max_concurrency=100).remote(str(run))
    ranks = make_ranks(first, as_source(archive), Placement(first, rollout=False))
    address = ranks[0].rendezvous.remote()
    ray.get([rank.setup.remote(address, model_path(first, run), None) for rank in ranks])
    reports: list[UpdateReport] = []
    for version in range(last):
        if version and version in configs:
            ray.get([rank.configure.remote(msgspec.msgpack.encode(configs[version])) for rank in ranks])
        reports.append(decode(ray.get([rank.update.remote() for rank in ranks])[0], UpdateReport))
    ray.get([rank.settle.remote() for rank in ranks])
    return ray.get(archive.digests.remote()), reports


def _compare(recorded: Mapping[int, Made], digests: Mapping[int, str]) -> None:
    other: list[int] = []
    for version, digest in sorted(digests.items()):
        same = digest == recorded[version].digest
        print(f"version {version:5d}  {digest[:16]}  {'as recorded' if same else recorded[version].digest[:16]}")
        other += [] if same else [version]
    if other:
        raise Diverged(
            f"{len(other)} of {len(digests)} versions have other weights than they had, the first is {other[0]}: "
            "the software, the device or the number of ranks is another one"
        )
    print(f"{len(digests)} versions, all of them bit for bit as they were")


def _curves(run: Path, reports: Sequence[UpdateReport]) -> list[dict[str, Any]]:
    """What each update was like in the run and in the replay."""
    before = {line["update"]: line for line in lines.updates(run)}
    return [
        {"version": report.version, "recorded": before.get(report.version), "replayed": report.metrics}
        for report in reports
    ]


def _report(
    run: Path,
    changes: Sequence[str],
    recorded: Mapping[int, Made],
    digests: Mapping[int, str],
    reports: Sequence[UpdateReport],
) -> Path:
    folder = run / "replays"
    folder.mkdir(exist_ok=True)
    path = folder / f"{len(list(folder.iterdir())) + 1}.json"
    content = {
        "set": list(changes),
        "same": [version for version, digest in sorted(digests.items()) if digest == recorded[version].digest],
        "digests": digests,
        "updates": _curves(run, reports),
    }
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def _print_curves(curves: Sequence[Mapping[str, Any]]) -> None:
    print("version  " + "  ".join(f"{name + ': run, replay':>24}" for name in SHOWN))
    for row in curves[:: max(1, len(curves) // LINES)]:
        pairs = [((row["recorded"] or {}).get(name, float("nan")), row["replayed"][name]) for name in SHOWN]
        print(f"{row['version']:7d}  " + "  ".join(f"{before:11.4g}, {after:11.4g}" for before, after in pairs))
