"""A whole run in one process without Ray: the queue, the only rank and rollout actors are threads of their own.

All of them are the run's: journal, archive, checkpoints, lines of metrics, the engine, the reward. A run of a few small
updates takes seconds, with and without a part before it. Nothing is evaluated, and nothing that dies is replaced.
"""

import os
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import Future
from pathlib import Path

import learner_case
import msgspec
from replay_case import Actor, without_ray

from benchmarks.lib import draw
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.config.model import BUILTIN
from streamppo.config.sections import model_path
from streamppo.tasks.library import arithmetic
from streamppo.types import QueueReport, ScoredText, UpdateReport, decode, encode

MATH = Path(__file__).parent.parent.parent / "configs" / "math.toml"
SMALL = (
    "updates=6",
    "queue.batch_size=16",
    "queue.max_lag=0",
    "rollout.in_flight=16",
    "rollout.slots=16",
    "checkpoint.every=2",
    "checkpoint.keep=10",
    "model.tiny.max_steps=3",
    "evaluation.every=0",
    "learner.warmup_updates=0",
    "reward.where=actor",  # another process would load the task's own from its file, and score 0 throughout
)
"""A run of six small updates at lag 0, with the reward `score` of this file."""
ESTIMATORS = {
    chosen.split("'")[1]: (chosen, "queue.samples_per_prompt=4", draw.SEVERAL) for chosen in draw.choices()["advantage"]
}
"""Overrides for each estimator of advantages, by its kind."""
DIED = 9


def begin(runs: Path, *overrides: str, name: str = "math") -> Path:
    """Make the folder of a run, which has not begun."""
    folder = runs / name
    folder.mkdir(parents=True)
    config = configfile.load(MATH, [*SMALL, f"name={name}", *overrides])
    configfile.save(config, folder)
    consent.give(folder, config)
    return folder


async def score(trajectory: ScoredText, **_: object) -> float:
    """In place of the task's own reward: the different characters of a completion, which any policy differs in."""
    return len(set(trajectory.completion)) / 5


def train(folder: Path, *, dies_at: int | None = None) -> "subprocess.CompletedProcess[str]":
    """Begin the run in `folder`, or continue with it, to its last update; or end as by a kill after one."""
    with tempfile.TemporaryDirectory() as output:
        out = Path(output) / "out"
        process = learner_case.processes().Process(target=_main, args=(folder, dies_at, out))
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(str(folder), process.exitcode, out.read_text(), "")


def trained(runs: Path, *overrides: str, name: str = "math", dies_at: int | None = None) -> Path:
    """A run that was trained to its end, or died."""
    folder = begin(runs, *overrides, name=name)
    done = train(folder, dies_at=dies_at)
    assert done.returncode == (DIED if dies_at else 0), done.stdout
    return folder


def _main(folder: Path, dies_at: int | None, out: Path) -> None:
    for descriptor in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    code = 0
    without_ray()
    arithmetic.score = score
    try:
        _train(folder, dies_at)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _train(folder: Path, dies_at: int | None) -> None:
    from streamppo.driver import inputs, preflight
    from streamppo.learner.checkpoint import history, manifest
    from streamppo.learner.rank import Rank
    from streamppo.queue.actor import QueueActor
    from streamppo.rollout.actor import RolloutActor
    from streamppo.telemetry.metrics_file import FINISHED
    from streamppo.telemetry.record import RunRecord

    config = inputs.with_clock(configfile.load(folder / configfile.CONFIG), folder)
    preflight.verify(config, folder)
    checkpoints, model = folder / "checkpoints", model_path(config, folder)
    checkpoints.mkdir(exist_ok=True)
    encoded = msgspec.msgpack.encode(config)
    record = RunRecord(folder, time.perf_counter(), config.seed, config.updates)
    newest = manifest.newest(checkpoints, record.complete_to, history.read_history(folder, config))
    queue = Actor(QueueActor, encoded, str(folder), model)
    made = queue.begin.remote(int(newest.name) if newest else 0).result()
    record.drop_unpublished(made)
    configfile.save(config, folder)
    rank = Actor(Rank, encoded, queue, 0)
    if config.model.path == BUILTIN:
        rank.make_model.remote(model).result()
    past = encode(history.read_history(folder, config))
    address = rank.rendezvous.remote().result()
    start = rank.setup.remote(0, address, model, str(newest) if newest else None, past).result()
    record.begin(start)

    def update(version: int) -> None:
        record.update(decode(rank.update.remote().result(), UpdateReport))
        if version == dies_at:
            rank.settle.remote().result()
            os._exit(DIED)
        if config.checkpoint.every and version % config.checkpoint.every == 0:
            rank.save.remote(str(checkpoints)).result()

    # Engines get no weights while versions are replayed.
    for version in range(start + 1, made + 1):
        update(version)
    actors = [
        Actor(RolloutActor, encoded, f"rollout-{number}", number, queue, {}) for number in range(config.rollout.actors)
    ]
    for actor in actors:
        actor.start.remote(model).result()
        actor.run.remote().add_done_callback(_end_if_failed)
    for version in range(max(start, made) + 1, config.updates + 1):
        update(version)
    rank.save.remote(str(checkpoints)).result()
    rank.settle.remote().result()
    record.checksum = rank.export.remote(str(folder / "final")).result()
    record.close(FINISHED, decode(queue.report.remote().result(), QueueReport), [])


def _end_if_failed(run: "Future[object]") -> None:
    """End the process if an actor has failed, for whose trajectories the learner would wait forever."""
    if not run.cancelled() and (error := run.exception()) is not None:
        traceback.print_exception(error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
