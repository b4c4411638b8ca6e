"""What `check` says of ends, of sampling that the model asks for, and of the memory of this machine."""

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from conftest import MATH
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from streamppo.commands.checks import check, folder, lengths, machine, memory, memory_estimate, model
from streamppo.commands.checks import task as tasks
from streamppo.commands.checks.finding import Finding
from streamppo.config import file as configfile
from streamppo.config.sections import Config, longest_row
from streamppo.errors import ConfigError
from streamppo.learner import memory as ranks
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.telemetry import host

SMALL: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
QWEN3: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
DATA = "task={kind='data', sources={data={data='rows.jsonl', max_prompt_tokens=64}}}"


def folder_of(folder: Path, *added: str, generation: object = None) -> Tokenizer:
    made = character_tokenizer("abcdefgh")
    made.add_tokens(list(added))
    made.save_pretrained(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return Tokenizer(folder)


def config_of(*overrides: str) -> Config:
    return configfile.load(MATH, list(overrides))


def found(config: Config, tokenizer: Tokenizer, hf_config: Any) -> list[Finding]:
    return list(model.ends(config, hf_config, tokenizer))


# --- ends ----------------------------------------------------------------------------------------------------


def test_ends_are_printed_by_name_with_their_places(tmp_path: Path) -> None:
    tokenizer = folder_of(tmp_path, "<end>", generation={"eos_token_id": [11]})
    config = config_of(f"model.path={tmp_path}", 'rollout.stop=["<end>", "ab", "<|x|>"]')
    first, misspelt, rows = found(config, tokenizer, Qwen2Config(vocab_size=20, **SMALL))
    assert first == Finding(
        "stop",
        "ok",
        "completions end at <eos> (1: tokenizer), <end> (11: generation config, rollout.stop), the string 'ab', the "
        "string '<|x|>'",
    )
    assert misspelt.state == "note" and "'<|x|>', which is no token of the tokenizer" in misspelt.text
    assert rows == Finding(
        "vocabulary", "ok", "8 rows of the model's vocabulary are not tokens of the tokenizer: never sampled"
    )


@pytest.mark.parametrize("eos", [3, [1, 3], [1, 11], 1])
def test_an_end_that_is_a_token_of_ordinary_text_is_noted(eos: object, tmp_path: Path) -> None:
    tokenizer = folder_of(tmp_path, "<end>", generation={"eos_token_id": eos})
    ends, *notes = found(config_of(f"model.path={tmp_path}"), tokenizer, Qwen2Config(vocab_size=12, **SMALL))
    assert ends.state == "ok"
    if eos in ([1, 11], 1):
        assert not notes
    else:
        (note,) = notes
        assert note.state == "note"
        assert note.text == (
            f"{tokenizer.name(3)!r} (3), a token of ordinary text, ends completions: correct eos_token_id in the "
            "generation config if they end too early"
        )


def test_a_model_that_nothing_ends_is_noted_and_an_end_that_is_no_token_is_an_error(tmp_path: Path) -> None:
    tokenizer = folder_of(tmp_path, generation={"eos_token_id": "nobody"})
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    config, hf_config = config_of(f"model.path={tmp_path}"), Qwen2Config(vocab_size=11, **SMALL)
    (only,) = found(config, tokenizer, hf_config)
    assert only.state == "error" and "eos_token_id has 'nobody', which is not a token" in only.text
    (tmp_path / "generation_config.json").unlink()
    (only,) = found(config, Tokenizer(tmp_path), hf_config)
    assert only.state == "note" and "only its length ends a completion" in only.text


@pytest.mark.parametrize(
    ("engine", "hf_config", "said"),
    [
        ("embedded", Qwen2Config(**SMALL, **WINDOW), None),
        ("embedded", Qwen2Config(**SMALL, **WINDOW | {"sliding_window": 4096}), None),
        ("sglang", Qwen2Config(**SMALL, **WINDOW | {"sliding_window": 4096}), None),
        ("sglang", Qwen2Config(**SMALL, **WINDOW), "in SGLang to"),
        ("sglang", LlamaConfig(**SMALL, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
        ("embedded", LlamaConfig(**SMALL, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), None),
        ("sglang", Qwen2Config(**SMALL, use_sliding_window=False, sliding_window=8), None),
    ],
)
def test_rows_that_an_engine_would_compute_otherwise_are_an_error(
    engine: str, hf_config: Any, said: str | None
) -> None:
    got = list(model.longest_rows(config_of(f"rollout.engine.kind={engine}"), hf_config))
    assert [one.state for one in got] == ["error"] * (said is not None)
    assert said is None or said in got[0].text


# --- sampling ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "said"),
    [
        (None, None),
        ({}, None),
        ({"do_sample": True, "eos_token_id": 1, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "num_beams": 1}, None),
        ({"temperature": None, "top_k": None, "repetition_penalty": 1.0, "bad_words_ids": None}, None),
        ({"temperature": 0.7, "top_p": 0.8, "top_k": 20}, "has temperature 0.7, top_p 0.8, top_k 20, which sampling"),
        ({"repetition_penalty": 1.05}, "has repetition_penalty 1.05, which sampling ignores: tokens are sampled with"),
        ({"suppress_tokens": [3], "min_new_tokens": 4}, "has suppress_tokens [3], min_new_tokens 4"),
        ({"num_beams": 4}, "num_beams 4"),
    ],
)
def test_sampling_that_the_model_asks_for_is_named_once(tmp_path: Path, generation: object, said: str | None) -> None:
    folder_of(tmp_path, generation=generation)
    got = list(folder.ignored_sampling(config_of(f"model.path={tmp_path}")))
    assert [one.state for one in got] == ["note"] * (said is not None)
    assert said is None or said in got[0].text


def test_sampling_that_the_configuration_has_too_is_not_named(tmp_path: Path) -> None:
    folder_of(tmp_path, generation={"temperature": 0.7, "top_k": 20})
    chosen = [f"model.path={tmp_path}", "rollout.temperature=0.7", "rollout.top_k=20"]
    assert not list(folder.ignored_sampling(config_of(*chosen)))
    (one,) = folder.ignored_sampling(config_of(*chosen[:2]))
    assert "has top_k 20, which" in one.text and "temperature 0.7, top_p 1, top_k 0 only" in one.text


def test_the_log_of_a_run_names_it_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder_of(tmp_path, generation={"repetition_penalty": 1.3})
    with caplog.at_level("INFO"), contextlib.suppress(ConfigError):
        check.refuse(config_of(f"model.path={tmp_path}"))
    assert caplog.text.count("repetition_penalty 1.3") == 1


# --- memory --------------------------------------------------------------------------------------------------


def memory_of(config: Config, monkeypatch: pytest.MonkeyPatch, gib: int = 24) -> dict[str, list[Finding]]:
    monkeypatch.setattr(host, "total_mib", lambda: gib * 1024)
    made: dict[str, list[Finding]] = {}
    for one in memory.memory(config, Qwen3Config(**QWEN3), memory.gpu(80)):
        made.setdefault(one.subject, []).append(one)
    return made


def test_the_cache_is_that_of_the_configurations_rows_and_not_of_the_whole_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """16 slots of 64 + 8 tokens, 224 KiB each; 40,960 of them would be 140 GiB."""
    config = config_of(DATA, "rollout.slots=16", "rollout.max_tokens=8", "learner.micro_batch_tokens=512")
    assert longest_row(config) == 72
    (engine,) = memory_of(config, monkeypatch)["engine memory"]
    assert "cache 0.2 GiB (1,152 tokens)" in engine.text


@pytest.mark.parametrize(
    ("overrides", "gib", "states"),
    [
        ((), 64, ["ok"]),
        ((), 16, ["error"]),
        (("cluster.address=auto",), 16, []),
        (("rollout.slots=1024", "rollout.max_tokens=512"), 128, ["error"]),
        (("learner.ranks=4", "queue.batch_size=512"), 32, ["error"]),
        (("rollout.actors=8",), 48, ["error"]),
        (("learner.gpus=1", "rollout.gpus=1", "model.dtype=bfloat16"), 24, ["ok"]),
        (("learner.gpus=1", "rollout.gpus=1", "rollout.engine.kind=sglang"), 4, ["not here"]),
    ],
)
def test_the_memory_of_a_run_is_compared_with_that_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], gib: int, states: list[str]
) -> None:
    config = config_of(DATA, "rollout.slots=16", "rollout.max_tokens=8", "learner.micro_batch_tokens=512", *overrides)
    got = memory_of(config, monkeypatch, gib).get("this machine", [])
    assert [one.state for one in got] == states
    for one in got:
        share = f" of {gib}.0 GiB: " if one.state == "ok" else f"are too much for this machine, which has {gib}.0 GiB: "
        assert share in one.text and ", processes " in one.text
        assert ("for a smaller cache" in one.text) == ("rollout.slots=1024" in overrides)


