"""A run that cannot continue is refused before anything in its folder is changed, and the reason is said."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from conftest import COUNTERS, MATH, trajectory
from msgspec import structs

from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.config.task import DataTask
from streamppo.driver import inputs, preflight
from streamppo.errors import CheckpointError, ConfigError, JournalError, StreamppoError
from streamppo.learner.checkpoint import manifest
from streamppo.learner.checkpoint.manifest import CheckpointFiles, CheckpointState
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.rules.state import queue_settings
from streamppo.queue.store.archive import Archive
from streamppo.queue.store.journal import Journal
from streamppo.queue.store.trajectory_store import TrajectoryStore
from streamppo.telemetry.catalogue import UPDATE
from streamppo.types import Batch

Load = Callable[..., Config]


def trained(run: Path, config: Config, checkpoint: int = 1) -> Path:
    """A run whose driver died after version 2, with one checkpoint; its log was never folded into the journal."""
    run.mkdir(exist_ok=True)
    journal, archive = Journal(run / "journal.sqlite"), Archive(run / "archive", {})
    journal.fence()
    journal.configure(0, msgspec.msgpack.encode(config))
    counters = msgspec.structs.replace(COUNTERS, shape=queue_settings(config).shape)
    journal.write(Changes(counters), [PublishedVersion(version=0, digest="0", archived=None)])
    for version in (0, 1):
        archived = archive.write(Batch(version=version, min_version=0, trajectories=(trajectory([1, version]),)))
        made = PublishedVersion(version=version + 1, digest="d", archived=archived)
        journal.write(Changes(counters), [made], archive.settle)
    numbers = {"wall_s": 1.0, **dict.fromkeys(UPDATE, 1.0)}
    updates = [{"update": version, **numbers, "lag_histogram": {"0": 1}} for version in (1, 2)]
    lines = "".join(json.dumps(line) + "\n" for line in updates)
    (run / "metrics.jsonl").write_text(lines)
    (run / "summary.json").write_text("{}")
    saved = run / "checkpoints" / f"{checkpoint:08d}"
    saved.mkdir(parents=True)
    state = CheckpointState(version=checkpoint, digest="d", ranks=1, beta=0.0, bad_steps=(0, 0))
    manifest.write(saved, state, CheckpointFiles(shared={}, ranks=({},)))
    KEPT.append(journal)
    return run


KEPT: list[Journal] = []
"""Journals stay open: the last one that closes folds the log into the file."""


def contents(run: Path) -> dict[str, str]:
    """Every file of the run but SQLite's index of its log, which any reader makes."""
    files = [path for path in run.rglob("*") if path.is_file() and not path.name.endswith("-shm")]
    return {str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refusal(config: Config, run: Path) -> StreamppoError:
    """The error of a resume, which has left the run as it was."""
    before = contents(run)
    with pytest.raises(StreamppoError) as refused:
        preflight.verify(config, run)
    assert contents(run) == before
    return refused.value


def test_a_new_run_and_one_that_was_stopped_go_on(math_config: Load, tmp_path: Path) -> None:
    preflight.verify(math_config(), tmp_path)
    preflight.verify(math_config(), trained(tmp_path, math_config(), checkpoint=2))
    preflight.verify(math_config("learner.lr=1e-5"), tmp_path)


def test_a_run_of_another_version_of_streamppo_is_named(math_config: Load, tmp_path: Path) -> None:
    run = trained(tmp_path, math_config(), checkpoint=2)
    KEPT[-1].configure(2, msgspec.msgpack.encode(msgspec.to_builtins(math_config()) | {"gone": 1}))
    error = refusal(math_config(), run)
    assert "a configuration of another version of streamppo: Object contains unknown field `gone`" in str(error)


@pytest.mark.parametrize(
    "name",
    [
        *("metrics.jsonl", "logs/driver.log", "logs/tensorboard.log", "trackers/mlflow.json.tmp"),
        *(
            "archive/00000007.zarr.zip.tmp",
            "checkpoints/00000003.tmp/.metadata",
            "final.tmp",
            "checkpoints/00000003.tmp",
        ),
    ],
)
def test_a_link_that_a_run_would_write_through_is_refused(math_config: Load, tmp_path: Path, name: str) -> None:
    run = trained(tmp_path / "run", math_config(), checkpoint=2)
    other = tmp_path / "other"
    if name.endswith(("final.tmp", "3.tmp")):
        other.mkdir()
    else:
        other.write_text("theirs")
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(other)
    assert f"{run / name}: a link, and a run would write through it" in str(refusal(math_config(), run))


def test_folders_of_a_run_on_another_disk_and_links_of_a_model_and_of_wandb_are_no_fault(
    math_config: Load, tmp_path: Path
) -> None:
    run, elsewhere = trained(tmp_path / "run", math_config(), checkpoint=2), tmp_path / "elsewhere"
    (run / "checkpoints").rename(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere)
    (tmp_path / "blob").write_text("{}")
    for name in ("model/config.json", "wandb/debug.log"):
        (run / name).parent.mkdir()
        (run / name).symlink_to(tmp_path / "blob")
    preflight.verify(math_config(), run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("learner.ranks=2", "a run keeps its learner.ranks: it was 1, and cannot become 2"),
        ("queue.samples_per_prompt=2", "of another run"),
    ],
)
@pytest.mark.parametrize("closed", [False, True])
def test_a_refused_change_leaves_every_file_as_it_was(
    math_config: Load, tmp_path: Path, change: str, words: str, closed: bool
) -> None:
    run = trained(tmp_path, math_config())
    if closed:
        KEPT.pop().close()
    assert words in str(refusal(math_config(change), run))


