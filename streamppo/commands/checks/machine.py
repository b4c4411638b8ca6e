"""Checks this machine for a run: engine, CPUs, GPUs, libraries, and the store of checkpoint copies."""

import os
import re
import resource
import shutil
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.learner import Nixl
from streamppo.config.rollout import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import LOCAL, Config, Endpoint, shares_gpus
from streamppo.driver import threads
from streamppo.driver.ray import placement
from streamppo.errors import CheckpointError, ModelError
from streamppo.telemetry import host

DEVICES = Path("/dev")
SHARED = Path("/dev/shm")
SOCKET = f"ray/session_2026-01-31_12-00-00_000000_{os.getpid()}/sockets/plasma_store"
MOST_SOCKET_BYTES = 107 if sys.platform == "linux" else 103
"""Maximum bytes of a socket's path (sockaddr_un)."""
PROCESS_MIB = 300
"""Memory of a process that has imported torch and holds no model."""
TRACKER_EXTRAS = {"trackio": "trackio"}
"""Extras of trackers whose library is not in the extra `tracking`."""
TRACKER_MODULES = {"prometheus": "prometheus_client"}
"""Modules of trackers whose names differ from the trackers' names."""


def engine(config: Config) -> Finding:
    """Check that the engine is installed. A running server is not contacted."""
    match config.rollout.engine:
        case EmbeddedEngine():
            return Finding("engine", "ok", f"embedded, {config.rollout.slots} completions at once in each actor")
        case SGLangEngine(urls=urls) if urls:
            verb = "is" if len(urls) == 1 else "are"
            return Finding("engine", "later", f"{', '.join(urls)} {verb} contacted when the run starts")
        case SGLangEngine():
            return _sglang()


def _sglang() -> Finding:
    try:
        metadata.version("sglang")
    except metadata.PackageNotFoundError:
        text = "SGLang is not installed: pip install 'streamppo[sglang]', or another rollout.engine"
        return Finding("engine", "not here", text)
    # The package rollout.sglang imports torch, which is slow.
    from streamppo.rollout.sglang import wire

    try:
        return Finding("engine", "ok", f"SGLang {'.'.join(map(str, wire.installed_version()))}")
    except ModelError as error:
        return Finding("engine", "error", str(error))


def gpus_here() -> int:
    """Count the GPUs that a process on this machine can use, if possible without torch."""
    if (DEVICES / "kfd").exists():
        import torch

        return torch.cuda.device_count()
    count = sum(re.fullmatch(r"nvidia\d+", path.name) is not None for path in DEVICES.glob("nvidia*"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return count
    return min(count, len([device for device in visible.split(",") if device.strip() not in ("", "-1")]))


def shared_mib() -> int | None:
    """Return the size of this machine's /dev/shm; None if there is no /dev/shm."""
    return shutil.disk_usage(SHARED).total // 2**20 if SHARED.is_dir() else None


def places(config: Config) -> Findings:
    """Report the resources that a run requests from Ray and, with a local Ray, compare them with this machine's."""
    if config.learner.threads == "auto":
        number, reason = threads.choose(config)
        yield Finding("threads", "ok", f"learner.threads = {number}: {reason}")
        config = threads.with_number(config, number)
    plan, gpu_count = placement.plan(config), gpus_here()
    gpus, cpus = plan.total("GPU"), plan.total("CPU")
    ranks, rollouts = f"learner ranks ({config.learner.ranks})", f"rollout actors ({config.rollout.actors})"
    evaluators = f" and actors that only evaluate ({config.evaluation.actors})" if config.evaluation.actors else ""
    sharing = ", which share GPUs" if shares_gpus(config) else ""
    yield Finding("Ray is asked", "ok", f"GPU {gpus:g}, CPU {cpus:g}: for {ranks} and {rollouts}{evaluators}{sharing}")
    if config.cluster.address != LOCAL:
        return
    if gpus > gpu_count:
        state = "error" if gpu_count else "not here"
        yield Finding("GPUs", state, f"the run requests {gpus:g}; this machine has {gpu_count}")
    limit = config.cluster.cpus
    if limit is not None and limit < cpus:
        yield Finding("CPUs", "error", f"cluster.cpus ({limit}) is less than the {cpus:g} that the run requests")
    processes = config.learner.ranks + config.engines
    mib, store = host.total_mib(), config.cluster.object_store_mib
    if PROCESS_MIB * processes > mib:
        evaluators = f", evaluation.actors ({config.evaluation.actors})" if config.evaluation.actors else ""
        text = f"learner.ranks ({config.learner.ranks}) and rollout.actors ({config.rollout.actors}){evaluators} are "
        text += f"{processes} processes of at least {PROCESS_MIB} MiB each, and this machine has {mib} MiB "
        yield Finding("processes", "error", f"{text}and {host.cores()} cores")
    if store > mib:
        text = f"cluster.object_store_mib ({store}) is more than the memory of this machine, {mib} MiB"
        yield Finding("object store", "not here", text)
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if most != resource.RLIM_INFINITY and most < store * 2**20:
        text = f"no file may be larger than {most // 2**10} KiB here, and Ray's object store is a file of {store} MiB"
        yield Finding("file size", "not here", f"{text}: ulimit -f unlimited, or a smaller cluster.object_store_mib")
    yield from _sockets()


def _sockets() -> Findings:
    folder = os.environ.get("RAY_TMPDIR") or (sys.platform == "linux" and os.environ.get("TMPDIR")) or "/tmp"
    if (size := len(os.fsencode(os.path.join(folder, SOCKET)))) > MOST_SOCKET_BYTES:
        text = f"the paths of Ray's sockets in {folder} would have {size} bytes, and may have {MOST_SOCKET_BYTES}"
        yield Finding("sockets", "not here", f"{text}: set RAY_TMPDIR to a folder with a shorter path, such as /tmp")


def libraries(config: Config) -> Findings:
    """Check that the libraries of trackers, Prometheus, model.lora and learner.transport are installed."""
    kinds: list[str] = [*config.telemetry.trackers]
    kinds += ["prometheus"] if isinstance(config.telemetry.prometheus, Endpoint) else []
    for kind in kinds:
        extra = TRACKER_EXTRAS.get(kind, "tracking")
        yield _library(kind, "", f"pip install 'streamppo[{extra}]', or another [telemetry]")
    if config.model.lora is not None:
        yield _library("peft", ", for model.lora", "pip install 'streamppo[lora]', or leave out model.lora")
    if isinstance(config.learner.transport, Nixl):
        yield _library("nixl", ", for learner.transport", "pip install 'streamppo[nixl]', or another transport")


def _library(name: str, purpose: str, remedy: str) -> Finding:
    """Check that a module is installed. A folder without code does not count, such as the wandb/ of offline runs."""
    spec = find_spec(TRACKER_MODULES.get(name, name))
    if spec is not None and spec.origin is not None:
        return Finding(name, "ok", f"is installed{purpose}")
    return Finding(name, "error", f"is not installed: {remedy}")


def copies(config: Config) -> Findings:
    """Check that a file can be written to checkpoint.remote, read and deleted."""
    if not (address := config.checkpoint.remote):
        return
    # fsspec is slow to import, and most runs have no remote.
    from streamppo.weights.store import Store

    try:
        Store(address).check_access()
    except CheckpointError as error:
        yield Finding("copies", "error", f"checkpoint.remote: {error}")
    else:
        yield Finding("copies", "ok", f"checkpoints are copied to {address}")
