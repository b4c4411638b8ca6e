"""The restored state of a checkpoint, whatever runs beside its writing, and the report of a failed one."""

import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, filesystem, state_dict_saver
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo import durable
from streamppo.algorithms.exploration import Bonus
from streamppo.errors import CheckpointError
from streamppo.learner import device
from streamppo.learner.batch.padded import pad
from streamppo.learner.checkpoint import checkpoint, manifest
from streamppo.learner.checkpoint.checkpoint import Saver, TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState
from streamppo.learner.checkpoint.remote import CheckpointStore
from streamppo.learner.model import optimizer
from streamppo.learner.objective.adaptation import UpdaterState
from streamppo.learner.update import Updater
from streamppo.weights.pusher import PushedVersion

ALONE = pytest.mark.usefixtures("alone")


def pushed(digest: str = "") -> Future[PushedVersion]:
    """A finished push."""
    done = Future[PushedVersion]()
    done.set_result(PushedVersion(digest, 0.0, 0))
    return done


def saver_of(updater: Updater) -> Saver:
    return Saver(updater.config.checkpoint)


def trained(updater: Updater) -> TrainState:
    return TrainState(updater.policy, updater.optimizer, updater.reference)


def state_of(updater: Updater, version: int = 1) -> CheckpointState:
    ranks = dist.get_world_size()
    kept = {
        "beta": updater.beta,
        "bad_steps": updater.state.bad_steps,
        "bonus": updater.state.bonus,
    }
    kept["reference_moved"] = updater.reference_moved
    return CheckpointState(version=version, digest="", ranks=ranks, **kept)  # pyright: ignore[reportArgumentType]


def started(saver: Saver, updater: Updater, folder: Path, version: int = 1) -> None:
    saver.start(folder, state_of(updater, version), trained(updater), pushed())


