"""`streamppo replay` in a process with the learner preloaded, and with threads instead of Ray actors.

Everything but Ray is the real command: arguments, `Rank`, the archive as batch source, report, exit code. A replay
takes one or two seconds instead of ten. Runs with several ranks need several processes, and use the command itself.
"""

import asyncio
import inspect
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import learner_case
import numpy as np
import pytest
import ray
import torch.distributed as dist
from conftest import REPOSITORY, SUPPORT
from ray.exceptions import RayTaskError

from streamppo.api import parent
from streamppo.config import file as configfile

STEERED = ("queue.max_lag={kind = 'adaptive', at_most = 4, ess = 0.9}", "learner.lr=5e-3")
STEERED_SEGMENTS = (*STEERED, "queue.segments={max_tokens = 2, explained = 0}", "queue.too_old=mask")
"""Overrides of runs with a steered lag, whose `decisions` a replay makes again."""


def replay(run: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """`streamppo replay RUN OPTIONS` to its end; without Ray if the run has one rank."""
    words = "streamppo", "replay", str(run), *options
    if configfile.load(run / configfile.CONFIG).learner.ranks > 1:
        environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{SUPPORT}"}
        return subprocess.run(
            [sys.executable, "-m", *words], capture_output=True, text=True, check=False, env=environment
        )
    return command(*words)


def command(*words: str, main: Callable[..., None] | None = None) -> "subprocess.CompletedProcess[str]":
    """A command of streamppo that makes updates again, to its end, without Ray; `main` replaces `run_command`."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        process = learner_case.processes().Process(target=main or run_command, args=(list(words), out, err))
        process.start()
        process.join()
        assert process.exitcode is not None
        return subprocess.CompletedProcess(words, process.exitcode, out.read_text(), err.read_text())


def start_by_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the functions of `streamppo.api` start their commands as `command` does."""

    def run(words: Sequence[str], **_: object) -> "subprocess.CompletedProcess[str]":
        return command("streamppo", *words[words.index("streamppo") + 1 :])

    monkeypatch.setattr(parent, "subprocess", SimpleNamespace(run=run))


def succeeds(run: Path) -> bool:
    """True if a replay reproduces every version of a run bit for bit."""
    return replay(run).returncode == 0


def decisions(run: Path) -> set[tuple[float, float]]:
    """The admitted lags and learning-rate shares of a run, after its replay has made them again."""
    report = json.loads((run / "replays" / "1.json").read_text())
    found: list[set[tuple[float, float]]] = []
    for one in report["updates"]:
        parts = one["recorded"], one["replayed"]
        found.append({(part["admitted_lag"], part["lr_share"]) for part in parts})
    assert all(len(both) == 1 for both in found), "the replay decided otherwise"
    return set.union(*found)


def run_command(words: list[str], out: Path, err: Path) -> None:
    """Run the command with its output in two files, and end the process."""
    for path, descriptor in ((out, 1), (err, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), descriptor)
    without_ray()
    sys.argv = words
    code = 0
    try:
        from streamppo.__main__ import main

        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def without_ray() -> None:
    """Replace what `replay` uses of Ray, in this process."""
    from streamppo.commands import replay as command

    context = {"get_actor_id": "replay", "get_node_id": "here", "get_accelerator_ids": {"GPU": list[str]()}}
    patched: dict[str, Any] = {
        "remote": lambda kind: SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda *a: Actor(kind, *a))),
        "get": _get,
        "put": _put,
        "shutdown": _shutdown,
        "get_runtime_context": lambda: SimpleNamespace(**{name: partial(_value, at) for name, at in context.items()}),
    }
    for name, function in patched.items():
        setattr(ray, name, function)
    ray.util.get_node_ip_address = lambda: "127.0.0.1"
    # Coroutines wait for answers and objects, as for Ray's references.
    Future.__await__ = lambda self: asyncio.wrap_future(self).__await__()  # pyright: ignore[reportAttributeAccessIssue]
    placement = SimpleNamespace(rank=lambda _: {})
    stand_ins = {
        "started_ray": lambda *_: nullcontext(),
        "this_node": _nothing,
        "Placement": lambda *_, **__: placement,
    }
    for name, function in stand_ins.items():
        setattr(command, name, function)


def _shutdown() -> None:
    """End the process group of the ranks, whose processes end with Ray."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _nothing(*_: object) -> None:
    """Replaces functions of Ray's session and placement, which are not needed here."""


def _put(value: object) -> "Future[object]":
    done: Future[object] = Future()
    # The owner of an array may write to it again.
    done.set_result(value.copy() if isinstance(value, np.ndarray) else value)
    return done


def _get(asked: Any) -> Any:
    return [one.result() for one in asked] if isinstance(asked, list) else asked.result()


class Actor:
    """An object whose methods run one after another in a thread; coroutines run in an event loop."""

    def __init__(self, kind: type, *arguments: object) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, daemon=True).start()
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._object = self._thread.submit(kind, *arguments).result()

    @property
    def __ray_call__(self) -> Any:
        return SimpleNamespace(remote=lambda call, *arguments: self._call(partial(call, self._object), arguments))

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._object, name)
        return SimpleNamespace(remote=lambda *arguments, **named: self._call(partial(method, **named), arguments))

    def _call(self, method: "partial[Any]", arguments: tuple[object, ...]) -> "Future[Any]":
        if inspect.iscoroutinefunction(method.func):
            return asyncio.run_coroutine_threadsafe(self._answer_later(method, arguments), self._loop)
        return self._thread.submit(self._answer, method, arguments)

    async def _answer_later(self, method: "partial[Any]", arguments: tuple[object, ...]) -> object:
        try:
            return await method(*map(_value, arguments))
        except Exception as error:
            raise _as_of_ray(method, error) from None

    def _answer(self, method: "partial[Any]", arguments: tuple[object, ...]) -> object:
        try:
            return method(*map(_value, arguments))
        except Exception as error:
            raise _as_of_ray(method, error) from None


def _value(argument: object) -> object:
    """An argument as Ray passes it: a reference is replaced by its value."""
    return argument.result() if isinstance(argument, Future) else argument


def _as_of_ray(method: "partial[Any]", error: Exception) -> Exception:
    """The error as `ray.get` raises that of an actor."""
    if isinstance(error, RayTaskError):
        return error
    return RayTaskError(method.func.__name__, traceback.format_exc(), error).as_instanceof_cause()
