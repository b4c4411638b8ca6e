"""The environment variables of Ray's processes.

our own Ray    its processes inherit the driver's environment and `OWN_RAY`
a cluster      actors get the driver's `carried_variables`; other variables come from `ray start`
"""

import os
import secrets
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from ray._private import ray_constants

from streamppo import process
from streamppo.config.reward import Remote
from streamppo.config.rollout import SGLangEngine
from streamppo.config.sections import Config
from streamppo.driver.ray.orphans import MARK

OWN_RAY = {
    # Events of calls would make Ray's GCS grow by 35 KiB with every update, for a dashboard that is not started.
    "RAY_task_events_report_interval_ms": "0",
    # A rank's threads that wait for each other would otherwise occupy a core that an engine needs.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Ray's default of 15 would slow a run down if the machine has other work.
    "RAY_worker_niceness": "0",
    # Ray has this setting for Windows and macOS. Here it makes Ray's servers listen only at 127.0.0.1.
    ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0",
    # If the driver dies while a process of Ray starts or calls, the process searches for Ray for 15 s, not for 60.
    "RAY_NUM_REDIS_GET_RETRIES": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "2",
    "RAY_py_gcs_connect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "15",
    # Otherwise Ray logs every retried call, including calls to a GCS that has ended. The driver reports deaths.
    "RAY_enable_output_error_log_if_still_retry": "0",
}
"""Settings of our own Ray. A variable that the user has set takes precedence."""
FORKED = {
    # Ray would start workers in advance, which are not forks and would never be used.
    "RAY_prestart_worker_first_driver": "0",
}
"""Settings in addition to `OWN_RAY` if workers are forks of a template (worker_template.py)."""
LOOPBACK = "127.0.0.1"
RAY_TOKEN = ".ray/auth_token"
"""The file in the user's home with the token that authenticates all Rays of the user."""
RAY_TOKEN_VARIABLE = "RAY_AUTH_TOKEN"
"""The variable with a token that takes precedence over the file."""
CARRIED = ("PYTHONPATH", "PYTHONHASHSEED", "OMP_NUM_THREADS")
CARRIED_PREFIXES = (
    *("STREAMPPO_", "HF_", "HUGGING_FACE_", "TRANSFORMERS_", "TOKENIZERS_", "SGLANG_", "NCCL_", "GLOO_"),
    *("PYTORCH_", "FLASH_ATTENTION_", "CUTE_DSL_", "TRITON_", "TORCHINDUCTOR_"),
)
CARRIED_SUFFIXES = ("_API_KEY", "_TOKEN", "_PROXY")
NODE_PREFIXES = ("RAY_",)
"""A variable with such a prefix belongs to a node, and is not carried, even if it has one of the suffixes."""


def carried_variables(environment: Mapping[str, str], keys: frozenset[str]) -> dict[str, str]:
    """Return the driver's variables for actors on a cluster: those that match `CARRIED...`, and `keys`."""
    return {name: value for name, value in environment.items() if name in keys or _is_general(name)}


def _is_general(name: str) -> bool:
    if name.startswith(NODE_PREFIXES):
        return False
    return name in CARRIED or name.startswith(CARRIED_PREFIXES) or name.upper().endswith(CARRIED_SUFFIXES)


def key_variables(config: Config) -> frozenset[str]:
    """Return the variables with API keys of reward services, of the teacher and, if it is set, of the engines."""
    remotes = [scorer for scorer in config.reward.scorers.values() if isinstance(scorer, Remote)]
    names = {service.key_env for service in (*remotes, config.algorithm.teacher) if service.key_env}
    engine = config.rollout.engine
    if isinstance(engine, SGLangEngine) and engine.urls and engine.api_key_env in os.environ:
        names.add(engine.api_key_env)
    return frozenset(names)


def _has_token_file() -> bool:
    """True if Ray can read or create the token's file. The user of a container may have no home, or a read-only one."""
    try:
        file = Path.home() / RAY_TOKEN
        file.parent.mkdir(parents=True, exist_ok=True)
        return os.access(file, os.R_OK) if file.exists() else os.access(file.parent, os.W_OK)
    except (OSError, RuntimeError):
        return False


@contextmanager
def own_ray_environment(mark: str, log_mark: str, *, forked: bool = False) -> Generator[None]:
    """Set the environment for our own Ray, which only this machine can reach. Ray's processes get both marks."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    if not _has_token_file():
        os.environ.setdefault(RAY_TOKEN_VARIABLE, secrets.token_hex(32))
    os.environ |= {MARK: mark, process.MARK: log_mark}
    for name, value in (OWN_RAY | (FORKED if forked else {})).items():
        os.environ.setdefault(name, value)
    # Ray read the variable when it was imported, so its constant is set too.
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
        # Ray lets other users of the machine read the token. Path.home raises RuntimeError for a user without a home.
        with suppress(OSError, RuntimeError):
            (Path.home() / RAY_TOKEN).chmod(0o600)
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
        os.environ.pop(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, None)
        del os.environ[MARK], os.environ[process.MARK]
