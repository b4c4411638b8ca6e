"""`streamppo export`: the weights of any checkpoint, by transformers' own means, are those that were pushed."""

import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
from conftest import COUNTERS
from msgspec import structs
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from streamppo import cli
from streamppo.commands.models import weights
from streamppo.config import file as configfile
from streamppo.config.sections import Config
from streamppo.errors import CheckpointError
from streamppo.learner.checkpoint import manifest
from streamppo.learner.checkpoint.checkpoint import Saver, TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.model import optimizer, policy
from streamppo.learner.model.snapshot import snapshot
from streamppo.learner.update import Updater
from streamppo.queue.rules.records import Changes, PublishedVersion
from streamppo.queue.store.journal import Journal
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.weights import buckets
from streamppo.weights.pusher import PushedVersion

pytestmark = pytest.mark.usefixtures("alone")


def model_at(folder: Path, *, tied: bool) -> None:
    torch.manual_seed(5)
    Qwen2ForCausalLM(Qwen2Config(**case.SMALL, tie_word_embeddings=tied)).save_pretrained(folder)
    character_tokenizer("0123456789+=").save_pretrained(folder)


def checkpointed(run: Path, config: Config, versions: tuple[int, ...], digest: str | None = None) -> Updater:
    """A dead run with a checkpoint of each of `versions`, every one with weights of its own."""
    updater = case.updater(config, Path(config.model.path))
    updater.optimizer = optimizer.adamw(updater.policy, config)
    journal, saver = Journal(run / "journal.sqlite"), Saver(config.checkpoint)
    journal.fence()
    for version in versions:
        with torch.no_grad():
            for parameter in updater.policy.parameters():
                if parameter.requires_grad:
                    parameter.add_(0.125)
        whole = buckets.Buckets(policy.shards(updater.policy, config.model.dtype), config.learner.bucket_bytes)
        snapshot(updater.policy, whole.tensors)
        push = structs.replace(whole.push(version).push, frozen=policy.frozen(updater.policy, config.model.dtype))
        pushed = Future[PushedVersion]()
        pushed.set_result(PushedVersion(digest or push.digest, 0.0, 0))
        journal.write(Changes(COUNTERS), [PublishedVersion(version=version, digest=push.digest, archived=None)])
        state = CheckpointState(version=version, digest="", ranks=1, beta=0.0, bad_steps=(0, 0))
        saver.start(run / "checkpoints", state, TrainState(updater.policy, updater.optimizer, None), pushed)
    saver.wait()
    journal.close()
    configfile.save(config, run)
    return updater


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_what_is_exported_has_the_digest_that_the_journal_has_of_that_version(
    tmp_path: Path, dtype: str, tied: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model_at(tmp_path / "model", tied=tied)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    config = case.config_of(f"model.path={tmp_path / 'model'}", f"model.dtype={dtype}", "checkpoint.keep=9")
    checkpointed(run, config, (3, 5))
    for version, flags in ((3, ["--version", "3"]), (5, [])):
        out = tmp_path / "out" / str(version)
        assert cli.main(["export", str(run), *flags, "--to", str(out)]) == 0, capsys.readouterr().err
        lm = AutoModelForCausalLM.from_pretrained(out, dtype=getattr(torch, dtype))
        push, _ = buckets.pack_whole(version, dict(lm.named_parameters()), config.learner.bucket_bytes)
        assert push.digest == Journal.open_run(run).versions()[version].digest
        assert AutoTokenizer.from_pretrained(out)("1+1=")["input_ids"]
        assert list(out.glob("*.safetensors"))


def test_adapters_are_exported_merged_or_alone_as_peft_loads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_at(tmp_path / "model", tied=True)
    run, out, alone = tmp_path / "run", tmp_path / "out", tmp_path / "alone"
    (run / "checkpoints").mkdir(parents=True)
    config = case.config_of(f"model.path={tmp_path / 'model'}", "model.lora={rank=3, alpha=4}")
    checkpointed(run, config, (3,))
    assert cli.main(["export", str(run), "--to", str(out)]) == 0, capsys.readouterr().err
    assert cli.main(["export", str(run), "--to", str(alone), "--adapter"]) == 0, capsys.readouterr().err
    assert sorted(path.name for path in alone.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    tokens_1L = torch.arange(10)[None]
    first = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = first(tokens_1L).logits
    merged = AutoModelForCausalLM.from_pretrained(out)(tokens_1L).logits
    adapted = PeftModel.from_pretrained(first, alone)(tokens_1L).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-4, atol=1e-4)
    assert (adapted - before).abs().max() > 0.01


def test_a_run_without_adapters_has_none_to_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_at(tmp_path / "model", tied=True)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpointed(run, case.config_of(f"model.path={tmp_path / 'model'}"), (3,))
    assert cli.main(["export", str(run), "--to", str(tmp_path / "out"), "--adapter"]) == 2
    assert "was trained without model.lora" in capsys.readouterr().err


def test_a_folder_that_exists_is_refused_and_the_versions_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model_at(tmp_path / "model", tied=True)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpointed(run, case.config_of(f"model.path={tmp_path / 'model'}", "checkpoint.keep=9"), (3, 5), digest="other")
    out = tmp_path / "out"
    assert cli.main(["export", str(run), "--version", "4", "--to", str(out)]) == 1
    assert "no checkpoint of version 4; there are 3, 5" in capsys.readouterr().err
    assert cli.main(["export", str(run), "--to", str(out)]) == 1
    assert (
        "00000005: of another run: its weights are other, and version 5 of the journal has " in capsys.readouterr().err
    )
    assert not out.exists()
    out.mkdir()
    assert cli.main(["export", str(run), "--to", str(out)]) == 1
    assert f"{out}: already exists" in capsys.readouterr().err
    assert list(out.iterdir()) == []


@pytest.mark.parametrize("adapter", [(), ("--adapter",)])
def test_a_folder_at_the_temporary_name_is_not_deleted(
    tmp_path: Path, adapter: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    model_at(tmp_path / "model", tied=True)
    run, aside = tmp_path / "run", tmp_path / "out.tmp"
    (run / "checkpoints").mkdir(parents=True)
    checkpointed(run, case.config_of(f"model.path={tmp_path / 'model'}", "model.lora={rank=3, alpha=4}"), (3,))
    aside.mkdir()
    (aside / "notes.txt").write_text("mine")
    assert cli.main(["export", str(run), "--to", str(tmp_path / "out"), *adapter]) == 1
    assert "is where out is written until it is complete, and exists" in capsys.readouterr().err
    assert (aside / "notes.txt").read_text() == "mine"


def test_a_copy_of_a_run_never_gets_the_weights_of_the_first_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both have the address of the first one, which has continued: version 5 there is not version 5 of the copy."""
    model_at(tmp_path / "model", tied=True)
    config = case.config_of(f"model.path={tmp_path / 'model'}", "checkpoint.keep=9")
    for name, versions in (("first", (1, 3, 5)), ("copy", (3, 5))):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        checkpointed(tmp_path / name, config, versions)
        (tmp_path / name / "remote.address").write_text(f"file://{tmp_path}/first/checkpoints")
    copy = tmp_path / "copy"
    shutil.rmtree(copy / "checkpoints" / "00000005")
    assert cli.main(["export", str(copy), "--version", "5", "--to", str(tmp_path / "out")]) == 1
    assert "no checkpoint of version 5; there are 3" in capsys.readouterr().err
    shutil.copytree(tmp_path / "first" / "checkpoints" / "00000005", copy / "checkpoints" / "00000005")
    assert cli.main(["export", str(copy), "--version", "5", "--to", str(tmp_path / "out")]) == 1
    assert "00000005: of another run: its weights are " in capsys.readouterr().err
    assert cli.main(["export", str(copy), "--to", str(tmp_path / "out")]) == 0, "the newest of its own"
    assert "version 3, weights " in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["a file", "a part of a file", "the manifest", "all but the manifest", "all"])
def test_what_a_disk_lacks_of_a_checkpoint_comes_from_the_runs_address(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    """With disks of their own, a node has the manifest and the files of its own ranks."""
    model_at(tmp_path / "model", tied=True)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpointed(run, case.config_of(f"model.path={tmp_path / 'model'}"), (3,))
    path = run / "checkpoints" / "00000003"
    shutil.copytree(run / "checkpoints", tmp_path / "address")
    files = [file for file in path.iterdir() if file.name != manifest.MANIFEST]
    assert len(files) > 1
    match lost:
        case "a file":
            files[0].unlink()
        case "a part of a file":
            files[0].write_bytes(files[0].read_bytes()[:-1])
        case "the manifest":
            (path / manifest.MANIFEST).unlink()
        case "all but the manifest":
            for file in files:
                file.unlink()
        case _:
            shutil.rmtree(path)
    export = ["export", str(run), "--version", "3", "--to"]
    assert cli.main([*export, str(tmp_path / "none")]) == 1, "nothing on this disk can replace it"
    (run / "remote.address").write_text(f"file://{tmp_path}/address")
    assert cli.main([*export, str(tmp_path / "out")]) == 0, capsys.readouterr().err
    assert list((tmp_path / "out").glob("*.safetensors"))
    assert sorted(file.name for file in path.iterdir()) == sorted(
        file.name for file in (tmp_path / "address" / "00000003").iterdir()
    )


def test_weights_get_out_though_the_journal_cannot_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model_at(tmp_path / "model", tied=True)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    checkpointed(run, case.config_of(f"model.path={tmp_path / 'model'}"), (3,))
    (run / "journal.sqlite").write_bytes(b"damaged")
    assert cli.main(["export", str(run), "--to", str(tmp_path / "out")]) == 0
    assert "the weights are compared only with their checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("version", [None, 5])
def test_a_checkpoint_that_the_run_deletes_while_it_is_read_is_replaced_by_the_newest_or_said(
    version: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_at(tmp_path / "model", tied=True)
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    config = case.config_of(f"model.path={tmp_path / 'model'}", "checkpoint.keep=9")
    checkpointed(run, config, (5, 7))
    later = run / "checkpoints" / "00000007"
    later.rename(tmp_path / "later")
    load = weights.distcp.load

    def prune(*given: Any, **named: Any) -> None:
        """The run makes version 7 and deletes version 5, once."""
        if not later.exists():
            (tmp_path / "later").rename(later)
            manifest.drop(run / "checkpoints", 1, 0)
        load(*given, **named)

    monkeypatch.setattr(weights.distcp, "load", prune)
    if version is None:
        assert weights.checkpoint_weights(config, run, None).version == 7
    else:
        with pytest.raises(CheckpointError, match=r"00000005: the run deleted it meanwhile: it keeps the newest 9"):
            weights.checkpoint_weights(config, run, version)
