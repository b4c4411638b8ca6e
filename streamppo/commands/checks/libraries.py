"""Checks that the libraries of [telemetry], model.lora and learner.transport are installed."""

from importlib.util import find_spec

from streamppo.commands.checks.finding import Finding, Findings
from streamppo.config.learner import Nixl
from streamppo.config.sections import Config, Endpoint

EXTRAS = {"trackio": "trackio"}
"""Libraries in an extra other than `tracking`."""
MODULES = {"prometheus": "prometheus_client"}
"""Modules whose names differ from their kinds."""


def trackers(config: Config) -> Findings:
    """Find the library of each tracker and of the endpoint; a run without it would continue untracked."""
    kinds: list[str] = [*config.telemetry.trackers]
    kinds += ["prometheus"] if isinstance(config.telemetry.prometheus, Endpoint) else []
    for kind in kinds:
        if _is_here(MODULES.get(kind, kind)):
            yield Finding(kind, "ok", "is installed")
        else:
            extra = EXTRAS.get(kind, "tracking")
            yield Finding(kind, "error", f"is not installed: pip install 'streamppo[{extra}]', or another [telemetry]")


def adapters(config: Config) -> Findings:
    """Find the library of model.lora."""
    if config.model.lora is not None:
        if _is_here("peft"):
            yield Finding("peft", "ok", "is installed, for model.lora")
        else:
            yield Finding("peft", "error", "is not installed: pip install 'streamppo[lora]', or leave out model.lora")


def transports(config: Config) -> Findings:
    """Find the library of learner.transport."""
    if isinstance(config.learner.transport, Nixl):
        if _is_here("nixl"):
            yield Finding("nixl", "ok", "is installed, for learner.transport")
        else:
            yield Finding("nixl", "error", "is not installed: pip install 'streamppo[nixl]', or another transport")


def _is_here(module: str) -> bool:
    """True if a module with code exists; a folder such as the wandb/ of offline runs is not one."""
    spec = find_spec(module)
    return spec is not None and spec.origin is not None
