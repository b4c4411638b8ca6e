"""Writes requests to SGLang and reads its answers, with token ids and without text. Does not import SGLang."""

import base64
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Literal, NamedTuple
from uuid import uuid4

import numpy as np

from streamppo import process
from streamppo.config.hints import nearest
from streamppo.config.rollout import SGLangEngine
from streamppo.config.sections import Config
from streamppo.errors import ModelError
from streamppo.rollout.engine import Completion, Sampling, TokenCandidates
from streamppo.rollout.sglang.link import Answer
from streamppo.types import Floats, Ints, Routes

WRITER = uuid4().hex[:8]
"""Identifies this process in version names: two runs that use one server would otherwise both push a "7"."""
OLDEST = (0, 5, 21)
"""The oldest supported version, and the oldest that was tested."""
RESTORES_EXPERTS = (0, 5, 23)
"""The first version that restores the layout of experts before it loads weights, with every MoE backend."""
MOST_BIASES = 16384
"""Maximum number of biases in a request, because SGLang processes each of them for every completion."""
UNSAMPLED = -1e9
"""A bias that prevents sampling of a token; unlike -inf it exists in JSON, and in float32 it gives no NaN."""
NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
}


class SampledPart(NamedTuple):
    """Consecutive tokens of a completion with their log-probs, and with candidates if top-p or top-k is on."""

    tokens: Ints
    logprobs: Floats
    candidates: TokenCandidates | None


def installed_version() -> tuple[int, ...]:
    """Return the version of the installed SGLang. Raises `ModelError` if it is not installed or too old."""
    try:
        return parse_supported_version(metadata.version("sglang"), "the installed SGLang")
    except metadata.PackageNotFoundError:
        raise ModelError(
            "SGLang is not installed: pip install 'streamppo[sglang]', or another rollout.engine"
        ) from None


def parse_supported_version(version: str, owner: str) -> tuple[int, ...]:
    """Parse the `version` of `owner`. Raises `ModelError` if it is older than `OLDEST`."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST:
        raise ModelError(f"{owner} is {version}: {'.'.join(map(str, OLDEST))} or newer is needed")
    return numbers


def arguments(
    config: Config,
    engine: SGLangEngine,
    model_path: str,
    tokens: int,
    version: tuple[int, ...],
    *,
    loads_tokenizer: bool = False,
) -> dict[str, object]:
    """Return the arguments of an SGLang of `version` that this actor starts, with a cache of `tokens` on a CPU."""
    rollout, model = config.rollout, config.model
    common: dict[str, object] = {
        "model_path": model_path,
        "skip_tokenizer_init": not loads_tokenizer,
        "dtype": model.dtype,
        "enable_fp32_lm_head": model.float32_head,
        "tp_size": ranks(config),
        "max_running_requests": rollout.slots,
        "mem_fraction_static": engine.mem_fraction_static,
        # The first push writes every tensor and checks that SGLang has it, so the model's files need not be read.
        "load_format": "dummy",
        "grammar_backend": "none",
        # Rows are text, so a multimodal model needs no processor of pictures.
        "enable_multimodal": False,
        "host": "127.0.0.1",
        "log_level": "error",
        # Without this, an idle engine uses a whole core.
        "sleep_on_idle": True,
        # Without this, every message of a stream repeats all earlier tokens.
        "incremental_streaming_output": True,
        "sampling_defaults": "openai",
        **({"enable_return_routed_experts": True} if engine.routes else {}),
    }
    if rollout.gpus:
        gpu_arguments: dict[str, object] = {}
        if engine.max_total_tokens:
            gpu_arguments["max_total_tokens"] = engine.max_total_tokens
        # SGLang's default backend returns no experts on a B200, and before 0.5.23 its layout takes no new weights.
        if engine.routes or version < RESTORES_EXPERTS:
            gpu_arguments["moe_runner_backend"] = "triton"
        # A decode step with more completions than the largest CUDA graph would launch each kernel separately.
        gpu_arguments["cuda_graph_max_bs_decode"] = rollout.slots
        return {**common, **gpu_arguments, **engine.args}
    return common | {
        "device": "cpu",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "attention_backend": "torch_native",
        "max_total_tokens": engine.max_total_tokens or tokens,
        **engine.args,
    }


def head(engine: SGLangEngine, *, untied: bool) -> dict[str, object]:
    """Return the argument for a model with a separate head although its config.json ties it to the embedding."""
    if not untied:
        return {}
    overrides = json.loads(str(engine.args.get("json_model_override_args", "{}")))
    return {"json_model_override_args": json.dumps({**overrides, "tie_word_embeddings": False})}


def check_arguments(names: Iterable[str], known: Collection[str]) -> None:
    """Raise `ModelError` for an argument unknown to SGLang, with the most similar known name."""
    for name in names:
        if name not in known:
            hint = nearest(name, known)
            raise ModelError(f"the installed SGLang has no argument {name!r} (rollout.engine.args){hint}")


def ranks(config: Config) -> int:
    """Return the number of processes that share the model in an SGLang that this actor starts."""
    return max(1, int(config.rollout.gpus))


def environment(config: Config, *, local: bool) -> dict[str, str]:
    """Return the environment of SGLang's processes. With `local`, the model is a folder, and no hub is contacted."""
    offline = {"HF_HUB_OFFLINE": "1"} if local else {}
    # SGLang's own caches are already in a persistent folder.
    caches = process.compile_caches() if config.rollout.gpus else {}
    # SGLANG_RETURN_ORIGINAL_LOGPROB = 0 gives log-probs under the sampling distribution, after temperature.
    return {
        "OMP_NUM_THREADS": str(config.rollout.threads),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # Weights are written after the running step, which otherwise could read some of the new weights.
        "SGLANG_FORCE_COARSE_WAR_BARRIER": "1",
        **offline,
        **caches,
    }


