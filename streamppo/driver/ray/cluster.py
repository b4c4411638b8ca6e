"""Starts and shuts down Ray for a run or a command, and describes Ray's errors in one line."""

import functools
import logging
import os
import re
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Timer
from typing import Any, TypeAlias, TypeVar, cast

import ray
from ray import ObjectRef
from ray._private import ray_constants, ray_logging, services, worker
from ray._private.node import Node
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.experimental.tqdm_ray import RAY_TQDM_MAGIC
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamppo import errors, process
from streamppo.config.sections import LOCAL, Config
from streamppo.driver.ray import environment, orphans, worker_template
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.driver.ray.placement import plan
from streamppo.errors import Interrupted, RunError, StreamppoError
from streamppo.tasks import plugins
from streamppo.terminal import harmless

Actor: TypeAlias = ActorProxy[Any]
Call: TypeAlias = ObjectRef[Any]
T = TypeVar("T")
BLAME_S = 5.0
"""Time limit for finding the actor whose death made another actor's call fail."""
CLOSING_S = 10.0
TOO_LATE = "timed out during startup"
"""A part of Ray's message that its processes have not started in time."""
START_S = 90.0
"""Time limit for the start of Ray's processes. Ray has a fixed limit of 30 s, too short for a busy machine."""
TOO_LONG = "AF_UNIX path length"
"""A part of Ray's message about a socket whose path has more than 107 bytes."""
LOST_NODE = re.compile(r"\bnode has (crashed|died)")
"""A part of Ray's message for an actor that died with its node or its owner's node."""
UNUSED_SERVICES = ("start_monitor", "start_api_server")
"""Methods of Ray's node that start a process each: the autoscaler of a single node, and the server of a dashboard that
is off. Ray has no option against them. They take a second of CPU, and `ray.init` waits for the server."""
GIVEN_UP = "Ray has lost its machine: the raylet there died, was stopped, or had no CPU or memory for half a minute"
NOT_JOINED = (
    "is cluster.address that of its head? If the cluster has a token, set RAY_AUTH_MODE=token, with the head's "
    "~/.ray/auth_token on this machine (docs/clusters.md)"
)
"""What a user can do if Ray does not join a cluster: its error is the same for a wrong address and a missing token."""
RAYS_OWN = ("raylet", "gcs_server", "autoscaler")
"""The "pid" fields of log lines from Ray's processes. In log lines from actors, "pid" is a number."""
ORDERS = (RAY_TQDM_MAGIC, ray_constants.LOG_PREFIX_INFO_MESSAGE)
"""The first marker in a line makes Ray draw a progress bar, and the second makes Ray omit the text before it."""
FULL_DISK = re.compile(r"file_system_monitor\.cc:\d+: (.*) is over (.*) full, available space: ([^;]*)")
"""A line of Ray, every ten seconds, if the disk of its folder is nearly full."""
log = logging.getLogger(__name__)


@contextmanager
def ray_session(config: Config, interrupts: Interrupts) -> Generator[None]:
    """Run the block with Ray, and leave no process behind. If Ray's shutdown hangs, exit after `CLOSING_S`."""
    is_own = config.cluster.address == LOCAL
    with orphans.kill_at_end() if is_own else nullcontext("") as mark, started_ray(config, mark):
        # The start of Ray has replaced the handlers.
        interrupts.catch()
        try:
            yield
        finally:
            last = Timer(CLOSING_S, _end_without_ray, [sys.exception()])
            last.daemon = True
            last.start()
            _shut_down(is_own=is_own)
            last.cancel()


@contextmanager
def command_ray(start: Callable[[str], AbstractContextManager[object]]) -> Generator[None]:
    """Run a command's block with its own Ray, started by `start` with a mark; leave no process or folder behind."""
    handlers = {number: signal.getsignal(number) for number in process.SIGNALS}
    with orphans.kill_at_end() as mark:
        try:
            with start(mark):
                _install(handlers)
                yield
        finally:
            _shut_down(is_own=True)
            _install(handlers)


