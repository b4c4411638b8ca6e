"""Checks of the engine's software, and of the CPUs and GPUs that the run asks Ray for."""

from importlib.metadata import PackageNotFoundError

import torch

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.engine import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import LOCAL, Config, shares_gpus
from streamppo.driver import placement
from streamppo.errors import ModelError
from streamppo.rollout.sglang import wire


def engine(config: Config) -> Finding:
    """Check that the engine is installed, or tell that its server is asked later."""
    match config.rollout.engine:
        case EmbeddedEngine():
            return Finding("engine", "ok", f"embedded, {config.rollout.slots} completions at once in each actor")
        case SGLangEngine(url=url) if url:
            return Finding("engine", "not here", f"{url} is asked when the run starts")
        case SGLangEngine():
            return _sglang()


def _sglang() -> Finding:
    try:
        version = wire.installed()
    except ModelError as error:
        absent = isinstance(error.__context__, PackageNotFoundError)
        return Finding("engine", "not here" if absent else "error", str(error))
    return Finding("engine", "ok", f"SGLang {'.'.join(map(str, version))}")


def places(config: Config) -> Findings:
    """Tell what Ray is asked for, and whether a cluster of this machine alone has it."""
    plan, here = placement.plan(config), torch.cuda.device_count()
    gpus, cpus = plan.total("GPU"), plan.total("CPU")
    together = ", which share GPUs" if shares_gpus(config) else ""
    actors = f"learner ranks ({config.learner.ranks}) and rollout actors ({config.rollout.actors}){together}"
    yield Finding("Ray is asked", "ok", f"GPU {gpus:g}, CPU {cpus:g}: for {actors}")
    if config.cluster.address != LOCAL:
        return
    if gpus > here:
        yield Finding("GPUs", "error" if here else "not here", f"{gpus:g} are asked for; this machine has {here}")
    given = config.cluster.cpus
    if given is not None and given < cpus:
        yield Finding("CPUs", "error", f"cluster.cpus ({given}) is less than the {cpus:g} that are asked for")
