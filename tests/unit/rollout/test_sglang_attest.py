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

    `means` is all that its checker is capable of, `ranks` how many share the model.
    """

    version = (0, 5, 21)
    capacity = 4

    def __init__(self, known: Tensors, means: str, ranks: int = 1) -> None:
        self.means, self.ranks = means, ranks
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
        if name != "weights_checker" or not self.means:
            raise NotImplementedError(name)
        match fields["action"]:
            case "checksum" if self.means == "checksums":
                sums = {name: str(sorted(parts.items())) for name, parts in self.held.items()}
                return [{"checksums": sums}] * self.ranks
            case "reset_tensors":
                self.held = {name: dict.fromkeys(parts, -1.5) for name, parts in self.held.items()}
            case _:
                raise ValueError("not here")

    async def abort(self, rid: str) -> None: ...

    async def death(self) -> str:
        return ""

    async def stop(self) -> None: ...


async def loaded(link: Checked, tensors: Tensors) -> verify_weights.Attestation:
    attestation = await verify_weights.begin(link, tensors, 16)
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


MEANS = pytest.mark.parametrize("means", ["checksums"])


@MEANS
def test_experts_under_the_names_of_files_are_all_taken(
    architecture: Architecture, first: dict[str, Tensor], means: str
) -> None:
    saved = architecture.as_saved(first)
    assert any(".experts.1." in name for name in saved)
    attestation = run(loaded(Checked(saved, means), saved))
    assert attestation.method == means


@MEANS
def test_experts_under_names_that_the_engine_skips_are_an_error_by_name(
    architecture: Architecture, first: dict[str, Tensor], means: str
) -> None:
    link = Checked(architecture.as_saved(first), means)
    with pytest.raises(
        WeightsError, match=rf"has not loaded \S+experts.w13_weight \(compared by {means}, [46] are wrong"
    ):
        run(loaded(link, first))


@MEANS
def test_a_tensor_that_a_later_push_loses_is_an_error_by_name(
    architecture: Architecture, first: dict[str, Tensor], means: str
) -> None:
    saved = architecture.as_saved(first)
    lost = next(name for name in saved if name.endswith("norm.weight"))

    async def case() -> None:
        link = Checked(saved, means, ranks=2 if means == "checksums" else 1)
        attestation = await loaded(link, saved)
        # What did not change need not move.
        await swap(link, attestation, saved)
        link.lost = lost
        await swap(link, attestation, {name: tensor + (name != lost) for name, tensor in saved.items()})
        with pytest.raises(WeightsError, match=rf"has not loaded {lost} .*1 are wrong"):
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
        link = Checked(saved, "checksums")
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
        link = Checked(saved, "checksums")
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


def test_a_mixture_of_experts_is_refused_by_an_engine_that_cannot_show_its_tensors(
    architecture: Architecture, first: dict[str, Tensor]
) -> None:
    saved = architecture.as_saved(first)
    with pytest.raises(WeightsError, match=r"gives no checksums.*a load of \S+\.experts\.0\."):
        run(loaded(Checked(saved, ""), saved))


# --- by values -----------------------------------------------------------------------------------------------


class Valued(Checked):
    """An SGLang on a CPU: no checker, but the values of its tensors, but for those of `unreadable` ones."""

    def __init__(self, unreadable: str = "") -> None:
        super().__init__({}, "")
        self.values: dict[str, Tensor] = {}
        self.unreadable, self.asked = unreadable, 0

    def load(self, tensors: Tensors) -> None:
        self.values |= {name: tensor.clone() for name, tensor in tensors.items() if name != self.lost}

    async def call(self, name: str, /, **fields: Any) -> Any:
        if name == "generate":
            token = float(sum(tensor.double().sum() for tensor in self.values.values()))
            return {"meta_info": {"input_token_logprobs": [[None], [token]]}}
        if name != "get_weights_by_name":
            raise NotImplementedError(name)
        self.asked += 1
        wanted, rows = fields["name"], fields["truncate_size"]
        return None if wanted == self.unreadable else self.values[wanted][:rows].tolist()


DENSE = {f"layers.{number}.weight": (20, 3) for number in range(40)}


def of_version(number: float) -> dict[str, Tensor]:
    return {name: torch.full(shape, number) + torch.rand(shape) for name, shape in DENSE.items()}


@pytest.mark.parametrize("lost", ["layers.0.weight", "layers.17.weight", "layers.39.weight"])
def test_without_checksums_every_tensor_is_read_back_and_a_lost_one_is_named(lost: str) -> None:
    async def case() -> None:
        link: Any = Valued()
        attestation = await loaded(link, of_version(0))
        assert (attestation.method, link.asked) == ("values", len(DENSE))
        link.lost = lost
        with pytest.raises(WeightsError, match=f"has not loaded {lost} .compared by values, 1 are wrong"):
            await swap(link, attestation, of_version(1))

    run(case())


def test_of_a_small_model_every_value_is_read_back_and_of_a_large_one_the_first_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def case(row: int) -> None:
        link: Any = Valued()
        attestation = await loaded(link, of_version(0))
        changed = of_version(1)
        link.load(changed)
        link.values["layers.5.weight"][row, 1] += 1
        await attestation.check(changed)

    with pytest.raises(WeightsError, match=r"layers.5.weight"):
        run(case(row=19))
    monkeypatch.setattr(verify_weights, "SMALL", 10)
    with pytest.raises(WeightsError, match=r"layers.5.weight"):
        run(case(row=verify_weights.ROWS - 1))
    run(case(row=verify_weights.ROWS))


def test_where_a_single_tensor_cannot_be_read_log_probs_say_that_nothing_has_moved() -> None:
    async def case() -> None:
        link: Any = Valued(unreadable="layers.3.weight")
        attestation = await loaded(link, of_version(0))
        assert attestation.method == "log-probs"
        await swap(link, attestation, of_version(1))
        with pytest.raises(WeightsError, match=r"compared by log-probs, 40 are wrong"):
            await attestation.check(of_version(2))

    run(case())


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
