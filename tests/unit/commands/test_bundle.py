"""A bundle is one update in a file: replayed alone it gives the run's next version, and its tokens' numbers."""

import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import bundle_case
import numpy as np
import pytest
import ray
import replay_case
import thread_run
import torch
from msgspec import structs

import streamppo
from streamppo import cli
from streamppo.commands import versions
from streamppo.commands.bundle import file, make
from streamppo.commands.bundle.file import Bundle
from streamppo.config import file as configfile
from streamppo.errors import ConfigError
from streamppo.learner.batch.padded import pad
from streamppo.learner.checkpoint import checkpoint, distcp
from streamppo.learner.checkpoint.checkpoint import TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.model import optimizer
from streamppo.learner.update import Updater
from streamppo.queue.store import archive
from streamppo.queue.store.journal import Journal
from streamppo.telemetry import metrics_file
from streamppo.types import flags
from streamppo.weights.pusher import PushedVersion

TIMES = {"score_s", "train_s"}


@pytest.fixture(scope="module")
def run(exact: Path) -> Path:
    return exact


@pytest.fixture(scope="module")
def bundled(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its fifth update, which begins with a checkpoint."""
    to = tmp_path_factory.mktemp("bundled") / "math-5.safetensors"
    assert cli.main(["bundle", str(run), "--update", "5", "--to", str(to)]) == 0
    return to


@pytest.fixture
def synthetic(folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """A function from overrides to the file of a bundle without a run."""

    def write(*overrides: str) -> Path:
        file.write(tmp_path / "a.safetensors", bundle_case.bundle(folder, *overrides))
        return tmp_path / "a.safetensors"

    return write


def replayed(path: Path, capsys: pytest.CaptureFixture[str], *options: str) -> Any:
    capsys.readouterr()
    assert cli.main(["replay", str(path), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def columns(told: Any) -> dict[str, np.ndarray]:
    """The columns of a replay as arrays; null is NaN."""
    return {name: np.array([np.nan if one is None else one for one in some]) for name, some in told["tokens"].items()}


def failed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    assert cli.main([*words])
    told = capsys.readouterr()
    assert not told.out and "Traceback" not in told.err
    return told.err


def changed(path: Path, to: Path, change: Callable[[Bundle], Bundle]) -> Path:
    file.write(to, change(file.read(path)))
    return to


# --- the bits ------------------------------------------------------------------------------------------------


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("version", "remade"), [(1, 0), (4, 1), (5, 0)])
def test_the_update_of_a_file_makes_the_next_version_bit_for_bit(
    run: Path, tmp_path: Path, version: int, remade: int
) -> None:
    """From the first model, from a version that is replayed, and from a checkpoint."""
    told = bundle_case.made_again(run, version, tmp_path / "a.safetensors")
    assert told["update"] == version and told["run"] == "math"
    (line,) = (line for line in metrics_file.updates(run) if line["update"] == version)
    same = {name for name in told["metrics"].keys() - TIMES if line[name] == told["metrics"][name]}
    assert same == told["metrics"].keys() - TIMES, "the line of the run has these numbers"
    done = replay_case.command(
        *("streamppo", "bundle", str(run), "--update", str(version), "--to", str(tmp_path / "b"), "--json")
    )
    assert json.loads(done.stdout)["remade"] == remade
    assert (tmp_path / "b").read_bytes() == (tmp_path / "a.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b"], "nothing else is left"


def test_it_is_made_without_ray_and_the_last_line_says_so(
    run: Path, bundled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(bundled)]) == 0
    with closing(Journal.open_run(run)) as journal:
        digest = journal.versions()[5].digest
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"version 5 replayed bit for bit: its digest {digest[:12]} is that of the journal"
    assert not ray.is_initialized()


def saved_by_ranks(_: int, model: Path, to: Path) -> dict[str, torch.Tensor]:
    """Save the checkpoint of several ranks after an update; return the whole tensors that are trained."""
    one = trained(model, "learner.ranks=2")
    one.update(pad(bundle_case.case.batch()))
    saver, pushed = checkpoint.Saver(one.config.checkpoint), Future[PushedVersion]()
    pushed.set_result(PushedVersion("", 0.0, 0))
    state = CheckpointState(version=1, digest="", ranks=2, beta=0.0, bad_steps=(0, 0))
    saver.start(to, state, TrainState(one.policy, one.optimizer, None), pushed)
    saver.wait()
    return tensors_of(one)


def trained(model: Path, *overrides: str) -> Updater:
    one = bundle_case.case.updater(bundle_case.case.config_of("learner.lr=0.01", *overrides), model)
    one.optimizer = optimizer.adamw(one.policy, one.config)
    return one


def tensors_of(one: Updater) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for name, parameter in one.policy.named_parameters():
        found[f"policy.{name}"] = bundle_case.case.full(parameter).clone()
        for kind, moment in one.optimizer.state[parameter].items():
            found[f"optimizer.{name}.{kind}"] = bundle_case.case.full(moment).clone()
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
def test_the_tensors_of_two_ranks_are_whole_in_a_bundle(folder: Path, tmp_path: Path) -> None:
    expected = bundle_case.case.by_ranks(saved_by_ranks, 2, tmp_path, folder, tmp_path / "checkpoints")
    path = tmp_path / "checkpoints" / "00000001"
    stored = distcp.empty_tensors(path)
    distcp.load(stored, path, alone=True)
    named = {new: stored[old] for old in stored if (new := make._name(old))}
    one = trained(folder)
    checkpoint.restore(TrainState(one.policy, one.optimizer, None), named)
    found = tensors_of(one)
    assert found.keys() == expected.keys() and "rng" in named
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert any(expected[name].any() for name in expected if name.endswith("exp_avg"))


def test_a_change_makes_another_version_and_is_named(bundled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = replayed(bundled, capsys, "--set", "learner.lr=0.01", "algorithm.entropy=0.5")
    assert not told["same"] and told["differences"] == ["--set learner.lr=0.01 algorithm.entropy=0.5"]
    assert told["metrics"]["lr"] != replayed(bundled, capsys)["metrics"]["lr"]
    assert "learner.lrr" in failed(capsys, "replay", str(bundled), "--set", "learner.lrr=1")


def test_what_its_bits_depend_on_is_named_if_they_are_others(
    bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(found: Bundle) -> Bundle:
        software = {**found.facts.software, "torch": "1.0"}
        state = structs.replace(found.facts.state, ranks=2)
        facts = structs.replace(found.facts, digest="0" * 64, software=software, state=state, gpu=True, exact=False)
        return found._replace(facts=facts)

    path = changed(bundled, tmp_path / "a", other)
    assert cli.main(["replay", str(path)]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    for reason in ("summed over 2 ranks in the run", "a GPU", "learner.exact = false", "torch 1.0 in the run, "):
        assert reason in last and "recorded 000000000000" in last
    unknown = changed(
        bundled, tmp_path / "b", lambda found: found._replace(facts=structs.replace(found.facts, digest="0" * 64))
    )
    assert cli.main(["replay", str(unknown)]) == 1
    assert "Diverged" in capsys.readouterr().err


# --- the numbers ---------------------------------------------------------------------------------------------


def test_the_numbers_of_a_token_are_those_of_the_archive_and_of_their_definitions(
    run: Path, bundled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = columns(replayed(bundled, capsys))
    batch, record = archive.open(run).batch_and_record(4)
    lengths = [one.num_tokens for one in batch.trajectories]
    assert found["row"].tolist() == np.repeat(range(len(lengths)), lengths).tolist()
    for name, kept in {"advantage": "advantages", "value": "values"}.items():
        assert np.array_equal(found[name].astype(np.float32), np.concatenate(record[kept])), name
    passed = ~np.isnan(found["logprob"])
    ratio = np.exp(found["logprob"] - found["proximal"])[passed]
    sampled = np.concatenate([flags(one.mask) for one in batch.trajectories])[passed]
    assert ratio[sampled] == pytest.approx(found["ratio"][passed][sampled])
    assert found["reward"].sum() == pytest.approx(sum(one.reward for one in batch.trajectories))
    assert "".join(found["text"][found["row"] == 0]).startswith(tuple("0123456789+= "))


def test_tokens_that_are_left_out_name_the_rule(
    synthetic: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = synthetic("algorithm.correction={kind='mask', band=[0.5, 2.0]}", "algorithm.filters=[{kind='truncated'}]")
    told = replayed(path, capsys)
    found, metrics, batch = columns(told), told["metrics"], pad(file.read(path).batch)
    dropped = found["dropped"].tolist()
    assert dropped.count("not sampled") == int(batch.length_B.sum() - batch.mask_BT.sum())
    assert dropped.count("too old") == metrics["tokens_too_old"]
    kept = [name == "" for name in dropped]
    assert sum(kept) and all(weight > 0 for weight in found["weight"][kept])
    named = {name for some in dropped for name in some.split(", ")}
    assert named == {"", "not sampled", "too old", "rejected_mask", "filtered_truncated"}
    out = ~((found["weight"] >= 0.5) & (found["weight"] <= 2)) & (found["weight"] == 0)
    assert all(out[["rejected_mask" in name for name in dropped]])


def test_each_pass_over_a_row_is_shown_with_its_own_ratio(
    synthetic: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    path = synthetic("learner.epochs=3", "learner.minibatches=2")
    found = columns(replayed(path, capsys, "--rows", "5"))
    assert set(found["row"]) == {5} and set(found["pass"]) == {0, 1, 2}
    first, last = (found["ratio"][found["pass"] == number] for number in (0, 2))
    assert not np.array_equal(first, last)
    cli.main(["replay", str(path), "--rows", "5"])
    assert "\npass  position " in capsys.readouterr().out


def test_rows_are_chosen_and_shown(bundled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(bundled), "--rows", "3", "7"]) == 0
    told = capsys.readouterr().out
    assert "row 3: prompt " in told and "row 7: prompt " in told and "row 0: " not in told
    assert "the file has rows 0 to 15" in failed(capsys, "replay", str(bundled), "--rows", "16")


def test_a_bundle_of_some_rows_is_another_update_and_says_so(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = tmp_path / "a.safetensors"
    assert cli.main(["bundle", str(run), "--update", "5", "--to", str(to), "--rows", "9", "3"]) == 0
    told = replayed(to, capsys)
    assert not told["same"] and told["recorded"] == "" and "2 of the batch's 16 rows" in told["differences"]
    assert cli.main(["replay", str(to), "--rows", "1"]) == 0
    assert "row 1, row 9 of the batch: prompt " in capsys.readouterr().out
    assert [one.identity for one in file.read(to).batch.trajectories] == [
        archive.open(run).batch(4).trajectories[row].identity for row in (3, 9)
    ]


def test_the_debugger_stops_where_the_update_begins(
    bundled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["p len(batch.reward_B)", "continue"])
    monkeypatch.setattr("builtins.input", lambda *_: next(answers))
    assert cli.main(["replay", str(bundled), "--pdb"]) == 0
    told = capsys.readouterr().out
    assert "learner/update.py" in told and "\n16\n" in told and "bit for bit" in told


def test_an_operation_that_is_not_exact_ends_the_update_with_the_setting(
    bundled: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Updater, "backward", lambda *_, **__: torch.zeros(2).put_(torch.tensor([0]), torch.ones(1)))
    torch.use_deterministic_algorithms(True)
    try:
        assert cli.main(["replay", str(bundled)]) == 1
    finally:
        torch.use_deterministic_algorithms(False)
    assert re.search(r"put_ has no .*set learner\.exact = false", capsys.readouterr().err)


# --- the file ------------------------------------------------------------------------------------------------


def test_nothing_of_the_maker_is_in_the_file_but_what_the_update_needs(run: Path, bundled: Path) -> None:
    content = bundled.read_bytes()
    assert str(run.parent).encode() not in content
    config = file.read(bundled).config
    assert "max_lag = 0" in config and "in_flight = 16" not in config


def test_sizes_are_said(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    to = tmp_path / "a.safetensors"
    assert cli.main(["bundle", str(run), "--update", "5", "--to", str(to), "--json"]) == 0
    told = capsys.readouterr()
    sizes = json.loads(told.out)["bytes"]
    assert "MiB besides the batch: policy 0." in told.err
    assert sizes["optimizer"] > 2 * sizes["policy"] - 100 and sum(sizes.values()) < to.stat().st_size


@pytest.mark.slow
def test_adapters_alone_take_their_model_from_elsewhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, to = thread_run.trained(tmp_path, "model.lora={rank=4}", "learner.lr=5e-3"), tmp_path / "a.safetensors"
    assert cli.main(["bundle", str(run), "--update", "5", "--to", str(to), "--adapter"]) == 0
    assert not file.read(to).part("model")
    assert "--set model.path=FOLDER" in failed(capsys, "replay", str(to))
    told = replayed(to, capsys, "--set", f"model.path={run / 'model'}")
    assert told["digest"] == told["recorded"]
    other = thread_run.trained(tmp_path, "seed=7", "updates=1", name="other")
    assert "not those of version 4" in failed(capsys, "replay", str(to), "--set", f"model.path={other / 'model'}")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--update", "7"), "version 7 was never made"),
        (("--update", "9"), "version 8 was never made"),
        (("--update", "5", "--rows", "16"), "the batch has rows 0 to 15"),
        (("--update", "5", "--adapter"), "--adapter is for a run with model.lora"),
        (("--update", "5", "--to", "/nowhere/a"), "/nowhere: no such folder"),
    ],
)
def test_what_no_bundle_can_be_is_refused_in_a_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    assert reason in failed(capsys, "bundle", str(run), *options)


def test_a_file_at_the_temporary_name_is_not_deleted(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept.bundle.tmp").write_text("mine")
    said = failed(capsys, "bundle", str(run), "--update", "5", "--to", str(tmp_path / "kept.bundle"))
    assert "is where kept.bundle is written until it is complete, and exists" in said
    assert (tmp_path / "kept.bundle.tmp").read_text() == "mine"


def test_a_file_that_is_there_is_not_replaced(
    run: Path, bundled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "already exists" in failed(capsys, "bundle", str(run), "--update", "5", "--to", str(bundled))
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    assert "already exists" in failed(capsys, "bundle", str(run), "--update", "5", "--to", str(tmp_path / "link"))


def test_a_batch_that_is_lost_is_refused(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = shutil.copytree(run, tmp_path / "copy")
    archive.open(copy).path(4).unlink()
    assert "00000004.zarr.zip: cannot be read" in failed(capsys, "bundle", str(copy), "--update", "5")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("algorithm.critic.model=MODEL",), "algorithm.critic.model is"),
        (("algorithm.teacher={model='MODEL', weight=0.1}",), "algorithm.teacher.model is"),
    ],
)
def test_a_second_model_is_refused_by_name(run: Path, overrides: tuple[str, ...], reason: str, tmp_path: Path) -> None:
    past = versions.read_past(run, 4)
    changes = [change.replace("MODEL", str(run / "model")) for change in overrides]
    config = configfile.change(past.history.at(4), ["algorithm.advantage={kind='gae'}", *changes])
    past = past._replace(history=structs.replace(past.history, configs={0: config}))
    with pytest.raises(ConfigError, match=reason):
        make._refuse(past, 5, tmp_path / "a", adapter=False)


def test_options_of_the_other_kind_of_replay_are_refused(
    run: Path, bundled: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "are for the file of a bundle" in failed(capsys, "replay", str(run), "--rows", "3")
    assert "--to is for the folder of a run" in failed(capsys, "replay", str(bundled), "--to", "3")


# --- in Python -----------------------------------------------------------------------------------------------


def test_python_gets_arrays(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_case.start_by_fork(monkeypatch)
    made = streamppo.bundle(run, 5, tmp_path / "a.safetensors")
    found = streamppo.replay(made, [1, 2])
    assert found.same and found.digest == found.recorded and not found.differences
    tokens = found.tokens
    assert set(tokens["row"].tolist()) == {1, 2} and len({len(column) for column in tokens.values()}) == 1
    assert tokens["ratio"].dtype == tokens["behavior"].dtype == np.float32 and tokens["clipped"].dtype == np.bool_
    assert found.metrics["grad_norm"] > 0
    with pytest.raises(ConfigError, match="rows 0 to 15"):
        streamppo.replay(made, [99])