def request(
    prompt: Ints,
    sampling: Sampling,
    *,
    room: int,
    eos_ids: Sequence[int],
    strings: Sequence[str] = (),
    biases: Mapping[str, float] | None = None,
    rid: str,
    key: str,
    interval: int = 0,
    routes: bool = False,
) -> dict[str, object]:
    """Return the fields of a `generate` call. Prompts with the same `key` share cached prefixes.

    Every sampling parameter is set, so that no default of the server applies. With `interval`, the first token is
    streamed at once, and then `interval` tokens in each message. `routes` asks for the experts of all tokens.
    """
    routed: dict[str, object] = {"return_routed_experts": True} if routes else {}
    candidates: dict[str, object] = {"return_sampling_mask": True} if sampling.excludes_tokens else {}
    stream: dict[str, object] = {"stream": True} if interval else {}
    return {
        **candidates,
        **stream,
        **routed,
        "rid": rid,
        "input_ids": prompt.tolist(),
        "return_logprob": True,
        "extra_key": key,
        "sampling_params": {
            "max_new_tokens": min(sampling.max_tokens, room),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            **NEUTRAL,
            "stop_token_ids": list(eos_ids),
            # While the text may end in a stop string, SGLang holds the stream back, so that more than `interval` tokens
            # could be missing at a pause. SGLang does not hold streams back for stop patterns.
            "stop": [] if interval else list(strings),
            **({"stop_regex": [re.escape(string) for string in strings]} if interval and strings else {}),
            **({"logit_bias": biases} if biases else {}),
            # SGLang uses the seed only with enable_deterministic_inference, and reads it as int64.
            **({"sampling_seed": sampling.seed >> 1} if sampling.seed is not None else {}),
            "skip_special_tokens": False,
            **({"stream_interval": interval} if interval else {}),
        },
    }


def biases(unknown: Sequence[int]) -> dict[str, float] | None:
    """Return the biases that prevent sampling of `unknown` tokens. Raises `ModelError` if there are too many."""
    if len(unknown) > MOST_BIASES:
        raise ModelError(
            f"the tokenizer lacks {len(unknown):,} tokens of the model's vocabulary, and a request excludes "
            f"at most {MOST_BIASES:,}: cut the model's embeddings to its tokenizer (resize_token_embeddings)"
        )
    return {str(token): UNSAMPLED for token in unknown} or None


def completion(
    answer: Mapping[str, Answer],
    oldest: int,
    *,
    candidates: bool = False,
    kv: Literal["keep", "recompute"] = "recompute",
    routed: int = 0,
) -> Completion:
    """Read the completion in the answer to a `generate` call that was sent at version `oldest`.

    `kv` is the engine's setting for its cache at swaps. With `candidates` (top-p or top-k), log-probs are renormalised
    over them. If experts are recorded, `routed` is the number of prompt tokens. Raises `ModelError` for other answers.
    """
    meta = answer["meta_info"]
    completed = complete(
        read_sampled(meta, len(meta.get("output_token_logprobs") or ()), candidates=candidates), meta, oldest, kv
    )
    return completed._replace(routes_SE=_routes(meta, routed + len(completed.tokens) - 1)) if routed else completed


