"""Samples of a prompt as one row: the same scores and gradients as alone, for less work, and only where it is less."""

from pathlib import Path

import fake_flash
import fake_varlen
import learner_case as case
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.learner import batching, memory
from streamppo.learner.attention import attention, layers, prefix_kv, prefix_sharing, shared_keys, varlen
from streamppo.learner.attention.layers import Checkpointing
from streamppo.learner.attention.tree import RowSizes
from streamppo.learner.batch.padded import PaddedBatch, SharedPrompts, pad
from streamppo.learner.model import hf_files, load_policy
from streamppo.learner.model.policy import Policy
from streamppo.types import Batch, Trajectory, ints
from streamppo.weights.models.settings import read_settings

EACH = ("sdpa", "flash_attention_2")
COLUMNS = ("logprobs_BT", "entropy_BT", "values_BT", "bootstrap_B")


def grouped(prompts: list[list[int]], lengths: list[int], seed: int = 0) -> PaddedBatch:
    """Trajectories with these prompts and completions of these lengths."""
    generator, like = np.random.default_rng(seed), case.batch().trajectories
    made = [
        _with(generator, like[n], prompt, count) for n, (prompt, count) in enumerate(zip(prompts, lengths, strict=True))
    ]
    return pad(Batch(version=3, min_version=0, trajectories=tuple(made)))


def _with(generator: np.random.Generator, like: Trajectory, prompt: list[int], count: int) -> Trajectory:
    return replace(
        like,
        prompt_tokens=np.array(prompt, np.int32).tobytes(),
        tokens=generator.integers(1, 17, count).astype(np.int32).tobytes(),
        logprobs=(-generator.random(count) * 4).astype(np.float32).tobytes(),
        versions=np.full(count, 2, np.int32).tobytes(),
        mask=np.ones(count, np.bool_).tobytes(),
    )


# Samples that are not side by side, one that is alone, a prompt that is the beginning of others.
A, LONGER, ZERO, OTHER = [5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 0], [9]
ROWS = grouped([A, LONGER, A, OTHER, LONGER, A, A, ZERO], [4, 1, 2, 3, 5, 4, 1, 2])


