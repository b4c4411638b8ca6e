"""The Ray of a run: its addresses and priority, the environment of a cluster's nodes, and what ends or outlives a
run."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from conftest import MATH, REPOSITORY
from ray.cluster_utils import Cluster
from test_run import MARK, SHORT, family, gone, summary, wait_for_updates

from streamppo.config.sections import Config
from streamppo.driver.ray import actors, cluster, nodes
from streamppo.driver.ray.cluster import call_in_actor

ENDLESS = (*SHORT, "updates=100000", "evaluation.every=0", "watchdog.shutdown_s=60")
LOOPBACK = ("127.", "::1", "::ffff:127.")


@contextlib.contextmanager
def on_a_terminal(folder: Path, *overrides: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`streamppo run` as the session leader of a terminal; the descriptor is the terminal's other end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "streamppo", "run", str(MATH), "--runs", str(folder), *overrides]
    # A new session that opens a terminal has it as its own: closing it is a hangup, also where pytest is under nohup.
    opened = (
        "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_DFL); "
        f"os.close(os.open({os.ttyname(theirs)!r}, os.O_RDWR)); os.execv({sys.executable!r}, {command!r})"
    )
    environment = {**os.environ, MARK: str(folder), "PYTHONPATH": str(REPOSITORY)}
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen([sys.executable, "-c", opened], env=environment, start_new_session=True, **streams)
    os.close(theirs)
    try:
        yield process, ours
    finally:
        for left in family(folder):
            left.kill()
        process.wait()


@pytest.mark.slow
def test_a_local_run_is_reached_from_this_machine_alone_and_a_closed_terminal_ends_it_with_a_checkpoint(
    tmp_path: Path,
) -> None:
    with on_a_terminal(tmp_path, *ENDLESS) as (process, terminal):
        reader = threading.Thread(target=read_all, args=(terminal,), daemon=True)
        reader.start()
        wait_for_updates(tmp_path, 3)
        found = family(tmp_path)
        listening = {(one.name(), *address) for one in found for address in addresses(one)}
        assert listening and {one for one in listening if not one[1].startswith(LOOPBACK)} == set()
        ours = [one for one in found if one.cmdline()[:1] and one.cmdline()[0].startswith("ray::")]
        assert {one.nice() for one in ours} == {0}
        os.close(terminal)
        assert process.wait(120) == 128 + signal.SIGHUP
        assert gone(tmp_path)
    said = summary(tmp_path)
    assert said["outcome"] == "Interrupted: stopped by SIGHUP"
    assert (tmp_path / "math" / "checkpoints" / f"{said['updates']:08d}").is_dir()
    assert "SIGHUP" in json.dumps(said) and (tmp_path / "math" / "logs" / "driver.log").is_file()


def read_all(descriptor: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(descriptor, 4096):
            pass


def addresses(process: psutil.Process) -> list[tuple[str, int]]:
    """Every address at which a process waits for connections."""
    with contextlib.suppress(psutil.Error):
        return [tuple(one.laddr) for one in process.net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return []


@pytest.fixture
def three_nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster of three nodes, whose raylets have not the driver's environment."""
    made = Cluster()
    try:
        for number in range(3):
            made.add_node(num_cpus=1, include_dashboard=False, resources={f"node{number}": 1})
        monkeypatch.setenv("HF_HOME", "/models")
        monkeypatch.setenv("PYTHONHASHSEED", "7")
        monkeypatch.setenv("PATH_OF_THE_DRIVER", "stays")
        yield made.address
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.slow
def test_on_three_nodes_the_queue_is_beside_the_driver_and_every_actor_gets_its_environment_and_proves_what_it_sees(
    three_nodes: str, tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    class Stage:
        def look(self) -> tuple[str, str | None, str | None, int]:
            name = os.environ.get("PATH_OF_THE_DRIVER")
            return ray.get_runtime_context().get_node_id(), os.environ.get("HF_HOME"), name, hash("a text")

    config = math_config(f"cluster.address={three_nodes}")
    with cluster.started_ray(config, ""):
        pass
    actor: Any = ray.remote(Stage)
    everywhere = [actor.options(resources={f"node{number}": 1}).remote() for number in range(3)]
    seen = ray.get([one.look.remote() for one in everywhere], timeout=120)
    assert len({node for node, *_ in seen}) == 3
    hashed = subprocess.run(
        [sys.executable, "-c", "print(hash('a text'))"], env={**os.environ}, capture_output=True, text=True, check=True
    )
    assert {tuple(rest) for _, *rest in seen} == {("/models", None, int(hashed.stdout))}

    beside = [actor.options(num_cpus=0, scheduling_strategy=cluster.this_node()).remote() for _ in range(3)]
    own = ray.get_runtime_context().get_node_id()
    assert {node for node, *_ in ray.get([one.look.remote() for one in beside], timeout=120)} == {own}
    assert "scheduling_strategy" in queue_options(config, tmp_path)

    needs = nodes.rank_needs(config, tmp_path)
    ray.get([call_in_actor(one, nodes.check_visible, needs) for one in everywhere], timeout=60)
    (tmp_path / nodes.TOKEN).unlink()
    with pytest.raises(ray.exceptions.RayTaskError, match="lacks the run's folder"):
        ray.get(call_in_actor(everywhere[2], nodes.check_visible, needs), timeout=60)


def queue_options(config: Config, folder: Path) -> dict[str, Any]:
    """Ray's options for the queue."""
    found: dict[str, Any] = {}
    made = SimpleNamespace(remote=lambda *_: None)
    with pytest.MonkeyPatch.context() as patch:
        asked = SimpleNamespace(options=lambda **options: found.update(options) or made)
        patch.setattr(actors.ray, "remote", lambda kind: asked)
        actors.make_queue(config, folder)
    return found
