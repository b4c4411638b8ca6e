"""Nodes with disks of their own: files of other nodes come through `checkpoint.remote`."""

import shutil
from pathlib import Path

import pytest
from conftest import MATH
from test_recovery import all_accounted, command
from test_run import SHORT, family, gone, started, updates, wait_for_updates

from benchmarks.faults import node_deaths


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shards", [1, 2])
def test_a_run_whose_queue_and_its_disk_are_gone_goes_on_from_the_copies(shards: int, tmp_path: Path) -> None:
    runs, store, again = tmp_path / "runs", tmp_path / "store", tmp_path / "again" / "math"
    runs.mkdir()
    again.parent.mkdir()
    given = (*SHORT, *node_deaths.own(store), f"queue.shards={shards}", "updates=30", "evaluation.every=0")
    with started(runs, *given) as process:
        wait_for_updates(runs, 13)
        for one in family(runs):
            one.kill()
        process.wait()
        assert gone(runs)
    made = len(updates(runs))
    address = (runs / "math" / "remote.address").read_text().split()[0]
    shutil.rmtree(runs)
    done = command("resume", str(again), "--from", address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all_accounted(again).consumed == 30 * 64
    assert made >= 13 and [row["update"] for row in updates(again.parent)] == list(range(1, 31))
