"""A fork begins as its run was at a version, and without a change it is the same run. No Ray (thread_run.py)."""

import json
import shutil
import statistics
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import replay_case
import thread_run

import streamppo
from streamppo import cli
from streamppo.commands.look import verify
from streamppo.config import diff
from streamppo.config import file as configfile
from streamppo.queue import pairs
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file

LAGGED = ("queue.max_lag=2", "rollout.in_flight=48", "rollout.actors=2")


@pytest.fixture(scope="module")
def lagged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two actors at a lag of up to 2 that died after its fifth update."""
    return thread_run.trained(tmp_path_factory.mktemp("lagged"), *LAGGED, dies_at=5)


def forked(run: Path, at: int, *options: str, runs: Path) -> Any:
    """What `streamppo fork --json` says of the fork that it makes."""
    done = replay_case.command("streamppo", "fork", str(run), "--at", str(at), "--runs", str(runs), "--json", *options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def refused(run: Path, at: int, *options: str, runs: Path) -> str:
    done = replay_case.command("streamppo", "fork", str(run), "--at", str(at), "--runs", str(runs), *options)
    assert done.returncode and not done.stdout and "Traceback" not in done.stderr
    assert not list(runs.glob("*")), "nothing is left"
    return done.stderr


def digests(run: Path) -> dict[int, str]:
    with closing(Journal.open_run(run)) as journal:
        return {version: one.digest for version, one in journal.versions().items()}


def prompts(run: Path) -> list[list[tuple[int, int]]]:
    """The prompts and samples of every batch."""
    found = archive.open(run)
    batches = [found.batch(version).trajectories for version in found.versions()]
    return [[(one.identity.prompt, one.identity.sample) for one in batch] for batch in batches]


def everything(folder: Path) -> dict[str, bytes]:
    """Every file but that in which readers of SQLite's log meet."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.endswith("-shm"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize(("at", "begin"), [(3, 2), pytest.param(4, 4, marks=pytest.mark.slow)])
def test_a_fork_without_a_change_is_the_same_run_bit_for_bit(exact: Path, tmp_path: Path, at: int, begin: int) -> None:
    before = everything(exact)
    told = forked(exact, at, runs=tmp_path)
    fork = Path(told["folder"])
    assert fork == tmp_path / f"math-at-{at}"
    assert (told["begin"], told["remade"], told["digest"]) == (begin, at - begin, digests(exact)[at])
    assert thread_run.train(fork).returncode == 0
    assert digests(fork) == digests(exact) and prompts(fork) == prompts(exact)
    assert everything(exact) == before, "the run is as it was"
    assert replay_case.succeeds(fork)
    origin = configfile.load(fork / configfile.CONFIG).origin
    assert origin and (origin.run, origin.version, origin.digest) == (str(exact), at, digests(exact)[at])
    numbers = [line["update"] for line in metrics_file.read(fork) if "update" in line]
    assert numbers == list(range(1, 7))


