"""A run's records agree with each other, and a change of any is found, or known to be out of reach. No Ray."""

import json
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import replay_case
import thread_run
from manipulations import MANIPULATIONS
from test_hostile_folders import PLANTED

import streamppo
from streamppo import cli
from streamppo.commands.look import verify
from streamppo.commands.verification import Verification
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import catalogue

DRAWS, SEED = 200, 47
FILES = ["config.toml", "metrics.jsonl", "journal.sqlite", "journal.tip", "summary.json", "inputs.json"]
FILES += ["archive/00000003.zarr.zip", "model/config.json", "checkpoints/00000004/manifest.json", "final/config.json"]
FILES += ["checkpoints/00000004/.metadata", "final/model.safetensors"]


@pytest.fixture(scope="module")
def published(exact: Path) -> Verification:
    return verify.check(exact, 0)


@pytest.fixture
def copy(exact: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exact, tmp_path / "math")


def files(folder: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.name.endswith("-shm"):
            yield str(path.relative_to(folder)), path.read_bytes()


def verified(run: Path, *options: str) -> tuple[int, Any]:
    """The exit code of the command, and its JSON."""
    done = replay_case.command("streamppo", "verify", str(run), "--json", *options)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


# --- clean runs ----------------------------------------------------------------------------------------------


def test_a_run_is_as_recorded_down_to_each_update_and_is_not_changed(exact: Path) -> None:
    before = dict(files(exact))
    code, told = verified(exact, "--updates", "6")
    assert (code, told["faults"], told["notes"]) == (0, [], [])
    assert told["remade"] == [1, 2, 3, 4, 5, 6] and (told["versions"], told["batches"], told["checkpoints"]) == (
        7,
        6,
        3,
    )
    assert dict(files(exact)) == before


def test_what_a_machine_measures_is_not_compared_with_a_replay() -> None:
    measured = {"fetch_s", "push_mib", "push_ms", "score_s", "train_s", "update_s", "wait_s", "wall_s"}
    measured |= {"learner_tflops", "learner_tokens_per_s", "mfu", "peak_memory_mib"}
    assert {name for name in catalogue.ENTRIES if verify._is_measured(name)} == measured
    assert not verify._is_measured("reward_s"), "a reward of that name"


@pytest.mark.slow
def test_a_run_with_lag_that_died_and_one_that_went_on_raise_no_alarm(tmp_path: Path) -> None:
    lagged = ("queue.max_lag=2", "rollout.in_flight=48", "rollout.actors=2")
    run = thread_run.trained(tmp_path, *lagged, dies_at=5)
    assert verify.check(run, 0).faults == []
    assert thread_run.train(run).returncode == 0
    code, told = verified(run, "--updates", "6")
    assert (code, told["faults"], len(told["remade"])) == (0, [], 6)


def test_lines_that_a_driver_has_not_written_yet_are_a_note_and_older_ones_a_fault(copy: Path) -> None:
    path = copy / "metrics.jsonl"
    (copy / "summary.json").unlink()
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.startswith(('{"update"', '{"part"'))]
    path.write_text("".join(lines[:-2]))
    found = verify.check(copy, 0)
    assert found.faults == [] and found.notes == [
        "updates [5, 6] have no line yet, or lost it when the driver was killed"
    ]
    path.write_text("".join(lines[:-4]))
    assert [fault.place for fault in verify.check(copy, 0).faults] == ["metrics.jsonl"] * 4


def test_a_line_of_an_update_that_a_kill_kept_from_being_published_is_a_note(copy: Path) -> None:
    path = copy / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    (last,) = (line for line in lines if line.get("update") == 6)
    (copy / "summary.json").unlink()
    for ending, ahead, faults in ({}, 1, 0), ({"end": "RunError: full"}, 1, 0), ({}, 2, 1), ({"end": "finished"}, 1, 1):
        kept = [line for line in lines if "end" not in line]
        kept += [{**last, "update": 6 + ahead}, *([{**ending, "wall_s": 1e6}] if ending else [])]
        kept.sort(key=lambda line: line["wall_s"])
        path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        found = verify.check(copy, 0)
        assert len(found.faults) == faults and len(found.notes) == 1 - faults


def test_batches_that_are_not_kept_leave_the_chain_whole_and_are_a_note(copy: Path) -> None:
    found = archive.open(copy)
    with closing(Journal(copy / "journal.sqlite")) as journal:
        journal.forget(3, 0)
    found.drop(3)
    code, told = verified(copy, "--updates", "6")
    assert (code, told["faults"], told["batches"]) == (0, [], 3)
    assert told["notes"] == ["4 versions cannot be replayed: their batches are not kept"]
    assert told["remade"] == [5, 6]


