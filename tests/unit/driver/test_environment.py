"""The environment of Ray's processes, and the disk, the memory and the signals of the driver's machine."""

import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from driver_case import Case
from ray._private import node, ray_constants

from streamppo import process
from streamppo.config.sections import Config
from streamppo.driver import run_folder, stages
from streamppo.driver.ray import cluster, environment, nodes
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.driver.watch.watch import RunStage
from streamppo.errors import Interrupted, RunError
from streamppo.telemetry import host
from streamppo.telemetry.host import MemoryKills

# --- variables -----------------------------------------------------------------------------------------------


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[dict[str, Any]]]:
    """The options of every ray.init, beside the environment that its processes would have."""
    found: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        found.append({**options, "cluster": ray_constants.ENABLE_RAY_CLUSTER, "environment": dict(os.environ)})

    for name in (*environment.OWN_RAY, *environment.FORKED, "RAY_COLOR_PREFIX", "PYTHONHASHSEED"):
        # Set first, so that it is restored after the code under test.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("PYTHONPATH", "plugins")
    monkeypatch.setattr(cluster.ray, "init", init)
    yield found


def test_a_ray_of_our_own_is_on_loopback_at_nice_0_without_events_and_a_cluster_after_it_is_not(
    started: list[dict[str, Any]], math_config: Callable[..., Config]
) -> None:
    with cluster.started_ray(math_config(), ""):
        pass
    with cluster.started_ray(math_config("cluster.address=10.0.0.1:6379"), ""):
        pass
    own, joined = started
    assert (own["_node_ip_address"], own["cluster"]) == ("127.0.0.1", False)
    assert own["environment"]["RAY_worker_niceness"] == own["environment"]["RAY_task_events_report_interval_ms"] == "0"
    assert joined["cluster"] and "_node_ip_address" not in joined
    assert ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in joined["environment"]


def test_a_ray_of_our_own_starts_neither_a_dashboard_nor_an_autoscaler_and_a_later_ray_does(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = {name: getattr(node.Node, name) for name in ("start_monitor", "start_api_server")}
    during: list[object] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **_: during.extend(getattr(node.Node, name) for name in before))
    with cluster.started_ray(math_config(), ""):
        pass
    assert during and not set(during) & set(before.values())
    assert {name: getattr(node.Node, name) for name in before} == before


