"""What is said to SGLang and how its answers are read, without SGLang."""

import base64
import re
from importlib import metadata
from typing import Any

import numpy as np
import pytest

from streamppo.config.sections import Config
from streamppo.errors import ConfigError, ModelError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.sglang import checks, processes, server, wire

PROMPT = np.array([3, 4], np.int32)


def span(version: str, start: int, end: int) -> dict[str, Any]:
    return {"version": wire.version_name(int(version)) if version.isdigit() else version, "start": start, "end": end}


def answer(count: int = 3, finish: str = "length", **more: Any) -> dict[str, Any]:
    drawn = [(-0.5 * n, 10 + n, None) for n in range(count)]
    meta = {"finish_reason": {"type": finish}, "output_token_logprobs": drawn, "weight_versions": [span("1", 0, count)]}
    return {"meta_info": {**meta, **more}}


def test_spans_become_one_version_for_each_token() -> None:
    assert wire.token_versions([span("4", 0, 2), span("6", 2, 3)], 3).tolist() == [4, 4, 6]


def test_spans_that_leave_a_token_out_or_name_no_version_of_ours_are_refused() -> None:
    with pytest.raises(ModelError, match="token 1 of 3"):
        wire.token_versions([span("4", 0, 1), span("6", 2, 3)], 3)
    with pytest.raises(ModelError, match=r"'3-0a1b2c3d', which .* another run, updates the same server"):
        wire.token_versions([span("3-0a1b2c3d", 0, 3)], 3)
    with pytest.raises(ModelError, match="'default', which this actor never pushed"):
        wire.token_versions([span("default", 0, 3)], 3)


