"""The choice of `model.gradient_checkpointing = "auto"`: by the free memory, with the same weights either way."""

from pathlib import Path

import learner_case as case
import pytest
import torch
from conftest import MATH
from transformers import OPTConfig, OPTForCausalLM, Qwen2Config

from streamppo.commands.checks import memory as checks
from streamppo.config import file as configfile
from streamppo.config.sections import Config, longest_row
from streamppo.learner import gradient_checkpointing, memory
from streamppo.learner import learner as built
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import optimizer
from streamppo.telemetry import host

GIB = 2**30
WIDE = Qwen2Config(
    vocab_size=1000, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, max_position_embeddings=4096
)


def on_gpu(*overrides: str) -> Config:
    return configfile.load(MATH, ["learner.gpus=1", "model.dtype=bfloat16", *overrides])


def needed(config: Config) -> int:
    return memory.rank(config, memory.sizes(WIDE, config.model), longest_row(config)).total


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_activations_are_kept_where_a_rank_fits_in_85_percent_of_its_share(share: float) -> None:
    config = on_gpu(f"learner.gpus={share}")
    assert config.model.gradient_checkpointing == "auto"
    model, whole, longest = memory.sizes(WIDE, config.model), needed(config), longest_row(config)
    assert whole > needed(on_gpu("model.gradient_checkpointing=full"))
    enough = int(whole / 0.85) + 2
    total = int(enough / share)
    assert gradient_checkpointing.checkpointing_for(config, model, longest, total, total) == "off"
    assert gradient_checkpointing.checkpointing_for(config, model, longest, total - 8, total - 8) == "full"
    # Beside an engine that has already taken its share, the choice is the same while a rank's share is free.
    assert gradient_checkpointing.checkpointing_for(config, model, longest, enough, total) == "off"
    assert gradient_checkpointing.checkpointing_for(config, model, longest, enough - 4, total) == "full"
    # The memory of a rank decides, with its micro-batches.
    more = on_gpu(f"learner.gpus={share}", "learner.micro_batch_tokens=65536")
    assert gradient_checkpointing.checkpointing_for(more, model, longest, total, total) == "full"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_on_a_cpu_keep_activations_if_they_fit_in_half_of_the_machines_memory(ranks: int) -> None:
    config = configfile.load(MATH, [f"learner.ranks={ranks}"])
    model, whole, longest = memory.sizes(WIDE, config.model), needed(config), longest_row(config)
    for spare, kind in ((0, "off"), (-2 * ranks, "full")):
        machine = 2 * ranks * whole + spare
        assert gradient_checkpointing.checkpointing_for(config, model, longest, machine, machine) == kind


def test_a_rank_chooses_before_it_loads_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    WIDE.save_pretrained(tmp_path)
    monkeypatch.setattr(gradient_checkpointing.dist, "get_rank", lambda: 0)
    config, whole = on_gpu(), needed(on_gpu())
    for free, kind in ((8 * whole, "off"), (whole, "full")):
        monkeypatch.setattr(gradient_checkpointing, "_free_and_total", lambda _, free=free: (free, 9 * whole))
        logged.clear()
        assert gradient_checkpointing.resolve_on_rank(config, str(tmp_path), "cuda").gradient_checkpointing == kind
        (line,) = logged.messages
        there = f"{free / GIB:.1f} of {9 * whole / GIB:.1f} GiB are free, and learner.gpus is 1"
        numbers = f"about {whole / GIB:.1f} GiB with all activations kept, {there}"
        assert line == f'model.gradient_checkpointing = "{kind}": {numbers}'
        # A choice of the user's wins, without a word.
        logged.clear()
        for chosen in ("off", "full", "offloaded"):
            own = on_gpu(f"model.gradient_checkpointing={chosen}")
            assert gradient_checkpointing.resolve_on_rank(own, "nowhere", "cuda") is own.model
        assert not logged.messages


