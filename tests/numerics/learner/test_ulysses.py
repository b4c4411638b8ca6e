"""Rows that are cut into slices between ranks (Ulysses): the update of one rank, in every layout."""

import re
from pathlib import Path
from typing import Any

import fake_flash
import fake_varlen
import learner_case as case
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import MixtralConfig, Qwen2Config, Qwen2ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from streamppo.config.learner import Mesh
from streamppo.errors import ConfigError, ModelError
from streamppo.learner.attention import attention, prefix_sharing, varlen
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.model import hf_files, load_policy
from streamppo.learner.model.policy import Policy
from streamppo.learner.parallel import context_parallel
from streamppo.learner.parallel.context_parallel import Slices

IN_TWO = "learner.mesh.context=2"
OF_TWO = (
    (IN_TWO,),
    (IN_TWO, "model.share_prompts=false", "algorithm.entropy=0.01"),
    (IN_TWO, "algorithm.critic.model=policy", "algorithm.kl.loss_beta=0.1", "learner.minibatches=2"),
    (IN_TWO, "model.lora.rank=2", "algorithm.kl.loss_beta=0.1"),
    (IN_TWO, "algorithm.correction.kind=topr", "algorithm.negative_weight=0.25", "algorithm.advantage.kind=grpo"),
    (IN_TWO, "algorithm.teacher.model=FOLDER"),
    (IN_TWO, "model.gradient_checkpointing=full"),
    (IN_TWO, "model.gradient_checkpointing=full"),
)
OF_FOUR = (
    (IN_TWO, "algorithm.policy_loss.kind=gspo", "learner.norm=max-norm"),
    (IN_TWO, "learner.mesh.replicate=2", "algorithm.entropy=0.01"),
)
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}


def updates(ranks: int, folder: Path, cases: tuple[tuple[str, ...], ...]) -> list[Any]:
    """Weights and metrics of an update for each of `cases`, with prompts shared wherever they can be."""
    load_policy.SHARD_LAYERS_ABOVE, prefix_sharing.WORTH = 0, 100.0
    found: list[Any] = []
    for overrides in cases:
        several = [one.replace("FOLDER", str(folder)) for one in overrides if ranks > 1 or "mesh" not in one]
        small = "learner.lr=0.01", "learner.micro_batch_tokens=40"
        updater = case.updater(case.config_of(f"learner.ranks={ranks}", *small, *several), folder)
        metrics = case.metrics(updater, pad(case.batch()))
        found.append((case.whole(updater.policy), metrics))
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("ranks", "cases"), [(2, OF_TWO), (4, OF_FOUR)])
def test_an_update_of_slices_is_that_of_whole_rows(
    ranks: int, cases: tuple[tuple[str, ...], ...], folder: Path, tmp_path: Path
) -> None:
    whole, cut = (case.by_ranks(updates, n, tmp_path, folder, cases) for n in (1, ranks))
    for one, other in zip(whole, cut, strict=True):
        case.assert_same(one, other)


@pytest.mark.slow
def test_experts_are_chosen_token_by_token_in_slices_too(tmp_path: Path) -> None:
    torch.manual_seed(5)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**case.SMALL, **MOE, initializer_range=0.3)).save_pretrained(tmp_path / "model")
    whole, cut = (case.by_ranks(updates, n, tmp_path, tmp_path / "model", ((IN_TWO,),)) for n in (1, 2))
    case.assert_same(whole[0], cut[0])


def flash_gradients(ranks: int, folder: Path) -> dict[str, Any]:
    """Scores of rows end to end by flash-attn, the gradient of their sum over `ranks`, and what flash-attn was told."""
    calls = fake_flash.install(pytest.MonkeyPatch())
    slices = context_parallel.slices_of("cpu", Mesh(context=ranks))
    torch.manual_seed(9)
    lm = hf_files.read(folder, context_parallel.name_of("flash_attention_2", slices))
    policy = Policy(lm, 0.7, layout=attention.joined)
    torch.nn.init.normal_(policy.value_head.weight)
    policy.slices = slices
    # 87 tokens: three of four ranks have some of what is behind the last row.
    rows = pad(case.batch())
    with (kept := KeptBytes(policy)):
        scored = policy(rows, "both")
    sum(column.square().sum() for column in scored).backward()  # pyright: ignore
    gradients = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    told = [(call.queries, call.longest_query) for call in calls]
    return {
        "scored": [one.detach() for one in scored],
        "gradients": gradients,
        "told": told,
        "rows": width(rows),
        "kept": kept.bytes,
    }