def _install(handlers: Mapping[signal.Signals, Any]) -> None:
    """Install signal handlers again. Ray replaces them at its start, and removes all handlers at its end."""
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _shut_down(*, is_own: bool) -> None:
    """Shut down Ray. If it `is_own`, remove its folder with logs and sockets; a cluster manages its folders itself."""
    node = cast("Node | None", worker._global_node)
    ray.shutdown()
    if is_own and node is not None:
        error = sys.exception()
        failed = isinstance(error, Exception) and not isinstance(error, Interrupted)
        _clear(Path(node.get_session_dir_path()), failed=failed)


def _clear(folder: Path, *, failed: bool) -> None:
    """Remove the session folder of a Ray that has ended. After a failure, keep the folder and log its path."""
    if failed:
        size = sum(path.lstat().st_size for path in folder.rglob("*"))
        log.info("Ray's logs, %.1f MiB: %s", size / 2**20, folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.with_name("session_latest")
    with suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == folder.name:
            latest.unlink()


def show_origins() -> str:
    """Make Ray show the origin of printed lines, from the next `ray.init` on. Returns a value for `process.MARK`."""
    secret = secrets.token_hex(8)
    printed = ray_logging.global_worker_stdstream_dispatcher
    printed.remove_handler(__name__)
    # This handler must run before Ray's handler, which `ray.init` adds.
    printed.add_handler(__name__, functools.partial(_show_lines, secret, set[str]()))
    return secret


def _show_lines(mark: str, full_disks: set[str], data: dict[str, Any]) -> None:
    """Make actors' lines harmless before Ray prints them, and mark lines that are not from our log.

    Ray's lines about a full disk are replaced by a warning for each of its folders, which are added to `full_disks`.
    """
    rays_own = data.get("pid") in RAYS_OWN
    if rays_own:
        found = [(line, FULL_DISK.search(line)) for line in data.get("lines", ())]
        data["lines"] = [line for line, full in found if full is None]
        for folder, share, free in (full.groups() for _, full in found if full):
            if folder not in full_disks:
                full_disks.add(folder)
                log.warning("%s: the disk is over %s full (%s left), and Ray may need it", folder, share, free)
    shown = ((harmless(line) if rays_own else process.with_origin(line, mark)) for line in data.get("lines", ()))
    data["lines"] = [
        line if rays_own else functools.reduce(lambda text, order: text.replace(order, "·"), ORDERS, line)
        for line in shown
    ]
    # A line that user code prints can set the names that Ray shows before later lines.
    for name in ("actor_name", "task_name"):
        if isinstance(data.get(name), str):
            data[name] = harmless(data[name])


def _end_without_ray(error: BaseException | None) -> None:
    reason = f": {error}" if error else ""
    log.info("Ray has not ended within %g s; the process ends without waiting for it%s", CLOSING_S, reason)
    os._exit(1)


@contextmanager
def started_ray(config: Config, mark: str) -> Generator[None]:
    """Join the cluster, or start our own Ray, whose processes have the `mark`. The caller ends Ray."""
    cluster = config.cluster
    plugins.export_path()
    # Ray's colour codes are only for terminals.
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        os.environ["RAY_COLOR_PREFIX"] = "0"
    secret = show_origins()
    # Some data sets use hashes of strings. Every actor must make the same prompts, also after a resume.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if cluster.address != LOCAL:
        variables = environment.carried_variables(os.environ, environment.key_variables(config)) | {
            process.MARK: secret
        }
        try:
            ray.init(
                address=cluster.address,
                log_to_driver=True,
                logging_level=logging.ERROR,
                runtime_env={"env_vars": variables},
            )
        except ConnectionError as error:
            raise RunError(f"{error}: {NOT_JOINED}") from error
        yield
        return
    # GPU libraries read a worker's environment when they are imported. A template would import them too early.
    forked = sys.platform == "linux" and not plan(config).total("GPU")
    with ExitStack() as template:
        with environment.own_ray_environment(mark, secret, forked=forked), _readable_start_errors():
            python = template.enter_context(worker_template.running()) if forked else None
            init_own_ray(
                num_cpus=cluster.cpus or int(plan(config).total("CPU")),
                object_store_memory=cluster.object_store_mib * 2**20,
                runtime_env={"py_executable": python} if python else None,
            )
        yield


def init_own_ray(**options: Any) -> None:
    """Start Ray on this machine's loopback address, with further `options` of `ray.init`."""
    with ExitStack() as restored:
        for name in UNUSED_SERVICES:
            restored.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, lambda node, **_options: None)
        # A signal to the driver's process group (SIGTERM of `timeout`, SIGHUP of a closed terminal) would end Ray's
        # server at once, and the actors a minute later, perhaps before the last checkpoint is complete.
        restored.callback(setattr, services, "ConsolePopen", services.ConsolePopen)
        services.ConsolePopen = functools.partial(services.ConsolePopen, process_group=0)
        restored.callback(setattr, services, "get_node", services.get_node)
        services.get_node = functools.partial(_wait_for_node, services.get_node)
        ray.init(
            address=LOCAL,
            include_dashboard=False,
            logging_level=logging.ERROR,
            _node_ip_address=environment.LOOPBACK,
            **options,
        )


