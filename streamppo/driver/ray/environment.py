"""The environment of Ray's processes.

a Ray of our own    its processes inherit the driver's environment, and `OWN_RAY` beside it
a cluster           actors get those of the driver's that `carried_variables` chooses, and else what `ray start` had
"""

import os
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._private import ray_constants

from streamppo import process
from streamppo.config.reward import Remote
from streamppo.config.sections import Config
from streamppo.driver.ray.orphans import MARK

OWN_RAY = {
    # An event of every call would make its GCS grow by 35 KiB with every update, for a dashboard that nobody opens.
    "RAY_task_events_report_interval_ms": "0",
    # Ray's 15 would make a run crawl beside any other load, and it is what its user waits for.
    "RAY_worker_niceness": "0",
    # The name is of other systems; the effect is a node at 127.0.0.1, whose servers listen there alone.
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    # Processes of Ray that start or speak as the driver dies look for a Ray that is gone: for 15 s, not for a minute.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    # A line for every call that is repeated, also as Ray ends, then to a GCS that is gone: we tell of deaths ourselves.
    "RAY_enable_output_error_log_if_still_retry": "0",
}
"""Settings of a Ray of our own; a variable that the user has set wins."""
LOOPBACK = "127.0.0.1"
RAY_TOKEN = ".ray/auth_token"
"""The file, in the user's home, of the token that every process shows to a Ray of the user's."""
CARRIED = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS")
CARRIED_PREFIXES = (
    "STREAMPPO_",
    "HF_",
    "HUGGING_FACE_",
    "TRANSFORMERS_",
    "TOKENIZERS_",
    "SGLANG_",
    "NCCL_",
    "GLOO_",
    "PYTORCH_",
    "FLASH_ATTENTION_",
    "CUTE_DSL_",
    "TRITON_",
    "TORCHINDUCTOR_",
)
CARRIED_SUFFIXES = ("_API_KEY", "_TOKEN", "_PROXY")
KEPT = ("RAY_",)
"""Prefixes of variables that belong to a node, whatever their end."""


def carried_variables(environment: Mapping[str, str], keys: frozenset[str]) -> dict[str, str]:
    """Choose the variables of the driver that actors on a cluster get: those of `CARRIED...` and those in `keys`."""
    return {name: value for name, value in environment.items() if name in keys or _is_everybodys(name)}


def _is_everybodys(name: str) -> bool:
    if name.startswith(KEPT):
        return False
    return name in CARRIED or name.startswith(CARRIED_PREFIXES) or name.upper().endswith(CARRIED_SUFFIXES)


def key_variables(config: Config) -> frozenset[str]:
    """Name the variables that the configuration asks for: the keys of its services and its teacher."""
    remotes = [scorer for scorer in config.reward.scorers.values() if isinstance(scorer, Remote)]
    return frozenset(one.key_env for one in (*remotes, config.algorithm.teacher) if one.key_env)


def quiet_pipes() -> None:
    """Have Ray write no colour codes where standard output is no terminal, or NO_COLOR is set."""
    if os.environ.get("NO_COLOR") or not sys.stdout.isatty():
        os.environ["RAY_COLOR_PREFIX"] = "0"


@contextmanager
def of_own_ray(mark: str, log_mark: str) -> Generator[None]:
    """Start a Ray of our own in the block: nobody but this machine can reach it, and its processes have both marks."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    os.environ |= {MARK: mark, process.MARK: log_mark}
    for name, value in OWN_RAY.items():
        os.environ.setdefault(name, value)
    # It was read when Ray was imported.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
        # Ray makes it with the rights of any file; it is what keeps other users of the machine out.
        with suppress(OSError):
            (Path.home() / RAY_TOKEN).chmod(0o600)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, None)
        del os.environ[MARK], os.environ[process.MARK]