def test_a_rank_on_a_cpu_says_only_that_it_recomputes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    WIDE.save_pretrained(tmp_path)
    monkeypatch.setattr(gradient_checkpointing.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(gradient_checkpointing.dist, "all_reduce", lambda *_: None)
    config = configfile.load(MATH)
    mib = -(-needed(config) // 2**20)
    for machine, kind in ((2 * mib, "off"), (mib, "full")):
        monkeypatch.setattr(host, "total_mib", lambda machine=machine: machine)
        logged.clear()
        assert gradient_checkpointing.resolve_on_rank(config, str(tmp_path), "cpu").gradient_checkpointing == kind
        assert [f"{mib / 1024:.1f} GiB in this machine" in line for line in logged.messages] == [True] * (
            kind == "full"
        )


def test_a_model_whose_memory_is_not_known_keeps_all_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba", "num_hidden_layers": 1, "vocab_size": 10}')
    monkeypatch.setattr(gradient_checkpointing.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(gradient_checkpointing, "_free_and_total", lambda _: (1, 1))
    assert gradient_checkpointing.resolve_on_rank(on_gpu(), str(tmp_path), "cuda").gradient_checkpointing == "off"
    assert "the memory of a rank and an engine is unknown for a MambaConfig" in logged.text


@pytest.mark.usefixtures("alone")
def test_the_choice_changes_no_bit_of_the_weights(folder: Path) -> None:
    weights = {}
    for kind in ("auto", "off", "full"):
        config = case.config_of(f"model.gradient_checkpointing={kind}", "learner.epochs=2", "algorithm.entropy=0.1")
        updater = case.updater(config, folder)
        updater.optimizer = optimizer.adamw(updater.policy, config)
        for seed in (0, 1):
            updater.update(pad(case.batch(seed=seed)))
        weights[kind] = [case.full(one).clone() for one in updater.policy.parameters()]
    for kind in ("auto", "full"):
        assert all(torch.equal(one, other) for one, other in zip(weights[kind], weights["off"], strict=True)), kind


@pytest.mark.usefixtures("alone")
def test_a_layer_that_is_computed_again_drops_no_entries(tmp_path: Path) -> None:
    torch.manual_seed(5)
    shape = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "max_position_embeddings": 64}
    opt = OPTConfig(**{**case.SMALL, **shape}, dropout=0.5, init_std=0.3)
    OPTForCausalLM(opt).save_pretrained(tmp_path)
    found = []
    for kind in ("off", "full"):
        policy = case.updater(case.config_of(f"model.gradient_checkpointing={kind}"), tmp_path).policy
        policy(pad(case.batch()), "policy").logprobs_BT.sum().backward()
        found.append([one.grad for one in policy.lm.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_check_counts_what_the_choice_would_be() -> None:
    config, whole = on_gpu("rollout.gpus=1", "rollout.engine.kind=sglang"), needed(on_gpu())
    lighter = needed(on_gpu("model.gradient_checkpointing=full"))
    for gib, kind, total in ((80.0, "off", whole), (whole / GIB, "full", lighter)):
        found = {one.subject: one.text for one in checks.memory(config, WIDE, checks.Gpu(gib, True))}
        assert found["checkpointing"].startswith(f'model.gradient_checkpointing = "{kind}" on a GPU of {gib:.0f} GiB')
        assert found["rank"].startswith(f"about {checks._gib(total)}: ")
    assert "checkpointing" not in {one.subject for one in checks.memory(configfile.load(MATH), WIDE, checks.gpu(80))}


def test_a_learner_loads_with_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loaded(Exception):
        pass

    def load(model: object, *_: object, **__: object) -> None:
        raise Loaded(model)

    config = configfile.load(MATH)
    chosen = configfile.load(MATH, ["model.gradient_checkpointing=full"]).model
    monkeypatch.setattr(built.gradient_checkpointing, "resolve_on_rank", lambda *_: chosen)
    monkeypatch.setattr(built.load_policy, "load", load)
    monkeypatch.setattr(built.context_parallel, "slices_of", lambda *_: built.context_parallel.WHOLE)

    class Mesh:
        device_type = "cpu"

    with pytest.raises(Loaded) as raised:
        built.build(config, str(tmp_path), Mesh(), lambda *_: None, None)  # pyright: ignore[reportArgumentType]
    assert raised.value.args == (chosen,)
