"""Models of 32 to 235 billion parameters, laid out over 64 ranks without memory: a rank has what `check` says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import learner_case as case
import pytest
import torch.distributed as dist
from conftest import MATH
from torch.distributed.checkpoint.default_planner import create_default_local_save_plan
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import Qwen2Config, Qwen3MoeConfig

from streamppo.commands.checks import memory_estimate
from streamppo.config import file as configfile
from streamppo.learner import device, memory
from streamppo.learner.model import load_policy, policy
from streamppo.learner.parallel import context_parallel, tensor_parallel
from streamppo.weights.buckets import Buckets

RANKS = 64
LARGE: dict[str, tuple[float, Any]] = {
    "Qwen2.5-32B": (
        32.8e9,
        Qwen2Config(
            hidden_size=5120,
            intermediate_size=27648,
            num_hidden_layers=64,
            num_attention_heads=40,
            num_key_value_heads=8,
            vocab_size=152064,
        ),
    ),
    "Qwen2.5-72B": (
        72.7e9,
        Qwen2Config(
            hidden_size=8192,
            intermediate_size=29568,
            num_hidden_layers=80,
            num_attention_heads=64,
            num_key_value_heads=8,
            vocab_size=152064,
        ),
    ),
    "Qwen3-235B-A22B": (
        235.1e9,
        Qwen3MoeConfig(
            hidden_size=4096,
            num_hidden_layers=94,
            num_attention_heads=64,
            num_key_value_heads=4,
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=1536,
            vocab_size=151936,
        ),
    ),
}


@pytest.fixture
def first_of_many() -> Iterator[None]:
    """Rank 0 of 64, whose collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    yield
    dist.destroy_process_group()


def test_the_table_of_the_documentation_is_what_check_says() -> None:
    text = (MATH.parent.parent / "docs" / "scaling.md").read_text()
    rows = re.findall(r"^\| (`learner.mesh=.*`) \| (.*) \|$", text, re.MULTILINE)
    assert len(rows) == 4
    for settings, numbers in rows:
        options = [f"learner.ranks={RANKS}", "model.dtype=bfloat16", "model.gradient_checkpointing=full"]
        config = configfile.load(MATH, [*options, *re.findall("`(.*?)`", settings)])
        _, model = LARGE["Qwen3-235B-A22B"]
        model.tie_word_embeddings = False
        said = memory.rank(config, memory.sizes(model, config.model), longest=16384)
        parts = said.state, said.gathered, said.activations, max(said.head, said.layer), said.total
        assert numbers.split(" | ") == [f"{part / 2**30:.1f}" for part in parts], settings


def parts_of(weight: Any) -> int:
    """The number of ranks that have a part each of what FSDP2 gathers."""
    mesh = weight.device_mesh
    return mesh[tensor_parallel.PART].size() if tensor_parallel.PART in (mesh.mesh_dim_names or ()) else 1


@pytest.mark.slow
@pytest.mark.usefixtures("first_of_many")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, mesh) for name in LARGE for mesh in ("replicate = 1", "replicate = 8")),
        pytest.param("Qwen2.5-72B", "tensor = 8", marks=case.CUTS),
        pytest.param("Qwen2.5-72B", "replicate = 2, tensor = 4, context = 2", marks=case.CUTS),
        pytest.param("Qwen3-235B-A22B", "expert = 8", marks=case.CUTS),
        pytest.param("Qwen3-235B-A22B", "replicate = 2, expert = 16, tensor = 4", marks=case.CUTS),
    ],
)
def test_bytes_of_a_rank_its_push_and_its_checkpoint_are_those_of_check(tmp_path: Path, name: str, mesh: str) -> None:
    parameters, settings = LARGE[name]
    settings.tie_word_embeddings = False
    settings.architectures = [f"{type(settings).__name__.removesuffix('Config')}ForCausalLM"]
    settings.save_pretrained(tmp_path)
    config = configfile.load(MATH, [f"learner.ranks={RANKS}", f"learner.mesh={{{mesh}}}", "model.dtype=bfloat16"])
    copies, slices = config.learner.mesh.replicate, context_parallel.slices_of("cpu", config.learner.mesh)
    ranks = device.mesh_of("cpu", config.learner.mesh)
    made = load_policy.shard_without_weights(config.model, tmp_path, ranks, "head", "sdpa", slices=slices)
    assert sum(one.numel() for one in made.lm.parameters()) == pytest.approx(parameters, rel=2e-3)

    said = memory.sizes(settings, config.model)
    own = sum(policy.local(one).numel() for one in made.parameters())
    state = memory.MASTER + memory.GRADIENT + memory.MOMENTS
    assert own * state == pytest.approx(memory.rank(config, said, longest=64).state, rel=1e-3)

    gathered = said.rest + 2 * sum(one.numel() // parts_of(one) for one in made.lm.base_model.layers[0].parameters())
    reduced = max(said.rest, (gathered - said.rest) // 2)
    counted = memory.rank(config, said, longest=64).gathered
    assert 2 * 2 * gathered + memory.MASTER * reduced == pytest.approx(counted, rel=1e-3)

    buckets = Buckets(policy.shards(made, "bfloat16"), config.learner.bucket_bytes)
    pushed = sum(array.nbytes for array in buckets.arrays)
    assert pushed * RANKS / copies == pytest.approx(
        memory_estimate.object_store(said) / memory_estimate.VERSIONS, rel=1e-3
    )

    plan = create_default_local_save_plan(made.state_dict(), is_coordinator=True)
    chunks = [item.tensor_data.chunk.sizes.numel() for item in plan.items if item.tensor_data is not None]
    assert sum(chunks) == pytest.approx(own, rel=1e-6)
