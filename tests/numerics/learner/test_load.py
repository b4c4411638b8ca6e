"""A model comes to every rank from rank 0, which alone reads weights."""

import shutil
from pathlib import Path

import learner_case as case
import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

from streamppo.algorithms.chunked_head import LogitShape
from streamppo.errors import ModelError
from streamppo.learner.attention import layers
from streamppo.learner.model import lm_head, load_policy
from streamppo.learner.model import policy as model

RANKS = 3
CRITICS = ("head", "policy", "scratch", "path")
SETTINGS = Qwen2Config(**case.SMALL | {"intermediate_size": 50}, tie_word_embeddings=True, num_labels=1)
"""No number of ranks divides all of its widths."""


def load(folder: Path, critic: str, mesh: object, dtype: str = "float32") -> model.Policy:
    torch.manual_seed(3)
    checkpointing = "full" if critic == "path" else "off"
    config = case.config_of(f"model.gradient_checkpointing={checkpointing}", f"model.dtype={dtype}").model
    choice = str(folder / "critic") if critic == "path" else critic
    return load_policy.load(config, folder / "policy", 1.0, mesh, choice)  # pyright: ignore[reportArgumentType]


def everything(policy: model.Policy) -> dict[str, torch.Tensor]:
    buffers = {name: buffer.clone() for name, buffer in policy.named_buffers(remove_duplicate=False)}
    return case.whole(policy) | buffers


def _rank(rank: int, ranks: int, store: Path, folder: Path, out: Path) -> None:
    torch.set_num_threads(1)
    # Every layer is sharded on its own, as those of a large model are.
    load_policy.SHARD_LAYERS_ABOVE = 0
    with case.group(rank, ranks, store):
        mesh = init_device_mesh("cpu", (ranks,))
        found = {}
        for critic in CRITICS:
            policy = load(folder, critic, mesh)
            assert torch.equal(torch.get_rng_state(), torch.random.manual_seed(3).get_state()), (
                "random numbers moved on"
            )
            assert policy.lm.lm_head.weight is policy.lm.model.embed_tokens.weight, "tied no longer"
            assert not any(part.training for part in (policy.lm, policy.lm.model.layers[0].mlp))
            found[critic] = everything(policy)
        torch.save(found, out / f"{ranks}-{rank}.pt")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A policy with tied weights, and a reward model."""
    torch.manual_seed(5)
    Qwen2ForCausalLM(SETTINGS).save_pretrained(tmp_path / "0" / "policy")
    Qwen2ForSequenceClassification(SETTINGS).save_pretrained(tmp_path / "0" / "critic")
    return tmp_path


@pytest.mark.slow
def test_the_other_ranks_need_no_weights_and_have_the_same_model(models: Path) -> None:
    for rank in range(1, RANKS):
        for name in ("policy", "critic"):
            (models / str(rank) / name).mkdir(parents=True)
            shutil.copy(models / "0" / name / "config.json", models / str(rank) / name)
    context = case.processes()
    for ranks in (1, RANKS):
        workers = [
            context.Process(target=_rank, args=(rank, ranks, models / f"store-{ranks}", models / str(rank), models))
            for rank in range(ranks)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            assert worker.exitcode == 0
    alone = torch.load(models / "1-0.pt", weights_only=True)
    read = Qwen2ForCausalLM.from_pretrained(models / "0" / "policy")
    for name, tensor in read.named_parameters():
        assert torch.equal(alone["head"][f"lm.{name}"], tensor), name
    assert torch.equal(alone["head"]["lm.model.rotary_emb.inv_freq"], read.model.rotary_emb.inv_freq)
    for rank in range(RANKS):
        found = torch.load(models / f"{RANKS}-{rank}.pt", weights_only=True)
        for critic in CRITICS:
            assert found[critic].keys() == alone[critic].keys()
            assert all(torch.equal(tensor, alone[critic][name]) for name, tensor in found[critic].items()), critic


@pytest.mark.usefixtures("alone")
def test_a_model_that_does_more_to_its_logits_than_its_settings_say_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(5)
    GraniteForCausalLM(GraniteConfig(**case.SMALL, logits_scaling=8.0)).save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(lm_head, "shape_of", lambda _: LogitShape())
    with pytest.raises(ModelError, match=r"a soft cap: the learner's log-probs would differ by up to [0-9.]+ nats"):
        load(tmp_path, "head", init_device_mesh("cpu", (1,)))


@pytest.mark.usefixtures("alone")
def test_a_large_model_whose_layers_are_not_where_others_have_them_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load_policy, "SHARD_LAYERS_ABOVE", 0)
    GPT2LMHeadModel(GPT2Config(vocab_size=17, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path / "policy")
    monkeypatch.setattr(layers, "PLACES", ("layers", "blocks"))
    mesh = init_device_mesh("cpu", (1,))
    # A rank alone shards nothing.
    load(tmp_path, "head", mesh, "bfloat16")
    monkeypatch.setattr(load_policy, "is_whole", lambda *_, **__: False)
    with pytest.raises(ModelError, match="GPT2Model is not supported: its layers are not at layers, blocks"):
        load(tmp_path, "head", mesh, "bfloat16")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("content", [None, bytes(100)])
def test_weights_that_are_missing_or_damaged_are_named(models: Path, content: bytes | None) -> None:
    weights = models / "0" / "policy" / "model.safetensors"
    weights.unlink()
    if content is not None:
        weights.write_bytes(content)
    with pytest.raises(ModelError, match=r"policy(: no weights|/model.safetensors: not a file of safetensors)"):
        load(models / "0", "head", init_device_mesh("cpu", (1,)))
