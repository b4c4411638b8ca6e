"""Kill whole nodes of a Ray cluster with SIGKILL during a run; then account for all trajectories, as chaos.py does.

    python benchmarks/faults/node_deaths.py --trials 3 --json out.json
    python benchmarks/faults/node_deaths.py --own-disks --kinds learner rollout head disk --set learner.ranks=2
        updates=300

All nodes are on this machine and share one folder. With `--own-disks` (needs bubblewrap) each node has its own disk at
the path of the runs, and a shared folder holds copies. The head has the driver and the queue. Three other nodes with
one CPU each have the learner's ranks, the rollout actor, or nothing. A dying node loses its raylet and all its workers
at once; a new node with an empty disk replaces it two seconds later. If the head dies, the whole cluster is lost: a new
one starts at the same address, and the run is resumed. The kind `disk` (with `--own-disks`) also deletes the run's
folder, which is restored from the copies. `learner/60` stops all processes of that node for 60 s instead of killing
them: if Ray has declared the node dead by then, it exits when it continues, and a new node is added.

    python benchmarks/faults/node_deaths.py --networks --kinds learner~6 rollout~6 head~6 rollout~60 learner~60 head~60

With `--networks` (needs root; benchmarks/lib/networks.py) every node has its own network. `learner~60` disconnects that
node from all others for 60 s while its processes continue; `head~60` disconnects the head; `learner-rollout~60`
disconnects only these two from each other. Seconds are then the longest wait for a new update, from the disconnection
to the first update after its end.
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

sys.path.insert(0, str(Path(__file__).parents[2]))

from ray.cluster_utils import Cluster

from benchmarks.faults.chaos import REPOSITORY, SHORT, Kill, Trial, Victim, environment
from benchmarks.lib import networks
from benchmarks.lib.networks import Link, Networks, longest_wait
from benchmarks.lib.runs import machine
from streamppo.errors import StreamppoError
from streamppo.telemetry import metrics_file as lines
from streamppo.weights.store import ADDRESS

BWRAP = shutil.which("bwrap")
HOLDS = {"learner": "ray::Rank", "rollout": "ray::RolloutActor", "nothing": "", "head": ""}
"""Kinds of nodes, and the name of a process that only this kind has."""
DISK = "disk"
HEADS = ("head", DISK)
"""Deaths of the head; with `DISK` its disk is lost too."""
CUT, STOPPED, PAIR = "~", "/", "-"
"""Separators: kind~seconds disconnects a node, kind/seconds stops it, kind-kind~seconds disconnects two nodes."""
NODES, REPLACED_S, STARTED_S, ENDS_S = 3, 2.0, 60.0, 30.0
BORNE_S, UNHEARD_S = 10.0, 67.0
"""Ray tolerates a disconnection of `BORNE_S`. After `UNHEARD_S` it has declared a node dead: five health checks with a
timeout of 10 s, 3 s apart, have failed."""


class Node(NamedTuple):
    """A node other than the head: the process of its `ray start`, its id in Ray, and its network link."""

    process: "subprocess.Popen[bytes]"
    name: str
    link: Link | None


class Nodes:
    """A head without CPUs, and `NODES` other nodes with one CPU each and a separate empty disk at `hidden`, if given.

    With `connected` each node has its own network, otherwise this machine's and `port`; 0 is a free port.
    """

    def __init__(self, hidden: Path | None = None, connected: Networks | None = None, port: int = 0) -> None:
        self._hidden, self._networks = hidden, connected
        head: dict[str, Any] = {"num_cpus": 0, "gcs_server_port": port, "include_dashboard": False}
        if connected is not None:
            head |= {"gcs_server_port": connected.port, "node_ip_address": connected.head.address}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.address = str(self._cluster.address)
        self.port = int(self.address.rpartition(":")[2])
        self._others: list[Node] = []
        for _ in range(NODES):
            self.add()

    def add(self) -> None:
        """Add a node, and wait for it: two nodes that start at the same time may take each other's sockets.

        Raises `RuntimeError` if it does not start within `STARTED_S`.
        """
        before, link = self._alive(), self._networks.join() if self._networks else None
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--address", self.address]
        disk = [str(BWRAP), "--dev-bind", "/", "/", "--tmpfs", str(self._hidden), "--"] if self._hidden else []
        around, at = (link.prefix, ["--node-ip-address", link.address]) if link else ([], [])
        command = [*around, *disk, *ray, *at, "--num-cpus", "1", "--disable-usage-stats"]
        quiet = subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment(), stdout=quiet, stderr=quiet)
        deadline = time.monotonic() + STARTED_S
        while not (new := self._alive() - before):
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(f"no node came within {STARTED_S:g} s of {' '.join(command)}")
            time.sleep(0.2)
        self._others.append(Node(process, new.pop(), link))

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in self._cluster.global_state.node_table() if node["Alive"]}

    def strike(self, kind: str) -> bool:
        """Kill, stop or disconnect a node of `kind`, and replace it if it dies. False if there is no such node.

        The head can only be disconnected here.
        """
        place, cut, cut_s = kind.partition(CUT)
        if cut:
            links = [self._link(one) for one in place.split(PAIR)]
            return self._cut([link for link in links if link], float(cut_s)) if all(links) else False
        place, stopped, seconds = kind.partition(STOPPED)
        if (node := self._holder(place)) is None:
            return False
        family = _family([node.process.pid])
        if stopped:
            _signal(family, signal.SIGSTOP)
            time.sleep(float(seconds))
            _signal(family, signal.SIGCONT)
            time.sleep(REPLACED_S)
        if not stopped or node.process.poll() is not None:
            self._replace(node)
        return True

    def _holder(self, place: str) -> Node | None:
        """A node of the kind `place`; None if there is none."""
        for node in self._others:
            names = [" ".join(_words(one)) for one in _family([node.process.pid])]
            busy = any(wanted in name for name in names for wanted in HOLDS.values() if wanted)
            if any(HOLDS[place] in name for name in names) if HOLDS[place] else not busy:
                return node
        return None

    def _link(self, place: str) -> Link | None:
        """The network link of a node of the kind `place`. Raises `RuntimeError` without networks."""
        if self._networks is None:
            raise RuntimeError("to cut nodes off from each other takes --networks")
        if place == "head":
            return self._networks.head
        return node.link if (node := self._holder(place)) else None

    def _cut(self, links: list[Link], seconds: float) -> bool:
        """Disconnect a node from all others, or two from each other; then replace nodes that Ray has declared dead."""
        assert self._networks is not None, "links are of networks"
        self._networks.cut(*links)
        time.sleep(seconds)
        self._networks.mend(*links)
        # Long-broken connections recover slowly: Ray may declare a node dead after the disconnection has ended.
        time.sleep(max(UNHEARD_S - seconds if seconds > BORNE_S else 0.0, REPLACED_S))
        alive = self._alive()
        for one in [one for one in self._others if one.name not in alive or one.process.poll() is not None]:
            # Ray notifies the node now that it was declared dead, and it exits.
            with contextlib.suppress(subprocess.TimeoutExpired):
                one.process.wait(ENDS_S)
            self._replace(one)
        return True

    def _replace(self, node: Node) -> None:
        _signal(_family([node.process.pid]), signal.SIGKILL)
        node.process.wait()
        self._others.remove(node)
        time.sleep(REPLACED_S)
        self.add()

    def end(self) -> None:
        """Kill all nodes."""
        head: Any = self._cluster.head_node
        pids = [one.process.pid for processes in head.all_processes.values() for one in processes]
        _signal(_family(pids + [node.process.pid for node in self._others]), signal.SIGKILL)
        for node in self._others:
            node.process.wait()
        self._cluster.remove_node(head, allow_graceful=False)


def _family(pids: Iterable[int]) -> list[psutil.Process]:
    """These processes and all their descendants."""
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
    """Overrides for nodes without a shared folder: checkpoints, journal and archive are copied to `folder`."""
    remote = f"checkpoint.remote=file://{folder}"
    return ("cluster.own_disks=true", remote, "checkpoint.every=5", "queue.standby=true")


def _lost(run: Path) -> tuple[str, str]:
    """Delete a run's folder; return the options with which `resume` restores it."""
    address = (run / ADDRESS).read_text()
    shutil.rmtree(run)
    return "--from", address


