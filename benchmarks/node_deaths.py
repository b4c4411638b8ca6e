"""kill -9 of whole nodes of a Ray cluster while a run trains; then an account of every trajectory, as in chaos.py.

    python benchmarks/node_deaths.py --trials 3 --json out.json
    python benchmarks/node_deaths.py --own-disks --kinds learner rollout head disk --set learner.ranks=2 updates=300

The nodes are on this machine and see one folder, or with `--own-disks` (needs bubblewrap) each of them has a disk of
its own at the path of the runs, and copies are in a folder beside it that all see. The head has the driver
and the queue; three others, with a CPU each, have the learner's ranks, the rollout actor, and what is left over
nothing. A node that dies loses its raylet and all of its workers at the same instant; another one comes in its place
two seconds later, with an empty disk. The head takes the whole cluster with it: a new one is started at its address,
and the run is resumed. Of the kind `disk` (with `--own-disks`) the run's folder is gone too, and is made again of the
copies. `learner/60` stops all processes of that node for 60 s in place of killing them, as a node that
cannot be reached: a node that Ray has given up by then ends itself when it comes back, and another one is added.
"""

import argparse
import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from ray.cluster_utils import Cluster

from benchmarks.chaos import ENVIRONMENT, REPOSITORY, SHORT, Kill, Trial, Victim
from benchmarks.runs import machine
from streamppo.errors import StreamppoError
from streamppo.weights.store import ADDRESS

BWRAP = shutil.which("bwrap")
HOLDS = {"learner": "ray::Rank", "rollout": "ray::RolloutActor", "nothing": "", "head": ""}
"""Kinds of nodes, and the name of a process that only they have."""
DISK = "disk"
HEADS = ("head", DISK)
"""Deaths of the head; of the second its disk dies too."""
NODES, REPLACED_S, STARTED_S, PORT = 3, 2.0, 60.0, 6397


class Nodes:
    """A head without CPUs, and `NODES` others with one each, which see an empty disk of their own at `hidden`."""

    def __init__(self, hidden: Path | None = None) -> None:
        self._hidden = hidden
        head = {"num_cpus": 0, "gcs_server_port": PORT, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.address = str(self._cluster.address)
        self._others: list[subprocess.Popen[bytes]] = []
        for _ in range(NODES):
            self.add()

    def add(self) -> None:
        """Add a node, and wait for it: of two that start at one time one may take the other's sockets.

        Raises `RuntimeError` if it does not come.
        """
        before = self._alive()
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--address", self.address]
        disk = [str(BWRAP), "--dev-bind", "/", "/", "--tmpfs", str(self._hidden), "--"] if self._hidden else []
        command = [*disk, *ray, "--num-cpus", "1", "--disable-usage-stats"]
        quiet = subprocess.DEVNULL
        self._others.append(subprocess.Popen(command, env=ENVIRONMENT, stdout=quiet, stderr=quiet))
        deadline = time.monotonic() + STARTED_S
        while not self._alive() - before:
            if time.monotonic() > deadline or self._others[-1].poll() is not None:
                raise RuntimeError(f"no node came within {STARTED_S:g} s of {' '.join(command)}")
            time.sleep(0.2)

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in self._cluster.global_state.node_table() if node["Alive"]}

    def strike(self, kind: str) -> bool:
        """Kill or stop a node of `kind`, which is no head, and replace a dead one. False if there is none."""
        place, _, seconds = kind.partition("/")
        for node in self._others:
            family = _family([node.pid])
            names = [" ".join(_words(one)) for one in family]
            busy = any(wanted in name for name in names for wanted in HOLDS.values() if wanted)
            if any(HOLDS[place] in name for name in names) if HOLDS[place] else not busy:
                if seconds:
                    _signal(family, signal.SIGSTOP)
                    time.sleep(float(seconds))
                    _signal(family, signal.SIGCONT)
                    time.sleep(REPLACED_S)
                    if node.poll() is None:
                        return True
                _signal(family, signal.SIGKILL)
                node.wait()
                self._others.remove(node)
                time.sleep(REPLACED_S)
                self.add()
                return True
        return False

    def end(self) -> None:
        """Kill all nodes."""
        head: Any = self._cluster.head_node
        pids = [one.process.pid for processes in head.all_processes.values() for one in processes]
        _signal(_family(pids + [node.pid for node in self._others]), signal.SIGKILL)
        for node in self._others:
            node.wait()
        self._cluster.remove_node(head, allow_graceful=False)


