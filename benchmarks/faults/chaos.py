"""Kill rollout actors, queue, learner ranks and driver with SIGKILL at random times; then account for all trajectories.

    python benchmarks/faults/chaos.py --trials 100 --json out.json

Each trial is a real, shortened run of `--config` with `--kills` kills at random times; a killed driver is resumed. At
the end of the run, every slot that the queue has opened must be consumed once, waiting, or given up with a reason
(`lost` counts slots in none of these states, `twice` the repeats), and `streamppo replay` must reproduce the weights
bit for bit. The recovery time is from the kill to the next new update. `--scale` changes the number of rollout actors
before every kill. `--watch` polls the run's page every 0.2 s (benchmarks/faults/poll.py). With `--draw` every trial has
a random configuration, drawn from the configuration's types and stored with the trial.

With `--agents` the configuration is one of agents, whose processes are killed, too: every sampled token must be under
one end (benchmarks/faults/token_account.py), and agents have seen what was trained on. Processes that are left ten
seconds after the end of a run, or of a driver that was killed, are orphans.

With `--json out.json` every trial is also appended to out.jsonl when it ends: the same command continues after the
stored trials, and a larger `--trials` adds trials.
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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import psutil

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.faults import token_account
from benchmarks.faults.poll import polled
from benchmarks.lib import draw
from benchmarks.lib.runs import machine
from streamppo.errors import StreamppoError
from streamppo.queue.rules.records import GIVEN_UP
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file as lines
from streamppo.types import Identity, Trajectory

MARK = "STREAMPPO_CHAOS"
REPOSITORY = Path(__file__).parents[2]
KINDS = {"rollout": "ray::RolloutActor", "queue": "ray::QueueActor", "learner": "ray::Rank", "driver": "-m streamppo "}
SHARDS = {"shard": "ray::QueueShard"}
"""An additional kind of process in runs with `--set queue.shards=2`."""
AGENTS = {"agent": "streamppo.tasks.rewards.processes.worker"}
"""With `--agents`: the processes in which agents run, and the one that forks them."""
WITNESS = (
    "environment.agent=benchmarks/lib/witness_agent.py:run",
    "environment.max_turns=6",
    "environment.max_tokens=64",
)
TEMPLATE = {"template": "worker_template.py forks"}
"""The process that forks workers. It is not replaced: workers that start later import everything themselves."""
ALL = KINDS | SHARDS | AGENTS | TEMPLATE
SHORT = ("queue.batch_size=64", "evaluation.prompts=64", "evaluation.every=0", "checkpoint.every=10", "name=chaos")
STUCK_S = 300.0
MAX_ROLLOUTS = 3
"""With `--scale` a run has 1 to `MAX_ROLLOUTS` rollout actors."""
Replays: TypeAlias = Callable[[Path], bool]
"""True if a replay reproduces every version of a run bit for bit; where it is None, `replay` is used."""


def environment() -> dict[str, str]:
    """This process's present environment, with this repository first in PYTHONPATH."""
    return {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{os.environ.get('PYTHONPATH', '')}"}


class Kill(NamedTuple):
    """One kill, and the seconds until the next new update; None if the run ended without another update."""

    kind: str
    recovery_s: float | None


class Trial(NamedTuple):
    """The account of a run after its kills."""

    kills: list[Kill]
    opened: int
    consumed: int
    lost: int
    twice: int
    replayed: bool
    restarts: dict[str, int]
    page_replies: int
    page_errors: dict[str, int]
    orphans: int = 0
    tokens: dict[str, int] | None = None


class Victim:
    """A run in separate processes that can be killed; they are found by `MARK` in their environment."""

    def __init__(self, config: Path, folder: Path, overrides: tuple[str, ...]) -> None:
        self.folder = folder
        self.run = folder / "chaos"
        self.log, self.witness, self.orphans = folder / "log", folder / "witness", 0
        self._environment = {**environment(), MARK: str(folder), "STREAMPPO_WITNESS": str(self.witness)}
        self._begin("run", str(config), "--runs", str(folder), *overrides)

    def _begin(self, *arguments: str) -> None:
        with self.log.open("a") as log:
            command = [sys.executable, "-m", "streamppo", *arguments]
            self.driver = subprocess.Popen(command, env=self._environment, stdout=log, stderr=subprocess.STDOUT)

    def kill(self, kind: str) -> bool:
        """Kill a process of `kind`; resume a driver after all its processes have ended. False if there is none."""
        found = list[psutil.Process]()
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                found += [process] if ALL[kind] in " ".join(process.cmdline()) else []
        if not found:
            return False
        # Of agents' processes any: that which forks the others, too.
        with contextlib.suppress(psutil.Error):
            (random.choice(found) if kind in AGENTS else found[0]).kill()
        if kind == "driver":
            self.driver.wait()
            self.end()
            self.resume()
        return True

    def resume(self, *options: str) -> None:
        """Start a driver that resumes the run."""
        self._begin("resume", str(self.run), *options)

    def scale(self, rollouts: int) -> bool:
        """Request `rollouts` rollout actors. False if the run has ended in the meantime."""
        command = [sys.executable, "-m", "streamppo", "scale", str(self.run), "--rollouts", str(rollouts)]
        with self.log.open("a") as log:
            return subprocess.run(command, check=False, env=environment(), stdout=log, stderr=log).returncode == 0

    def family(self) -> list[psutil.Process]:
        """Every living process of the run."""
        found: list[psutil.Process] = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(MARK) == str(self.folder) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def updates(self) -> int:
        """The last recorded update."""
        return max((line["update"] for line in lines.updates(self.run)), default=0)

    def wait_for(self, update: int) -> bool:
        """Wait for `update`. False if the run has ended; raises `RuntimeError` after `STUCK_S`."""
        deadline = time.monotonic() + STUCK_S
        while self.updates() < update:
            if self.driver.poll() is not None:
                return False
            if time.monotonic() > deadline:
                raise RuntimeError(f"no update {update} within {STUCK_S:g} s:\n{self.log.read_text()[-3000:]}")
            time.sleep(0.05)
        return True

    def finish(self, kills: list[Kill], replays: Replays | None = None) -> Trial:
        """Wait for the end of the run, and return its account. Raises `RuntimeError` if it failed."""
        if self.driver.wait(STUCK_S * 3):
            raise RuntimeError(f"the run ended with {self.driver.returncode}:\n{self.log.read_text()[-3000:]}")
        return account(self.run, kills, replays, witness=self.witness if self.witness.exists() else None)

    def end(self) -> None:
        """Wait until no process is left; kill those that are left after 10 s, and count them as orphans."""
        deadline, orphans = time.monotonic() + 10, set[int]()
        while left := self.family():
            if time.monotonic() > deadline:
                for process in left:
                    orphans.add(process.pid)
                    process.kill()
            time.sleep(0.1)
        self.orphans += len(orphans)


def trial(
    config: Path,
    folder: Path,
    overrides: tuple[str, ...],
    kinds: list[str],
    seed: int,
    *,
    scale: bool = False,
    watch: bool = False,
    replays: Replays | None = None,
) -> Trial:
    """Make one run with one kill of each of `kinds`, in that order; `replays` checks its replay at the end.

    With `scale` the number of rollout actors changes; with `watch` its page is polled from the first update to the end.
    """
    victim = Victim(config, folder, (*SHORT, *overrides))
    try:
        victim.wait_for(1)
        with polled(victim.run, environment()) if watch else contextlib.nullcontext() as page:
            made = killed(victim, kinds, seed, scale=scale, replays=replays)
        victim.end()
        made = made._replace(orphans=victim.orphans)
        return made._replace(page_replies=page.replies, page_errors=dict(page.errors)) if page else made
    finally:
        if victim.driver.poll() is None:
            victim.driver.send_signal(signal.SIGKILL)
        victim.end()


def killed(victim: Victim, kinds: list[str], seed: int, *, scale: bool, replays: Replays | None = None) -> Trial:
    """Kill a process of each of `kinds` at random times, and wait for the end of the run."""
    generator, kills = random.Random(seed), list[Kill]()
    for kind in kinds:
        time.sleep(generator.expovariate(1.0))
        if scale and victim.driver.poll() is None:
            victim.scale(generator.randint(1, MAX_ROLLOUTS))
            time.sleep(generator.expovariate(1.0))
        before, start = victim.updates(), time.monotonic()
        if victim.driver.poll() is None and victim.kill(kind):
            recovered = victim.wait_for(before + 1)
            kills.append(Kill(kind, time.monotonic() - start if recovered else None))
    return victim.finish(kills, replays)


def replay(run: Path) -> bool:
    """True if `streamppo replay` reproduces every version of a run bit for bit."""
    command = [sys.executable, "-m", "streamppo", "replay", str(run)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if done.returncode:
        print(f"{run}: not replayed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}", file=sys.stderr)
    return not done.returncode


def account(run: Path, kills: list[Kill], replays: Replays | None = None, *, witness: Path | None = None) -> Trial:
    """Find every trajectory of an ended run, and check the replay of its weights.

    With the notes of agents in `witness`, find every token, too.
    """
    journal = Journal.open_run(run)
    saved, ended, skipped = journal.read(), journal.ended_attempts(), journal.skipped()
    journal.close()
    assert saved is not None
    samples, size = saved.counters.shape.samples_per_prompt, saved.counters.shape.unit_size
    found = archive.open(run)
    trained = [one for version in found.versions() for one in found.batch(version).trajectories]
    waiting = [one for one in (slot.stored for slot in saved.slots) if one is not None]
    # A slot has one end, or is still open; each segment counts on its own.
    ends = Counter(_number(one.identity, samples) for one in trained if one.finish != "cut")
    ends += Counter(slot.number for slot in saved.slots if not slot.stored or slot.stored.finish != "cut")
    ends += Counter({one.number for one in ended if one.state in GIVEN_UP})
    ends += Counter(number for first, _ in skipped for number in range(first, first + size))
    segments = Counter(one.identity for one in (*trained, *waiting) if one.finish == "cut")
    # After a segment that was too old, the rest of its completion is not sampled again.
    old = {one.number for one in ended if one.state == "too_old" and any(segments)}
    return Trial(
        kills=kills,
        opened=saved.counters.opened,
        consumed=len(trained),
        lost=len(set(range(saved.counters.opened)) - set(ends) - old),
        twice=sum(count - 1 for count in (*ends.values(), *segments.values())),
        replayed=(replays or replay)(run),
        restarts=json.loads((run / "summary.json").read_text())["restarts"],
        page_replies=0,
        page_errors={},
        tokens=None if witness is None else _tokens(run, [*trained, *waiting], witness),
    )


def _tokens(run: Path, there: list[Trajectory], witness: Path) -> dict[str, int]:
    found = token_account.account(run, there, witness)
    return {**found._asdict(), "holds": found.holds}


def _number(identity: Identity, samples: int) -> int:
    return identity.prompt * samples + identity.sample


def table(trials: list[Trial]) -> dict[str, Any]:
    """The totals of the campaign."""
    kills = [kill for one in trials for kill in one.kills]
    rows: dict[str, Any] = {}
    for kind in ALL:
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
        "page": {
            "replies": sum(one.page_replies for one in trials),
            "errors": dict(sum((Counter(one.page_errors) for one in trials), Counter[str]())),
        },
        "orphans": sum(one.orphans for one in trials),
        "tokens": dict(sum((Counter(one.tokens) for one in trials if one.tokens), Counter[str]())),
        "replayed_bit_for_bit": sum(one.replayed for one in trials),
    }


class Job(NamedTuple):
    """One trial: the kinds of its kills, its seed, and its overrides."""

    number: int
    kinds: list[str]
    seed: int
    overrides: list[str]


def jobs(options: argparse.Namespace, folder: Path) -> list[Job]:
    """All trials of a campaign, a function of the options; a larger `--trials` only adds trials."""
    generator, made = random.Random(options.seed), list[Job]()
    for number in range(options.trials):
        victims = [*KINDS, *(SHARDS if any(one.startswith("queue.shards=") for one in options.set) else ())]
        victims += AGENTS if options.agents else ()
        kinds, seed = [generator.choice(victims) for _ in range(options.kills)], generator.randrange(2**31)
        # The draw uses the trial's seed, so that new choices in the configuration do not change later trials' kills.
        fixed = [*SHORT, *options.set]
        drawn = draw.draw(random.Random(seed), options.config, fixed, folder) if options.draw else []
        made.append(Job(number, kinds, seed, [*(WITNESS if options.agents else ()), *options.set, *drawn]))
    return made


def attempt(options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Make one trial; return its line of the log, with its account or its failure."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            how = {"scale": options.scale, "watch": options.watch}
            made = trial(options.config, Path(folder), tuple(job.overrides), job.kinds, job.seed, **how)
        except (RuntimeError, StreamppoError, OSError, subprocess.SubprocessError) as error:
            return {**job._asdict(), "failure": f"{type(error).__name__}: {error}"}
    return {**job._asdict(), "trial": {**made._asdict(), "kills": [kill._asdict() for kill in made.kills]}}


def campaign(options: argparse.Namespace, folder: Path, log: Path | None) -> Iterator[list[dict[str, Any]]]:
    """Yield the lines of all trials after each one, with those of earlier calls, which are stored in `log`."""
    wanted = jobs(options, folder)
    lines_made = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    for line in lines_made:
        if (
            line["number"] < len(wanted)
            and {name: line[name] for name in Job._fields} != wanted[line["number"]]._asdict()
        ):
            sys.exit(f"{log}: trial {line['number']} is of another campaign: take another --json, or the same options")
    there = {line["number"] for line in lines_made}
    if lines_made:
        yield lines_made
    pool = ThreadPoolExecutor(options.parallel)
    try:
        left = [pool.submit(attempt, options, job) for job in wanted if job.number not in there]
        for ended in as_completed(left):
            line = ended.result()
            print(json.dumps(line), flush=True)
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(line) + "\n")
            lines_made.append(line)
            yield lines_made
    finally:
        pool.shutdown(cancel_futures=True)


def result(lines_made: list[dict[str, Any]]) -> dict[str, Any]:
    """The totals of the campaign, its failures, and the overrides of each trial."""
    made = [line["trial"] for line in lines_made if "trial" in line]
    trials = [Trial(**{**one, "kills": [Kill(**kill) for kill in one["kills"]]}) for one in made]
    failures = [line for line in lines_made if "failure" in line]
    return {**table(trials), "failures": failures, "drawn": [line["overrides"] for line in lines_made]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/math.toml"))
    parser.add_argument("--agents", action="store_true", help="of examples/calculator_agent.toml, for one")
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--kills", type=int, default=4, help="kills of one trial")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--parallel", type=int, default=1, help="runs at a time")
    parser.add_argument("--scale", action="store_true", help="change the number of rollout actors before every kill")
    parser.add_argument("--watch", action="store_true", help="ask the run's page every 0.2 s")
    parser.add_argument("--set", nargs="*", default=["updates=60"], metavar="section.field=value")
    parser.add_argument("--json", type=Path, help="write the table here too, and each trial to the .jsonl beside it")
    parser.add_argument(
        "--draw", action="store_true", help="another configuration for every trial (benchmarks/lib/draw.py)"
    )
    options = parser.parse_args()
    described = {
        "machine": machine(),
        "config": str(options.config),
        "overrides": options.set,
        "seed": options.seed,
        "scale": options.scale,
        "watch": options.watch,
        "agents": options.agents,
        "runs_at_a_time": options.parallel,
    }
    # Trials store the paths of their data and teacher, so these must be the same in every call.
    folder = Path(tempfile.gettempdir()) / "streamppo-chaos"
    if options.draw:
        draw.write(folder, options.config)
    log = options.json.with_suffix(".jsonl") if options.json else None
    found: dict[str, Any] = {}
    for lines_made in campaign(options, folder, log):
        found = described | result(lines_made)
        if options.json:
            options.json.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    if (
        found["failures"]
        or found["page"]["errors"]
        or found["lost"]
        or found["twice"]
        or found["orphans"]
        or found["tokens"].get("holds", found["trials"]) < found["trials"]
        or found["replayed_bit_for_bit"] < found["trials"]
    ):
        sys.exit(1)


if __name__ == "__main__":
    main()
