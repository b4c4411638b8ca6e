"""What the journal says of a run's versions: how each was configured, and which weights it has."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from checkpoint_files import copied, written
from conftest import COUNTERS

from streamppo.config.diff import learning
from streamppo.config.sections import Config
from streamppo.learner.checkpoint import history, manifest, remote
from streamppo.learner.checkpoint.history import ANY, History
from streamppo.learner.checkpoint.manifest import DamagedFile
from streamppo.learner.checkpoint.remote import CheckpointStore
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.store.journal import Journal
from streamppo.types import decode, encode

Load = Callable[..., Config]


@pytest.fixture
def past(math_config: Load) -> History:
    """A run that has made version 5, with the weights that `written` has, and version 10 with others."""
    return History({0: math_config()}, {5: "d", 10: "another"})


def journal_of(run: Path, configs: dict[int, Config], versions: int) -> None:
    journal = Journal(run / "journal.sqlite")
    for version, config in configs.items():
        journal.configure(version, msgspec.msgpack.encode(config))
    journal.write(
        Changes(COUNTERS), [PublishedVersion(version=one, digest=f"d{one}", archived=None) for one in range(versions)]
    )
    journal.close()


def test_each_version_has_the_configuration_that_it_was_made_with(math_config: Load, tmp_path: Path) -> None:
    present = math_config("learner.lr=0.125", "updates=9", "checkpoint.remote=memory://here")
    was = {0: math_config("learner.lr=0.5"), 3: math_config("learner.lr=0.25", "checkpoint.remote=memory://there")}
    journal_of(tmp_path, {**was, 8: math_config("learner.lr=0.125", "updates=9")}, 9)
    past = decode(encode(history.read_history(tmp_path, present)), History)
    rates = [past.at(version).learner.lr for version in range(10)]
    assert rates == [0.5] * 3 + [0.25] * 5 + [0.125] * 2
    assert past.at(9) == past.at(8) == present
    for version, config in was.items():
        assert learning(past.at(version)) == learning(config)
        assert past.at(version).checkpoint == present.checkpoint, "copies go to one address"


def test_a_new_run_has_its_configuration_alone_and_compares_nothing(math_config: Load, tmp_path: Path) -> None:
    past = history.read_history(tmp_path, math_config())
    assert past == History({0: math_config()}, {}) and past.refusal(7, "any") == ""


def test_versions_that_may_come_out_otherwise_are_known_and_not_compared(math_config: Load, tmp_path: Path) -> None:
    journal_of(tmp_path, {0: math_config(), 2: math_config("learner.exact=false"), 4: math_config()}, 6)
    past = history.read_history(tmp_path, math_config())
    assert past.digests == {0: "d0", 1: "d1", 2: "d2", 3: ANY, 4: ANY, 5: ANY}
    assert past.refusal(5, "other") == "" and "has no version 6" in past.refusal(6, "d6")


# --- checkpoints of another run -----------------------------------------------------------------------------------


def test_a_checkpoint_of_another_run_is_moved_out_of_the_way(tmp_path: Path, past: History) -> None:
    for version in (5, 10, 15):
        written(tmp_path, version)
    assert manifest.newest(tmp_path, past=past) == tmp_path / "00000005"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00000005", "00000010.damaged", "00000015.damaged"]


def test_copies_of_another_run_are_none(tmp_path: Path, past: History, logged: pytest.LogCaptureFixture) -> None:
    copies = CheckpointStore(f"file://{tmp_path}/store/math-1")
    for version in (5, 10, 15):
        path = written(tmp_path / "there", version)
        copied(copies, path, *(one.name for one in path.iterdir()))
    assert copies.versions() == [5, 10, 15] and copies.versions(past) == [5]
    assert "00000010: of another run: its weights are d, and version 10 of the journal has another" in logged.text
    assert "00000015: of another run: the journal has no version 15" in logged.text
    here = tmp_path / "here"
    assert remote.newest(here, copies.address, 99, past) == here / "00000005"


@pytest.mark.parametrize("version", [10, 15])
def test_what_a_rank_fetches_of_another_run_is_refused(tmp_path: Path, past: History, version: int) -> None:
    copies = CheckpointStore(f"file://{tmp_path}/store/math-1")
    path = written(tmp_path / "there", version)
    copied(copies, path, *(one.name for one in path.iterdir()))
    with pytest.raises(DamagedFile, match=f"{version:08d}: of another run"):
        manifest.verify(tmp_path / "here" / path.name, 0, None, copies.fetch, past)
    with pytest.raises(DamagedFile, match=f"{version:08d}: of another run"):
        manifest.verify_whole(path, past)
    assert manifest.verify_whole(path).version == version