def test_a_cluster_gets_the_key_of_every_service_that_a_run_calls(
    started: list[dict[str, Any]], math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = (
        "reward={scorers={a={kind='service', url='http://a', key_env='MINE_A'}, "
        "b={kind='judge', url='http://b', model='m', question='?', key_env='MINE_B'}}}",
        "algorithm.teacher={url='http://t', key_env='MINE_T'}",
        "rollout.engine={kind='sglang', urls=['http://e'], transport='group', api_key_env='MINE_E'}",
    )
    for name in "ABTE":
        monkeypatch.setenv(f"MINE_{name}", name)
    config = math_config("cluster.address=10.0.0.1:6379", *services)
    with cluster.started_ray(config, ""):
        pass
    variables = started[0]["runtime_env"]["env_vars"]
    assert {name: variables[f"MINE_{name}"] for name in "ABTE"} == dict(zip("ABTE", "ABTE", strict=True))
    # A server may need none: the name of its variable is there by default.
    monkeypatch.delenv("MINE_E")
    assert environment.key_variables(config) == {"MINE_A", "MINE_B", "MINE_T"}


def test_nobody_else_can_read_the_token_of_a_ray_of_our_own(
    started: list[dict[str, Any]], math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"

    def init(**options: Any) -> None:
        token.parent.mkdir(exist_ok=True)
        token.touch(mode=0o644)

    with cluster.started_ray(math_config(), ""):
        pass
    assert started, "without a token, as Rays before 2.60 are, it starts too"
    monkeypatch.setattr(cluster.ray, "init", init)
    with cluster.started_ray(math_config(), ""):
        pass
    assert stat.S_IMODE(token.stat().st_mode) == 0o600


@pytest.mark.parametrize("home", ["", "missing", "file", "unreadable"])
def test_a_user_without_a_home_that_can_be_written_gets_a_token_in_the_environment(
    home: str,
    started: list[dict[str, Any]],
    math_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Containers of clusters run as a user without a home, or with a home that is read-only. Ray writes into it."""
    monkeypatch.setenv(environment.RAY_TOKEN_VARIABLE, "")
    monkeypatch.delenv(environment.RAY_TOKEN_VARIABLE)
    (tmp_path / "file").touch()
    (tmp_path / "unreadable" / ".ray").mkdir(parents=True)
    (tmp_path / "unreadable" / ".ray" / "auth_token").touch()
    monkeypatch.setenv("HOME", {"missing": "/proc/nowhere"}.get(home, str(tmp_path / home)))
    if home == "unreadable":
        monkeypatch.setattr(environment.os, "access", lambda path, mode: False)
    if home == "":
        monkeypatch.setattr(Path, "home", classmethod(no_home))
    with cluster.started_ray(math_config(), ""):
        pass
    assert len(started[0]["environment"][environment.RAY_TOKEN_VARIABLE]) == 64


def no_home(_: type[Path]) -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_a_home_that_can_be_written_has_the_token(
    started: list[dict[str, Any]], math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(environment.RAY_TOKEN_VARIABLE, raising=False)
    with cluster.started_ray(math_config(), ""):
        pass
    assert environment.RAY_TOKEN_VARIABLE not in started[0]["environment"]


def test_a_setting_of_the_users_own_wins(
    started: list[dict[str, Any]], math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_worker_niceness", "5")
    with cluster.started_ray(math_config(), ""):
        pass
    assert started[0]["environment"]["RAY_worker_niceness"] == "5"


def test_actors_on_a_cluster_get_the_drivers_keys_and_settings_and_nothing_of_its_machine(
    started: list[dict[str, Any]], math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "HF_HOME": "/models",
        "SGLANG_X": "1",
        "OPENAI_API_KEY": "key",
        "https_proxy": "p",
        "MY_SECRET": "s",
        "MY_TEACHER": "t",
        "RAY_AUTH_TOKEN": "t",
        "CUDA_VISIBLE_DEVICES": "7",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    service = "reward={scorers={one={kind='service', url='http://localhost:1', key_env='MY_SECRET'}}}"
    teacher = "algorithm.teacher={url='http://localhost:1', key_env='MY_TEACHER'}"
    with cluster.started_ray(math_config("cluster.address=auto", service, teacher), ""):
        pass
    variables = started[0]["runtime_env"]["env_vars"]
    assert {name: variables.get(name) for name in given} == {
        **given,
        "RAY_AUTH_TOKEN": None,
        "CUDA_VISIBLE_DEVICES": None,
    }
    assert variables["PYTHONHASHSEED"] == "0" and variables["PYTHONPATH"].endswith("plugins")
    assert "PATH" not in variables and "HOME" not in variables


def test_ray_writes_no_colours_into_a_pipe(started: list[dict[str, Any]], math_config: Callable[..., Config]) -> None:
    with cluster.started_ray(math_config(), ""):
        pass
    assert started[0]["environment"]["RAY_COLOR_PREFIX"] == "0"


# --- nodes ---------------------------------------------------------------------------------------------------


def test_a_node_that_lacks_something_is_named_with_all_that_it_lacks(
    tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}")
    scorer = "{kind='function', function='nowhere.at_all:score'}"
    service = "{kind='service', url='http://localhost:1', key_env='NO_SUCH_KEY'}"
    changes = (
        f"task={{kind='data', data='{data}'}}",
        f"reward={{scorers={{one={scorer}, two={service}}}}}",
        "rollout.limit=nowhere.either:limit",
    )
    rank = nodes.rank_needs(math_config(*changes), tmp_path)
    needs = nodes.rollout_needs(math_config(*changes), rank)
    assert nodes.missing_needs(rank) == []
    assert nodes.missing_needs(needs) == [
        "the plug-in nowhere.at_all:score",
        "the plug-in nowhere.either:limit",
        "the environment variable NO_SUCH_KEY",
    ]
    data.unlink()
    (tmp_path / nodes.TOKEN).write_text("of another disk")
    with pytest.raises(
        RunError, match=rf"^node \S+ lacks the run's folder {tmp_path} .a different folder.*; {data}; the plug-in"
    ):
        nodes.check_visible(None, needs)
    (tmp_path / nodes.TOKEN).unlink()
    assert nodes.missing_needs(rank) == [f"the run's folder {tmp_path}"]


def test_a_rank_needs_every_model_the_run_that_its_critic_reads_and_functions_of_the_users_own(
    tmp_path: Path, math_config: Callable[..., Config]
) -> None:
    folders = [tmp_path / name for name in ("critic", "teacher", "before")]
    for folder in folders:
        folder.mkdir()
    critic, teacher, before = folders
    changes = (
        f"algorithm.critic={{model='{critic}', pretrain='{before}'}}",
        f"algorithm.teacher={{model='{teacher}', weight=0.1}}",
        "algorithm.policy_loss={kind='function', function='nowhere.own:loss'}",
    )
    rank = nodes.rank_needs(math_config(*changes), tmp_path)
    for folder in folders:
        folder.rmdir()
    assert nodes.missing_needs(rank) == [str(critic), str(before), str(teacher), "the plug-in nowhere.own:loss"]
    with_none = nodes.rank_needs(math_config("algorithm.critic.model=policy"), tmp_path)
    assert nodes.missing_needs(with_none) == []


def test_a_plug_in_that_is_importable_is_found_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    assert nodes._is_importable("mine") and nodes._is_importable("mine.py") and not nodes._is_importable("yours.py")


# --- disk ----------------------------------------------------------------------------------------------------

MOUNTS = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 27 0:50 / /home rw shared:1 - nfs4 server:/home rw,vers=4.2
41 40 0:51 / /home/my\\040disk rw - xfs /dev/vdb rw
42 27 0:52 / /scratch rw - lustre mds@tcp:/scratch rw
43 27 0:53 / /cloud rw - fuse.gcsfuse bucket rw
44 27 0:54 / /layer rw - fuse.fuse-overlayfs fuse rw
45 27 0:55 / /layer/again rw - cifs //server/x rw
46 27 254:1 / /layer/again rw - ext4 /dev/vdc rw
47 27 0:56 / /mnt/f\u00fcr\\040alle rw - nfs4 server:/all rw
48 27 0:57 / /mnt/\udcfc\u4e2d rw - nfs4 server:/other rw
49 27 254:2 / /mnt/f\u00fcr\\040alle/local rw - ext4 /dev/vdd rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        *(("/home/me/runs", "nfs4"), ("/scratch/runs/math", "lustre"), ("/cloud", "fuse.gcsfuse")),
        *(("/mnt/f\u00fcr alle/runs", "nfs4"), ("/mnt/\udcfc\u4e2d/runs", "nfs4")),
    ],
)
def test_a_run_on_a_network_file_system_is_refused_with_the_remedy(
    folder: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MOUNTS", tmp_path / "mountinfo")
    run_folder.MOUNTS.write_bytes(os.fsencode(MOUNTS))
    with pytest.raises(RunError, match=rf"^{folder}: is on a network file system \({kind}\).*`--runs FOLDER`"):
        run_folder.refuse_place(Path(folder))


@pytest.mark.parametrize(
    "folder", ["/home/my disk/runs", "/homes/runs", "/layer", "/layer/again/runs", "/mnt/f\u00fcr alle/local/x"]
)
def test_a_disk_of_this_machine_is_accepted_also_inside_a_network_file_system(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "MOUNTS", tmp_path / "mountinfo")
    run_folder.MOUNTS.write_bytes(os.fsencode(MOUNTS))
    run_folder.refuse_place(Path(folder))


# --- memory --------------------------------------------------------------------------------------------------


def cgroup(folder: Path, version: int, kills: int, limit: str) -> MemoryKills:
    """The counter of a process in the cgroup /job/run; job has the limit."""
    controller, counter, bound = (
        ("", "memory.events", "memory.max"),
        ("memory", "memory.oom_control", "memory.limit_in_bytes"),
    )[version == 1]
    run = folder / controller / "job" / "run"
    run.mkdir(parents=True, exist_ok=True)
    for level, text in ((run, "max" if version == 2 else str(2**63 - 4096)), (run.parent, limit)):
        (level / counter).write_text(f"under_oom 0\noom_kill {kills}\n")
        (level / bound).write_text(f"{text}\n")
    (folder / "own").write_text(f"3:cpu:/other\n4:{controller}:/job/run\n")
    return MemoryKills(folder, folder / "own")


@pytest.mark.parametrize("version", [1, 2])
def test_a_stage_that_the_kernel_killed_for_memory_says_so_and_how_much_there_was(
    version: int, tmp_path: Path, driver_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = cgroup(tmp_path / "groups", version, 3, str(3 * 2**29))
    monkeypatch.setattr(stages, "MemoryKills", lambda: kills)
    run = driver_case(1, "watchdog.max_restarts=1")
    run.stages.note_restart(RunStage.ROLLOUT, "rollout-0: died")
    cgroup(tmp_path / "groups", version, 4, str(3 * 2**29))
    said = "rollout-1: died: killed by the kernel, out of memory: the limit of the cgroup is 1.50 GiB"
    with pytest.raises(RunError, match=f"^2 restarts within 600 s; the last reason: {said}$"):
        run.stages.note_restart(RunStage.ROLLOUT, "rollout-1: died")
    assert run.record.restarts == [("rollout", "rollout-0: died")]
    assert kills.explain() == ""


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_in_use_is_that_of_the_cgroup_with_the_smallest_limit(version: int, tmp_path: Path) -> None:
    cgroup(tmp_path, version, 0, str(2**26))
    job = tmp_path / ("memory" if version == 1 else "") / "job"
    used, cached = [*host.USED.items()][version == 1]
    (job / used).write_text(f"{3 * 2**24}\n")
    (job / "memory.stat").write_text(f"anon 1\n{cached} {2**24}\n")
    assert host.memory_in_use(tmp_path, tmp_path / "own") == (2**25 / 2**30, 2**26 / 2**30)
    (job / used).unlink()
    assert host.memory_in_use(tmp_path, tmp_path / "own") is None
    used_gib, total_gib = host.memory_in_use(tmp_path, tmp_path / "none") or (0.0, 0.0)
    assert 0 < used_gib < total_gib and total_gib > 2**26 / 2**30


def test_a_machine_without_cgroups_tells_nothing(tmp_path: Path) -> None:
    assert MemoryKills(tmp_path, tmp_path / "none").explain() == ""


# --- a Ray that died -----------------------------------------------------------------------------------------


def test_a_ray_whose_own_process_has_died_ends_the_run_at_once_with_the_reason(
    driver_case: Callable[..., Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = driver_case(1)
    run.tick()
    processes = {"raylet": [Service(None)], "gcs_server": [Service(-signal.SIGKILL)]}
    monkeypatch.setattr(cluster.worker, "_global_node", Node(processes))
    with pytest.raises(RunError, match=r"^Ray's gcs_server has died \(SIGKILL\)"):
        run.tick()


class Node:
    def __init__(self, processes: dict[str, list["Service"]]) -> None:
        self.all_processes = processes


class Service:
    def __init__(self, code: int | None) -> None:
        self.process = self
        self.poll = lambda: code


# --- signals -------------------------------------------------------------------------------------------------


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in process.SIGNALS}
    # A run that an earlier test started in this process has handled it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_is_answered_at_once_with_the_way_to_go_on_and_raised_where_the_driver_looks(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    interrupts = Interrupts()
    interrupts.run = Path("runs/math")
    interrupts.check()
    assert signal.getsignal(number) not in (signal.SIG_DFL, signal.SIG_IGN), "it would end the tests"
    os.kill(os.getpid(), number)
    said = capfd.readouterr().out
    assert said.startswith(f"{number.name}: stopping") and said.endswith("streamppo resume runs/math\n")
    with pytest.raises(Interrupted):
        interrupts.check()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    # A terminal that is closed sends it more than once.
    os.kill(os.getpid(), signal.SIGHUP)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("name", ["a;b c", "a$(cmd)", "it's", "`x`", "a b"])
def test_the_way_to_go_on_can_be_pasted_into_a_shell(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    interrupts = Interrupts()
    interrupts.run = Path("runs") / name
    os.kill(os.getpid(), signal.SIGINT)
    said = capfd.readouterr().out
    assert shlex.split(said.partition("continue with: ")[2]) == ["streamppo", "resume", f"runs/{name}"]


@pytest.mark.usefixtures("handlers")
def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    interrupts = Interrupts()
    os.kill(os.getpid(), signal.SIGHUP)
    interrupts.check()


def test_a_signal_that_comes_twice_at_once_is_one() -> None:
    script = (
        "import os, signal; from threading import Timer\n"
        "from streamppo.driver.ray.interrupts import TOGETHER_S, Interrupts\n"
        "Interrupts(); Timer(TOGETHER_S / 4, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "os.kill(os.getpid(), signal.SIGTERM); print('goes on')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["goes on"]), done.stderr