def adamw(config: Any, folder: Path) -> Updater:
    """With an optimizer that has a memory."""
    updater = case.updater(config, folder)
    updater.optimizer = optimizer.adamw(updater.policy, config)
    return updater


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set no byte of a checkpoint is written."""
    opened, save = threading.Event(), state_dict_saver.save

    def held(*arguments: Any, **words: Any) -> Any:
        assert opened.wait(60)
        return save(*arguments, **words)

    monkeypatch.setattr(state_dict_saver, "save", held)
    yield opened
    opened.set()


# --- what comes back -----------------------------------------------------------------------------------------


def carried_over(one: Updater, two: Updater, folder: Path) -> CheckpointState:
    """Save `one` as version 1 and load it into `two`."""
    saver = saver_of(one)
    started(saver, one, folder)
    saver.wait()
    return checkpoint.load(folder / "00000001", trained(two))


@ALONE
def test_a_checkpoint_brings_back_weights_optimizer_and_what_updates_hand_on(folder: Path, tmp_path: Path) -> None:
    bonus = ("algorithm.entropy=0.1", "algorithm.entropy_control.target=9")
    config = case.config_of("algorithm.kl.reward_beta=0.1", "algorithm.kl.target=0.001", "learner.lr=0.01", *bonus)
    one, two = (case.updater(config, folder) for _ in range(2))
    case.metrics(one, pad(case.batch()))
    one.bad_steps, one.critic_bad_steps = 2, 1
    state = carried_over(one, two, tmp_path)
    assert (state.version, state.beta, state.bad_steps) == (1, one.beta, (2, 1))
    assert one.beta != 0.1
    assert state.bonus is not None
    two.restore(UpdaterState(state.beta, state.bad_steps, Bonus(*state.bonus)))
    assert two.state.bad_steps == (2, 1)
    assert two.bonus == one.bonus == pytest.approx((0.105, 0.105))
    one.update(pad(case.batch(seed=1)))
    two.update(pad(case.batch(seed=1)))
    assert two.beta == one.beta
    expected = case.whole(one.policy)
    assert all(torch.equal(expected[name], tensor) for name, tensor in case.whole(two.policy).items())


@ALONE
def test_ranks_wait_for_a_checkpoint_as_long_as_for_a_model(folder: Path) -> None:
    group = saver_of(case.updater(case.config_of(), folder))._group
    assert group._get_backend(torch.device("cpu")).options._timeout == device.LOAD


@ALONE
def test_an_embedding_that_is_also_the_head_is_stored_once(tmp_path: Path) -> None:
    sizes = {**case.SMALL, "max_position_embeddings": 64, "tie_word_embeddings": True}
    Qwen2ForCausalLM(Qwen2Config(**sizes)).save_pretrained(tmp_path / "model")
    config = case.config_of(f"model.path={tmp_path / 'model'}", "learner.lr=0.01")
    one, two = (adamw(config, tmp_path / "model") for _ in range(2))
    one.update(pad(case.batch()))
    carried_over(one, two, tmp_path)
    stored = FileSystemReader(tmp_path / "00000001").read_metadata().state_dict_metadata
    assert "policy.lm.model.embed_tokens.weight" in stored
    assert not [name for name in stored if "lm_head" in name]
    for updater in (one, two):
        updater.update(pad(case.batch(seed=1)))
    expected, lm = case.whole(one.policy), two.policy.lm
    assert all(torch.equal(expected[name], tensor) for name, tensor in case.whole(two.policy).items())
    assert lm.lm_head.weight is lm.model.embed_tokens.weight


@ALONE
def test_settings_are_those_of_the_configuration_and_not_of_the_checkpoint(folder: Path, tmp_path: Path) -> None:
    changes = ["learner.lr=0.5", "algorithm.critic.lr=0.7", "learner.betas=[0.5, 0.6]", "learner.weight_decay=0.3"]
    one, two = (case.updater(case.config_of(*some), folder) for some in ([], changes))
    for updater in (one, two):
        updater.optimizer = optimizer.adamw(updater.policy, updater.config)
    carried_over(one, two, tmp_path)
    optimizer.configure(two.optimizer, two.config)
    settings = [
        (group["full_lr"], tuple(group["betas"]), group["weight_decay"]) for group in two.optimizer.param_groups
    ]
    assert settings == [(0.5, (0.5, 0.6), 0.3), (0.7, (0.5, 0.6), 0.3)]


@ALONE
@pytest.mark.parametrize(
    ("change", "beta"),
    [
        ([], 0.1),
        (["algorithm.kl.target=0.5"], 0.7),
        (["algorithm.kl.reward_beta=0.2"], 0.2),
    ],
    ids=["fixed", "adapted", "changed"],
)
def test_only_a_beta_that_adapts_itself_goes_on_from_where_it_was(folder: Path, change: list[str], beta: float) -> None:
    updater = case.updater(case.config_of("algorithm.kl.reward_beta=0.1", *change), folder)
    updater.restore(UpdaterState(0.7))
    assert updater.beta == beta
    updater.restore(UpdaterState(0.0))
    assert updater.beta == beta, "a penalty that was off before begins as the configuration says"
    fixed = case.updater(case.config_of("algorithm.kl.reward_beta=0.3"), folder)
    updater.restore(fixed.state)
    assert updater.beta == beta, "and so does one that did not adapt"


@pytest.mark.sampled(2)
@ALONE
@pytest.mark.parametrize(
    "choices",
    [[], ["algorithm.advantage.kind=rloo"], ["algorithm.critic.model=policy", "algorithm.critic.warmup_updates=9"]],
    ids=["all learn", "no critic", "the policy stands still"],
)
def test_a_checkpoint_is_whole_whatever_has_not_learned_yet(folder: Path, tmp_path: Path, choices: list[str]) -> None:
    one, two = (case.updater(case.config_of(*choices), folder) for _ in range(2))
    for updater in (one, two):
        updater.optimizer = optimizer.adamw(updater.policy, updater.config)
    one.update(pad(case.batch()))
    carried_over(one, two, tmp_path)
    for updater in (one, two):
        updater.update(pad(case.batch(version=30, min_version=28)))
    expected = case.whole(one.policy)
    assert all(torch.equal(expected[name], tensor) for name, tensor in case.whole(two.policy).items())


@ALONE
def test_moments_made_at_the_start_are_those_made_at_the_first_gradient(folder: Path) -> None:
    one, two = (case.updater(case.config_of("learner.minibatches=3"), folder) for _ in range(2))
    one.optimizer, learner = optimizer.adamw(one.policy, one.config), one.config.learner
    two.optimizer = torch.optim.AdamW(two.policy.parameters(), learner.lr, learner.betas, weight_decay=0.0, fused=True)
    for updater in (one, two):
        updater.update(pad(case.batch()))
    expected = case.whole(two.policy)
    assert all(torch.equal(expected[name], tensor) for name, tensor in case.whole(one.policy).items())


@ALONE
def test_a_rank_on_a_cpu_asks_no_gpu_that_it_sees_for_random_numbers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> torch.Tensor:
        raise AssertionError("opens a context on a GPU")

    updater = adamw(case.config_of(), folder)
    with monkeypatch.context() as seen:
        seen.setattr(torch.cuda, "is_available", lambda: True)
        seen.setattr(torch.cuda, "get_rng_state", refused)
        saved = checkpoint._tensors(trained(updater), state_of(updater, 1))
    assert list(saved["own"]["rank-0"]["rng"]) == ["cpu"]


@ALONE
def test_the_writer_of_a_checkpoint_waits_for_no_gpu(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("waits for all that the GPU has to do")

    updater = adamw(case.config_of(), folder)
    saver = saver_of(updater)
    monkeypatch.setattr(filesystem, "_OverlappingCpuLoader", refused)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    started(saver, updater, tmp_path)
    saver.wait()
    assert (tmp_path / "00000001").is_dir()


@ALONE
def test_what_is_saved_is_the_state_at_the_call_though_updates_run_before_it_is_written(
    folder: Path, tmp_path: Path, gate: threading.Event
) -> None:
    config = case.config_of("learner.lr=0.01")
    one, two = adamw(config, folder), adamw(config, folder)
    saver = saver_of(one)
    one.update(pad(case.batch()))
    two.update(pad(case.batch()))
    expected, drawn = case.whole(one.policy), torch.get_rng_state()
    started(saver, one, tmp_path)
    torch.rand(3)
    one.update(pad(case.batch(seed=1)))
    later = case.whole(one.policy)
    gate.set()
    saver.wait()
    assert any(not torch.equal(expected[name], tensor) for name, tensor in later.items())
    checkpoint.load(tmp_path / "00000001", trained(one))
    assert torch.equal(torch.get_rng_state(), drawn)
    for name, tensor in case.whole(one.policy).items():
        assert torch.equal(expected[name], tensor), name
    # The optimizer's moments too: the next update is the one that the other learner makes.
    one.update(pad(case.batch(seed=2)))
    two.update(pad(case.batch(seed=2)))
    expected = case.whole(two.policy)
    assert all(torch.equal(expected[name], tensor) for name, tensor in case.whole(one.policy).items())


# --- beside training -----------------------------------------------------------------------------------------


@ALONE
def test_one_checkpoint_at_a_time_and_none_is_left_out(
    folder: Path, tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[str] = []
    get, settle = checkpoint.get_state_dict, durable.settle
    monkeypatch.setattr(checkpoint, "get_state_dict", lambda *some: (happened.append("copied"), get(*some))[1])
    monkeypatch.setattr(durable, "settle", lambda path: (happened.append(path.name), settle(path)))
    updater = case.updater(case.config_of(), folder)
    saver = saver_of(updater)
    started(saver, updater, tmp_path, 1)
    threading.Timer(0.3, gate.set).start()
    started(saver, updater, tmp_path, 2)
    started(saver, updater, tmp_path, 2)
    saver.wait()
    names = [what for what in happened if what != manifest.MANIFEST]
    assert names == ["copied", "00000001", "copied", "00000002"]
    assert [path.name for path in manifest.complete(tmp_path)] == ["00000001", "00000002"]


@ALONE
def test_a_checkpoint_counts_only_when_its_version_is_published(folder: Path, tmp_path: Path) -> None:
    updater, push = case.updater(case.config_of(), folder), Future[PushedVersion]()
    saver = saver_of(updater)
    saver.start(tmp_path, state_of(updater), trained(updater), push)
    dist.barrier()
    saver.check()
    assert manifest.complete(tmp_path) == []
    push.set_result(PushedVersion("its digest", 1.0, 0))
    saver.wait()
    assert manifest.verify(tmp_path / "00000001", 0).digest == "its digest"


@ALONE
@pytest.mark.parametrize("ask", [Saver.wait, Saver.check], ids=["wait", "check"])
def test_a_checkpoint_that_cannot_be_written_is_told_with_its_reason(
    folder: Path, tmp_path: Path, ask: Callable[[Saver], None]
) -> None:
    updater = case.updater(case.config_of(), folder)
    saver, there = saver_of(updater), tmp_path / "checkpoints"
    there.write_text("in the way")
    started(saver, updater, there)
    saver._thread.shutdown()
    with pytest.raises(CheckpointError, match=r"checkpoints/00000001: cannot be written: .*(exists|Not a directory)"):
        ask(saver)


def _rank(rank: int, ranks: int, store: Path, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    with case.group(rank, ranks, store):
        updater = case.updater(case.config_of(f"learner.ranks={ranks}"), folder)
        saver, push = saver_of(updater), Future[PushedVersion]()
        torch.manual_seed(rank)
        # Rank 0 alone waits for the push before it gives the name; the others ask again in the meantime.
        threading.Timer(1.0, push.set_result, [PushedVersion("", 0.0, 0)]).start()
        for _ in range(2):
            saver.start(out, state_of(updater), trained(updater), push)
        drawn = torch.rand(4)
        saver.wait()
        dist.barrier()
        checkpoint.load(out / "00000001", trained(updater))
        assert torch.equal(torch.rand(4), drawn), "another rank's random numbers"
        (out / f"rank-{rank}").touch()


def test_every_rank_gets_its_own_random_numbers_and_nobody_saves_alone(folder: Path, tmp_path: Path) -> None:
    context, out = case.processes(), tmp_path / "checkpoints"
    workers = [
        context.Process(target=_rank, args=(rank, 2, tmp_path / "store", folder, out), daemon=True) for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert [(out / f"rank-{rank}").exists() for rank in range(2)] == [True, True]


def _apart(rank: int, ranks: int, store: Path, folder: Path, out: Path) -> None:
    """Rank `rank` of two that have a disk each."""
    torch.set_num_threads(1)
    own = out / f"disk-{rank}" / "checkpoints"
    with case.group(rank, ranks, store):
        updater = case.updater(case.config_of(f"learner.ranks={ranks}"), folder)
        saver = saver_of(updater)
        for version in (1, 2):
            saver.start(own, state_of(updater, version), trained(updater), pushed("its digest"))
        saver.wait()
        dist.barrier()
        loaded = checkpoint.load_newest(own / "00000002", trained(updater))
        assert loaded is not None and (loaded.version, loaded.digest) == (2, "its digest")
        if rank == 1:
            file = own / "00000002" / "__1_0.distcp"
            file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
        dist.barrier()
        loaded = checkpoint.load_newest(own / "00000002", trained(updater))
        assert loaded is not None and loaded.version == 1
        assert [path.name for path in sorted(own.iterdir())] == ["00000001", "00000002.damaged"]
        if rank == 1:
            (own / "00000001" / "__1_0.distcp").unlink()
        dist.barrier()
        with pytest.raises(
            CheckpointError, match=r"disk-1/checkpoints/00000001/__1_0.distcp: missing on the disk of rank 1"
        ):
            checkpoint.load_newest(own / "00000001", trained(updater))
        assert (own / "00000001").is_dir()
        (out / f"done-{rank}").touch()


@pytest.mark.slow
def test_ranks_with_a_disk_each_write_verify_and_miss_files_of_their_own(folder: Path, tmp_path: Path) -> None:
    assert _done_by_two(_apart, folder, tmp_path) == [True, True]


def _done_by_two(function: Callable[[int, int, Path, Path, Path], None], folder: Path, tmp_path: Path) -> list[bool]:
    """True for each of two ranks whose `function` has ended."""
    context, out = case.processes(), tmp_path / "disks"
    workers = [
        context.Process(target=function, args=(rank, 2, tmp_path / "store", folder, out), daemon=True)
        for rank in range(2)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    return [(out / f"done-{rank}").exists() for rank in range(2)]


def _copied(rank: int, ranks: int, store: Path, folder: Path, out: Path) -> None:
    """Rank `rank` of two that have a disk each, and copies at one address; the second disk is lost."""
    torch.set_num_threads(1)
    own, address = out / f"disk-{rank}" / "checkpoints", f"file://{out}/copies"
    with case.group(rank, ranks, store):
        config = case.config_of(f"learner.ranks={ranks}", f"checkpoint.remote={address}")
        updater = adamw(config, folder)
        saver = saver_of(updater)
        for version in (1, 2):
            case.metrics(updater, pad(case.batch(seed=version)))
            started(saver, updater, own, version)
        saver.settle()
        dist.barrier()
        expected = case.whole(updater.policy)
        if rank == 1:
            shutil.rmtree(own)
        else:
            (own / "00000002" / "__0_0.distcp").write_bytes(b"damaged")
        dist.barrier()
        other = adamw(config, folder)
        with pytest.raises(CheckpointError):
            checkpoint.load(own / "00000002", trained(other))
        loaded = checkpoint.load_newest(own / "00000002", trained(other), address)
        assert loaded is not None and loaded.version == 2
        assert all(torch.equal(expected[name], tensor) for name, tensor in case.whole(other.policy).items())
        # An empty disk.
        dist.barrier()
        shutil.rmtree(own)
        dist.barrier()
        loaded = checkpoint.load_newest(own / "00000002", trained(other), address)
        assert loaded is not None and loaded.version == 2
        (out / f"done-{rank}").touch()


@pytest.mark.slow
def test_ranks_fetch_what_their_disks_have_lost_from_the_copies(folder: Path, tmp_path: Path) -> None:
    assert _done_by_two(_copied, folder, tmp_path) == [True, True]


@ALONE
def test_a_checkpoint_that_comes_while_another_is_copied_is_left_out_unless_it_is_the_last(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, put = threading.Event(), CheckpointStore.put

    def held(self: CheckpointStore, name: str, files: Any) -> None:
        assert opened.wait(60)
        put(self, name, files)

    monkeypatch.setattr(CheckpointStore, "put", held)
    updater = case.updater(case.config_of(f"checkpoint.remote=file://{tmp_path}/copies"), folder)
    saver = saver_of(updater)
    for version in (1, 2, 3):
        started(saver, updater, tmp_path / "checkpoints", version)
    saver.wait()
    assert [path.name for path in manifest.complete(tmp_path / "checkpoints")] == ["00000002", "00000003"]
    opened.set()
    saver.settle()
    assert CheckpointStore(f"file://{tmp_path}/copies").versions() == [1, 3]
