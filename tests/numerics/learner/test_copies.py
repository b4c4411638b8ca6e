"""Several copies of a sharded model (FSDP2's hybrid sharding): the update of one rank, one push, one checkpoint."""

from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch
import torch.distributed as dist
from msgspec import structs
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from streamppo.errors import ConfigError
from streamppo.learner import device
from streamppo.learner.batch.padded import pad
from streamppo.learner.checkpoint import checkpoint
from streamppo.learner.checkpoint.checkpoint import Saver, TrainState
from streamppo.learner.checkpoint.manifest import CheckpointState, DamagedFile
from streamppo.learner.model import load_policy, optimizer
from streamppo.learner.model import policy as model
from streamppo.learner.model.snapshot import snapshot
from streamppo.learner.update import Updater
from streamppo.weights.buckets import Buckets, pack_whole
from streamppo.weights.pusher import PushedVersion
from streamppo.weights.shares import join

RANKS, COPIES = 4, 2
DONE = Future[PushedVersion]()
DONE.set_result(PushedVersion("", 0.0, 0))


def made(ranks: int, folder: Path, out: Path) -> dict[str, Any]:
    """An update, its push, and what a checkpoint of it brings back; with four ranks in two copies."""
    load_policy.SHARD_LAYERS_ABOVE = 0
    overrides = [f"learner.ranks={ranks}", f"learner.mesh.replicate={COPIES if ranks > 1 else 1}", "learner.lr=0.01"]
    updater = case.updater(case.config_of(*overrides, "learner.micro_batch_tokens=40"), folder)
    with counted() as counts:
        metrics = case.metrics(updater, pad(case.batch()))
    found: dict[str, Any] = {"weights": case.whole(updater.policy), "metrics": metrics, "counts": dict(counts)}
    found["parts"] = sum(isinstance(module, FSDPModule) for module in updater.policy.modules())
    buckets = Buckets(model.shards(updater.policy, "bfloat16"), 3000)
    snapshot(updater.policy, buckets.tensors)
    pushes: list[Any] = [None] * ranks
    dist.all_gather_object(pushes, buckets.push(1, rank=dist.get_rank(), ranks=ranks).push)
    gathered = model.gather_weights(updater.policy, "bfloat16")
    found["digests"] = [join(pushes).digest, pack_whole(1, gathered, 3000).push.digest if gathered else ""]
    found["bytes"] = [sum(one.bucket_bytes) for one in pushes]
    if ranks > 1:
        found |= checkpointed(updater, out)
    return found | {"adapters": adapters(ranks, folder, overrides)}


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Count backward passes, and FSDP's sums over copies."""
    counts, all_reduce, backward = Counter[str](), dist.all_reduce, Updater.backward

    def add_up(*arguments: Any, **named: Any) -> Any:
        counts["sums"] += "group" in named
        return all_reduce(*arguments, **named)

    def passed_back(*arguments: Any, **named: Any) -> None:
        counts["passes"] += 1
        backward(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", add_up)
        patch.setattr(Updater, "backward", passed_back)
        yield counts


def adapters(ranks: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """An update of adapters: their weights, and the hashes of the frozen weights that go along with a push."""
    updater = case.updater(case.config_of(*overrides, "model.lora.rank=2"), folder)
    case.metrics(updater, pad(case.batch()))
    buckets = Buckets(model.shards(updater.policy, "float32"), 3000)
    snapshot(updater.policy, buckets.tensors)
    mine = buckets.push(1, rank=dist.get_rank(), ranks=ranks).push
    pushes: list[Any] = [None] * ranks
    dist.all_gather_object(pushes, structs.replace(mine, frozen=model.frozen(updater.policy, "bfloat16")))
    whole = join(pushes)
    trained = {name: tensor for name, tensor in case.whole(updater.policy).items() if "lora" in name}
    return {"trained": trained, "frozen": [one.content for one in whole.frozen], "tensors": len(whole.tensors)}


def checkpointed(updater: Any, out: Path) -> dict[str, Any]:
    """Save with moments, train on, go back and train on again; then damage a file that only the first copy wrote."""
    updater.optimizer = optimizer.adamw(updater.policy, updater.config)
    case.metrics(updater, pad(case.batch(seed=1)))
    trained = TrainState(updater.policy, updater.optimizer, None)
    saver = Saver(updater.config.checkpoint)
    saver.start(out, CheckpointState(version=1, digest="", ranks=RANKS, beta=0.0, bad_steps=(0, 0)), trained, DONE)
    saver.wait()
    dist.barrier()
    after = list[Mapping[str, torch.Tensor]]()
    for _ in range(2):
        checkpoint.load(out / "00000001", trained)
        case.metrics(updater, pad(case.batch(seed=2)))
        after.append(case.whole(updater.policy))
    same = all(torch.equal(tensor, after[1][name]) for name, tensor in after[0].items())
    sizes = [sum(path.stat().st_size for path in (out / "00000001").glob(f"__{rank}_*")) for rank in range(RANKS)]
    dist.barrier()
    if dist.get_rank() == 1:
        file = out / "00000001" / "__1_0.distcp"
        file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    dist.barrier()
    refused: list[bool] = [False] * RANKS
    try:
        checkpoint.load(out / "00000001", trained)
    except DamagedFile as error:
        dist.all_gather_object(refused, "__1_0.distcp: damaged" in str(error))
    return {"same": same, "sizes": sizes, "refused": refused}


@pytest.mark.slow
def test_two_copies_of_two_shards_make_the_update_the_push_and_the_checkpoint_of_one_rank(
    folder: Path, tmp_path: Path
) -> None:
    of_one, of_four = (case.by_ranks(made, ranks, tmp_path, folder, tmp_path / "checkpoints") for ranks in (1, RANKS))
    case.assert_same((of_one["weights"], of_one["metrics"]), (of_four["weights"], of_four["metrics"]))
    assert of_four["digests"][0] == of_four["digests"][1], "what was pushed is the whole policy, once"
    counts = of_four["counts"]
    assert counts["passes"] > 1 and counts["sums"] == of_four["parts"], "copies add up their gradients once a step"
    # The first copy publishes and saves; what the others save is their random numbers.
    assert sum(of_four["bytes"][:COPIES]) >= sum(of_one["bytes"]) > 0 and of_four["bytes"][COPIES:] == [0, 0]
    assert of_four["same"] and min(of_four["sizes"][:COPIES]) > 3 * max(of_four["sizes"][COPIES:]) > 0
    one, four = of_one["adapters"], of_four["adapters"]
    case.assert_same_weights(one["trained"], four["trained"])
    assert four["frozen"] == one["frozen"] and four["tensors"] == one["tensors"] == len(one["trained"]) > 0
    assert of_four["refused"] == [True] * RANKS, "the other copy reads these shards too"


@pytest.mark.usefixtures("alone")
def test_without_copies_the_mesh_is_all_ranks_in_a_row() -> None:
    assert device.mesh_of("cpu", case.config_of().learner.mesh) == init_device_mesh("cpu", (1,))


def test_copies_divide_the_ranks() -> None:
    with pytest.raises(ConfigError, match=r"learner.mesh.replicate \(2\) must divide learner.ranks \(3\)"):
        case.config_of("learner.ranks=3", "learner.mesh.replicate=2")