def test_versions_that_must_be_made_again_hold_no_change_of_learning_back(math_config: Load, tmp_path: Path) -> None:
    run = trained(tmp_path, math_config(), checkpoint=2)
    (run / "checkpoints" / "00000002" / "manifest.json").write_text("{}")
    preflight.verify(math_config("learner.lr=1e-5"), run)


def test_a_journal_of_a_shard_that_was_deleted_is_named(math_config: Load, tmp_path: Path) -> None:
    config = math_config("queue.shards=2")
    run = trained(tmp_path, config, checkpoint=2)
    for number in range(2):
        TrajectoryStore(run, number).close()
    preflight.verify(config, run)
    (run / "shards" / "1.sqlite").unlink()
    assert f"{run}/shards/1.sqlite: missing" in str(refusal(config, run))
    assert "a run keeps its queue.shards: it was 2" in str(refusal(math_config(), run))


def test_a_journal_that_was_deleted_is_named_and_none_is_made(math_config: Load, tmp_path: Path) -> None:
    run = trained(tmp_path, math_config())
    for path in run.glob("journal*"):
        path.unlink()
    error = refusal(math_config(), run)
    assert isinstance(error, JournalError)
    assert f"{run / 'journal.sqlite'}: missing, though {run / 'archive'}/0000000" in str(error)
    assert "streamppo export" in str(error)


@pytest.mark.parametrize("place", ["run/base", "base"])
def test_a_run_that_was_moved_with_its_model_goes_on_and_not_with_another_one(
    math_config: Load, tmp_path: Path, place: str
) -> None:
    """Versions must be redone: any other model would make others."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in ("run", place):
        (old / folder).mkdir(parents=True, exist_ok=True)
    (old / place / "config.json").write_text("{}")
    config = math_config(f"model.path={old / place}")
    run = trained(old / "run", config)
    configfile.save(config, run)
    preflight.verify(config, run)
    KEPT.pop().close()
    old.rename(new)
    moved = configfile.load(new / "run" / configfile.CONFIG)
    assert moved.model.path == str(new / place)
    (new / place / "config.json").write_text("another")
    assert "base has changed since the run began: changed: config.json" in str(refusal(moved, new / "run"))
    (new / place / "config.json").write_text("{}")
    preflight.verify(moved, new / "run")


# --- data, models, rewards -----------------------------------------------------------------------------------


@pytest.fixture
def own(math_config: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration with data, a model and a reward in the present folder."""
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    Path("mine.py").write_text("def score(trajectory): return 1.0\n")
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    Path("run").mkdir()
    task = "task={kind='data', sources={data={data='train.jsonl'}}}"
    return math_config(task, "model.path=model", "reward={function='mine.py:score'}")


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ("train.jsonl", "train.jsonl has changed since the run began: changed: train.jsonl"),
        ("model/config.json", "model has changed since the run began: changed: config.json"),
        ("model/added.json", "model has changed since the run began: new: added.json"),
    ],
)
def test_changed_data_or_a_changed_model_is_refused_until_it_is_accepted(
    own: Config, changed: str, words: str, logged: pytest.LogCaptureFixture
) -> None:
    run = Path("run")
    preflight.verify(own, run)
    preflight.verify(own, run)
    Path(changed).write_text("other")
    error = refusal(own, run)
    assert isinstance(error, CheckpointError)
    assert words in str(error) and f"streamppo resume {run} --accept-changes" in str(error)
    preflight.verify(own, run, accept_changes=True)
    assert f"{words}; the run continues with it" in logged.text
    preflight.verify(own, run)