def test_a_completion_has_the_tokens_that_were_drawn_with_their_log_probs_and_versions() -> None:
    done = wire.completion(answer(weight_versions=[span("1", 0, 1), span("2", 1, 3)]), oldest=1)
    assert (done.tokens.tolist(), done.versions.tolist()) == ([10, 11, 12], [1, 2, 2])
    assert done.logprobs.tolist() == [-0.0, -0.5, -1.0]
    assert done.finish == "length"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (answer(finish="abort"), "gave up a completion: abort"),
        (answer(count=0), "without tokens"),
        (answer(weight_versions=None), "which weights sampled token 0 of 3"),
        ({"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [(None, 1, None)]}}, "diverged"),
        (
            {"meta_info": {"finish_reason": {"type": "stop"}, "output_token_logprobs": [(float("-inf"), 1, None)]}},
            "div",
        ),
    ],
)
def test_what_is_no_completion_is_refused(said: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        wire.completion(said, oldest=0)


def test_a_request_holds_token_ids_and_how_to_sample() -> None:
    fields = wire.request(PROMPT, Sampling(9, 0.7), room=5, eos_ids=[1, 2], rid="r", key="run-3")
    assert (fields["input_ids"], fields["extra_key"], fields["return_logprob"]) == ([3, 4], "run-3", True)
    knobs = fields["sampling_params"]
    assert (knobs["max_new_tokens"], knobs["temperature"], knobs["top_k"]) == (5, 0.7, -1)
    assert knobs["stop_token_ids"] == [1, 2]


def test_a_request_leaves_nothing_to_what_a_server_or_a_model_prefers() -> None:
    plain: Any = wire.request(PROMPT, Sampling(9), room=5, eos_ids=[], rid="r", key="k")["sampling_params"]
    assert wire.NEUTRAL.items() <= plain.items() and plain["stop"] == [] and "logit_bias" not in plain
    asked: dict[str, Any] = {"strings": ["\n\n"], "biases": wire.biases([7, 9])}
    told: Any = wire.request(PROMPT, Sampling(9), room=5, eos_ids=[4], rid="r", key="k", **asked)["sampling_params"]
    assert told["stop"] == ["\n\n"] and told["logit_bias"] == {"7": wire.UNSAMPLED, "9": wire.UNSAMPLED}


@pytest.mark.parametrize("string", ["\n\nQ:", "1+", "[a-z]*", "\\d", "7"])
def test_the_strings_of_a_stream_are_patterns_of_themselves(string: str) -> None:
    """SGLang holds back no message for a pattern, so that it sends tokens at the interval that versions rely on."""
    asked: dict[str, Any] = {"rid": "r", "key": "k", "strings": [string], "interval": 8}
    told: Any = wire.request(PROMPT, Sampling(9), room=5, eos_ids=[4], **asked)["sampling_params"]
    (pattern,) = told["stop_regex"]
    assert told["stop"] == [] and re.fullmatch(pattern, string) and not re.search(pattern, "abcd8")


def test_more_unknown_tokens_than_sglang_can_be_told_of_are_refused() -> None:
    assert wire.biases([]) is None and len(wire.biases(range(wire.MOST_BIASES)) or ()) == wire.MOST_BIASES
    with pytest.raises(ModelError, match="lacks 16,385 tokens of the model's vocabulary"):
        wire.biases(range(wire.MOST_BIASES + 1))


def test_strings_need_a_tokenizer_in_sglang(math_config: Any) -> None:
    config = math_config("rollout.engine.kind=sglang")
    for spells in (False, True):
        made = wire.arguments(config, config.rollout.engine, "m", 9, (0, 5, 21), loads_tokenizer=spells)
        assert made["skip_tokenizer_init"] is not spells
        assert made["sampling_defaults"] == "openai"
    checks.check_strings({"skip_tokenizer_init": True}, ())
    checks.check_strings({"skip_tokenizer_init": False}, ("x",))
    with pytest.raises(ModelError, match=r"rollout\.stop has the string 'x', which a server finds by its tokenizer"):
        checks.check_strings({"skip_tokenizer_init": True}, ("x",))
    with pytest.raises(ConfigError, match="sampling_defaults is decided elsewhere"):
        math_config("rollout.engine.kind=sglang", "rollout.engine.args.sampling_defaults=model")


def test_tokens_come_at_an_interval_only_where_a_completion_hands_over_segments(math_config: Any) -> None:
    fields = wire.request(PROMPT, Sampling(9), room=5, eos_ids=[], rid="r", key="k")
    assert "stream" not in fields and "stream_interval" not in fields["sampling_params"]
    fields = wire.request(PROMPT, Sampling(9), room=5, eos_ids=[], rid="r", key="k", interval=8)
    assert (fields["stream"], fields["sampling_params"]["stream_interval"]) == (True, 8)
    assert arguments(math_config("rollout.engine.kind=sglang"))["incremental_streaming_output"] is True


@pytest.mark.parametrize("count", [0, 1, 3])
def test_the_last_tokens_of_an_answer_are_read_and_too_few_are_refused(count: int) -> None:
    meta = answer(3, output_token_sampling_mask=[[10], [11], [12, 5]], output_token_sampling_logprobs=[-1, -2, -3])
    got = wire.read_sampled(meta["meta_info"], count, candidates=True)
    assert got.tokens.tolist() == [10, 11, 12][3 - count :]
    assert got.logprobs.tolist() == [-1.0, -2.0, -3.0][3 - count :]
    assert got.candidates is not None
    assert got.candidates.tokens.tolist() == [10, 11, 5, 12][{0: 4, 1: 2, 3: 0}[count] :]
    with pytest.raises(ModelError, match="3 log-probs for 4 tokens"):
        wire.read_sampled(meta["meta_info"], 4, candidates=False)


def test_candidates_are_asked_for_only_where_top_p_or_top_k_cut() -> None:
    def asked(sampling: Sampling) -> object:
        return wire.request(PROMPT, sampling, room=5, eos_ids=[], rid="r", key="k").get("return_sampling_mask")

    assert [asked(one) for one in (Sampling(9), Sampling(9, 0.0), Sampling(9, top_p=0.9), Sampling(9, top_k=7))] == [
        None,
        None,
        True,
        True,
    ]


def test_routes_are_read_for_every_token_but_the_last_and_asked_for_where_they_are_wanted(math_config: Any) -> None:
    routed = np.arange(4 * 6, dtype="<i4")
    said = answer(routed_experts=base64.b64encode(routed.tobytes()).decode())
    done = wire.completion(said, oldest=1, routed=len(PROMPT))
    assert done.routes_SE is not None and done.routes_SE.dtype == np.int16
    assert done.routes_SE.tolist() == routed.reshape(4, 6).tolist()
    assert wire.completion(said, oldest=1).routes_SE is None
    for prompt, told in ((3, said), (len(PROMPT), answer())):
        with pytest.raises(ModelError, match=r"SGLang gave \d+ experts for \d tokens"):
            wire.completion(told, oldest=1, routed=prompt)
    asked = wire.request(PROMPT, Sampling(9), room=5, eos_ids=[], rid="r", key="k", routes=True)
    plain = wire.request(PROMPT, Sampling(9), room=5, eos_ids=[], rid="r", key="k")
    assert asked == plain | {"return_routed_experts": True}
    sglang = "rollout.engine.kind=sglang"
    own = arguments(math_config(sglang, "rollout.engine.routes=true"))
    assert own == arguments(math_config(sglang)) | {"enable_return_routed_experts": True}
    with pytest.raises(ModelError, match="a server needs --enable-return-routed-experts"):
        checks.check_routes({})
    checks.check_routes({"enable_return_routed_experts": True})


def test_log_probs_are_those_among_the_candidates_that_sglang_names() -> None:
    named = {
        "output_token_sampling_mask": [[12, 10], [11], [3, 12, 5]],
        "output_token_sampling_logprobs": [-0.1, 0, -2],
    }
    done = wire.completion(answer(**named), oldest=1, candidates=True)
    assert done.logprobs.tolist() == np.array([-0.1, 0, -2], np.float32).tolist()
    assert done.candidates is not None
    assert done.candidates.tokens.tolist() == [10, 12, 11, 3, 5, 12]
    assert done.candidates.counts.tolist() == [2, 1, 3]
    assert wire.completion(answer(), oldest=1).candidates is None


@pytest.mark.parametrize("named", [0, 2])
def test_a_completion_whose_candidates_sglang_does_not_name_is_refused(named: int) -> None:
    sets = {"output_token_sampling_mask": [[1]] * named, "output_token_sampling_logprobs": [0.0] * named}
    with pytest.raises(ModelError, match="does not name the tokens that top-p and top-k left"):
        wire.completion(answer(**sets if named else {}), oldest=1, candidates=True)


@pytest.mark.parametrize("version", ["0.5.20", "0.4.9.post1"])
def test_an_older_version_is_refused(version: str) -> None:
    with pytest.raises(ModelError, match=r"0.5.21 or newer"):
        wire.parse_supported_version(version, "it")


def test_newer_versions_are_taken() -> None:
    assert wire.parse_supported_version("0.5.21", "it") == (0, 5, 21)
    assert wire.parse_supported_version("0.6.0rc1", "it") == (0, 6, 0)


def test_a_missing_sglang_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    with pytest.raises(ModelError, match=r"SGLang is not installed: pip install 'streamppo\[sglang\]'"):
        wire.installed_version()


def test_where_the_cache_is_kept_boundaries_are_one_token_later_and_no_token_is_too_young() -> None:
    spans = [span("4", 0, 2), span("6", 2, 3), span("7", 3, 5)]
    kept = wire.completion(answer(5, weight_versions=spans), oldest=3, kv="keep")
    assert kept.versions.tolist() == [3, 4, 4, 6, 7]
    assert kept.versions.dtype == np.int32
    whole = wire.completion(answer(5, weight_versions=[span("4", 0, 5)]), oldest=4, kv="keep")
    assert whole.versions.tolist() == [4] * 5
    # A retracted request has none under way.
    assert wire.completion(answer(5, weight_versions=spans), oldest=3).versions.tolist() == [4, 4, 6, 7, 7]


def test_an_engine_of_our_own_overlaps_and_shares_prefixes(math_config: Any) -> None:
    recomputed = math_config("rollout.engine.kind=sglang", "rollout.engine.kv=recompute")
    for config in (math_config("rollout.engine.kind=sglang"), recomputed):
        assert not {"disable_overlap_schedule", "disable_radix_cache"} & arguments(config).keys()


def test_no_weights_are_read_and_decode_steps_are_graphs_up_to_all_slots(math_config: Any) -> None:
    config = math_config("rollout.engine.kind=sglang", "rollout.gpus=1", "rollout.slots=48")
    assert (arguments(config)["load_format"], arguments(config)["cuda_graph_max_bs_decode"]) == ("dummy", 48)
    assert "cuda_graph_max_bs_decode" not in arguments(math_config("rollout.engine.kind=sglang"))


def test_arguments_of_the_user_are_passed_on_and_win_over_those_without_a_field(math_config: Any) -> None:
    given = "rollout.engine={kind='sglang', args={cuda_graph_max_bs_decode=8, log_level='info', x=1.5}}"
    for gpus in ("rollout.gpus=1", "rollout.gpus=0"):
        made = arguments(math_config(given, gpus))
        assert (made["cuda_graph_max_bs_decode"], made["log_level"], made["x"]) == (8, "info", 1.5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("args={tp_size=2}", "args.tp_size is decided elsewhere: by rollout.gpus"),
        ("args={host='0.0.0.0'}", "args.host is decided elsewhere: our engines listen on loopback"),
        ("args={x=1}, urls=['http://localhost:1']", "args are for engines that actors start"),
    ],
)
def test_arguments_that_have_a_field_or_belong_to_a_server_are_refused(
    math_config: Any, fields: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        math_config(f"rollout.engine={{kind='sglang', {fields}}}")


def test_an_argument_that_sglang_has_not_is_refused_by_name() -> None:
    wire.check_arguments(["schedule_policy"], ["schedule_policy", "tp_size"])
    with pytest.raises(ModelError, match=r"no argument 'schedul_policy' .* did you mean 'schedule_policy'"):
        wire.check_arguments(["tp_size", "schedul_policy"], ["schedule_policy", "tp_size"])


def test_gpus_are_split_by_tensors_and_a_cpu_uses_torch_alone(math_config: Any) -> None:
    four = arguments(math_config("rollout.engine.kind=sglang", "rollout.gpus=4"))
    assert (four["tp_size"], "device" in four, "max_total_tokens" in four) == (4, False, False)
    none = arguments(math_config("rollout.engine.kind=sglang"))
    assert (none["tp_size"], none["device"], none["max_total_tokens"]) == (1, "cpu", 1000)
    assert none["attention_backend"] == "torch_native"


@pytest.mark.parametrize(
    ("fields", "version", "runner"),
    [
        ("", (0, 5, 23), None),
        ("", (0, 5, 22), "triton"),
        (", routes=true", (0, 5, 23), "triton"),
        (", routes=true, args={moe_runner_backend='deep_gemm'}", (0, 5, 23), "deep_gemm"),
    ],
)
def test_experts_are_computed_where_they_are_reported_and_take_new_weights(
    math_config: Any, fields: str, version: tuple[int, ...], runner: str | None
) -> None:
    config = math_config(f"rollout.engine={{kind='sglang'{fields}}}", "rollout.gpus=4")
    assert arguments(config, version).get("moe_runner_backend") == runner


def arguments(config: Config, version: tuple[int, ...] = (0, 5, 21)) -> dict[str, Any]:
    return wire.arguments(config, config.rollout.engine, "model", 1000, version)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("written", "meaning"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "mem_fraction_static"),
        ("[2026-01-01 00:00:00] RuntimeError: Not enough memory. Please", "mem_fraction_static"),
        ("OSError: [Errno 98] Address already in use", "a port that it needs is taken"),
        ("RuntimeError: No CUDA GPUs are available", "there is no GPU"),
        ("noise\nTraceback\n  File x\nAssertionError: head_dim 7\nmore noise", "AssertionError: head_dim 7"),
        ("nothing went wrong", ""),
    ],
)
def test_the_last_error_in_the_output_becomes_one_sentence(written: str, meaning: str) -> None:
    found = processes.explain_failure(written)
    assert meaning in found if meaning else found == ""
    assert "\n" not in found


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        ("http://127.0.0.1:30000", "", None),
        ("http://10.1.2.3:30000", "key", None),
        ("http://100.64.7.8:30000", "key", None),
        ("http://100.64.7.8:30000", "", "needs a key"),
        ("http://10.1.2.3:30000", "", "needs a key"),
        ("http://8.8.8.8:30000", "key", "public address"),
    ],
)
def test_a_server_is_loopback_or_private_with_a_key(url: str, key: str, message: str | None) -> None:
    if message is None:
        server.check_address(url, key)
        return
    with pytest.raises(ModelError, match=message):
        server.check_address(url, key)