def _family(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all below them."""
    found: list[psutil.Process] = []
    for pid in pids:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            found += [process, *process.children(recursive=True)]
    return found


def _words(process: psutil.Process) -> list[str]:
    with contextlib.suppress(psutil.Error):
        return process.cmdline()
    return []


def _signal(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def own(folder: Path) -> tuple[str, ...]:
    """What a run needs on nodes that share no folder; checkpoints, journal and archive are copied to `folder`."""
    remote = f"checkpoint.remote=file://{folder}"
    return ("cluster.own_disks=true", remote, "checkpoint.every=5", "queue.standby=true")


def _lost(run: Path) -> tuple[str, str]:
    """Lose a run's folder; the options with which `resume` makes it again."""
    address = (run / ADDRESS).read_text()
    shutil.rmtree(run)
    return "--from", address


def trial(
    config: Path, folder: Path, overrides: tuple[str, ...], kinds: list[str], seed: int, own_disks: bool = False
) -> Trial:
    """One run with one death of each of `kinds`, in that order. It is in `folder/runs`."""
    runs = folder / "runs"
    runs.mkdir()
    hidden, more = (runs, own(folder / "store")) if own_disks else (None, ())
    generator, kills, nodes = random.Random(seed), list[Kill](), Nodes(hidden)
    victim = Victim(config, runs, (*SHORT, *more, *overrides, f"cluster.address={nodes.address}"))
    try:
        victim.wait_for(1)
        for kind in kinds:
            time.sleep(generator.expovariate(0.5))
            if victim.driver.poll() is not None:
                break
            before, start = victim.updates(), time.monotonic()
            if kind in HEADS:
                victim.driver.kill()
                nodes.end()
                victim.driver.wait()
                nodes = Nodes(hidden)
                victim.resume(*(_lost(victim.run) if kind == DISK else ()))
            elif not nodes.strike(kind):
                continue
            recovered = victim.wait_for(before + 1)
            kills.append(Kill(kind, time.monotonic() - start if recovered else None))
        return victim.finish(kills)
    finally:
        victim.driver.kill()
        nodes.end()


class Job(NamedTuple):
    """The kinds of the deaths of a trial, and its seed."""

    number: int
    kinds: list[str]
    seed: int


def attempt(options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Make one trial; its line of the log, with a trial or a failure in it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            given = tuple(options.set)
            made = trial(options.config, Path(folder), given, job.kinds, job.seed, options.own_disks)
        except (RuntimeError, StreamppoError, OSError) as error:
            return {**job._asdict(), "failure": f"{type(error).__name__}: {error}"}
    return {**job._asdict(), "trial": {**made._asdict(), "kills": [kill._asdict() for kill in made.kills]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "math.toml")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(HOLDS), help="in this order in each trial")
    parser.add_argument("--own-disks", action="store_true", help="nodes share no folder")
    parser.add_argument("--set", nargs="*", default=["updates=300", "model.tiny.max_steps=20"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = {"overrides": options.set, "own_disks": options.own_disks}
    found = {"machine": machine(), **given, "trials": list[dict[str, Any]]()}
    for number in range(options.trials):
        line = attempt(options, Job(number, options.kinds, options.seed + number))
        print(json.dumps(line), flush=True)
        found["trials"].append(line)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
