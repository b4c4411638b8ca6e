"""Rows end to end, as flash-attn reads them: every row is scored as if it were alone."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import fake_flash
import fake_varlen
import learner_case as case
import pytest
import torch
from fake_flash import Call
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    BloomConfig,
    DeepseekV3Config,
    DeepseekV3Model,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    LlamaModel,
    MistralConfig,
    MistralModel,
    MptConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from streamppo.config.model import JOINED
from streamppo.errors import ConfigError, ModelError
from streamppo.learner.attention import attention, varlen
from streamppo.learner.batch.padded import PaddedBatch, pad
from streamppo.learner.batching import micro_batches
from streamppo.learner.model import hf_files, load_policy
from streamppo.learner.model.policy import Policy, PolicyOutput

TWO, THREE, FOUR, _ = JOINED
BF16 = "model.dtype=bfloat16"


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return fake_flash.install(monkeypatch)


def policy(folder: Path, implementation: str, layout: attention.Layout) -> Policy:
    """The model in `folder` with a critic that is not zero, in float32."""
    torch.manual_seed(9)
    made = Policy(hf_files.read(folder, implementation), 0.7, layout=layout)
    torch.nn.init.normal_(made.value_head.weight)
    return made


def alone(rows: PaddedBatch) -> list[PaddedBatch]:
    return [rows.select(torch.tensor([row])) for row in range(len(rows.start_B))]


def assert_scores_rows_as_if_alone(made: Policy, expected: Policy, rows: PaddedBatch, atol: float) -> None:
    scored = made(rows, "both")
    for row, single in enumerate(alone(rows)):
        length, one = int(single.length_B), expected(single, "both")
        for name in ("logprobs_BT", "entropy_BT", "values_BT"):
            got, want = getattr(scored, name)[row], getattr(one, name)[0]
            torch.testing.assert_close(got[:length], want, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}")
            assert not got[length:].any()
        torch.testing.assert_close(scored.bootstrap_B[row], one.bootstrap_B[0], rtol=0, atol=atol)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("layout", [attention.padded, attention.joined])
def test_no_row_sees_another(folder: Path, implementation: str, layout: attention.Layout) -> None:
    with torch.no_grad():
        made, plain = policy(folder, implementation, layout), policy(folder, "eager", attention.padded)
        assert_scores_rows_as_if_alone(made, plain, pad(case.batch()), atol=2e-5)


def test_flash_attention_gets_the_bounds_of_every_row_and_no_padding(folder: Path, flash: list[Call]) -> None:
    rows = pad(case.batch())
    made = policy(folder, "flash_attention_2", attention.layout("flash_attention_2"))
    with torch.no_grad():
        assert_scores_rows_as_if_alone(made, policy(folder, "eager", attention.padded), rows, atol=2e-5)
    widths = (rows.start_B + rows.length_B).tolist()
    bounds = [sum(widths[:row]) for row in range(len(widths) + 1)]
    assert len(flash) == 2
    assert set(map(str, flash)) == {str(Call(bounds, bounds, max(widths), max(widths), True))}


def test_gradients_are_those_of_padded_rows(folder: Path, flash: list[Call]) -> None:
    def gradients(implementation: str) -> dict[str, torch.Tensor]:
        made = policy(folder, implementation, attention.layout(implementation))
        scored: PolicyOutput = made(pad(case.batch()), "both")
        (scored.logprobs_BT.sum() + scored.values_BT.square().sum() + scored.bootstrap_B.sum()).backward()
        return {name: parameter.grad for name, parameter in made.named_parameters() if parameter.grad is not None}

    expected = gradients("sdpa")
    made = gradients("flash_attention_2")
    assert flash and made.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(made[name], gradient, rtol=0, atol=1e-5 * gradient.abs().max().item(), msg=name)


@pytest.mark.usefixtures("alone")
def test_an_update_with_flash_attention_fills_its_micro_batches_with_tokens_alone(
    folder: Path, flash: list[Call], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("model.dtype=bfloat16", "learner.micro_batch_tokens=40", "learner.epochs=2")
    results = {}
    for choice in ("sdpa", "flash_attention_2"):
        monkeypatch.setattr(attention, "choose", lambda config, device, choice=choice: choice)
        updater = case.updater(case.config_of(*options), folder)
        results[choice] = case.metrics(updater, pad(case.batch()))
    rows = pad(case.batch())
    widths_B, every = rows.start_B + rows.length_B, torch.arange(case.BATCH)
    prompts = rows.on_host.shared_prompts()
    (plan,), (wasteful,) = (
        micro_batches(every, widths_B, 40, 1, padded=padded, prompts=prompts) for padded in (False, True)
    )
    passes = [call.queries[-1] for call in flash[::2]]
    assert passes == 3 * [int(widths_B[piece].sum()) for piece in plan]
    assert max(passes) <= 40 and len(plan) < len(wasteful)
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert results["flash_attention_2"][name] == pytest.approx(results["sdpa"][name], rel=0.05, abs=0.02), name


# --- models that carry state from row to row -----------------------------------------------------------------

HYBRID = case.SMALL | {"initializer_range": 0.3}
MAMBA = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}


@pytest.fixture(scope="module", params=["falcon_h1", "qwen3_next"])
def hybrid(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of attention and a state space, or of attention and linear attention."""
    from transformers import FalconH1Config, FalconH1ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM

    torch.manual_seed(0)
    if request.param == "falcon_h1":
        made = FalconH1ForCausalLM(FalconH1Config(**HYBRID, **MAMBA, mamba_n_groups=1))
    else:
        layers = ["linear_attention", "full_attention"]
        sizes = {"head_dim": 8, "shared_expert_intermediate_size": 16, "layer_types": layers}
        made = Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, **LINEAR, **EXPERTS, **sizes))
    path = tmp_path_factory.mktemp(request.param)
    made.save_pretrained(path)
    return path