@pytest.mark.parametrize(
    "overrides",
    [
        ("queue.segments={}", "queue.max_lag=2"),
        ("algorithm.advantage={kind='grpo'}", "learner.exact=false"),
        ("model.lora={rank=4}",),
        ("model.dtype=bfloat16", "checkpoint.every=0", "queue.max_lag=1"),
    ],
)
@pytest.mark.slow
def test_runs_of_other_kinds_raise_no_alarm(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = thread_run.trained(tmp_path, *overrides)
    code, told = verified(run, "--updates", "2")
    assert (code, told["faults"]) == (0, [])


# --- what is planted -----------------------------------------------------------------------------------------


def judge(name: str, copy: Path, published: Verification, seed: str) -> None:
    """Plant one change, and see that it is found by what is said to find it, and by nothing less."""
    one = MANIPULATIONS[name]
    one.plant(copy, random.Random(seed))
    faults = verify.check(copy, 0, published.digest).faults
    by_records = [fault for fault in faults if fault.place != "."]
    assert faults and bool(by_records) == (one.found == "records"), f"{name} ({seed}): {faults}"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", MANIPULATIONS)
def test_each_kind_of_change_is_found_or_out_of_reach(name: str, copy: Path, published: Verification) -> None:
    judge(name, copy, published, f"{SEED}/{name}")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_200_changes_are_found_or_out_of_reach(exact: Path, published: Verification, tmp_path: Path) -> None:
    chance, found = random.Random(SEED), Counter[str]()
    for number in range(DRAWS):
        name = chance.choice([*MANIPULATIONS])
        copy = shutil.copytree(exact, tmp_path / "math")
        judge(name, copy, published, f"{SEED}/{number}")
        shutil.rmtree(copy)
        found[MANIPULATIONS[name].found] += 1
    assert sum(found.values()) == DRAWS and len(found) == 3


AGAIN = [name for name, one in MANIPULATIONS.items() if one.found == "again"]


@pytest.mark.slow
@pytest.mark.parametrize("name", AGAIN)
def test_what_no_record_shows_is_found_by_updates_that_are_made_again(name: str, copy: Path) -> None:
    for version in (2, 4):
        # All updates are replayed at a time, from version 0.
        shutil.rmtree(copy / "checkpoints" / f"{version:08d}")
    MANIPULATIONS[name].plant(copy, random.Random(f"{SEED}/{name}"))
    code, told = verified(copy, "--updates", "6")
    assert code == 1 and told["faults"] and len(told["remade"]) == 6
    assert "repla" in told["faults"][0]["what"]


@pytest.mark.slow
@pytest.mark.parametrize("content", PLANTED)
def test_files_of_strangers_are_faults_and_no_traceback(content: str, exact: Path, tmp_path: Path) -> None:
    for number, name in enumerate(FILES):
        copy = shutil.copytree(exact, tmp_path / f"{number}" / "math")
        if name == "journal.sqlite":
            (copy / "journal.sqlite-wal").unlink()
        (copy / name).write_bytes(PLANTED[content])
        assert verify.check(copy, 0).faults, name


# --- the command ---------------------------------------------------------------------------------------------


def test_the_command_says_what_differs_and_where(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copy / "archive" / "00000003.zarr.zip").write_bytes(b"damaged")
    assert cli.main(["verify", str(copy), "--updates", "0"]) == 1
    first, counts, digest = capsys.readouterr().out.splitlines()
    assert first == "fault: archive/00000003.zarr.zip: damaged: its SHA-256 is not the one that was recorded"
    assert counts == "math: 7 versions, 6 batches, 3 checkpoints: 1 fault"
    assert digest.startswith("digest: ") and len(digest) == 72


def test_a_script_gets_the_verdict_with_its_faults(copy: Path) -> None:
    (copy / "archive" / "00000003.zarr.zip").write_bytes(b"damaged")
    found = streamppo.verify(copy, updates=0, expect="0" * 64)
    assert [fault.place for fault in found.faults] == ["archive/00000003.zarr.zip", "."]
    assert found.link in verify.check(copy, 0).link and found.versions == 7


def test_a_digest_that_was_published_is_that_of_the_run_or_of_one_of_its_versions(
    exact: Path, published: Verification, capsys: pytest.CaptureFixture[str]
) -> None:
    for digest, code in ((published.digest, 0), (published.link, 0), ("0" * 64, 1)):
        assert cli.main(["verify", str(exact), "--updates", "0", "--expect", digest]) == code
    assert f"fault: .: its digest is {published.digest}, not 000000" in capsys.readouterr().out


def test_a_journal_that_cannot_be_read_is_a_fault(copy: Path) -> None:
    (copy / "journal.sqlite").write_bytes(b"no journal")
    (copy / "journal.sqlite-wal").unlink()
    found = verify.check(copy, 1)
    assert (found.digest, [fault.place for fault in found.faults]) == ("", ["journal.sqlite"])
