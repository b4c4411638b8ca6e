"""SGLang's weights are compared with each push; this SGLang is a dozen lines."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import MixtralConfig, Qwen3MoeConfig

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import verify_weights
from streamppo.rollout.sglang.verify_weights import held_name, tensors_of_rank
from streamppo.rollout.weight_checks import Architecture

SHAPE: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
}
MODELS = [
    Qwen3MoeConfig(**SHAPE, moe_intermediate_size=4, num_experts=2, num_experts_per_tok=1),
    MixtralConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1),
]
Tensors = Mapping[str, Tensor]


class Checked:
    """An SGLang with a weights checker; `load` takes each tensor that it knows, but for `lost`, and skips all others.

    The checker raises if it `fails`; `ranks` share the model.
    """

    capacity = 4

    def __init__(self, known: Tensors, ranks: int = 1, *, fails: bool = False) -> None:
        self.fails, self.ranks = fails, ranks
        self.held = {held_name(name): {name: 0.0} for name in known}
        for name in known:
            self.held[held_name(name)][name] = 0.0
        self.lost = ""

    def load(self, tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            held = self.held.get(held_name(name), {})
            if name in held and name != self.lost:
                held[name] = float(tensor.double().sum())

    async def call(self, name: str, /, **fields: object) -> Any:
        assert name == "weights_checker"
        if self.fails:
            raise ValueError("not here")
        if fields["action"] == "checksum":
            sums = {name: str(sorted(parts.items())) for name, parts in self.held.items()}
            return [{"checksums": sums}] * self.ranks
        self.held = {name: dict.fromkeys(parts, -1.5) for name, parts in self.held.items()}

    async def abort(self, rid: str) -> None: ...

    async def death(self) -> str:
        return ""

    async def stop(self) -> None: ...


async def loaded(link: Any, tensors: Tensors) -> verify_weights.Attestation:
    attestation = verify_weights.Attestation(link)
    await attestation.begin()
    await swap(link, attestation, tensors)
    return attestation


async def swap(link: Checked, attestation: verify_weights.Attestation, tensors: Tensors) -> None:
    link.load(tensors)
    await attestation.check(tensors)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 30))


@pytest.fixture(params=MODELS, ids=lambda config: config.model_type)
def architecture(request: pytest.FixtureRequest) -> Architecture:
    return Architecture(request.param)


@pytest.fixture
def first(architecture: Architecture) -> dict[str, Tensor]:
    return {name: torch.full(shape, 1.0) for name, shape in architecture.shapes.items()}


def test_experts_under_the_names_of_files_are_all_taken(architecture: Architecture, first: dict[str, Tensor]) -> None:
    saved = architecture.as_saved(first)
    assert any(".experts.1." in name for name in saved)
    run(loaded(Checked(saved), saved))


def test_experts_under_names_that_the_engine_skips_are_an_error_by_name(
    architecture: Architecture, first: dict[str, Tensor]
) -> None:
    link = Checked(architecture.as_saved(first))
    with pytest.raises(WeightsError, match=r"has not loaded \S+experts.w13_weight \(by its checksum; [46] tensors"):
        run(loaded(link, first))


def test_a_tensor_that_a_later_push_loses_is_an_error_by_name(
    architecture: Architecture, first: dict[str, Tensor]
) -> None:
    saved = architecture.as_saved(first)
    lost = next(name for name in saved if name.endswith("norm.weight"))

    async def case() -> None:
        link = Checked(saved, ranks=2)
        attestation = await loaded(link, saved)
        # What did not change need not move.
        await swap(link, attestation, saved)
        link.lost = lost
        await swap(link, attestation, {name: tensor + (name != lost) for name, tensor in saved.items()})
        with pytest.raises(WeightsError, match=rf"has not loaded {lost} .*1 tensors are wrong"):
            await swap(link, attestation, {name: tensor + 2 for name, tensor in saved.items()})

    run(case())


def test_a_tensor_that_moved_to_other_bytes_than_were_pushed_is_an_error_where_its_checksum_is_known(
    architecture: Architecture, first: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = architecture.as_saved(first)
    strange = "lm_head.weight"

    def known(tensors: Tensors) -> dict[str, str]:
        """The sums of `Checked`, but for one tensor with an unknown layout."""
        sums: dict[str, dict[str, float]] = {}
        for name, tensor in tensors.items():
            sums.setdefault(held_name(name), {})[name] = float(tensor.double().sum())
        return {name: str(sorted(parts.items())) for name, parts in sums.items()} | {strange: "?"}

    monkeypatch.setattr(verify_weights, "_expected_checksums", known)

    async def case(damaged: str) -> None:
        link = Checked(saved)
        attestation = await loaded(link, saved)
        assert set(attestation.exact) == link.held.keys() - {strange}
        later = {name: tensor + 1 for name, tensor in saved.items()}
        await swap(link, attestation, later)
        last = {name: tensor + 2 for name, tensor in saved.items()}
        link.load({**last, damaged: last[damaged] + 1})
        await attestation.check(last)

    with pytest.raises(WeightsError, match=r"has not loaded \S*layers\.0\.\S*k_proj"):
        run(case("model.layers.0.self_attn.k_proj.weight"))
    # Of a tensor in an unknown layout, only whether it has moved can be seen.
    run(case(strange))


def test_nothing_is_hashed_for_an_engine_whose_checksum_is_another_function(
    architecture: Architecture, first: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    saved, hashed = architecture.as_saved(first), list[str]()

    def known(tensors: Tensors) -> dict[str, str]:
        """Checksums as of a CPU, where `Checked` has others, as on a GPU."""
        hashed.extend(tensors)
        return {held_name(name): "of a CPU" for name in tensors}

    monkeypatch.setattr(verify_weights, "_expected_checksums", known)

    async def case() -> None:
        link = Checked(saved)
        attestation = await loaded(link, saved)
        assert attestation.exact == set()
        asked = {held_name(name) for name in hashed}
        assert len(asked) == verify_weights.SMALLEST and "lm_head.weight" not in asked
        hashed.clear()
        await swap(link, attestation, {name: tensor + 1 for name, tensor in saved.items()})
        assert hashed == []
        link.lost = "lm_head.weight"
        with pytest.raises(WeightsError, match=r"has not loaded lm_head\.weight"):
            await swap(link, attestation, {name: tensor + 2 for name, tensor in saved.items()})

    run(case())


def test_an_engine_whose_checker_fails_is_refused_with_its_reason(
    architecture: Architecture, first: dict[str, Tensor]
) -> None:
    saved = architecture.as_saved(first)
    with pytest.raises(WeightsError, match=r"weights checker, which verifies each load, fails: not here"):
        run(loaded(Checked(saved, fails=True), saved))


# --- SGLang's layout -----------------------------------------------------------------------------------------

AT = "model.layers.0."


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.qkv_proj.weight"),
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_up_proj.weight"),
        ("model.layers.1.mlp.experts.12.up_proj.weight", "model.layers.1.mlp.experts.w13_weight"),
        ("model.layers.1.mlp.experts.3.down_proj.weight", "model.layers.1.mlp.experts.w2_weight"),
        ("model.layers.1.block_sparse_moe.experts.0.w3.weight", "model.layers.1.block_sparse_moe.experts.w13_weight"),
        ("model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gate.weight"),
        ("model.norm.weight", "model.norm.weight"),
    ],
)
def test_tensors_are_found_behind_the_names_of_those_that_they_are_part_of(name: str, whole: str) -> None:
    assert held_name(name) == whole


def rows(*values: float) -> torch.Tensor:
    return torch.tensor([[value, value] for value in values])


def test_parts_lie_in_sglangs_order_whatever_their_order_in_files() -> None:
    made = dict(
        tensors_of_rank(
            {
                f"{AT}mlp.up_proj.weight": rows(5, 6),
                f"{AT}self_attn.v_proj.bias": torch.tensor([3.0]),
                f"{AT}self_attn.k_proj.weight": rows(3),
                f"{AT}mlp.gate_proj.weight": rows(7, 8),
                f"{AT}self_attn.q_proj.weight": rows(1, 2),
                f"{AT}self_attn.v_proj.weight": rows(4),
                f"{AT}self_attn.q_proj.bias": torch.tensor([1.0]),
                f"{AT}self_attn.k_proj.bias": torch.tensor([2.0]),
                "model.norm.weight": torch.ones(2),
            }
        )
    )
    assert {name: one.flatten().tolist() for name, one in made.items()} == {
        f"{AT}mlp.gate_up_proj.weight": [7, 7, 8, 8, 5, 5, 6, 6],
        f"{AT}self_attn.qkv_proj.bias": [1, 2, 3],
        f"{AT}self_attn.qkv_proj.weight": [1, 1, 2, 2, 3, 3, 4, 4],
        "model.norm.weight": [1, 1],
    }


def test_experts_stand_side_by_side_in_the_order_of_their_numbers() -> None:
    for gate, up, down in (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")):
        tensors = {f"{AT}mlp.experts.{n}.{down}.weight": rows(n).T for n in (10, 2)}
        tensors |= {f"{AT}mlp.experts.{n}.{up}.weight": rows(n + 0.5) for n in (10, 2)}
        tensors |= {f"{AT}mlp.experts.{n}.{gate}.weight": rows(n) for n in (10, 2)}
        made = dict(tensors_of_rank(tensors))
        assert made[f"{AT}mlp.experts.w13_weight"].tolist() == [[[2, 2], [2.5, 2.5]], [[10, 10], [10.5, 10.5]]]
        assert made[f"{AT}mlp.experts.w2_weight"].shape == (2, 2, 1)