def loaded(path: Path, *overrides: str, critic: str = "head") -> Policy:
    mesh = init_device_mesh("cpu", (1,))
    return load_policy.load(case.config_of(*overrides).model, path, 1.0, mesh, critic)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("alone", "flash")
def test_a_model_that_carries_state_from_row_to_row_reads_every_row_alone(
    hybrid: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(attention, "choose", lambda config, device: TWO)
    attention._warn.cache_clear()
    assert loaded(folder, critic="policy").layout is attention.joined
    assert "carries state" not in caplog.text
    made = loaded(hybrid)
    assert made.layout is attention.padded
    assert made.lm.config._attn_implementation == "sdpa"
    assert str(hybrid) in caplog.text and "carries state from row to row" in caplog.text
    rows = pad(case.batch())
    with torch.no_grad():
        together = made(rows, "policy").logprobs_BT
        for row, single in enumerate(alone(rows)):
            one = made(single, "policy").logprobs_BT[0]
            torch.testing.assert_close(together[row, : len(one)], one, rtol=0, atol=1e-4)
    assert loaded(folder, critic=str(hybrid)).layout is attention.padded


@pytest.mark.usefixtures("alone", "flash")
def test_where_the_configuration_insists_on_joined_rows_such_a_model_is_refused_by_name(hybrid: Path) -> None:
    with pytest.raises(ModelError, match=rf"{hybrid.name}.* carries state from row to row.*flash_attention_2"):
        loaded(hybrid, BF16, "learner.gpus=1", "model.attention=flash_attention_2")


# --- the choice ----------------------------------------------------------------------------------------------


def chosen(monkeypatch: pytest.MonkeyPatch, capability: int, there: set[str], *overrides: str) -> str:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (capability, 0))
    monkeypatch.setattr(attention, "is_flash_installed", lambda name: name in there)
    attention._warn.cache_clear()
    return attention.choose(case.config_of(*overrides).model, "cuda")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("capability", "there", "expected"),
    [
        (9, {TWO, THREE, FOUR}, FOUR),
        (9, {TWO, THREE}, THREE),
        (8, {TWO, THREE, FOUR}, TWO),
        (12, {FOUR}, "sdpa"),
        (7, {TWO}, "sdpa"),
    ],
)
def test_auto_takes_the_newest_flash_attention_that_runs(
    monkeypatch: pytest.MonkeyPatch, capability: int, there: set[str], expected: str
) -> None:
    assert chosen(monkeypatch, capability, there, BF16) == expected
    assert chosen(monkeypatch, capability, there, BF16, "model.attention=eager") == "eager"
    assert chosen(monkeypatch, capability, there) == "sdpa"


