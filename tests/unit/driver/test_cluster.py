"""How Ray is started and ended, and how its errors read."""

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.common_pb2 import ActorDiedErrorContext
from ray.exceptions import ActorDiedError, RayTaskError

from streamppo import process
from streamppo.config.sections import Config
from streamppo.driver.ray import cluster
from streamppo.driver.ray.cluster import describe, ray_session
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.errors import Interrupted, JournalError, RunError


def test_of_an_actor_that_died_while_it_was_made_the_reason_is_said() -> None:
    error = JournalError("runs/math/journal.sqlite: damaged: a row of 'slots' does not match its checksum")
    trace = f"Traceback (most recent call last):\n  File x\nstreamppo.errors.JournalError: {error}\n"
    died = ActorDiedError(RayTaskError("QueueActor.__init__", trace, error))
    assert describe(died) == f"JournalError: {error}"
    for cause in (
        "The actor is dead because its owner has died. Worker exit detail: Owner's node has crashed.",
        "The actor died because its node has died. Node Id: 02",
    ):
        died = ActorDiedError(ActorDiedErrorContext(error_message=cause, actor_id=b"1" * 16))
        assert describe(died).startswith("Ray has lost its machine: ")
    assert describe(ActorDiedError()) == "ActorDiedError: The actor died unexpectedly before finishing this task."
    assert describe(RayTaskError("begin", trace, error)) == str(error)