@pytest.mark.parametrize(
    ("overrides", "mib", "said"),
    [
        ((), 4096, None),
        (("rollout.engine.kind=sglang",), 6144, "error"),
        (("rollout.engine.kind=sglang", "rollout.gpus=1"), 6144, "not here"),
        (("rollout.engine.kind=sglang", "rollout.actors=3"), 7168, "ok"),
        (("rollout.engine.kind=sglang", "cluster.address=auto"), 64, "ok"),
        (("rollout.engine.kind=sglang", "model.lora.rank=2"), 4096, "error"),
        (("rollout.engine.kind=sglang", "model.lora.rank=2"), 6144, "ok"),
        (("rollout.engine={kind='sglang', transport='group'}",), 64, None),
    ],
)
def test_versions_in_shared_memory_are_compared_with_its_size(
    monkeypatch: pytest.MonkeyPatch, overrides: tuple[str, ...], mib: int, said: str | None
) -> None:
    """2.2 GiB in float32: three times for all engines, or with adapters twice for each; and 0.2 GiB of Ray's."""
    monkeypatch.setattr(machine, "shared_mib", lambda: mib)
    config = config_of(DATA, "rollout.slots=16", "rollout.max_tokens=8", *overrides)
    got = memory_of(config, monkeypatch, 512).get("/dev/shm", [])
    assert [one.state for one in got] == ([] if said is None else [said])
    begins = (
        "an engine's actor takes 4.5 GiB: " if "model.lora.rank=2" in overrides else "the actors of a node take 6.7 GiB"
    )
    assert all(one.text.startswith(begins) for one in got), [one.text for one in got]


