"""Checks that every node of a cluster sees the same run: its folder, model, data and plug-ins.

The driver writes a random token into the run's folder. Before a rank or rollout actor loads anything, it must read the
same token at the same path. A different folder of that name would lack the checkpoints of other nodes.
"""

import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

from streamppo import durable
from streamppo.config.algorithm import CRITICS
from streamppo.config.learner import Folder
from streamppo.config.model import BUILTIN
from streamppo.config.reward import FunctionScorer, ModelScorer
from streamppo.config.sections import Config
from streamppo.config.task import DataTask
from streamppo.driver.ray import environment
from streamppo.errors import RunError

TOKEN = "driver.token"


class Needs(NamedTuple):
    """What a process needs on its node: paths, names of plug-ins, and environment variables."""

    folder: str
    token: str
    paths: tuple[str, ...]
    plugins: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()


def rank_needs(config: Config, folder: Path) -> Needs:
    """Return a rank's needs; write the token to `folder` unless nodes have their own disks. Raises `RunError`."""
    if config.cluster.own_disks:
        return Needs("", "", _input_folders(config), tuple(config.algorithm.custom_functions.values()))
    token = uuid4().hex
    with durable.naming(folder / TOKEN, RunError):
        durable.write(folder / TOKEN, token.encode())
    return Needs(str(folder), token, _input_folders(config), tuple(config.algorithm.custom_functions.values()))


def rollout_needs(config: Config, rank: Needs) -> Needs:
    """Return a rollout actor's needs: the `rank`'s needs, and those of prompts and rewards."""
    scorers, task = config.reward.scorers.values(), config.task
    sources = task.sources.values() if isinstance(task, DataTask) else ()
    data = [path for source in sources for path in (source.data, source.evaluation) if path]
    models = [scorer.path for scorer in scorers if isinstance(scorer, ModelScorer)]
    plugins = [scorer.function for scorer in scorers if isinstance(scorer, FunctionScorer)]
    plugins += [name for name in [config.environment.module] if name] if config.environment else []
    plugins += [config.rollout.limit] if config.rollout.limit else []
    variables = tuple(sorted(environment.key_variables(config)))
    paths = rank.paths + _local([*data, *models])
    return rank._replace(paths=paths, plugins=(*rank.plugins, *plugins), variables=variables)


def check_visible(actor: object, needs: Needs) -> None:
    """Raise `RunError` with this node's name if the node lacks one of `needs`. Runs inside an actor."""
    if missing := missing_needs(needs):
        raise RunError(
            f"node {platform.node()} lacks {'; '.join(missing)}: every node needs the same folders under the same "
            "paths, and the same installation"
        )


def missing_needs(needs: Needs) -> list[str]:
    """Return the needs that this process does not find."""
    missing: list[str] = []
    token = Path(needs.folder) / TOKEN
    if not needs.folder:
        pass
    elif not token.is_file():
        missing.append(f"the run's folder {needs.folder}")
    elif token.read_text() != needs.token:
        missing.append(f"the run's folder {needs.folder} (a different folder has this name)")
    missing += [path for path in needs.paths if not Path(path).exists()]
    missing += [f"the plug-in {name}" for name in needs.plugins if not _is_importable(name.rpartition(":")[0])]
    missing += [f"the environment variable {name}" for name in needs.variables if name not in os.environ]
    return missing


def _input_folders(config: Config) -> tuple[str, ...]:
    algorithm, transport = config.algorithm, config.learner.transport
    folders = [config.model.path, algorithm.critic.model, algorithm.critic.pretrain, algorithm.teacher.model]
    folders += [transport.path] if isinstance(transport, Folder) else []
    return _local([name for name in folders if name not in ("", BUILTIN, *CRITICS)])


def _local(names: Sequence[str]) -> tuple[str, ...]:
    """Return the absolute paths of the names that exist on the driver's node. Other names belong to a hub."""
    return tuple(
        str(Path(name).resolve()) if not os.path.isabs(name) else name for name in names if Path(name).exists()
    )


def _is_importable(module: str) -> bool:
    if module.endswith(".py"):
        return any((Path(folder) / module).is_file() for folder in ("", *sys.path))
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