def _routes(meta: Mapping[str, Answer], tokens: int) -> Routes:
    experts = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), "<i4")
    if not len(experts) or len(experts) % tokens:
        raise ModelError(f"SGLang gave {len(experts)} experts for {tokens} tokens of a mixture of experts")
    return experts.reshape(tokens, -1).astype(np.int16)


def read_sampled(meta: Mapping[str, Answer], count: int, *, candidates: bool) -> SampledPart:
    """Read the last `count` tokens in an answer's `meta`. Raises `ModelError` if a token's data is missing."""
    entries = (meta.get("output_token_logprobs") or ())[-count:] if count else ()
    if len(entries) != count:
        raise ModelError(f"SGLang gave {len(entries)} log-probs for {count} tokens")
    logprobs = np.array([entry[0] for entry in entries], np.float32)
    token_candidates = None
    if candidates:
        logprobs, token_candidates = _read_candidates(meta, count)
    if not np.isfinite(logprobs).all():
        raise ModelError("the log-probs are not finite: the weights have diverged")
    return SampledPart(np.array([entry[1] for entry in entries], np.int32), logprobs, token_candidates)


def concatenate(parts: Sequence[SampledPart]) -> SampledPart:
    """Concatenate consecutive parts."""
    tokens, logprobs, candidates = zip(*parts, strict=True)
    candidate_parts = [part for part in candidates if part is not None]
    return SampledPart(
        np.concatenate(tokens),
        np.concatenate(logprobs),
        TokenCandidates.concatenate(candidate_parts) if candidate_parts else None,
    )


def complete(
    part: SampledPart, meta: Mapping[str, Answer], oldest: int, kv: Literal["keep", "recompute"]
) -> Completion:
    """Make a completion of all its tokens and of its last answer's `meta`. Other arguments are as in `completion`."""
    reason = meta.get("finish_reason") or {}
    finish = reason.get("type")
    if finish not in ("stop", "length"):
        raise ModelError(f"SGLang gave up a completion: {reason.get('message') or finish}")
    count = len(part.tokens)
    if not count:
        raise ModelError("SGLang gave a completion without tokens")
    versions = token_versions(meta.get("weight_versions") or (), count)
    return Completion(
        tokens=part.tokens,
        logprobs=part.logprobs,
        versions=shift_boundaries(versions, oldest) if kv == "keep" else versions,
        finish=finish,
        candidates=part.candidates,
        cached=meta.get("cached_tokens") or 0,
    )


def version_name(version: int) -> str:
    """Return the name of `version` in SGLang."""
    return f"{version}-{WRITER}"


def token_versions(spans: Sequence[Mapping[str, Answer]], count: int) -> Ints:
    """Expand SGLang's spans [{version, start, end}] to a version for each token. Raises `ModelError` for gaps."""
    by_token = np.full(count, -1, np.int32)
    for span in spans:
        number, _, writer = str(span["version"]).partition("-")
        if writer != WRITER:
            raise ModelError(
                f"SGLang sampled with weights {span['version']!r}, which this actor never pushed: another program, or "
                "another run, updates the same server"
            )
        by_token[span["start"] : span["end"]] = int(number)
    if (by_token < 0).any():
        raise ModelError(f"SGLang does not say which weights sampled token {int(np.argmin(by_token))} of {count}")
    return by_token


def shift_boundaries(versions_N: Ints, oldest: int) -> Ints:
    """Shift every boundary between versions one token later; the first token gets `oldest`.

    SGLang prepares a step while the previous one runs. At a pause in place, one step is computed and not yet counted,
    and its tokens would belong to the next version. The first token of the next version then counts as older.
    """
    return np.concatenate([[np.int32(oldest)], versions_N[:-1]]).astype(np.int32)


def _read_candidates(meta: Mapping[str, Answer], count: int) -> tuple[Floats, TokenCandidates]:
    sets, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    last = slice(-count, None) if count else slice(0)
    sets, logprobs = (sets or ())[last], (logprobs or ())[last]
    if not len(sets) == len(logprobs) == count:
        raise ModelError("SGLang does not name the tokens that top-p and top-k left for each token of a completion")
    return np.array(logprobs, np.float32), TokenCandidates(
        np.concatenate([np.zeros(0, np.int32), *(np.sort(np.array(candidates, np.int32)) for candidates in sets)]),
        np.array([len(candidates) for candidates in sets], np.int32),
    )


def checksums(ranks: Sequence[Mapping[str, Answer]]) -> dict[str, str]:
    """Return the weights checker's checksum of every tensor, by rank/tensor."""
    return {f"{rank}/{name}": value for rank, report in enumerate(ranks) for name, value in report["checksums"].items()}