class KeptBytes(torch.autograd.graph.saved_tensors_hooks):
    """Counts what a forward pass keeps for the backward pass, once, without parameters."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__(self._keep, lambda tensor: tensor)
        self._own = {one.untyped_storage()._cdata for one in module.parameters()}
        self._held: dict[int, torch.UntypedStorage] = {}

    def _keep(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._own:
            self._held[storage._cdata] = storage
        return tensor

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._held.values())


def width(rows: PaddedBatch) -> int:
    return int((rows.start_B + rows.length_B).sum())


@pytest.mark.slow
def test_flash_attention_gets_the_bounds_of_whole_rows(tmp_path: Path) -> None:
    torch.manual_seed(5)
    shape = case.SMALL | {"num_key_value_heads": 4}
    Qwen2ForCausalLM(Qwen2Config(**shape, initializer_range=0.3)).save_pretrained(tmp_path / "model")
    whole, cut = (case.by_ranks(flash_gradients, n, tmp_path, tmp_path / "model") for n in (1, 4))
    missing = -whole["rows"] % 4
    assert missing, "there is padding"
    bounds, longest = whole["told"][0]
    assert cut["told"] == [([*bounds, whole["rows"] + missing], longest)] * len(cut["told"]) and cut["told"]
    assert cut["kept"] < 0.35 * whole["kept"], "a quarter, and what all ranks have of a row's tokens"
    for one, other in zip(whole["scored"], cut["scored"], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    for name, gradient in whole["gradients"].items():
        torch.testing.assert_close(gradient, cut["gradients"][name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (Qwen2Config(**case.SMALL), "= 4 must divide the 2 heads of keys and values of 'some/model'"),
        (Qwen2Config(**case.SMALL, use_sliding_window=True, sliding_window=4), "without a sliding window"),
        (MixtralConfig(), r"needs one of llama, qwen2, qwen3, qwen3_moe, .* 'some/model' is mixtral"),
    ],
)
def test_models_that_cannot_be_cut_are_refused_by_name(config: Any, reason: str) -> None:
    config.name_or_path = "some/model"
    assert re.search(reason, context_parallel.refusal(config, 4))
    assert not context_parallel.refusal(config, 1)


@pytest.mark.usefixtures("alone")
def test_a_model_that_cannot_be_cut_is_refused_when_it_is_loaded(folder: Path) -> None:
    with pytest.raises(ModelError, match="must divide the 2 heads"):
        load_policy.load(case.config_of().model, folder, 1.0, init_device_mesh("cpu", (1,)), slices=Slices(ranks=4))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (["learner.ranks=3"], r"learner.mesh.context \(2\) must divide learner.ranks \(3\)"),
        (["learner.ranks=6", "learner.mesh.replicate=2"], r"context \(2\) must divide the 3 ranks of a replica"),
        (["learner.ranks=2", "model.attention=eager"], "context = 2 is not possible with model.attention = 'eager'"),
        (["learner.ranks=2", "model.compile=true"], "context = 2 is not possible with model.compile = True"),
        (
            ["learner.ranks=2", "queue.segments={max_tokens=2,prefix='detached'}"],
            "context = 2 computes all tokens of a row together.*prefix = 'detached'",
        ),
    ],
)
def test_choices_that_do_not_go_together(overrides: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        case.config_of(IN_TWO, *overrides)


def varlen_scores(ranks: int, folder: Path) -> list[torch.Tensor]:
    """Log-probs of a policy by torch's kernel, before and after another model was loaded in the same way."""
    fake_varlen.install(pytest.MonkeyPatch())
    slices = context_parallel.slices_of("cpu", Mesh(context=ranks))

    def loaded() -> Policy:
        name = context_parallel.name_of(varlen.register(), slices)
        policy = Policy(hf_files.read(folder, name), 0.7, layout=attention.joined)
        policy.slices = slices
        return policy

    policy, rows = loaded(), pad(case.batch())
    with torch.no_grad():
        found = [policy(rows, "policy").logprobs_BT]
        reference = loaded()
        found += [model(rows, "policy").logprobs_BT for model in (policy, reference)]
    return found


def test_a_second_model_leaves_the_slices_of_the_first_one_alone(folder: Path, tmp_path: Path) -> None:
    whole, cut = (case.by_ranks(varlen_scores, n, tmp_path, folder) for n in (1, 2))
    for one, other in zip(whole, cut, strict=True):
        torch.testing.assert_close(one, other)