def trial(
    config: Path,
    folder: Path,
    overrides: tuple[str, ...],
    kinds: list[str],
    seed: int,
    own_disks: bool = False,
    *,
    connected: Networks | None = None,
) -> Trial:
    """Make one run in `folder/runs` with one fault of each of `kinds`, in that order."""
    runs = folder / "runs"
    runs.mkdir()
    hidden, more = (runs, own(folder / "store")) if own_disks else (None, ())
    generator, kills, nodes = random.Random(seed), list[Kill](), Nodes(hidden, connected)
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
                nodes = Nodes(hidden, connected, nodes.port)
                victim.resume(*(_lost(victim.run) if kind == DISK else ()))
            elif not nodes.strike(kind):
                continue
            after = victim.updates() if CUT in kind else before
            seconds = time.monotonic() - start if victim.wait_for(after + 1) else None
            if CUT in kind:
                seconds = longest_wait(lines.updates(victim.run), before, after + 1)
            kills.append(Kill(kind, seconds))
        return victim.finish(kills)
    finally:
        victim.driver.kill()
        nodes.end()


class Job(NamedTuple):
    """The kinds of a trial's faults, and its seed."""

    number: int
    kinds: list[str]
    seed: int


def attempt(options: argparse.Namespace, job: Job) -> dict[str, Any]:
    """Make one trial; return its line of the log, with its account or its failure."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            with networks.made() if options.networks else contextlib.nullcontext() as connected:
                given = options.config, Path(folder), tuple(options.set), job.kinds, job.seed, options.own_disks
                made = trial(*given, connected=connected)
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
    parser.add_argument("--networks", action="store_true", help="every node has a network of its own")
    parser.add_argument("--set", nargs="*", default=["updates=300", "model.tiny.max_steps=20"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    given = {"overrides": options.set, "own_disks": options.own_disks, "networks": options.networks}
    found = {"machine": machine(), **given, "trials": list[dict[str, Any]]()}
    for number in range(options.trials):
        line = attempt(options, Job(number, options.kinds, options.seed + number))
        print(json.dumps(line), flush=True)
        found["trials"].append(line)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
