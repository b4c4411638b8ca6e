"""Every rank publishes its own shards: together they are the policy, whatever the number of ranks."""

from pathlib import Path

import learner_case as case
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.learner.model import load_policy
from streamppo.learner.model import policy as model
from streamppo.learner.model.snapshot import snapshot
from streamppo.types import Push
from streamppo.weights.buckets import Buckets
from streamppo.weights.content import check
from streamppo.weights.replica import Replica
from streamppo.weights.shares import join

RANKS = (1, 3)
SETTINGS = Qwen2Config(**case.SMALL | {"intermediate_size": 50}, tie_word_embeddings=True)
"""No number of ranks divides all of its widths, and a bias of 16 has one row for each of some."""
STEP = 1e-3


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(5)
    Qwen2ForCausalLM(SETTINGS).save_pretrained(tmp_path / "model")
    return tmp_path


def pushes(ranks: int, path: str, dtype: str, layer_by_layer: bool) -> dict[str, object]:
    """On rank 0: the tensors and the digest of two versions, whose second comes as a delta where that pays."""
    if layer_by_layer:
        load_policy.SHARD_LAYERS_ABOVE = 0
    config = case.config_of(f"model.dtype={dtype}").model
    policy = load_policy.load(config, path, 1.0, init_device_mesh("cpu", (ranks,)))
    sets = [Buckets(model.shards(policy, dtype), 3000) for _ in range(2)]
    replica, found = Replica(), dict[str, object]()
    for version in (0, 1):
        snapshot(policy, sets[version].tensors)
        mine = sets[version].push(version, sets[0] if version else None, rank=dist.get_rank(), ranks=ranks)
        # All ranks gather, whether they send something or not.
        everybody: list[object] = [None] * ranks
        dist.all_gather_object(everybody, (mine.push, mine.arrays))
        gathered = model.gather_weights(policy, dtype)
        if dist.get_rank() == 0:
            parts = [one for one in everybody if isinstance(one, tuple)]
            push: Push = join([part for part, _ in parts])
            replica.take(push, [array for _, arrays in parts for array in arrays])
            check(replica.contents, gathered.items())
            assert all(torch.equal(replica.tensors[name], tensor) for name, tensor in gathered.items())
            assert list(replica.tensors) == list(gathered) and "lm_head.weight" not in gathered
            deltas = sum(piece.is_delta for piece in push.pieces)
            found |= {f"digest {version}": push.digest, f"deltas {version}": deltas}
        with torch.no_grad():
            for name, parameter in policy.lm.named_parameters():
                if "embed" in name:
                    parameter.mul_(1 + STEP)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "layer_by_layer"), [("float32", False), ("bfloat16", True)])
def test_shares_of_any_number_of_ranks_are_the_policy_with_one_digest(
    folder: Path, dtype: str, layer_by_layer: bool
) -> None:
    made = [case.by_ranks(pushes, ranks, folder, str(folder / "model"), dtype, layer_by_layer) for ranks in RANKS]
    for version in (0, 1):
        assert len({one[f"digest {version}"] for one in made}) == 1
    assert made[0]["digest 0"] != made[0]["digest 1"]
    assert all(one["deltas 0"] == 0 < one["deltas 1"] for one in made), "only the embedding has changed"
