"""Ray, as a run starts it, and what it says when something is wrong."""

import logging
import os
import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError

from streamppo import errors
from streamppo.config.sections import LOCAL, Cluster, Config
from streamppo.driver.placement import plan
from streamppo.errors import StreamppoError
from streamppo.tasks import plugins

BLAME_S = 5.0
"""How long the other ranks of a group may take to show which of them died."""


def init_ray(config: Config) -> None:
    """Start Ray here, or join the cluster."""
    cluster: Cluster = config.cluster
    plugins.export_path()
    # Some data sets go by the hashes of texts, and every actor, now and after a resume, must make the same prompts.
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
    """The root of a chain of remote errors and exception groups, in one line."""
    while True:
        if isinstance(error, RayTaskError) and error.cause is not None:
            error = error.cause
        elif isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        else:
            break
    lines = str(error).strip().splitlines()
    if isinstance(error, ActorDiedError) and error._actor_init_failed:
        # It died while it was made: of the error there is only the traceback, which ends with it.
        return lines[-1].removeprefix(f"{errors.__name__}.")
    text = lines[0] if lines else ""
    return text if isinstance(error, StreamppoError) else f"{type(error).__name__}: {text}"


def death(refs: Sequence[Any]) -> RayActorError | None:
    """The death among the calls of one group that explains why another of them failed."""
    deadline = time.monotonic() + BLAME_S
    for ref in refs:
        try:
            ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except RayActorError as error:
            return error
        except RayError:
            continue
    return None