def test_auto_takes_torchs_own_where_no_flash_attention_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    assert chosen(monkeypatch, 9, set(), BF16) == "varlen"
    assert chosen(monkeypatch, 9, {THREE}, BF16) == THREE
    assert chosen(monkeypatch, 9, set()) == "sdpa"


# Configurations as transformers writes them, and the attention that computes such a model completely.
GEMMA, SINKS, WIDE = Gemma2Config(), GptOssConfig(), Qwen3Config(head_dim=320)
PLAIN, LATENT = Qwen2Config(), DeepseekV3Config()
NARROW = Qwen2Config(hidden_size=24, num_attention_heads=4)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("model", "expected"), [(PLAIN, "varlen"), (LATENT, "varlen"), (WIDE, "sdpa"), (SINKS, "eager"), (GEMMA, "eager")]
)
def test_a_model_that_torchs_own_cannot_compute_gets_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, model: PretrainedConfig, expected: str
) -> None:
    attention._warn.cache_clear()
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    config = case.config_of(BF16).model
    assert attention.fall_back("varlen", config, [PLAIN, model]) == expected
    assert caplog.text.count("torch's flash attention") == (expected != "varlen")
    named = case.config_of(BF16, "learner.gpus=1", "model.attention=varlen").model
    if expected != "varlen":
        with pytest.raises(ModelError, match=r"torch's flash attention .*choose model.attention"):
            attention.fall_back("varlen", named, [model])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("model", "name", "reason", "expected"),
    [
        (SINKS, FOUR, "", FOUR),
        (SINKS, TWO, "gpt_oss models are computed by .* not by flash_attention_2", "eager"),
        (BloomConfig(), THREE, "transformers has no flash-attn for bloom models", "eager"),
        (WIDE, TWO, "heads of 320 entries, and flash_attention_2 takes 256", "sdpa"),
        (PLAIN, TWO, "", TWO),
        (NARROW, TWO, "", TWO),
        (NARROW, FOUR, "heads of 6 entries, and flash_attention_4 takes multiples of 8", "sdpa"),
    ],
)
def test_a_model_that_a_flash_attention_cannot_compute_gets_the_next_one(
    monkeypatch: pytest.MonkeyPatch, model: PretrainedConfig, name: str, reason: str, expected: str
) -> None:
    attention._warn.cache_clear()
    config = case.config_of(BF16).model
    assert attention.fall_back(name, config, [PLAIN, model]) == expected
    monkeypatch.setattr(varlen, "is_available", lambda: True)
    assert attention.fall_back(name, config, [PLAIN]) == name
    if reason:
        named = case.config_of(BF16, "learner.gpus=1", f"model.attention={name}").model
        with pytest.raises(ModelError, match=rf"{reason}.*: choose model.attention"):
            attention.fall_back(name, named, [model])


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("model", "refused_on"),
    [
        *((Qwen3Config(head_dim=width), refused) for width, refused in ((128, []), (160, [10, 11]), (256, []))),
        (LATENT, [10, 11]),
        (Gemma2Config(head_dim=256), [10, 11]),
        (Gemma2Config(head_dim=128), []),
    ],
    ids=lambda one: str(one.head_dim) if isinstance(one, PretrainedConfig) else str(one),
)
def test_flash_attention_4_takes_fewer_widths_on_blackwell(
    monkeypatch: pytest.MonkeyPatch, model: PretrainedConfig, refused_on: list[int]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major in (9, 10, 11):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda major=major: (major, 0))
        assert ("does not take on this GPU" in attention._flash_refusal(FOUR, model)) == (major in refused_on)
        assert "on this GPU" not in attention._flash_refusal(TWO, model)


def test_ranks_that_would_compute_attention_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "gather", lambda own: [own, "sdpa", own])
    with pytest.raises(ModelError, match=r"flash_attention_2 on rank 0, sdpa on rank 1\): set model.attention"):
        attention.agree_on(TWO)
    assert attention.agree_on("sdpa") == "sdpa"


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("model", [BloomConfig(), MptConfig()], ids=lambda one: one.model_type)
def test_a_model_without_sdpa_is_computed_eagerly(model: PretrainedConfig) -> None:
    attention._warn.cache_clear()
    assert attention.fall_back("sdpa", case.config_of().model, [PLAIN, model]) == "eager"
    with pytest.raises(ModelError, match=f"only eager attention for {model.model_type} models: choose"):
        attention.fall_back("sdpa", case.config_of("model.attention=sdpa").model, [model])


