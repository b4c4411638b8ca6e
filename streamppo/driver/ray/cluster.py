"""Ray: how a run starts and ends it, how its errors read, and the attributes that it calls private."""

import functools
import logging
import os
import secrets
import shutil
import signal
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import ObjectRef
from ray._private import ray_constants, ray_logging, worker
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.experimental.tqdm_ray import RAY_TQDM_MAGIC
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from streamppo import errors, process
from streamppo.config.sections import LOCAL, Config
from streamppo.driver.ray import environment, orphans
from streamppo.driver.ray.interrupts import Interrupts
from streamppo.driver.ray.placement import plan
from streamppo.errors import RunError, StreamppoError
from streamppo.tasks import plugins
from streamppo.terminal import harmless

if TYPE_CHECKING:
    from ray._private.node import Node
    from ray.actor import ActorHandle, ActorProxy

BLAME_S = 5.0
"""How long the other ranks of a group may take to show which of them died."""
CLOSING_S = 10.0
"""How long Ray may take to end its processes."""

TOO_LATE = "timed out during startup"
"""A part of what Ray says when its processes have not started after 30 s, which nothing can change."""

RAYS_OWN = ("raylet", "gcs_server", "autoscaler")
"""What Ray has in place of a number for processes of its own: nobody else prints there."""
ORDERS = (RAY_TQDM_MAGIC, ray_constants.LOG_PREFIX_INFO_MESSAGE)
"""Words in a line by which Ray draws a bar, or leaves out what stands before them."""

log = logging.getLogger(__name__)


@contextmanager
def ray_session(config: Config, interrupts: Interrupts) -> Generator[None]:
    """Run the block with Ray, and leave no process behind.

    A Ray that hangs keeps no run from ending: after `CLOSING_S` this process ends, and with it all of Ray's.
    """
    with orphans.ends() if config.cluster.address == LOCAL else nullcontext("") as mark:
        yield from _session(config, interrupts, mark)


def _session(config: Config, interrupts: Interrupts, mark: str) -> Generator[None]:
    # A closed terminal signals the whole process group: Ray's processes, which inherit this, live until we end them.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    init_ray(config, mark)
    folder = _session_folder(config)
    # Ray has installed a handler of its own.
    interrupts.catch()
    try:
        yield
    finally:
        last = Timer(CLOSING_S, _end_without_ray, [sys.exception()])
        last.daemon = True
        last.start()
        ray.shutdown()
        last.cancel()
        if folder is not None:
            _clear(folder, failed=sys.exception() is not None)


def _session_folder(config: Config) -> Path | None:
    """The folder of logs and sockets of a Ray of our own; None for a cluster, whose folders are its own."""
    node = cast("Node | None", worker._global_node)
    return Path(node.get_session_dir_path()) if node is not None and config.cluster.address == LOCAL else None


def _clear(folder: Path, *, failed: bool) -> None:
    """Remove the folder of a Ray that has ended; after a failure its logs stay, and the place is said."""
    if failed:
        size = sum(path.lstat().st_size for path in folder.rglob("*"))
        log.info("Ray's logs, %.1f MiB: %s", size / 2**20, folder)
        return
    shutil.rmtree(folder, ignore_errors=True)
    latest = folder.with_name("session_latest")
    with suppress(OSError):
        if latest.is_symlink() and latest.readlink().name == folder.name:
            latest.unlink()


def tell_origins() -> str:
    """Show whose each line of an actor is, from the next `ray.init` on; returns the `process.MARK` of its actors."""
    secret = secrets.token_hex(8)
    printed = ray_logging.global_worker_stdstream_dispatcher
    printed.remove_handler(__name__)
    # Before Ray's own, which `ray.init` adds.
    printed.add_handler(__name__, functools.partial(_show_lines, secret))
    return secret