def test_a_fork_at_any_version_has_the_evaluations_so_far_and_is_as_recorded(exact: Path, tmp_path: Path) -> None:
    """An evaluation is answered after its update's line, and perhaps after later ones."""
    run = shutil.copytree(exact, tmp_path / "math")
    lines = list[Any]()
    for line in metrics_file.read(run):
        lines.append(line)
        # Those of even versions are answered after the next update's line.
        for version in {1: [1], 2: [], 3: [2, 3], 4: [], 5: [4, 5], 6: [6]}.get(line.get("update", 0), []):
            answers = {"accuracy": 0.5, "count": 8, "failed": 0, "versions": [version, version]}
            lines.append({"evaluation": version, "wall_s": line["wall_s"] + 1e-6, **answers})
    (run / metrics_file.METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for at, changes in (2, ()), (3, ("--set", "learner.lr=3e-3", "queue.batch_size=8")):
        fork = Path(forked(run, at, *changes, runs=tmp_path / "runs")["folder"])
        evaluated = {line["evaluation"] for line in metrics_file.read(fork) if "evaluation" in line}
        assert evaluated == set(range(1, at + 1))
        assert verify.check(fork, 0).faults == []


@pytest.mark.slow
def test_a_fork_has_the_configuration_that_held_at_its_version(exact: Path, tmp_path: Path) -> None:
    """Also in what no update depends on, and where a resume changed nothing else."""
    run = shutil.copytree(exact, tmp_path / "moved" / "math")
    held = {0: configfile.load(run / configfile.CONFIG)}
    for version, changes in {
        6: ("updates=7",),
        7: ("updates=9", "evaluation.prompts=3", "checkpoint.every=4"),
        8: ("rollout.slots=8", "reward.timeout_s=7.0"),
        9: ("updates=10", "rollout.slots=4", "queue.max_attempts=7"),
    }.items():
        held[version] = configfile.load(run / configfile.CONFIG, changes)
        configfile.save(held[version], run)
        trained = thread_run.train(run, dies_at=8 if version == 7 else None)
        assert trained.returncode == (thread_run.DIED if version == 7 else 0), trained.stdout
    places = ("name", "origin", "updates", "checkpoint", "model")
    for version, config in held.items():
        fork = Path(forked(run, version, "--set", "updates=20", runs=tmp_path / "runs")["folder"])
        its, wanted = (diff.fields(one) for one in (configfile.load(fork / configfile.CONFIG), config))
        differ = {name for name in wanted if its.get(name) != wanted[name] and name.partition(".")[0] not in places}
        assert not differ, version
        assert verify.check(fork, 0).faults == []
    assert verify.check(run, 0).faults == [] and replay_case.succeeds(run)


@pytest.mark.slow
def test_a_fork_of_a_finished_run_goes_on_where_that_ended(exact: Path, tmp_path: Path) -> None:
    assert "nothing is left to do: updates = 6" in refused(exact, 6, runs=tmp_path)
    fork = Path(forked(exact, 6, "--set", "updates=8", "--name", "longer", runs=tmp_path)["folder"])
    assert fork.name == "longer" and thread_run.train(fork).returncode == 0
    assert {**digests(fork), **digests(exact)} == digests(fork) and max(digests(fork)) == 8


@pytest.mark.slow
def test_a_fork_of_a_copy_from_elsewhere_with_another_rate_has_its_prompts_and_says_what_it_changed(
    exact: Path, tmp_path: Path
) -> None:
    copy, runs = tmp_path / "other" / "copied", tmp_path / "runs"
    shutil.copytree(exact, copy)
    fork = Path(forked(copy, 4, "--set", "learner.lr=3e-3", "algorithm.entropy=0.0", runs=runs)["folder"])
    shutil.rmtree(copy)
    assert thread_run.train(fork).returncode == 0
    mine, its = digests(fork), digests(exact)
    assert [version for version in mine if mine[version] != its[version]] == [5, 6]
    assert prompts(fork) == prompts(exact)
    assert replay_case.succeeds(fork), "with its own configuration behind version 4, and the run's before"


@pytest.mark.slow
def test_a_fork_at_version_0_begins_anew(exact: Path, tmp_path: Path) -> None:
    fork = Path(forked(exact, 0, "--set", "updates=2", runs=tmp_path)["folder"])
    assert thread_run.train(fork).returncode == 0
    assert digests(fork) == {version: digests(exact)[version] for version in range(2)} | {2: digests(fork)[2]}


@pytest.mark.slow
@pytest.mark.parametrize("at", [3, 5])
def test_a_fork_of_a_run_with_lag_that_died_has_the_same_prompts_in_the_same_order(
    lagged: Path, tmp_path: Path, at: int
) -> None:
    """Batches come as samples end, so that a prompt may change its batch; later prompts are the same."""
    fork = Path(forked(lagged, at, runs=tmp_path)["folder"])
    with closing(Journal.open_run(fork)) as journal:
        counters, slots = journal.counters(), journal.slots()
    assert counters is not None and counters.version == at
    consumed = {one for batch in prompts(lagged)[:at] for one in batch}
    every = {divmod(number, 4) for number in range(counters.opened)}
    to_come = [(slot.identity.prompt, slot.identity.sample) for slot in slots]
    assert to_come == sorted(every - consumed) and not consumed - every
    assert thread_run.train(fork).returncode == 0
    mine, its = prompts(fork), prompts(lagged)
    assert mine[:at] == its[:at] and digests(fork)[at] == digests(lagged)[at]
    later = [one for batch in mine[at:] for one in batch]
    assert not consumed.intersection(later) and len(set(later)) == len(later)
    first = sorted(later)[: len(to_come)]
    assert first == to_come, "all of them, and none is trained on twice"
    assert replay_case.succeeds(fork)


@pytest.mark.slow
def test_at_lag_0_a_run_is_the_same_bits_whatever_the_number_of_actors(exact: Path, tmp_path: Path) -> None:
    for actors in (2, 3):
        run = thread_run.trained(tmp_path, f"rollout.actors={actors}", "rollout.in_flight=7", name=f"of-{actors}")
        for version in range(6):
            both = [archive.open(one).batch(version).trajectories for one in (run, exact)]
            mine, its = ([(one.identity, one.tokens, one.logprobs, one.reward) for one in batch] for batch in both)
            assert mine == its, (actors, version)
        assert digests(run) == digests(exact), actors


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("at", "options", "reason"),
    [
        (9, (), "version 9 was never made; the newest is 6"),
        (3, ("--set", "learner.lrr=1"), "learner.lrr"),
        (3, ("--set", "model.tiny.layers=3"), "a run keeps its model.tiny.layers"),
        (3, ("--set", "queue.samples_per_prompt=2"), "a fork keeps task.kind, queue.samples_per_prompt"),
        (3, ("--set", "updates=3"), "nothing is left to do: updates = 3"),
        (3, ("--name", "a/b"), "usable as the name of a folder"),
    ],
)
def test_what_no_fork_can_be_is_refused_in_a_sentence(
    exact: Path, tmp_path: Path, at: int, options: tuple[str, ...], reason: str
) -> None:
    assert reason in refused(exact, at, *options, runs=tmp_path)