def test_hashes_are_the_same_in_every_process(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("PYTHONPATH", "")
    seeds: list[str] = []
    monkeypatch.setattr(cluster.ray, "init", lambda **options: seeds.append(os.environ["PYTHONHASHSEED"]))
    with cluster.started_ray(math_config(), ""):
        pass
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with cluster.started_ray(math_config(), ""):
        pass
    assert seeds == ["0", "7"]


def test_a_ray_that_has_not_started_in_time_is_told_in_a_sentence_and_other_errors_as_they_are(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(said: str, **options: object) -> None:
        raise Exception(said)

    for said, kind, told in (
        (
            "The current node timed out during startup. This could happen because",
            RunError,
            "this machine is too busy",
        ),
        ("AF_UNIX path length cannot exceed 107 bytes: /t", RunError, r"set RAY_TMPDIR to a shorter one \(AF_UNIX"),
        ("no such thing", Exception, "no such thing"),
    ):
        monkeypatch.setattr(cluster.ray, "init", partial(fail, said))
        with pytest.raises(kind, match=told), cluster.started_ray(math_config(), ""):
            pass


def test_a_cluster_that_cannot_be_joined_is_told_with_its_token(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(**options: object) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setattr(cluster.ray, "init", fail)
    told = r"^Failed to connect to Ray cluster at 10.0.0.1:6379: .* set RAY_AUTH_MODE=token, with the head's"
    with (
        pytest.raises(RunError, match=told),
        cluster.started_ray(math_config("cluster.address=10.0.0.1:6379"), ""),
    ):
        pass


def test_a_slow_start_of_ray_has_longer_than_rays_own_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[object] = [RuntimeError("not yet"), RuntimeError("not yet"), "a node", RuntimeError("never")]

    def get_node(address: str, node: str) -> object:
        answer = answers.pop(0)
        if isinstance(answer, RuntimeError):
            raise answer
        return answer

    found: list[object] = []
    monkeypatch.setattr(cluster.services, "get_node", get_node)
    # As Ray does in the start of its node.
    monkeypatch.setattr(cluster.ray, "init", lambda **_: found.append(cluster.services.get_node("address", "node")))
    cluster.init_own_ray()
    assert found == ["a node"] and cluster.services.get_node is get_node
    monkeypatch.setattr(cluster, "START_S", 0.0)
    with pytest.raises(RuntimeError, match="never"):
        cluster.init_own_ray()


@pytest.mark.parametrize("error", [None, Interrupted(signal.SIGINT), KeyError()])
def test_the_folder_of_a_good_session_is_removed_and_that_of_a_failed_one_is_said_with_its_size(
    error: Exception | None,
    tmp_path: Path,
    math_config: Callable[..., Config],
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    failed = isinstance(error, KeyError)
    ours, others = tmp_path / "session_1", tmp_path / "session_2"
    for folder in (ours, others):
        (folder / "logs").mkdir(parents=True)
        (folder / "logs" / "raylet.out").write_bytes(bytes(3 * 2**20))
    (tmp_path / "session_latest").symlink_to(ours)
    node = SimpleNamespace(get_session_dir_path=lambda: str(ours))
    monkeypatch.setattr(cluster.worker, "_global_node", node)
    monkeypatch.setattr(cluster, "started_ray", lambda config, mark: nullcontext())
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    interrupts: Any = SimpleNamespace(catch=lambda: None)
    with pytest.raises(type(error)) if error else nullcontext(), ray_session(math_config(), interrupts):
        if error:
            raise error
    assert ours.exists() == failed and others.exists()
    assert (tmp_path / "session_latest").is_symlink() == failed
    assert logged.messages == ([f"Ray's logs, 3.0 MiB: {ours}"] if failed else [])


@pytest.mark.parametrize("error", [None, KeyError, KeyboardInterrupt])
def test_the_ray_of_a_command_leaves_no_folder_but_after_an_error_and_signals_are_the_commands(
    error: type[BaseException] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "session_1"
    folder.mkdir()
    monkeypatch.setattr(cluster.worker, "_global_node", SimpleNamespace(get_session_dir_path=lambda: str(folder)))
    before, seen = signal.getsignal(signal.SIGTERM), list[object]()

    def rays_own(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        seen.append(folder.exists())

    monkeypatch.setattr(cluster.ray, "shutdown", rays_own)
    raised = pytest.raises(error) if error else nullcontext()
    with raised, cluster.command_ray(lambda mark: nullcontext(rays_own())):
        seen.append(signal.getsignal(signal.SIGTERM))
        if error:
            raise error
    assert seen == [True, before, True] and signal.getsignal(signal.SIGTERM) == before
    assert folder.exists() == (error is KeyError)


def test_a_session_ends_ray_after_an_error_too_and_a_ray_that_hangs_does_not_hide_the_error(
    math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    events: list[Any] = []

    def hang() -> None:
        events.append("shutdown")
        timers[0].run()

    class Timer(SimpleNamespace):
        def __init__(self, after_s: float, function: Callable[..., None], arguments: list[object]) -> None:
            super().__init__(run=lambda: function(*arguments), start=lambda: timers.append(self), cancel=lambda: None)

    timers: list[Any] = []
    interrupts: Any = SimpleNamespace(catch=lambda: events.append("catch"))
    monkeypatch.setattr(cluster, "started_ray", lambda config, mark: nullcontext(events.append("init")))
    monkeypatch.setattr(cluster, "Timer", Timer)
    monkeypatch.setattr(cluster.ray, "shutdown", hang)
    monkeypatch.setattr(cluster.os, "_exit", events.append)
    with pytest.raises(KeyError), ray_session(math_config(), interrupts):
        raise KeyError("the reason")
    assert events == ["init", "catch", "shutdown", 1]
    assert logged.messages == ["Ray has not ended within 10 s; the process ends without waiting for it: 'the reason'"]


@pytest.mark.parametrize("number", process.SIGNALS)
def test_a_signal_while_ray_starts_ends_the_run(
    number: signal.Signals, math_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    handlers = {each: signal.signal(each, signal.SIG_DFL) for each in process.SIGNALS}
    monkeypatch.setattr(cluster, "started_ray", lambda config, mark: nullcontext(os.kill(os.getpid(), number)))
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    try:
        interrupts = Interrupts()
        with pytest.raises(Interrupted, match=number.name), ray_session(math_config(), interrupts):
            interrupts.check()
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)