def test_a_containers_limit_is_the_memory_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("0::/job\n")
    (tmp_path / "job").mkdir()
    for name, content in {"memory.events": "oom_kill 0\n", "memory.max": str(3 * 2**30)}.items():
        (tmp_path / "job" / name).write_text(content)
    assert host.limit(tmp_path, tmp_path / "own") == 3 * 2**30
    monkeypatch.setattr(host, "limit", lambda: 3 * 2**30)
    assert host.total_mib() == 3 * 2**10
    monkeypatch.setattr(host, "limit", lambda: None)
    assert host.total_mib() > 3 * 2**10


def test_an_embedded_engine_has_its_weights_twice_and_what_is_on_gpus_is_not_on_the_machine() -> None:
    model = ranks.sizes(Qwen2Config(vocab_size=97, **SMALL), config_of().model)
    rank = ranks.rank(config_of(), model, 10)

    def parts(*overrides: str) -> memory_estimate.MachineMemory:
        config = config_of(*overrides)
        return memory_estimate.machine(config, model, rank, memory_estimate.engine(config, model, 10, 0.0), 10)

    weights, cache = model.parameters * 4, config_of().rollout.slots * 10 * model.cache_per_token
    pushes, checkpoint = 2 * weights, 3 * weights
    processes = memory_estimate.RAY + 2 * memory_estimate.PROCESS
    assert parts() == (rank.total, pushes, checkpoint, 2 * weights + cache, 0, 3 * weights, processes), (
        "a rank alone pushes what actors see"
    )
    engine = memory_estimate.engine(config_of(), model, 10, 0.0)
    assert engine is not None and engine.total == 2 * weights + cache, "also on a CPU"
    assert parts("learner.ranks=4", "learner.mesh.replicate=2").checkpoint == 2 * checkpoint
    assert parts("algorithm.advantage=gae", "algorithm.critic.model=policy").checkpoint == checkpoint + 12 * model.body
    assert parts("learner.ranks=2").weights == parts("learner.deltas=on").weights == weights
    assert parts("rollout.engine.kind=sglang").engines == weights + cache
    served = {kind: f"rollout.engine={{kind='sglang', transport='{kind}'}}" for kind in ("tensor", "group")}
    four = ("learner.ranks=2", "rollout.actors=4")
    assert parts(served["tensor"], *four).weights == 3 * weights, "the actors of a machine have one copy"
    assert parts(served["group"], *four).weights == 4 * 3 * weights
    found = [memory_estimate.actor(config_of(one, "learner.ranks=2"), model) for one in served.values()]
    assert [one.total for one in found] == [0, 3 * weights] and found[1].private == 2 * weights
    lora = memory_estimate.actor(config_of(served["tensor"], "model.lora.rank=2"), model)
    assert (lora.shared, lora.merged) == (2 * weights, 2 * weights), "each merges adapters of its own"
    adapted = memory_estimate.actor(config_of("model.lora.rank=2"), model._replace(trained=100))
    assert adapted == (0, 2 * weights, 0, 0), "the frozen model, and the next version"
    away = parts("learner.gpus=1", "rollout.gpus=1")
    assert (away.ranks, away.engines) == (0, 0)
    assert parts("learner.gpus=1", "learner.offload=true").ranks == ranks.state(
        config_of("learner.offload=true"), model
    )


