"""Ray: how a run starts and ends it, how its errors read, and the attributes that it calls private."""

import logging
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import ObjectRef
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from streamppo import errors
from streamppo.config.sections import LOCAL, Config
from streamppo.driver.interrupts import Interrupts
from streamppo.driver.placement import plan
from streamppo.errors import StreamppoError
from streamppo.tasks import plugins

if TYPE_CHECKING:
    from ray.actor import ActorHandle, ActorProxy

BLAME_S = 5.0
"""How long the other ranks of a group may take to show which of them died."""
CLOSING_S = 10.0
"""How long Ray may take to end its processes."""

log = logging.getLogger(__name__)


@contextmanager
def ray_session(config: Config, interrupts: Interrupts) -> Generator[None]:
    """Run the block with Ray, and leave no process behind.

    A Ray that hangs keeps no run from ending: after `CLOSING_S` this process ends, and with it all of Ray's.
    """
    init_ray(config)
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


def _end_without_ray(error: BaseException | None) -> None:
    reason = f": {error}" if error else ""
    log.info("Ray has not ended within %g s; ending without it%s", CLOSING_S, reason)
    os._exit(1)


def init_ray(config: Config) -> None:
    """Start Ray here, or join the cluster."""
    cluster = config.cluster
    plugins.export_path()
    # Some data sets use the hashes of texts, and every actor, now and after a resume, must make the same prompts.
    os.environ.setdefault("PYTHONHASHSEED", "0")
    if cluster.address != LOCAL:
        ray.init(address=cluster.address, log_to_driver=True, logging_level=logging.ERROR)
        return
    ray.init(
        address=LOCAL,
        num_cpus=cluster.cpus or int(plan(config).total("CPU")),
        include_dashboard=False,
        object_store_memory=cluster.object_store_mib * 2**20,
        logging_level=logging.ERROR,
    )


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


def kill(actor: "ActorProxy[Any]") -> None:
    """End an actor at once."""
    ray.kill(cast("ActorHandle[Any]", actor))
