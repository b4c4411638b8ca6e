"""Nodes with disks of their own: what one of them has to get from another comes by way of `checkpoint.remote`."""

from pathlib import Path

import pytest
from conftest import MATH

from benchmarks import node_deaths


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(node_deaths.BWRAP is None, reason="bubblewrap gives nodes disks of their own")
def test_nodes_that_do_not_see_the_runs_folder_die_and_the_run_goes_on_from_the_copies(tmp_path: Path) -> None:
    kinds = ["learner", "rollout", "learner", "head"]
    given = ("learner.ranks=2", "updates=300", "model.tiny.max_steps=20")
    made = node_deaths.trial(MATH, tmp_path, given, kinds, seed=0, own_disks=True)
    assert [kill.kind for kill in made.kills] == kinds
    assert (made.lost, made.twice) == (0, 0) and made.consumed == 300 * 64
    assert made.replayed and made.restarts["learner"] >= 2
    run, store = tmp_path / "runs" / "chaos", tmp_path / "store"
    assert list((run / "checkpoints").glob("*/*.distcp")) == [], "the disk of the driver has none of them"
    assert (run / "final" / "model.safetensors").is_file()
    assert {one.parent.name for one in store.glob("*/*/manifest.json")} >= {"00000300"}