# --- turns and contexts --------------------------------------------------------------------------------------

GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def glm(folder: Path, eos: str | None, stop: str = "") -> list[Finding]:
    """What is found of a folder whose template ends a turn with the role of the next one."""
    made = character_tokenizer("abcdefgh?\n")
    made.add_tokens(["<|user|>", "<|assistant|>"], special_tokens=True)
    made.chat_template = GLM
    made.save_pretrained(folder)
    if eos:
        ends_with = {"eos_token_id": made.convert_tokens_to_ids(eos)}
        (folder / "generation_config.json").write_text(json.dumps(ends_with))
    config = config_of(f"model.path={folder}", *([f"rollout.stop=['{stop}']"] if stop else []))
    return found(config, Tokenizer(folder), Qwen2Config(**SMALL, vocab_size=20))


def test_a_template_that_ends_no_turn_is_noted_with_the_token_that_begins_the_next(tmp_path: Path) -> None:
    (note,) = [one for one in glm(tmp_path, None) if one.state == "note"]
    assert (
        "writes no token after an assistant's turn" in note.text
        and "rollout.stop = ['<|user|>'] prevents that" in note.text
    )


@pytest.mark.parametrize(("eos", "stop"), [("<|user|>", ""), (None, "<|user|>")])
def test_a_template_that_ends_no_turn_is_in_order_where_the_next_ones_token_is_an_end(
    tmp_path: Path, eos: str | None, stop: str
) -> None:
    assert [one for one in glm(tmp_path, eos, stop) if one.state == "note"] == []


@pytest.mark.parametrize(("bound", "state"), [(8, "error"), (16, "note"), (64, None)])
def test_prompts_without_room_in_the_context_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: int, state: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    texts = ["a" * 12, *["b" * 20, "c" * 30] * 2, "d" * 14]
    Path("rows.jsonl").write_text("".join(json.dumps({"prompt": one, "answer": "a"}) + "\n" for one in texts))
    task = "task={kind='data', data='rows.jsonl', max_prompt_tokens=64, held_out=0}"
    config, tokenizer = config_of(task, f"model.path={tmp_path}"), folder_of(tmp_path)
    prompts = tasks.load(config, tokenizer).task
    assert prompts is not None
    told = list(lengths.prompts(prompts, Qwen2Config(**SMALL, max_position_embeddings=bound), tokenizer))
    assert [one.state for one in told] == [state] * bool(state)
    if told:
        count = "all" if state == "error" else "4"
        expected = (
            f"{count} of the first 6 prompts leave no room for a completion in the model's context of {bound} tokens"
        )
        assert expected in told[0].text
