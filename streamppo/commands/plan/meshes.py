"""Chooses the meshes that a plan tries. A mesh reduces the memory of each rank, and costs time for exchanges."""

from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import TYPE_CHECKING

from msgspec import structs

from streamppo.commands.plan.roofline import NODE
from streamppo.config import file as configfile
from streamppo.config.learner import Mesh
from streamppo.config.sections import Config
from streamppo.errors import ConfigError
from streamppo.learner.parallel import context_parallel, tensor_parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PARTS = (2, 4, 8)
"""Tried numbers of ranks that share rows, layers or experts."""


def choose(config: Config, model: "PretrainedConfig", fits: Callable[[Config], bool]) -> list[Mesh]:
    """Return meshes for the ranks of `config` that `model` supports and for which `fits` returns True.

    The candidates are the configured mesh, and the same mesh with a replica on each node. If neither fits, meshes that
    divide experts, then rows, then layers are tried, and the result is the first mesh that fits.
    """
    plain = [mesh for mesh in _plain(config) if _holds(config, mesh, model, fits)]
    candidates = product(("expert", "context", "tensor"), PARTS)
    meshes = (structs.replace(config.learner.mesh, **{field: parts}) for field, parts in candidates)
    return plain or list(islice((mesh for mesh in meshes if _holds(config, mesh, model, fits)), 1))


def override(mesh: Mesh) -> str:
    """Return the override that sets `mesh`."""
    parts = [f"{name}={ranks}" for name, ranks in structs.asdict(mesh).items() if ranks > 1]
    return f"learner.mesh={{{', '.join(parts)}}}"


def _plain(config: Config) -> Iterator[Mesh]:
    yield config.learner.mesh
    ranks = config.learner.ranks
    if ranks > NODE and ranks % NODE == 0:
        yield structs.replace(config.learner.mesh, replicate=ranks // NODE)


def _holds(config: Config, mesh: Mesh, model: "PretrainedConfig", fits: Callable[[Config], bool]) -> bool:
    if context_parallel.refusal(model, mesh.slices) or tensor_parallel.refusal(model, mesh.expert):
        return False
    try:
        return fits(configfile.change(config, [override(mesh)]))
    except ConfigError:
        return False