def _wait_for_node(get_node: Callable[..., Any], *arguments: object) -> Any:
    """Call Ray's `get_node` until Ray's processes have started, for at most `START_S`."""
    end = time.monotonic() + START_S
    while True:
        try:
            return get_node(*arguments)
        except RuntimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.1)


@contextmanager
def _readable_start_errors() -> Generator[None]:
    try:
        yield
    finally:
        if (error := sys.exception()) is not None and TOO_LATE in str(error):
            raise RunError(
                f"Ray has not started within {START_S:.0f} s: this machine is too busy; try again"
            ) from error
        if error is not None and TOO_LONG in str(error):
            raise RunError(f"Ray's folder has too long a path: set RAY_TMPDIR to a shorter one ({error})") from error


def this_node() -> NodeAffinitySchedulingStrategy:
    """Return Ray's option that places an actor on the driver's node, whose local disk has the run's folder."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def describe(error: BaseException) -> str:
    """Return the root cause of remote errors and exception groups in one line."""
    while True:
        if isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            break
    if isinstance(error, RayActorError) and LOST_NODE.search(str(error)):
        return GIVEN_UP
    lines = str(error).strip().splitlines()
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        # The actor died in its constructor. Ray returns only the traceback, whose last line is the error.
        return lines[-1].removeprefix(f"{errors.__name__}.")
    text = lines[0] if lines else ""
    return text if isinstance(error, StreamppoError) else f"{type(error).__name__}: {text}"


def death(refs: Sequence[Call]) -> RayActorError | None:
    """Return the first error about a dead actor among the calls `refs`; None if no actor has died."""
    deadline = time.monotonic() + BLAME_S
    for ref in refs:
        try:
            ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except RayActorError as error:
            return error
        except RayError:
            continue
    return None


def actor_id(actor: Actor) -> str:
    """Return Ray's id of an actor. The error about its death has the same `actor_id`."""
    return cast("ActorHandle[Any]", actor)._actor_id.hex()


def call_in_actor(actor: Actor, function: Callable[..., T], *arguments: object) -> "ObjectRef[T]":
    """Call `function(actor, *arguments)` in the actor's process."""
    return cast("ActorHandle[Any]", actor).__ray_call__.remote(function, *arguments)


def refuse_dead_ray() -> None:
    """Raise `RunError` if a process of our own Ray has died, because Ray could not restart or end actors."""
    node = cast("Node | None", worker._global_node)
    services = node.all_processes.items() if node is not None else ()
    for name, processes in services:
        for process_info in processes:
            if (code := process_info.process.poll()) is not None:
                ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
                raise RunError(f"Ray's {name} has died ({ending}); resume the run to start a new Ray")


def kill(actor: Actor) -> None:
    """End an actor at once."""
    ray.kill(cast("ActorHandle[Any]", actor))
