"""The death of a process of Ray: the run ends with the reason, and is resumed."""

from pathlib import Path

import pytest
from test_recovery import resumed
from test_run import SHORT, family, gone, started, summary, updates, wait_for_updates


@pytest.mark.slow
def test_a_ray_that_has_lost_its_gcs_ends_the_run_at_once_with_the_reason_and_it_is_resumed(tmp_path: Path) -> None:
    with started(tmp_path, *SHORT, "updates=40", "evaluation.every=0") as process:
        wait_for_updates(tmp_path, 6)
        next(one for one in family(tmp_path) if one.name() == "gcs_server").kill()
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 1 and gone(tmp_path)
    assert "RunError: Ray's gcs_server has died (SIGKILL); resume the run to start a new Ray" in output
    assert "gcs_server has died" in summary(tmp_path)["outcome"]
    resumed(tmp_path)
    assert [row["update"] for row in updates(tmp_path)] == list(range(1, 41))
