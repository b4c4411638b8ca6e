"""The learner with an older torch, as 2.11: it trains, or names the version that it needs."""

import re
from pathlib import Path

import learner_case as case
import pytest
import torch
import torch.distributed as dist
from conftest import REPOSITORY
from torch.distributed.fsdp._fully_shard import _fsdp_common

from streamppo.errors import ModelError
from streamppo.learner.batch.padded import pad
from streamppo.learner.parallel import tensor_parallel

PLACEMENT = (_fsdp_common, "ShardPlacementResult")
"""FSDP2's own modules keep what they have imported; they call collectives by their names of today."""
COLLECTIVES = ((dist, "all_gather_single"), (dist, "reduce_scatter_single"))
CUT = ("learner.mesh.tensor=2",)


def test_the_oldest_torch_that_is_promised_has_trained() -> None:
    (promised,) = re.findall(r'"torch>=([\d.]+)"', (REPOSITORY / "pyproject.toml").read_text())
    pinned = (REPOSITORY / "constraints.txt").read_text()
    kept = [file.read_text() for file in sorted((REPOSITORY / "benchmarks" / "results").glob("update-*.json"))]
    ran = any(re.search(rf'"torch": "{re.escape(promised)}[. ]', text) for text in kept)
    assert ran or f"\ntorch=={promised}." in pinned


def trained(ranks: int, folder: Path, older: bool, overrides: tuple[str, ...]) -> case.Weights | str:
    """The weights of an update on each of so many ranks, or the error."""
    with pytest.MonkeyPatch.context() as patch:
        if older:
            patch.delattr(*PLACEMENT, raising=False)
        try:
            chosen = f"learner.ranks={ranks}", "model.dtype=bfloat16", *overrides
            return case.updated(folder, pad(case.batch()), *chosen)[0]
        except ModelError as error:
            return str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [(), ("learner.mesh.replicate=2",), ("learner.mesh.context=2",)], ids=["all", "copies", "slices"]
)
def test_an_older_torch_makes_the_bits_of_a_younger_one(overrides: tuple[str, ...], tmp_path: Path) -> None:
    case.save_model(tmp_path / "model")
    found: list[case.Weights] = []
    for older in (False, True):
        (tmp_path / str(older)).mkdir()
        found.append(case.by_ranks(trained, 2, tmp_path / str(older), tmp_path / "model", older, overrides))
    case.assert_same_weights(*found, atol=0)


def test_weights_cannot_be_cut_by_an_older_torch_which_is_said(tmp_path: Path) -> None:
    case.save_model(tmp_path / "model")
    said = case.by_ranks(trained, 2, tmp_path, tmp_path / "model", True, CUT)
    assert "need a newer torch than" in said


def moved(ranks: int, older: bool) -> list[torch.Tensor]:
    """What the two moves of tensor parallelism make of this rank's numbers."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in COLLECTIVES if older else ():
            patch.delattr(module, name, raising=False)
        group, mine = dist.group.WORLD, torch.arange(24.0).view(2, 4, 3) * (1 + dist.get_rank())
        assert group is not None
        return [tensor_parallel._gather_slices(mine, group), tensor_parallel._reduce_slices(mine, group)]


def test_slices_are_gathered_and_scattered_by_the_older_names_too(tmp_path: Path) -> None:
    found: list[list[torch.Tensor]] = []
    for older in (False, True):
        (tmp_path / str(older)).mkdir()
        found.append(case.by_ranks(moved, 2, tmp_path / str(older), older))
    assert all(one.equal(other) for one, other in zip(*found, strict=True))