def test_a_version_whose_batches_are_gone_or_damaged_is_refused_and_one_behind_a_damaged_checkpoint_is_made_again(
    exact: Path, tmp_path: Path
) -> None:
    copy, runs = tmp_path / "copied", tmp_path / "runs"
    shutil.copytree(exact, copy)
    (copy / "checkpoints" / "00000004" / "__0_0.distcp").write_bytes(b"damaged")
    told = forked(copy, 4, runs=runs)
    assert (told["begin"], told["remade"]) == (2, 2), "the checkpoint of 2 is whole"
    shutil.rmtree(runs)
    (copy / "archive" / "00000001.zarr.zip").write_bytes(b"damaged")
    assert "00000001.zarr.zip: damaged" in refused(copy, 2, runs=runs)
    (copy / "archive" / "00000001.zarr.zip").unlink()
    assert "00000001.zarr.zip: cannot be read" in refused(copy, 2, runs=runs)


def test_weights_of_another_version_are_no_fork(exact: Path, tmp_path: Path) -> None:
    copy, runs = tmp_path / "copied", tmp_path / "runs"
    shutil.copytree(exact, copy)
    journal = Journal(copy / "journal.sqlite")
    with journal._transaction() as db:
        db.execute(
            "update versions set row = (select row from versions where version = 3), checksum = (select "
            "checksum from versions where version = 3) where version = 4"
        )
    journal.close()
    done = refused(copy, 4, runs=runs)
    assert "Error" in done or "Diverged" in done


@pytest.mark.slow
def test_a_run_and_its_fork_are_compared_prompt_by_prompt_from_where_they_part(
    exact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fork = Path(forked(exact, 2, "--set", "learner.lr=5e-3", runs=tmp_path)["folder"])
    assert thread_run.train(fork).returncode == 0
    assert cli.main(["report", str(exact), str(fork), "--to", str(tmp_path / "page.html")]) == 0
    said = capsys.readouterr().out
    assert "math-at-2 minus math since version 2: reward " in said and "(2 standard errors, 16 prompts in pairs" in said
    page = (tmp_path / "page.html").read_text()
    assert "updates 3 to 6" in page and "updates 6 to 6" in page
    assert cli.main(["report", str(exact), str(fork), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)
    assert told["version"] == 2 and [row["pairs"] for row in told["rows"]] == [16, 4, 4, 4, 4]
    first, second = (rewards(run, range(2, 6)) for run in (exact, fork))
    assert first.keys() == second.keys()
    paired = [second[prompt] - first[prompt] for prompt in first]
    assert told["rows"][0]["difference"] == pytest.approx(statistics.fmean(paired))
    assert told["rows"][0]["error"] == pytest.approx(statistics.stdev(paired) / 4)
    found = streamppo.open(fork).difference(streamppo.open(exact))
    assert found and found.rows[0].difference == told["rows"][0]["difference"]
    # A fork of the fork parts from it later, and from the run where the fork did.
    again = Path(forked(fork, 4, "--set", "learner.lr=1e-2", runs=tmp_path)["folder"])
    configs = {run: configfile.load(run / configfile.CONFIG) for run in (exact, fork, again)}
    for other, version in ((fork, 4), (exact, 2)):
        assert pairs.common_version(other, again, (configs[other], configs[again])) == version
        assert pairs.common_version(again, other, (configs[again], configs[other])) == version


def rewards(run: Path, versions: Iterable[int]) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for version in versions:
        for one in archive.open(run).batch(version).trajectories:
            found.setdefault(one.identity.prompt, []).append(one.reward)
    return {prompt: statistics.fmean(some) for prompt, some in found.items()}