class Seen(NamedTuple):
    """A model's class and configuration; torch's kernel gets the window, and the widths of keys and values."""

    model: type[PreTrainedModel]
    config: PretrainedConfig
    window: tuple[int, int]
    widths: tuple[int, int]


TINY = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 20}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MLA = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
DENSE = {"first_k_dense_replace": 1, "num_attention_heads": 4, "num_key_value_heads": 4}
KERNELS = [
    Seen(MistralModel, MistralConfig(**TINY, **HEADS, sliding_window=5), (4, 0), (8, 8)),
    Seen(LlamaModel, LlamaConfig(**TINY, **HEADS), (-1, 0), (8, 8)),
    Seen(LlamaModel, LlamaConfig(**TINY, **HEADS, head_dim=6), (-1, 0), (8, 8)),
    Seen(DeepseekV3Model, DeepseekV3Config(**TINY, **MLA, **DENSE), (-1, 0), (16, 16)),
]


@pytest.mark.parametrize("case_", KERNELS, ids=lambda seen: f"{seen.config.model_type}-{seen.widths[0]}")
def test_torchs_kernel_gets_rows_windows_and_heads_as_the_models_have_them(
    monkeypatch: pytest.MonkeyPatch, case_: Seen
) -> None:
    """transformers' models with torch's own attention make the hidden states that they make with SDPA, row by row."""
    calls: list[Any] = []

    def kernel(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, **named: Any) -> Tensor:
        calls.append((named["window_size"], (key.shape[-1], value.shape[-1])))
        assert named["enable_gqa"] and not named.keys() - {"scale", "window_size", "enable_gqa"}
        window = named["window_size"][0] + 1
        rows = fake_varlen.rows(*bounds[:2])
        return torch.cat(
            [fake_flash.attend(query[own], key[seen], value[seen], named["scale"], window) for own, seen in rows]
        )

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", kernel_like(kernel))
    torch.manual_seed(3)
    plain = case_.model._from_config(deepcopy(case_.config), attn_implementation="sdpa").eval()
    joined = case_.model._from_config(deepcopy(case_.config), attn_implementation=varlen.register()).eval()
    joined.load_state_dict(plain.state_dict())
    inputs_BL, width_B = torch.randint(0, 20, (3, 11)), torch.tensor([7, 11, 2])
    reading = attention.joined(inputs_BL, width_B)
    with torch.no_grad():
        made = joined(**reading.arguments, use_cache=False).last_hidden_state[0]
        for row, width in enumerate(width_B.tolist()):
            alone = plain(input_ids=inputs_BL[row : row + 1, :width], use_cache=False).last_hidden_state[0]
            torch.testing.assert_close(made[reading.index_BL[row, :width]], alone, rtol=0, atol=1e-5)
    assert calls == [(case_.window, case_.widths)]


def kernel_like(function: Any) -> Any:
    """`function` with the arguments of torch's kernel, as far as we look at them."""

    def varlen_attn(*tensors: Any, enable_gqa: bool = False, **named: Any) -> Tensor:
        return function(*tensors, enable_gqa=enable_gqa, **named)

    return varlen_attn


@pytest.mark.usefixtures("alone")
def test_the_fallback_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert chosen(monkeypatch, 9, set(), BF16) == "sdpa"
    attention.choose(case.config_of(BF16).model, "cuda")
    assert caplog.text.count("no flash-attn") == 1
    caplog.clear()
    assert chosen(monkeypatch, 9, set()) == "sdpa"
    assert caplog.text == ""


def test_flash_attention_where_there_is_none_is_refused_in_a_sentence(folder: Path) -> None:
    with pytest.raises(ConfigError, match='needs dtype = "bfloat16"'):
        case.config_of("model.attention=flash_attention_2")
    with pytest.raises(ModelError, match=r"FlashAttention2 .* doesn't seem to be installed"):
        hf_files.read(folder, "flash_attention_2")