def policy(
    folder: Path, *, share_prompts: bool, checkpointing: Checkpointing = "off", implementation: str = "sdpa"
) -> Policy:
    torch.manual_seed(9)
    layout = attention.layout(implementation)
    made = Policy(hf_files.read(folder, implementation), 0.7, layout=layout)
    made.share_prompts = share_prompts
    torch.nn.init.normal_(made.value_head.weight)
    prefix_kv.prepare(made.transformers)
    layers.checkpoint_activations(made.lm.base_model, checkpointing)
    return made


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Share prompts also where it is more work; flash-attn 2 is one in plain torch."""
    fake_flash.install(monkeypatch)
    monkeypatch.setattr(prefix_sharing, "WORTH", 100.0)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("implementation", EACH)
def test_every_row_is_scored_as_if_it_were_alone(folder: Path, implementation: str) -> None:
    made = policy(folder, share_prompts=True, implementation=implementation)
    plain = policy(folder, share_prompts=False)
    with torch.no_grad():
        scored = made(ROWS, "both")
        for row in range(len(ROWS.start_B)):
            single = ROWS.select(torch.tensor([row]))
            one, length = plain(single, "both"), int(single.length_B)
            for name in COLUMNS[:3]:
                torch.testing.assert_close(
                    getattr(scored, name)[row, :length], getattr(one, name)[0], rtol=0, atol=5e-5
                )
            torch.testing.assert_close(scored.bootstrap_B[row], one.bootstrap_B[0], rtol=0, atol=5e-5)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("checkpointing", ["off", "full"])
@pytest.mark.parametrize("implementation", EACH)
def test_gradients_are_those_of_rows_alone(folder: Path, checkpointing: Checkpointing, implementation: str) -> None:
    gradients: list[dict[str, torch.Tensor]] = []
    for share_prompts in (True, False):
        chosen = implementation if share_prompts else "sdpa"
        made = policy(folder, share_prompts=share_prompts, checkpointing=checkpointing, implementation=chosen)
        scored = made(ROWS, "both")
        weights = torch.Generator().manual_seed(1)
        sum(
            (torch.rand(getattr(scored, name).shape, generator=weights) * getattr(scored, name)).sum()
            for name in COLUMNS
        ).backward()  # pyright: ignore
        gradients.append({name: one.grad for name, one in made.named_parameters() if one.grad is not None})
    for name, gradient in gradients[1].items():
        torch.testing.assert_close(
            gradients[0][name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name
        )


@pytest.mark.usefixtures("always")
def test_a_prompt_is_computed_once_and_no_token_of_another_completion_is_seen() -> None:
    width_B = ROWS.start_B + ROWS.length_B
    reading = prefix_sharing.shared(
        ROWS.inputs_BL, ROWS.start_B, width_B, prefix_sharing.plan(ROWS.inputs_BL, ROWS.start_B, width_B)
    )
    tokens_GW, sees = reading.arguments["input_ids"], reading.arguments["attention_mask"]
    assert isinstance(tokens_GW, torch.Tensor) and isinstance(sees, torch.Tensor)
    assert tokens_GW.shape == (4, 3 + 4 + 2 + 4 + 1)
    assert tokens_GW[reading.index_BL[0, 0] // 14, :7].tolist() == [*A, *ROWS.inputs_BL[0, 3:7].tolist()]
    for row, (start, width) in enumerate(zip(ROWS.start_B.tolist(), width_B.tolist(), strict=True)):
        own = reading.index_BL[row, :width]
        assert tokens_GW.flatten()[own].tolist() == ROWS.inputs_BL[row, :width].tolist()
        line, places = int(own[-1]) // tokens_GW.shape[1], own % tokens_GW.shape[1]
        for at in range(start, width):
            assert sees[line, 0, places[at]].nonzero().flatten().tolist() == places[: at + 1].tolist()


@pytest.mark.parametrize("step", [1, 16])
def test_each_row_of_attention_has_its_completion_and_the_keys_of_its_prompt(step: int) -> None:
    reading = shared_keys.lay_out(ROWS.inputs_BL, ROWS.start_B, ROWS.start_B + ROWS.length_B, step=step)
    queries, keys = (reading.arguments[name].diff().tolist() for name in ("cu_seq_lens_q", "cu_seq_lens_k"))
    # Of A and LONGER the prompt and its completions; OTHER and ZERO have one sample, which is a row with its prompt.
    expected = [(3, 3), (4, 7), (2, 5), (4, 7), (1, 4), (4, 4), (1, 5), (5, 9), (4, 4), (6, 6)]
    # 34 tokens, filled up with a row of their own.
    assert sorted(zip(queries, keys, strict=True)) == sorted(expected + [(14, 14)] * (step == 16))
    tokens_N, keys_K = reading.arguments["input_ids"][0], reading.arguments[prefix_kv.NAME].token_K
    rows = dict(zip(keys_K[torch.tensor(keys).cumsum(0) - 1].tolist(), keys_K.split(keys), strict=False))
    for row, width in enumerate((ROWS.start_B + ROWS.length_B).tolist()):
        places = reading.index_BL[row, :width]
        assert torch.equal(tokens_N[places], ROWS.inputs_BL[row, :width])
        assert torch.equal(rows[int(places[-1])], places)


def test_it_is_done_where_it_is_less_work_and_by_as_much_as_operations_say(folder: Path) -> None:
    def counted(rows: PaddedBatch, *, share_prompts: bool) -> int:
        with FlopCounterMode(display=False) as counter:
            policy(folder, share_prompts=share_prompts)(rows, "both").logprobs_BT.sum().backward()
        return counter.get_total_flops()

    prompt = list(range(2, 14))
    asked = grouped([prompt] * 4 + [prompt[::-1]] * 4, [3] * 8)
    assert counted(asked, share_prompts=True) < 0.6 * counted(asked, share_prompts=False)
    alone = grouped([prompt[n:] for n in range(8)], [3] * 8)
    assert counted(alone, share_prompts=True) == counted(alone, share_prompts=False)
    long = grouped([[4]] * 8, [150] * 8)
    assert counted(long, share_prompts=True) == counted(long, share_prompts=False)


def kept_bytes(folder: Path, rows: PaddedBatch, *, share_prompts: bool) -> int:
    """Bytes of the numbers that a pass over `rows`, end to end, keeps for its backward pass."""
    made = policy(folder, share_prompts=share_prompts, implementation="flash_attention_2")
    weights = {one.untyped_storage()._cdata for one in made.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in weights and tensor.is_floating_point():
            storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    reading = made._row_layout(rows.on_host, torch.device("cpu"))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        made._hidden(made.lm.base_model, reading)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.usefixtures("always")
def test_the_keys_that_samples_repeat_are_in_the_estimate_of_memory(folder: Path) -> None:
    """For rows of P = 12 prompt tokens and T = 4 of their own, of which 8 share a prompt."""
    rows = grouped([list(range(2, 14))] * 8, [4] * 8)
    kept = {share: kept_bytes(folder, rows, share_prompts=share) for share in (True, False)}
    bfloat16 = (
        "model.dtype=bfloat16",
        "learner.gpus=1",
        "rollout.max_tokens=4",
        "queue.samples_per_prompt=8",
        "queue.batch_size=16",
    )
    config = case.config_of(*bfloat16, "model.gradient_checkpointing=off", "learner.micro_batch_tokens=44")
    of_rank, alone = (
        memory.rank(one, memory.sizes(read_settings(folder), one.model), 16).activations
        for one in (config, replace(config, model=replace(config.model, share_prompts=False)))
    )
    # 44 tokens with their activations, here in float32, and 140 - 44 further keys and values.
    repeated = kept[True] - kept[False] * 44 / 128
    assert repeated == pytest.approx(2 * (of_rank - alone), rel=0.05)


# --- whole updates, and models that cannot ---------------------------------------------------------------------


def same_prompts() -> PaddedBatch:
    """The batch of the other tests, in which the samples of a prompt have one, ten tokens longer."""
    batch = case.batch()
    more = np.arange(2, 12, dtype=np.int32)
    firsts = {one.identity.prompt: one for one in reversed(batch.trajectories)}
    prompts = {n: np.concatenate([more, ints(one.prompt_tokens)]).tobytes() for n, one in firsts.items()}
    made = [replace(one, prompt_tokens=prompts[one.identity.prompt]) for one in batch.trajectories]
    return pad(replace(batch, trajectories=tuple(made)))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("critic", ["head", "policy"])
def test_an_update_is_the_same_with_prompts_shared_and_not(
    folder: Path, critic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, used = same_prompts(), list[bool]()
    real = prefix_sharing.shared
    monkeypatch.setattr(prefix_sharing, "shared", lambda *arguments: used.append(True) or real(*arguments))
    choices = (f"algorithm.critic.model={critic}", "learner.minibatches=2", "algorithm.kl.loss_beta=0.1")
    one = case.updated(folder, rows, *choices)
    assert used
    used.clear()
    case.assert_same(one, case.updated(folder, rows, *choices, "model.share_prompts=false"))
    assert not used


WHOLE: dict[str, tuple[str, ...]] = {
    "a critic of its own": ("algorithm.critic.model=policy", "algorithm.kl.loss_beta=0.1"),
    "adapters": ("model.lora={rank=2}", "algorithm.kl.reward_beta=0.1"),
    "checkpointing": ("model.gradient_checkpointing=offloaded",),
}


@pytest.mark.sampled(2)
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fsdp", [False, True])
@pytest.mark.parametrize("choices", WHOLE.values(), ids=WHOLE)
def test_so_is_one_of_rows_end_to_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch, choices: tuple[str, ...], fsdp: bool
) -> None:
    fake_varlen.install(monkeypatch)
    monkeypatch.setattr(attention, "choose", lambda *_: varlen.register())
    if fsdp:
        monkeypatch.setattr(load_policy, "is_whole", lambda *_, **__: False)
    rows, used, real = same_prompts(), list[bool](), shared_keys.shared
    monkeypatch.setattr(shared_keys, "shared", lambda *one, **named: used.append(True) or real(*one, **named))
    choices = (*choices, "learner.minibatches=2", "learner.micro_batch_tokens=60")
    one = case.updated(folder, rows, *choices)
    assert used
    used.clear()
    case.assert_same(one, case.updated(folder, rows, *choices, "model.share_prompts=false"))
    assert not used


def _made(ranks: int, folder: Path) -> tuple[case.Weights, dict[str, float]]:
    return case.updated(folder, same_prompts(), "learner.minibatches=2", f"learner.ranks={ranks}")


@pytest.mark.slow
def test_ranks_change_nothing(folder: Path, tmp_path: Path) -> None:
    case.assert_same(*(case.by_ranks(_made, ranks, tmp_path, folder) for ranks in (1, 2)))


@pytest.mark.usefixtures("alone")
def test_models_that_look_at_more_than_the_mask_shows_share_nothing(folder: Path, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))

    def shares(path: Path, *overrides: str, critic: str = "head") -> bool:
        return load_policy.load(case.config_of(*overrides).model, path, 1.0, mesh, critic).share_prompts

    assert shares(folder) and shares(folder, critic="policy")
    assert not shares(folder, "model.attention=eager")
    sliding = Qwen2Config(**case.SMALL, use_sliding_window=True, sliding_window=64, max_window_layers=1)
    Qwen2ForCausalLM(sliding).save_pretrained(tmp_path)
    assert not shares(tmp_path) and not shares(folder, critic=str(tmp_path))


@pytest.mark.parametrize("bad_luck", [False, True])
def test_rows_have_one_number_if_and_only_if_they_are_alike(monkeypatch: pytest.MonkeyPatch, bad_luck: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    rows_BL = torch.randint(-1, 3, (200, 3), generator=generator)
    if bad_luck:
        # Factors of 1: rows of the same numbers in another order have the same sum.
        monkeypatch.setattr(torch, "randint", lambda _, shape, **__: torch.zeros(shape, dtype=torch.int64))
    number_B = prefix_sharing.number(rows_BL)
    assert sorted(set(number_B.tolist())) == list(range(int(number_B.max()) + 1))
    alike_BB = (rows_BL[:, None] == rows_BL[None]).all(-1)
    assert torch.equal(number_B[:, None] == number_B[None], alike_BB)
    assert 1 < int(number_B.max()) + 1 <= 4**3


def test_only_prompts_that_no_environment_may_change_are_counted_once() -> None:
    """Eight samples of 100 + 10 tokens fit into 200 if their 100 tokens are the same."""
    sizes = RowSizes(torch.full((8,), 110), SharedPrompts(torch.zeros(8, dtype=torch.long), torch.full((8,), 100)))
    found = []
    for environment in ((), ("environment={kind='class', name='a:B'}",)):
        config = case.config_of("learner.micro_batch_tokens=200", *environment)
        division = batching.Division(config, 0, 1, 32, is_padded=False, costs=batching.ON_CPU)
        found.append([len(piece) for piece in division.micro_batches(sizes, torch.arange(8))])
    assert found == [[8], [1] * 8]