def test_data_that_are_gone_are_refused(own: Config) -> None:
    preflight.verify(own, Path("run"))
    Path("train.jsonl").unlink()
    assert "train.jsonl does not exist" in str(refusal(own, Path("run")))


def test_missing_files_are_refused_with_the_overrides_that_name_them(
    own: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(own.task, DataTask)
    run, rows = tmp_path / "run", Path(own.task.sources["data"].data)
    inputs.refuse_missing(own, run)
    rows.unlink()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    told = rf"task\.sources\.data\.data: {rows} does not exist\nif it was moved: streamppo resume {run} "
    with pytest.raises(ConfigError, match=rf"{told}task\.sources\.data\.data=FOLDER/{rows.name}"):
        inputs.refuse_missing(own, run)
    (tmp_path / "here" / rows.name).touch()
    with pytest.raises(ConfigError, match=rf"{told}task\.sources\.data\.data={rows.name}"):
        inputs.refuse_missing(own, run)


def test_a_changed_reward_is_a_note_and_other_data_named_on_purpose_are_none(
    own: Config, math_config: Load, logged: pytest.LogCaptureFixture
) -> None:
    preflight.verify(own, Path("run"))
    Path("mine.py").write_text("def score(trajectory): return 0.0\n")
    preflight.verify(own, Path("run"))
    assert "mine.py has changed since the run began: changed: mine.py; the run continues with it" in logged.text
    Path("more.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}\n')
    other = "task={kind='data', sources={data={data='more.jsonl'}}}"
    preflight.verify(math_config(other, "model.path=model", "reward={function='mine.py:score'}"), Path("run"))


def test_a_changed_reward_in_the_init_of_a_package_is_a_note_and_one_of_another_package_is_none(
    math_config: Load, logged: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    for package in ("mine", "theirs"):
        Path(package).mkdir()
        Path(package, "__init__.py").write_text("def score(trajectory): return 1.0\n")
    config = math_config("reward={function='mine:score'}")
    preflight.verify(config, Path("run"))
    Path("mine/__init__.py").write_text("def score(trajectory): return 0.0\n")
    preflight.verify(config, Path("run"))
    assert "mine/__init__.py has changed since the run began: changed: __init__.py" in logged.text
    logged.clear()
    preflight.verify(math_config("reward={function='theirs:score'}"), Path("run"))
    assert "has changed" not in logged.text


def test_a_large_file_is_known_by_pieces_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from streamppo.driver import inputs

    monkeypatch.setattr(inputs, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(inputs, "PIECE", 10)
    large = tmp_path / "large"
    large.write_bytes(bytes(5000))
    before = inputs.fingerprint(large)
    for at in (0, 4999):
        large.write_bytes(bytes(at) + b"x" + bytes(4999 - at))
        assert inputs.fingerprint(large) != before
    large.write_bytes(bytes(5001))
    assert inputs.fingerprint(large) != before


CHOSEN = {
    field: f"algorithm.{field}={{kind='function', function='maths.py:mine'}}"
    for field in ("advantage", "correction", "policy_loss")
}


@pytest.mark.parametrize("override", [*CHOSEN.values(), "rollout.limit=maths.py:mine"], ids=[*CHOSEN, "limit"])
def test_a_changed_function_of_the_user_is_a_note(
    own: Config, math_config: Load, logged: pytest.LogCaptureFixture, override: str
) -> None:
    Path("maths.py").write_text("def mine(inputs): return inputs\n")
    chosen = math_config(override)
    preflight.verify(chosen, Path("run"))
    Path("maths.py").write_text("def mine(inputs): return None\n")
    preflight.verify(chosen, Path("run"))
    assert "maths.py has changed since the run began: changed: maths.py; the run continues with it" in logged.text


def test_a_run_keeps_the_time_of_its_start_for_chat_templates(tmp_path: Path) -> None:
    config = configfile.load(MATH)
    configfile.save(config, tmp_path)
    begun = inputs.with_clock(config, tmp_path)
    assert begun.model.clock[:2] == "20" and inputs.with_clock(begun, tmp_path) is begun
    configfile.save(structs.replace(begun, model=structs.replace(begun.model, clock="2026-01-31T12:05")), tmp_path)
    # By `resume`, which reads that file, and by `run --resume`, which reads the user's.
    for given in (configfile.load(tmp_path / configfile.CONFIG), config):
        assert inputs.with_clock(given, tmp_path).model.clock == "2026-01-31T12:05"
    with pytest.raises(ConfigError, match="is a date, or a date and a time"):
        configfile.load(MATH, ["model.clock=noon"])
