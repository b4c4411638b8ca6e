"""kill -9 of whole nodes of a Ray cluster while a run trains; then an account of every trajectory, as in chaos.py.

    python benchmarks/node_deaths.py --trials 3 --json out.json

The nodes are on this machine (`ray.cluster_utils.Cluster`), and see one folder. The head has the driver and the queue;
of three others, with a CPU each, one has the learner's rank, one the rollout actor, and one nothing. A node that dies
loses its raylet and all of its workers at the same instant; another one comes in its place two seconds later. The head
takes the whole cluster with it: a new one is started at its address, and the run is resumed. `learner/60` stops all
processes of that node for 60 s in place of killing them, as a node that cannot be reached: a node that Ray has given up
by then ends itself when it comes back, and another one is added.
"""

import argparse
import contextlib
import json
import random
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))

from ray.cluster_utils import Cluster

from benchmarks.chaos import REPOSITORY, SHORT, Kill, Trial, Victim
from benchmarks.runs import machine
from streamppo.errors import StreamppoError

HOLDS = {"learner": "ray::Rank", "rollout": "ray::RolloutActor", "nothing": "", "head": ""}
"""Kinds of nodes, and the name of a process that only they have."""
NODES, REPLACED_S, PORT = 3, 2.0, 6397


class Nodes:
    """A head without CPUs, and `NODES` others with one each."""

    def __init__(self) -> None:
        head = {"num_cpus": 0, "gcs_server_port": PORT, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        for _ in range(NODES):
            self.add()
        self.address = str(self._cluster.address)

    def add(self) -> None:
        """Add a node."""
        self._cluster.add_node(num_cpus=1, include_dashboard=False)

    def strike(self, kind: str) -> bool:
        """Kill or stop a node of `kind`, which is no head, and replace a dead one. False if there is none."""
        place, _, seconds = kind.partition("/")
        for node in list(self._cluster.worker_nodes):
            family = _family(node)
            names = [" ".join(_words(one)) for one in family]
            busy = any(wanted in name for name in names for wanted in HOLDS.values() if wanted)
            if any(HOLDS[place] in name for name in names) if HOLDS[place] else not busy:
                if seconds:
                    _signal(family, signal.SIGSTOP)
                    time.sleep(float(seconds))
                    _signal(family, signal.SIGCONT)
                    time.sleep(REPLACED_S)
                    if all(one.process.poll() is None for one in node.all_processes["raylet"]):
                        return True
                _signal(family, signal.SIGKILL)
                self._cluster.remove_node(node, allow_graceful=False)
                time.sleep(REPLACED_S)
                self.add()
                return True
        return False

    def end(self) -> None:
        """Kill all nodes."""
        nodes = [*self._cluster.worker_nodes, self._cluster.head_node]
        _signal([process for node in nodes for process in _family(node)], signal.SIGKILL)
        for node in list(self._cluster.worker_nodes):
            self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.remove_node(self._cluster.head_node, allow_graceful=False)


def _family(node: Any) -> list[psutil.Process]:
    """All processes of a node: Ray's own, and their children."""
    found: list[psutil.Process] = []
    for processes in node.all_processes.values():
        for one in processes:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(one.process.pid)
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


def trial(config: Path, folder: Path, overrides: tuple[str, ...], kinds: list[str], seed: int) -> Trial:
    """One run with one death of each of `kinds`, in that order."""
    generator, kills, nodes = random.Random(seed), list[Kill](), Nodes()
    victim = Victim(config, folder, (*SHORT, *overrides, f"cluster.address={nodes.address}"))
    try:
        victim.wait_for(1)
        for kind in kinds:
            time.sleep(generator.expovariate(0.5))
            if victim.driver.poll() is not None:
                break
            before, start = victim.updates(), time.monotonic()
            if kind == "head":
                victim.driver.kill()
                nodes.end()
                victim.driver.wait()
                nodes = Nodes()
                victim.resume()
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
            made = trial(options.config, Path(folder), tuple(options.set), job.kinds, job.seed)
        except (RuntimeError, StreamppoError, OSError) as error:
            return {**job._asdict(), "failure": f"{type(error).__name__}: {error}"}
    return {**job._asdict(), "trial": {**made._asdict(), "kills": [kill._asdict() for kill in made.kills]}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=REPOSITORY / "configs" / "math.toml")
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(HOLDS), help="in this order in each trial")
    parser.add_argument("--set", nargs="*", default=["updates=60", "model.tiny.max_steps=20"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = {"machine": machine(), "overrides": options.set, "trials": list[dict[str, Any]]()}
    for number in range(options.trials):
        line = attempt(options, Job(number, options.kinds, options.seed + number))
        print(json.dumps(line), flush=True)
        found["trials"].append(line)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