def _show_lines(mark: str, data: dict[str, Any]) -> None:
    """Make lines of actors harmless before Ray prints them, and say which of them our log has not written."""
    rays_own = data.get("pid") in RAYS_OWN
    shown = ((harmless(line) if rays_own else process.with_origin(line, mark)) for line in data.get("lines", ()))
    data["lines"] = [line if rays_own else functools.reduce(_without, ORDERS, line) for line in shown]
    # A printed line can name them, for the lines after it.
    for name in ("actor_name", "task_name"):
        if isinstance(data.get(name), str):
            data[name] = harmless(data[name])


def _without(line: str, order: str) -> str:
    return line.replace(order, "·")


def _end_without_ray(error: BaseException | None) -> None:
    reason = f": {error}" if error else ""
    log.info("Ray has not ended within %g s; ending without it%s", CLOSING_S, reason)
    os._exit(1)


def init_ray(config: Config, mark: str) -> None:
    """Join the cluster, or start Ray here; the processes of a Ray of our own have the mark of `orphans.ends`."""
    cluster = config.cluster
    plugins.export_path()
    environment.quiet_pipes()
    secret = tell_origins()
    # Some data sets use the hashes of texts, and every actor, now and after a resume, must make the same prompts.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if cluster.address != LOCAL:
        variables = environment.carried_variables(os.environ, environment.key_variables(config)) | {
            process.MARK: secret
        }
        ray.init(
            address=cluster.address,
            log_to_driver=True,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": variables},
        )
        return
    with environment.of_own_ray(mark, secret), _in_a_sentence():
        ray.init(
            address=LOCAL,
            num_cpus=cluster.cpus or int(plan(config).total("CPU")),
            include_dashboard=False,
            object_store_memory=cluster.object_store_mib * 2**20,
            logging_level=logging.ERROR,
            _node_ip_address=environment.LOOPBACK,
        )


@contextmanager
def _in_a_sentence() -> Generator[None]:
    """Raise `RunError` if Ray says that its processes have not started in time: it has no error of its own for that."""
    try:
        yield
    finally:
        if (error := sys.exception()) is not None and TOO_LATE in str(error):
            raise RunError("Ray has not started within its 30 s: this machine does too much else; try again") from error


def here() -> NodeAffinitySchedulingStrategy:
    """Keep an actor on the driver's node, which has the run's folder on a disk of its own."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def describe(error: BaseException) -> str:
    """Return the root of a chain of remote errors and exception groups, in one line."""
    while True:
        if isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            break
    lines = str(error).strip().splitlines()
    if isinstance(error, ActorDiedError) and error.actor_init_failed:
        # It died while it was made: of the error there is only the traceback, which ends with it.
        return lines[-1].removeprefix(f"{errors.__name__}.")
    text = lines[0] if lines else ""
    return text if isinstance(error, StreamppoError) else f"{type(error).__name__}: {text}"


def death(refs: Sequence[ObjectRef[Any]]) -> RayActorError | None:
    """Find the death, among the calls of one group, that explains why another of them failed."""
    deadline = time.monotonic() + BLAME_S
    for ref in refs:
        try:
            ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except RayActorError as error:
            return error
        except RayError:
            continue
    return None


def actor_id(actor: "ActorProxy[Any]") -> str:
    """Ray's name for an actor, the same as `actor_id` of the error that tells of its death."""
    return cast("ActorHandle[Any]", actor)._actor_id.hex()


def inside(actor: "ActorProxy[Any]", function: Callable[..., None], *arguments: object) -> "ObjectRef[None]":
    """Call `function(actor, *arguments)` in the process of an actor."""
    return cast("ActorHandle[Any]", actor).__ray_call__.remote(function, *arguments)


def refuse_dead_ray() -> None:
    """Raise `RunError` if a process of our own Ray has died: nothing is restarted or ended without them."""
    node = cast("Node | None", worker._global_node)
    services = node.all_processes.items() if node is not None else ()
    for name, processes in services:
        for one in processes:
            if (code := one.process.poll()) is not None:
                raise RunError(f"Ray's {name} has died ({_ending(code)}); resume starts another")


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def kill(actor: "ActorProxy[Any]") -> None:
    """End an actor at once."""
    ray.kill(cast("ActorHandle[Any]", actor))
