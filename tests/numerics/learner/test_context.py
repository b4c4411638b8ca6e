"""A context without gradient: the same scores, and gradients without the paths through its keys and values."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_flash
import learner_case as case
import pytest
import torch
from fake_flash import Call
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode
from transformers import AttentionInterface, Qwen2Config, Qwen2ForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from streamppo.errors import ModelError
from streamppo.learner.attention import attention, layers
from streamppo.learner.attention.layers import Checkpointing
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import hf_files, load_policy
from streamppo.learner.model.policy import Policy, PolicyOutput

DETACHED = "queue.segments={prefix='detached'}"
COLUMNS = ("logprobs_BT", "entropy_BT", "values_BT", "bootstrap_B")
ROWS = pad(case.batch())
"""Rows whose prompts have 1 to 5 tokens: of some, nothing at all is without gradient."""
Gradients = dict[str, torch.Tensor]


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return fake_flash.install(monkeypatch)


def policy(
    folder: Path,
    prefix: Any,
    *,
    implementation: str = "sdpa",
    critic: str = "head",
    share_prompts: bool = False,
    checkpointing: Checkpointing = "off",
) -> Policy:
    torch.manual_seed(9)
    own = hf_files.critic(critic, folder, implementation).transformer
    layout = attention.layout(implementation)
    lm = hf_files.read(folder, implementation)
    made = Policy(lm, 0.7, own, layout=layout)
    made.share_prompts = share_prompts
    torch.nn.init.normal_(made.value_head.weight, std=0.2)
    for transformer in (made.lm.base_model, *([] if own is None else [own])):
        layers.checkpoint_activations(transformer, checkpointing)
    made.set_context(prefix)
    return made


def loss(scored: PolicyOutput, lengths: torch.Tensor) -> torch.Tensor:
    """A sum in which every number of a row weighs another amount, the same in every batch that the row is in."""
    total = scored.bootstrap_B.sum() * 0.7
    for at, name in enumerate(COLUMNS[:3]):
        for row, length in enumerate(lengths.tolist()):
            weights = torch.linspace(0.5, 1.5 + at, length)
            total = total + (getattr(scored, name)[row, :length] * weights).sum()
    return total


def gradients(made: Policy, rows: PaddedBatch = ROWS) -> Gradients:
    loss(made(rows, "both"), rows.length_B).backward()
    return {name: one.grad for name, one in made.named_parameters() if one.grad is not None}


def assert_close(one: Gradients, other: Gradients, share: float = 1e-5) -> None:
    assert one.keys() == other.keys()
    for name, gradient in other.items():
        torch.testing.assert_close(one[name], gradient, rtol=0, atol=share * gradient.abs().max().item(), msg=name)


LAYOUTS: list[dict[str, Any]] = [{}, {"share_prompts": True}, {"implementation": "flash_attention_2"}]
"""Padded rows, equal contexts as one row, rows end to end."""


@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("critic", ["head", "policy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_the_same_with_gradient_and_without(folder: Path, layout: dict[str, Any], critic: str) -> None:
    expected = policy(folder, "attached", critic=critic)(ROWS, "both")
    found = policy(folder, "detached", critic=critic, **layout)(ROWS, "both")
    for name in COLUMNS:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-5, msg=name)


# --- against a computation by hand -----------------------------------------------------------------------------


@pytest.fixture
def detached_to(request: pytest.FixtureRequest) -> Iterator[Callable[[int], None]]:
    """The attention "by_hand": rows as a whole, with the keys and values of the first so many tokens detached."""
    count = 0

    def choose(number: int) -> None:
        nonlocal count
        count = number

    def attend(module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, **named: Any) -> Any:
        k, v = (torch.cat([x[:, :, :count].detach(), x[:, :, count:]], 2) for x in (k, v))
        return sdpa_attention_forward(module, q, k, v, mask, **named)

    AttentionInterface.register("by_hand", attend)
    yield choose
    del AttentionInterface._global_mapping["by_hand"]


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("flash")
@pytest.mark.parametrize("critic", ["head", "policy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_are_those_by_hand_with_keys_and_values_detached(
    folder: Path, detached_to: Callable[[int], None], layout: dict[str, Any], critic: str
) -> None:
    by_hand = policy(folder, "attached", implementation="by_hand", critic=critic)
    expected: Gradients = {}
    for row in range(len(ROWS.start_B)):
        one = ROWS.select(torch.tensor([row]))
        detached_to(int(one.start_B) - 1)
        expected = gradients(by_hand, one)
    found = gradients(policy(folder, "detached", critic=critic, **layout))
    assert_close(found, expected)
    attached = gradients(policy(folder, "attached", critic=critic))
    name = "lm.model.layers.0.self_attn.v_proj.weight"
    assert (attached[name] - expected[name]).abs().max() > 0.05 * expected[name].abs().max()


@pytest.mark.parametrize("checkpointing", ["offloaded", "full"])
def test_layers_that_are_computed_again_find_the_same_keys_and_values(
    folder: Path, checkpointing: Checkpointing
) -> None:
    expected = gradients(policy(folder, "detached", critic="policy"))
    assert_close(gradients(policy(folder, "detached", critic="policy", checkpointing=checkpointing)), expected)


def test_flash_attention_gets_the_bounds_of_queries_and_of_keys(folder: Path, flash: list[Call]) -> None:
    policy(folder, "detached", implementation="flash_attention_2")(ROWS, "both")
    first_B, width_B = ROWS.start_B - 1, ROWS.start_B + ROWS.length_B
    before, behind = flash[0], flash[2]
    assert (flash[0], flash[2]) == (flash[1], flash[3]) and len(flash) == 4
    assert before.queries == before.keys == attention.bounds(first_B.clamp(min=1)).tolist()
    assert behind.queries == attention.bounds(ROWS.length_B + 1).tolist()
    assert behind.keys == attention.bounds(width_B).tolist()
    assert (behind.longest_query, behind.longest_key) == (int(ROWS.length_B.max()) + 1, int(width_B.max()))
    assert before.causal and behind.causal


# --- its cost --------------------------------------------------------------------------------------------------


def operations(made: Policy, rows: PaddedBatch) -> int:
    with FlopCounterMode(display=False) as counter:
        made(rows, "both").logprobs_BT.sum().backward()
    return counter.get_total_flops()


def test_a_context_token_costs_a_forward_pass_alone_and_equal_contexts_cost_one(folder: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    context, rest = (
        torch.randint(2, 17, (1, 400), generator=generator),
        torch.randint(2, 17, (8, 8), generator=generator),
    )
    rows = ROWS.select(torch.arange(8))._replace(
        inputs_BL=torch.cat([context.expand(8, -1), rest], 1),
        start_B=torch.full((8,), 400),
        length_B=ROWS.mask_BT.shape[1] * torch.ones(8, dtype=torch.long),
        mask_BT=torch.ones(8, 8, dtype=torch.bool),
    )
    attached, detached = (operations(policy(folder, prefix), rows) for prefix in ("attached", "detached"))
    assert 0.3 < detached / attached < 0.45
    assert operations(policy(folder, "detached", share_prompts=True), rows) < 0.25 * detached


# --- whole updates, and models that cannot ---------------------------------------------------------------------


def made(ranks: int, folder: Path, *overrides: str) -> tuple[case.Weights, dict[str, float]]:
    """An update of layers that are sharded one by one, so that every pass is a collective of its own."""
    load_policy.SHARD_LAYERS_ABOVE = 0
    return case.updated(folder, ROWS, DETACHED, "learner.minibatches=2", f"learner.ranks={ranks}", *overrides)


@pytest.mark.slow
def test_ranks_and_micro_batches_change_nothing(folder: Path, tmp_path: Path) -> None:
    """With 8 tokens at once, some passes have contexts of no token at all beside others that have some."""
    choices = ("algorithm.critic.model=policy", "model.gradient_checkpointing=full")
    one = case.by_ranks(made, 1, tmp_path, folder, *choices)
    case.assert_same(one, case.by_ranks(made, 2, tmp_path, folder, *choices, "learner.micro_batch_tokens=8"))


@pytest.mark.usefixtures("alone")
def test_models_that_keep_more_than_keys_and_values_are_refused_by_name(folder: Path, tmp_path: Path) -> None:
    sliding = Qwen2Config(**case.SMALL, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    Qwen2ForCausalLM(sliding).save_pretrained(tmp_path)
    mesh = init_device_mesh("cpu", (1,))
    for path, critic in ((tmp_path, "head"), (folder, str(tmp_path))):
        loaded = load_policy.load(case.config_of().model, path, 1.0, mesh, critic)
        loaded.set_context("attached")
        with pytest.raises(ModelError, match=r"needs one of llama, qwen2, qwen3, .* is qwen2: choose"):
            loaded.set_context("detached")
