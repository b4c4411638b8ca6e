"""The recipes of examples/clusters: Slurm's script runs here by two Ray nodes of one machine, the others are read."""

import importlib.util
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import MATH, REPOSITORY
from test_run import MARK, family, gone, summary, updates, wait_for_updates

from benchmarks.faults import node_deaths
from benchmarks.lib import networks
from streamppo.config import file as configfile
from streamppo.driver.ray import placement

CLUSTERS = REPOSITORY / "examples" / "clusters"
SHORT = ("queue.batch_size=64", "model.tiny.max_steps=20", "evaluation.every=0", "evaluation.prompts=8")
SRUN = '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n'
"""Runs the command of a step here."""
SCONTROL = "#!/bin/bash\necho 127.0.0.1\necho 127.0.0.1\n"
"""Names two nodes."""


def job(folder: Path, number: int, *overrides: str, **variables: str) -> "subprocess.Popen[str]":
    """The script as Slurm would start it on the first of two nodes. It finds the run of an earlier job by its name."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NAME": "math"}
    slurm |= {"SLURM_JOB_ID": f"{number}", **variables}
    path = f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, **slurm, "PATH": path, "RAY_PORT": "6391", MARK: str(folder / "runs")}
    return subprocess.Popen(
        ["bash", str(CLUSTERS / "slurm.sh"), str(MATH), *SHORT, *overrides],
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slurm_job_that_is_told_to_end_saves_a_checkpoint_and_the_next_one_goes_on(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    try:
        first = job(tmp_path, 1, "updates=100000")
        wait_for_updates(runs, 3)
        first.send_signal(signal.SIGTERM)
        said, _ = first.communicate(timeout=120)
        assert first.returncode == 128 + signal.SIGTERM, said
        made = summary(runs)["updates"]
        assert (runs / "math" / "checkpoints" / f"{made:08d}").is_dir(), said
        assert gone(runs), [one.cmdline() for one in family(runs)]
        second = job(tmp_path, 2, f"updates={made + 3}")
        said, _ = second.communicate(timeout=300)
        assert second.returncode == 0, said
        assert summary(runs)["updates"] == made + 3
        assert [path.name for path in runs.iterdir()] == ["math"], "the second job continued with the run of the first"
    finally:
        for left in family(runs):
            left.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_slurm_job_on_a_network_disk_continues_on_another_node_from_copies(tmp_path: Path) -> None:
    nodes = [tmp_path / name for name in ("node1", "node2")]
    for node in nodes:
        node.mkdir()
    disks = [{"COPIES": str(tmp_path / "copies"), "RUNS": str(node)} for node in nodes]
    try:
        first = job(tmp_path, 1, "updates=100000", **disks[0])
        while len(updates(nodes[0] / "1-0")) < 3:
            assert first.poll() is None, first.communicate()[0]
            time.sleep(0.2)
        first.send_signal(signal.SIGTERM)
        said, _ = first.communicate(timeout=120)
        assert first.returncode == 128 + signal.SIGTERM, said
        made = summary(nodes[0] / "1-0")["updates"]
        shutil.rmtree(nodes[0])
        second = job(tmp_path, 2, f"updates={made + 3}", **disks[1])
        said, _ = second.communicate(timeout=300)
        assert second.returncode == 0, said
        assert summary(nodes[1] / "2-0")["updates"] == made + 3
        assert not (tmp_path / "runs").exists()
        (copies,) = (tmp_path / "copies").iterdir()
        assert (copies / "final" / "model.safetensors").is_file()
    finally:
        for left in family(tmp_path / "runs"):
            left.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("aiohttp_cors") is None, reason="ray[default] has jobs")
def test_a_run_that_is_submitted_as_a_job_of_ray_ends_with_the_job(tmp_path: Path) -> None:
    ray, runs = str(Path(sys.executable).parent / "ray"), tmp_path / "runs"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "RAY_AUTH_MODE": "token", MARK: str(runs)}
    ports = ["--port", "6392", "--dashboard-port", "8292", "--num-cpus", "2", "--disable-usage-stats"]
    # The folder has sockets, whose paths must be short.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as short:
        head = subprocess.Popen([ray, "start", "--head", "--block", *ports, "--temp-dir", short], env=environment)
        try:
            entry = ["streamppo", "run", str(MATH), "--runs", str(runs), "cluster.address=auto", "updates=4", *SHORT]
            submitted = [ray, "job", "submit", "--address", "http://127.0.0.1:8292", "--", *entry]
            for _ in range(30):
                done = subprocess.run(submitted, env=environment, capture_output=True, text=True, check=False)
                if "Failed to connect" not in done.stderr:
                    break
                time.sleep(2)
            assert done.returncode == 0 and "succeeded" in done.stdout + done.stderr, done.stdout + done.stderr
            assert summary(runs)["updates"] == 4
        finally:
            head.terminate()
            head.wait(60)
            for left in family(runs):
                left.kill()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_nodes_that_die_with_all_that_is_on_them_lose_nothing(tmp_path: Path) -> None:
    kinds = ["learner", "rollout", "head"]
    made = node_deaths.trial(MATH, tmp_path, ("updates=300", "model.tiny.max_steps=20"), kinds, seed=0)
    assert [kill.kind for kill in made.kills] == kinds
    assert (made.lost, made.twice) == (0, 0) and made.consumed == 300 * 64
    assert made.replayed and made.restarts["learner"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(os.geteuid() != 0 or bool(networks.refusal()), reason="networks for nodes need root and iproute2")
def test_nodes_that_are_cut_off_from_each_other_for_a_while_lose_nothing(tmp_path: Path) -> None:
    kinds = ["learner~6", "rollout~6", "head~6"]
    given = ("updates=150", "model.tiny.max_steps=20")
    with networks.made() as connected:
        made = node_deaths.trial(MATH, tmp_path, given, kinds, seed=0, connected=connected)
    assert [kill.kind for kill in made.kills] == kinds
    assert all(kill.recovery_s is not None and kill.recovery_s > 3 for kill in made.kills), "updates stood still"
    assert (made.lost, made.twice) == (0, 0) and made.consumed == 150 * 64
    assert made.replayed and not any(made.restarts.values()), "Ray bears what is shorter than 51 s"


def commands(text: str) -> list[list[str]]:
    """The words of every `streamppo run` in a text, without shell variables."""
    lines = re.findall(r"^.*?\b(streamppo run .*)$", text.replace("\\\n", " "), re.MULTILINE)
    return [[word for word in shlex.split(line, comments=True) if "$" not in word and word != "&"] for line in lines]


JOBS = {path.stem: path for path in (REPOSITORY / "configs").glob("*.toml") if "sbatch" in path.read_text()}


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_a_configuration_names_has_the_gpus_that_its_run_asks_for(name: str) -> None:
    (words,) = re.findall(r"sbatch (.*)", JOBS[name].read_text())
    options = dict(word.removeprefix("--").split("=") for word in shlex.split(words) if word.startswith("--"))
    asked = placement.plan(configfile.load(JOBS[name])).total("GPU")
    assert int(options["nodes"]) * int(options.get("gpus-per-node", 0)) == asked > 0


@pytest.mark.parametrize("path", ["docs/clusters.md", "examples/clusters/slurm.sh", "examples/clusters/sky.yaml"])
def test_who_starts_ray_sets_the_mode_of_its_token(path: str) -> None:
    """`ray start --head` requires a token that lies in HOME; `ray start --address` sends it only with this variable."""
    before, *_ = (REPOSITORY / path).read_text().split("ray start --")
    export = re.search(r"\bexport [^`]*?\bRAY_AUTH_MODE=(token|disabled)", before)
    assert export


@pytest.mark.parametrize("name", ["rayjob.yaml", "sky.yaml"])
def test_every_run_of_a_recipe_is_one_that_the_configuration_allows(name: str) -> None:
    found = yaml.safe_load((CLUSTERS / name).read_text())
    (words,) = commands(found["run"] if "run" in found else found["spec"]["entrypoint"])
    overrides = [word for word in words[3:] if re.match(r"[a-z_.]+=", word)]
    config = configfile.load(REPOSITORY / words[2].removeprefix("/streamppo/"), overrides)
    assert config.rollout.actors == 2
    if name == "rayjob.yaml":
        assert config.cluster.address == "auto"


def test_pods_of_kubernetes_see_one_folder_have_memory_for_objects_and_a_token() -> None:
    spec: Any = yaml.safe_load((CLUSTERS / "rayjob.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pinned = re.search(r"^ray==(.+)$", (REPOSITORY / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned and cluster["rayVersion"] == pinned[1]
    words = shlex.split(spec["entrypoint"])
    runs = words[words.index("--runs") + 1]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
        assert mounted == {"runs": runs, "shm": "/dev/shm"}
        assert {one["name"] for one in pod["volumes"]} == mounted.keys()
        assert {"name": "RAY_worker_niceness", "value": "0"} in container["env"]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.gpu"])
def test_images_install_extras_that_there_are_and_the_pinned_torch(name: str) -> None:
    text = (CLUSTERS / name).read_text()
    (extras,) = re.findall(r"'\.\[(.+)\]'", text)
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert set(extras.split(",")) <= set(project["optional-dependencies"])
    for version in re.findall(r"torch==(\S+)", text):
        assert f"torch=={version}" in (REPOSITORY / "constraints.txt").read_text()
    assert "USER ray" in text and 'ENTRYPOINT ["streamppo"]' in text
