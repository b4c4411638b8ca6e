"""Chooses the fixed number of threads of a run's learner ranks if `learner.threads` is "auto".

The rounding of sums depends on this number, so the run's configuration records it for every resume and replay.

a small model, a GPU, a cluster    1 thread
a large model on this machine      all cores except half of the engines' threads, divided by the number of ranks
"""

import logging
import math
from pathlib import Path
from typing import Literal, NamedTuple

from msgspec import structs

from streamppo.config import file as configfile
from streamppo.config.model import BUILTIN, Model
from streamppo.config.sections import LOCAL, Config
from streamppo.errors import ModelError
from streamppo.telemetry import host
from streamppo.weights.models import headers

LARGE = 10_000_000
"""A model with more parameters is large: its operations can use several threads."""
BYTES = 4
"""The assumed number of bytes per parameter in files that are pickles."""

log = logging.getLogger(__name__)


class Choice(NamedTuple):
    """A number of threads, and the reason in words."""

    number: int
    reason: str


def with_recorded(config: Config, folder: Path) -> Config:
    """Replace "auto" by the number recorded for the run in `folder`, if there is one."""
    if config.learner.threads != "auto" or not (folder / configfile.CONFIG).is_file():
        return config
    return with_number(config, configfile.load(folder / configfile.CONFIG).learner.threads)


def with_chosen(config: Config, folder: Path) -> Config:
    """Replace "auto" by the number recorded for the run in `folder`, or choose a number and log it."""
    config = with_recorded(config, folder)
    if config.learner.threads != "auto":
        return config
    number, reason = choose(config)
    log.info("learner.threads = %d: %s", number, reason)
    return with_number(config, number)


def with_number(config: Config, number: int | Literal["auto"]) -> Config:
    """Replace "auto" by `number`."""
    if config.learner.threads != "auto":
        return config
    return structs.replace(config, learner=structs.replace(config.learner, threads=number))


def choose(config: Config) -> Choice:
    """Choose the threads of a rank from its model, the engines on its machine, and the cores of this machine."""
    learner, rollout, cluster = config.learner, config.rollout, config.cluster
    if learner.gpus:
        return Choice(1, "a rank on a GPU")
    if cluster.address != LOCAL:
        return Choice(1, "the cores of a cluster's nodes are unknown")
    count = count_parameters(config.model)
    if count is not None and count < LARGE:
        return Choice(1, "a small model")
    available, engines = host.cores(), rollout.actors * rollout.threads
    free = available - engines // 2
    if cluster.cpus is not None:
        free = min(free, cluster.cpus - engines)
    size = "a model of unknown size" if count is None else f"{count:,} parameters"
    ranks = f", {learner.ranks} ranks" if learner.ranks > 1 else ""
    return Choice(max(1, free // learner.ranks), f"{size}, {available} cores{ranks}, {engines} threads of engines")


def count_parameters(model: Model) -> int | None:
    """Count the parameters in a model's files without torch; None if the files are not on this machine."""
    if model.path == BUILTIN:
        # Attention has four square matrices. The MLP has three, which are twice as wide.
        return (4 + 3 * 2) * model.tiny.layers * model.tiny.hidden_size**2
    folder = Path(model.path)
    if not folder.is_dir():
        # This import is slow, and most models are folders.
        from streamppo.weights.models.settings import local_folder

        if (folder := local_folder(model.path)) is None:
            return None
    try:
        stored = headers.folder_headers(folder)
        if stored is None:
            return sum(file.stat().st_size for file in headers.weight_files(folder)) // BYTES
    except ModelError:
        return None
    return sum(math.prod(header.shape) for header in stored.values())
