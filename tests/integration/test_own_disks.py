"""Nodes with disks of their own: what one of them has to get from another comes by way of `checkpoint.remote`."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conftest import MATH, REPOSITORY
from ray.cluster_utils import Cluster
from test_recovery import all_accounted
from test_run import MARK, SHORT, family, summary, updates, wait_for_updates

BWRAP = shutil.which("bwrap")


class Nodes:
    """A head without CPUs, and nodes of one CPU each that see another disk at `runs` than everybody else."""

    def __init__(self, runs: Path) -> None:
        self._runs = runs
        head = {"num_cpus": 0, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
        self.address = str(self._cluster.address)
        self.made: list[subprocess.Popen[bytes]] = []

    def add(self) -> None:
        """Add a node, and wait for it: of two that start at one time one may take the other's sockets."""
        before = self._alive()
        ray = [str(Path(sys.executable).parent / "ray"), "start", "--block", "--address", self.address]
        command = [str(BWRAP), "--dev-bind", "/", "/", "--tmpfs", str(self._runs), "--", *ray, "--num-cpus", "1"]
        environment = {**os.environ, MARK: str(self._runs), "PYTHONPATH": str(REPOSITORY)}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.made.append(subprocess.Popen([*command, "--disable-usage-stats"], env=environment, **quiet))
        deadline = time.monotonic() + 60
        while not self._alive() - before:
            assert time.monotonic() < deadline and self.made[-1].poll() is None, "no node came"
            time.sleep(0.2)

    def _alive(self) -> set[str]:
        return {node["NodeID"] for node in self._cluster.global_state.node_table() if node["Alive"]}

    def kill(self, holds: str) -> bool:
        """kill -9 the first node with a process of this name, and all of its processes. False if there is none."""
        for node in self.made:
            if node.poll() is None and any(holds in " ".join(_words(one)) for one in _family(node.pid)):
                for one in _family(node.pid):
                    one.kill()
                node.wait()
                return True
        return False

    def end(self) -> None:
        for node in self.made:
            if node.poll() is None:
                for one in _family(node.pid):
                    one.kill()
                node.wait()
        self._cluster.shutdown()


def _family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    (tmp_path / "runs").mkdir()
    made = Nodes(tmp_path / "runs")
    try:
        yield made
    finally:
        for left in family(tmp_path / "runs"):
            left.kill()
        made.end()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(BWRAP is None, reason="bubblewrap gives nodes disks of their own")
def test_nodes_that_do_not_see_the_runs_folder_die_and_the_run_goes_on_from_the_copies(
    nodes: Nodes, tmp_path: Path
) -> None:
    for _ in range(3):
        nodes.add()
    runs, store = tmp_path / "runs", tmp_path / "store"
    given = (f"cluster.address={nodes.address}", "cluster.own_disks=true", f"checkpoint.remote=file://{store}")
    more = ("learner.ranks=2", "checkpoint.every=5", "updates=100", "evaluation.every=0")
    command = [sys.executable, "-m", "streamppo", "run", str(MATH), "--runs", str(runs), *SHORT, *given, *more]
    environment = {**os.environ, MARK: str(runs), "PYTHONPATH": str(REPOSITORY)}
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    for holds in ("ray::Rank", "ray::RolloutActor", "ray::Rank"):
        wait_for_updates(runs, len(updates(runs)) + 12)
        assert nodes.kill(holds)
        nodes.add()
    assert process.wait(400) == 0, log.read_text()
    assert summary(runs)["restarts"]["learner"] >= 2
    assert list((runs / "math" / "checkpoints").glob("*/*.distcp")) == [], "the disk of the driver has none of them"
    assert (runs / "math" / "final" / "model.safetensors").is_file()
    assert {one.parent.name for one in store.glob("*/*/manifest.json")} >= {"00000100"}
    assert all_accounted(runs / "math").consumed == 100 * 64
