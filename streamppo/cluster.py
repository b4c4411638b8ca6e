"""Ray, as a run starts it, and what it says when something is wrong."""

import logging
import os

import ray
from ray.exceptions import RayTaskError

from streamppo.config import LOCAL, Cluster, Config
from streamppo.errors import StreamppoError
from streamppo.placement import plan
from streamppo.tasks import plugins


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
    text = lines[0] if lines else ""
    return text if isinstance(error, StreamppoError) else f"{type(error).__name__}: {text}"
