"""kill -9 at random instants of rollout actors, queue, learner ranks and driver; then an account of every trajectory.

    python benchmarks/chaos.py --trials 100 --json out.json

Each trial is a real run of `--config`, shortened, with `--kills` kills at random instants; a driver that was killed is
resumed. When the run has ended, every slot that the queue ever opened must be consumed once, still wait, or be given up
with a reason (lost: those that are nowhere; twice: those that are in more than one place), and `streamppo replay` must
arrive at the very weights. Seconds to recover are those from the kill to the next update that is new. With `--scale`
another number of rollout actors is asked for before every kill.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.runs import machine
from streamppo.queue import archive
from streamppo.queue.journal import Journal
from streamppo.queue.records import GIVEN_UP
from streamppo.telemetry import metrics_file as lines

MARK = "STREAMPPO_CHAOS"
REPOSITORY = Path(__file__).parent.parent
KINDS = {"rollout": "ray::RolloutActor", "queue": "ray::QueueActor", "learner": "ray::Rank", "driver": "-m streamppo"}
SHORT = ("queue.batch_size=64", "evaluation.prompts=64", "evaluation.every=0", "checkpoint.every=10", "name=chaos")
STUCK_S = 300.0
MAX_ROLLOUTS = 3
"""With `--scale` there are one to so many rollout actors."""
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}


class Kill(NamedTuple):
    """One kill, and the seconds until the next new update; None where the run had made its last one."""

    kind: str
    recovery_s: float | None


class Trial(NamedTuple):
    """What a run looked like after its kills."""

    kills: list[Kill]
    opened: int
    consumed: int
    lost: int
    twice: int
    replayed: bool
    restarts: dict[str, int]


class Victim:
    """A run in a process of its own whose parts can be killed. A mark in their environment finds its processes."""

    def __init__(self, config: Path, folder: Path, overrides: tuple[str, ...]) -> None:
        self.folder = folder
        self.run = folder / "chaos"
        self.log = folder / "log"
        self._environment = {**ENVIRONMENT, MARK: str(folder)}
        self._begin("run", str(config), "--runs", str(folder), *overrides)

    def _begin(self, *arguments: str) -> None:
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "streamppo", *arguments]
            self.driver = subprocess.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, kind: str) -> bool:
        """kill -9 a process of `kind`, and resume a driver when nothing is left of it. False if there is none."""
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if KINDS[kind] in " ".join(process.cmdline()):
                    process.kill()
                    break
        else:
            return False
        if kind == "driver":
            self.driver.wait()
            self.end()
            self._begin("resume", str(self.run))
        return True

    def scale(self, rollouts: int) -> bool:
        """Ask for so many rollout actors. False if the run has ended meanwhile."""
        command = [sys.executable, "-m", "streamppo", "scale", str(self.run), "--rollouts", str(rollouts)]
        with self.log.open("a") as log:
            return subprocess.run(command, check=False, env=ENVIRONMENT, stdout=log, stderr=log).returncode == 0

    def family(self) -> list[psutil.Process]:
        """Every living process of the run."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def updates(self) -> int:
        """The last update that is written down."""
        return max((line["update"] for line in lines.updates(self.run)), default=0)

    def wait_for(self, update: int) -> bool:
        """Until `update` is made. False if the run ended; raises `RuntimeError` if it does neither."""
        deadline = time.monotonic() + STUCK_S
        while self.updates() < update:
            if self.driver.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(f"no update {update} within {STUCK_S:g} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return True

    def end(self) -> None:
        """Until no process is left; whoever will not go by himself is killed."""
        deadline = time.monotonic() + 10
        while left := self.family():
            if time.monotonic() > deadline:
                for process in left:
                    process.kill()
            time.sleep(0.1)


def trial(
    config: Path, folder: Path, overrides: tuple[str, ...], kinds: list[str], seed: int, *, scale: bool = False
) -> Trial:
    """One run with one kill of each of `kinds`, in that order; with `scale`, of a changing number of rollout actors."""
    generator, kills = random.Random(seed), []
    victim = Victim(config, folder, (*SHORT, *overrides))
    try:
        victim.wait_for(1)
        for kind in kinds:
            time.sleep(generator.expovariate(1.0))
            if scale and victim.driver.poll() is None:
                victim.scale(generator.randint(1, MAX_ROLLOUTS))
                time.sleep(generator.expovariate(1.0))
            before, start = victim.updates(), time.monotonic()
            if victim.driver.poll() is None and victim.kill(kind):
                recovered = victim.wait_for(before + 1)
                kills.append(Kill(kind, time.monotonic() - start if recovered else None))
        if victim.driver.wait(STUCK_S * 3):
            raise RuntimeError(f"the run ended with {victim.driver.returncode}:\n{victim.log.read_text()[-3000:]}")
        return account(victim.run, kills)
    finally:
        if victim.driver.poll() is None:
            victim.driver.send_signal(signal.SIGKILL)
        victim.end()


def account(run: Path, kills: list[Kill]) -> Trial:
    """Where every trajectory of a run that has ended is, and whether its weights can be made again."""
    journal = Journal.of(run)
    saved = journal.read()
    given_up = {one.number for one in journal.ended() if one.state in GIVEN_UP}
    journal.close()
    assert saved is not None
    samples = saved.counters.shape.samples_per_prompt
    found = archive.open(run)
    consumed: Counter[int] = Counter()
    for version in found.versions():
        columns = found.columns(version)
        consumed.update((columns["prompt"] * samples + columns["sample"]).tolist())
    places = consumed + Counter(slot.number for slot in saved.slots) + Counter(given_up)
    command = [sys.executable, "-m", "streamppo", "replay", str(run)]
    replay = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    return Trial(
        kills=kills,
        opened=saved.counters.opened,
        consumed=sum(consumed.values()),
        lost=len(set(range(saved.counters.opened)) - set(places)),
        twice=sum(count - 1 for count in places.values()),
        replayed=replay.returncode == 0,
        restarts=json.loads((run / "summary.json").read_text())["restarts"],
    )


def table(trials: list[Trial]) -> dict[str, Any]:
    """The campaign in numbers."""
    kills = [kill for one in trials for kill in one.kills]
    rows: dict[str, Any] = {}
    for kind in KINDS:
        seconds = [kill.recovery_s for kill in kills if kill.kind == kind and kill.recovery_s is not None]
        rows[kind] = {
            "kills": sum(kill.kind == kind for kill in kills),
            "recovery_s": {"median": statistics.median(seconds), "worst": max(seconds)} if seconds else None,
        }
    return {
        "trials": len(trials),
        "kills": len(kills),
        "by_kind": rows,
        "trajectories": sum(one.consumed for one in trials),
        "lost": sum(one.lost for one in trials),
        "twice": sum(one.twice for one in trials),
        "replayed_bit_for_bit": sum(one.replayed for one in trials),
    }


def campaign(options: argparse.Namespace) -> Iterator[tuple[list[Trial], list[str]]]:
    """After every trial: those that ended, and what was wrong with the others."""
    generator = random.Random(options.seed)
    trials: list[Trial] = []
    failures: list[str] = []
    jobs = [
        ([generator.choice(list(KINDS)) for _ in range(options.kills)], generator.randrange(2**31))
        for _ in range(options.trials)
    ]

    def attempt(job: tuple[list[str], int]) -> Trial | str:
        kinds, seed = job
        with tempfile.TemporaryDirectory() as folder:
            try:
                return trial(options.config, Path(folder), tuple(options.set), kinds, seed, scale=options.scale)
            except RuntimeError as error:
                return f"kills {kinds}, seed {seed}: {error}"

    with ThreadPoolExecutor(options.parallel) as pool:
        for number, one in enumerate(pool.map(attempt, jobs)):
            if isinstance(one, Trial):
                trials.append(one)
                print(json.dumps({"trial": number, **one._asdict()}), flush=True)
            else:
                failures.append(one)
                print(json.dumps({"trial": number, "failure": one}), flush=True)
            yield trials, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/math.toml"))
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--kills", type=int, default=4, help="kills of one trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--scale", action="store_true", help="change the number of rollout actors before every kill")
    parser.add_argument("--set", nargs="*", default=["updates=60"], metavar="section.field=value")
    parser.add_argument("--json", type=Path, help="write the table here too, anew after every trial")
    options = parser.parse_args()
    described = {
        "machine": machine(),
        "config": str(options.config),
        "overrides": options.set,
        "scale": options.scale,
        "runs_at_a_time": options.parallel,
    }
    result: dict[str, Any] = {}
    for trials, failures in campaign(options):
        result = described | table(trials) | {"failures": failures}
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    if result["failures"] or result["lost"] or result["twice"] or result["replayed_bit_for_bit"] < result["trials"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
