"""Writes requests to SGLang and reads its answers. Pure: nothing of SGLang is loaded here.

Token ids go in and come out, never text.
"""

import base64
import difflib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from importlib import metadata
from typing import Literal, NamedTuple

import numpy as np

from streamppo.config.engine import SGLangEngine
from streamppo.config.sections import Config
from streamppo.config.task import AgentEnvironment
from streamppo.errors import ModelError
from streamppo.rollout.engine import Completion, Sampling, TokenCandidates
from streamppo.rollout.sglang.client import Answer
from streamppo.types import Floats, Ints, Routes

OLDEST = (0, 5, 17)
"""The oldest version that is used: earlier ones run the code of everybody who reaches their ports."""
FLUSHES_PAUSED = (0, 5, 21)
"""The first version whose paused engine can empty its cache of prefixes while requests wait; earlier ones die."""

NAMES_GRAPHS = (0, 5, 21)
"""The first version known to have a bound of its own on the graphs of decode steps."""
NAMES_CANDIDATES = (0, 5, 21)
"""The first version known to return the tokens that top-p and top-k left."""

NAMES_ROUTES = (0, 5, 21)
"""The first version known to return the experts of every token."""

NAMES_DEFAULTS = (0, 5, 21)
"""The first version known to take sampling parameters from the model unless it is told not to."""
MOST_BIASES = 16384
"""Biases that a request may have: SGLang reads all of them for each completion."""
UNSAMPLED = -1e9
"""A bias with which no token is sampled; as a number that JSON has, and float32 makes no NaN of."""

STREAMS = (0, 5, 21)
"""The first version whose streams are known: tokens at an interval that the request names, without those before."""


NEUTRAL = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "min_new_tokens": 0,
    "ignore_eos": False,
}
"""Sampling parameters that change nothing."""


class SampledPart(NamedTuple):
    """Consecutive tokens of a completion with their log-probs, and with their candidates if top-p or top-k are on."""

    tokens: Ints
    logprobs: Floats
    candidates: TokenCandidates | None


def installed_version() -> tuple[int, ...]:
    """Read the version of the installed SGLang. Raises `ModelError` if there is none, or if it is too old."""
    try:
        return parse_supported_version(metadata.version("sglang"), "the installed SGLang")
    except metadata.PackageNotFoundError:
        raise ModelError(
            "SGLang is not installed: pip install 'streamppo[sglang]', or another rollout.engine"
        ) from None


def parse_supported_version(version: str, what: str) -> tuple[int, ...]:
    """Parse `version`, that of `what`. Raises `ModelError` if it is too old to be used safely."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    if numbers < OLDEST:
        raise ModelError(f"{what} is {version}: {'.'.join(map(str, OLDEST))} or newer is needed")
    return numbers


def arguments(
    config: Config,
    engine: SGLangEngine,
    model_path: str,
    tokens: int,
    version: tuple[int, ...],
    *,
    spells: bool = False,
) -> dict[str, object]:
    """Write SGLang's arguments for an engine of our own, of `version`. On a CPU its cache holds `tokens`.

    It `spells` completions, by the model's tokenizer, to find the strings that end them.
    """
    rollout, model = config.rollout, config.model
    unflushed = engine.kv == "recompute" and version < FLUSHES_PAUSED
    made: dict[str, object] = {
        "model_path": model_path,
        "skip_tokenizer_init": not spells,
        "dtype": model.dtype,
        "enable_fp32_lm_head": model.float32_head,
        "tp_size": ranks(config),
        "max_running_requests": rollout.slots,
        "mem_fraction_static": engine.mem_fraction_static,
        "disable_radix_cache": not engine.prefix_cache or unflushed,
        # The first push writes every tensor, and is attested: nothing is read from the model's files.
        "load_format": "dummy",
        "grammar_backend": "none",
        "host": "127.0.0.1",
        "log_level": "error",
        # Otherwise an engine without requests takes a whole core.
        "sleep_on_idle": True,
        # Otherwise every message of a stream repeats the tokens before.
        **({"incremental_streaming_output": True} if version >= STREAMS else {}),
        **({"sampling_defaults": "openai"} if version >= NAMES_DEFAULTS else {}),
        **({"enable_return_routed_experts": True} if engine.routes else {}),
    }
    if rollout.gpus:
        chosen = {"attention_backend": engine.attention_backend, "max_total_tokens": engine.max_total_tokens}
        # A decode step of more completions than a graph was recorded for is launched operation by operation.
        graphs = {"cuda_graph_max_bs_decode": rollout.slots} if version >= NAMES_GRAPHS else {}
        return made | graphs | {name: value for name, value in chosen.items() if value} | dict(engine.args)
    return made | {
        "device": "cpu",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "attention_backend": engine.attention_backend or "torch_native",
        "max_total_tokens": engine.max_total_tokens or tokens,
        **engine.args,
    }


def head(engine: SGLangEngine, *, untied: bool) -> dict[str, object]:
    """Write the argument for a model with a head of its own, where config.json says that it is the embedding."""
    if not untied:
        return {}
    given = json.loads(str(engine.args.get("json_model_override_args", "{}")))
    return {"json_model_override_args": json.dumps({**given, "tie_word_embeddings": False})}


def check_arguments(given: Iterable[str], known: Collection[str]) -> None:
    """Refuse an argument that SGLang has not, by its name and the nearest that it has. Raises `ModelError`."""
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            meant = f": did you mean {near[0]!r}?" if near else ""
            raise ModelError(f"the installed SGLang has no argument {name!r} (rollout.engine.args){meant}")


def ranks(config: Config) -> int:
    """Count the processes that share the model in an engine of our own."""
    return max(1, int(config.rollout.gpus))


def environment(config: Config, *, local: bool) -> dict[str, str]:
    """Write the environment of SGLang's processes. With `local` the model is a folder, and the hub is not asked."""
    offline = {"HF_HUB_OFFLINE": "1"} if local else {}
    # Log-probs come from the distribution that is sampled from, after temperature.
    return {
        "OMP_NUM_THREADS": str(config.rollout.threads),
        "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",
        # New weights are written behind the step under way, which otherwise would read some of them.
        "SGLANG_FORCE_COARSE_WAR_BARRIER": "1",
        **offline,
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
    """Write the fields of a `generate` call. Prompts of one `key` share a cache of prefixes.

    All that a server could take from preferences of its own is said: log-probs are of this distribution. With
    `interval`, so many tokens are sent at a time, and the first at once; with `routes`, the experts of all.
    """
    routed: dict[str, object] = {"return_routed_experts": True} if routes else {}
    candidates: dict[str, object] = {"return_sampling_mask": True} if sampling.cuts else {}
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
            "stop": list(strings),
            **({"logit_bias": biases} if biases else {}),
            "skip_special_tokens": False,
            **({"stream_interval": interval} if interval else {}),
        },
    }


def biases(unknown: Sequence[int]) -> dict[str, float] | None:
    """Write the biases with which `unknown` tokens are never sampled. Raises `ModelError` if they are too many."""
    if len(unknown) > MOST_BIASES:
        raise ModelError(
            f"the tokenizer lacks {len(unknown):,} tokens of the model's vocabulary, and SGLang is told of "
            f"{MOST_BIASES:,} at most: cut the model's embeddings to its tokenizer (resize_token_embeddings)"
        )
    return {str(token): UNSAMPLED for token in unknown} or None


def completion(
    answer: Mapping[str, Answer],
    oldest: int,
    *,
    cuts: bool = False,
    kv: Literal["keep", "recompute"] = "recompute",
    routed: int = 0,
) -> Completion:
    """Read the completion in the answer to a `generate` call that was sent at version `oldest`.

    Its cache was kept or recomputed over swaps, as `kv` says. With `cuts`, top-p or top-k are on, and log-probs are
    among the candidates that it names. If SGLang does not say which version sampled a token, `oldest` is taken for all
    of them: a lag is never understated. With routes, `routed` is the number of the prompt's tokens. Raises `ModelError`
    if the answer is no completion.
    """
    meta = answer["meta_info"]
    made = complete(read_sampled(meta, len(meta.get("output_token_logprobs") or ()), candidates=cuts), meta, oldest, kv)
    return made._replace(routes_SE=_routes(meta, routed + len(made.tokens) - 1)) if routed else made


def _routes(meta: Mapping[str, Answer], tokens: int) -> Routes:
    """Read the experts of `tokens` tokens, layer by layer: those of a layer without experts mean nothing."""
    given = np.frombuffer(base64.b64decode(meta.get("routed_experts") or ""), "<i4")
    if not len(given) or len(given) % tokens:
        raise ModelError(f"SGLang gave {len(given)} experts for {tokens} tokens of a mixture of experts")
    return given.reshape(tokens, -1).astype(np.int16)


def read_sampled(meta: Mapping[str, Answer], count: int, *, candidates: bool) -> SampledPart:
    """Read the last `count` tokens in an answer's `meta`. Raises `ModelError` if it lacks something of them."""
    entries = (meta.get("output_token_logprobs") or ())[-count:] if count else ()
    if len(entries) != count:
        raise ModelError(f"SGLang gave {len(entries)} log-probs for {count} tokens")
    logprobs = np.array([entry[0] for entry in entries], np.float32)
    among = None
    if candidates:
        logprobs, among = _among_candidates(meta, count)
    if not np.isfinite(logprobs).all():
        raise ModelError("the log-probs are not finite: the weights have diverged")
    return SampledPart(np.array([entry[1] for entry in entries], np.int32), logprobs, among)


def concatenate(parts: Sequence[SampledPart]) -> SampledPart:
    """Lay consecutive parts end to end."""
    tokens, logprobs, candidates = zip(*parts, strict=True)
    among = [one for one in candidates if one is not None]
    return SampledPart(
        np.concatenate(tokens), np.concatenate(logprobs), TokenCandidates.concatenate(among) if among else None
    )


def complete(got: SampledPart, meta: Mapping[str, Answer], oldest: int, kv: Literal["keep", "recompute"]) -> Completion:
    """Make a completion of all its tokens and the `meta` of its last answer. The rest is as for `completion`."""
    reason = meta.get("finish_reason") or {}
    finish = reason.get("type")
    if finish not in ("stop", "length"):
        raise ModelError(f"SGLang gave up a completion: {reason.get('message') or finish}")
    count = len(got.tokens)
    if not count:
        raise ModelError("SGLang gave a completion without tokens")
    spans = meta.get("weight_versions")
    known = None if spans is None else versions(spans, count)
    if known is not None and kv == "keep":
        known = one_later(known, oldest)
    return Completion(
        tokens=got.tokens,
        logprobs=got.logprobs,
        versions=np.full(count, oldest, np.int32) if known is None else known,
        finish=finish,
        versions_known=spans is not None,
        candidates=got.candidates,
        cached=meta.get("cached_tokens") or 0,
    )


def _among_candidates(meta: Mapping[str, Answer], count: int) -> tuple[Floats, TokenCandidates]:
    """Read the log-probs of the last `count` tokens among their candidates, and these."""
    sets, logprobs = meta.get("output_token_sampling_mask"), meta.get("output_token_sampling_logprobs")
    last = slice(-count, None) if count else slice(0)
    sets, logprobs = (sets or ())[last], (logprobs or ())[last]
    if not len(sets) == len(logprobs) == count:
        raise ModelError("SGLang does not name the tokens that top-p and top-k left for each token of a completion")
    return np.array(logprobs, np.float32), TokenCandidates(
        np.concatenate([np.zeros(0, np.int32), *(np.sort(np.array(one, np.int32)) for one in sets)]),
        np.array([len(one) for one in sets], np.int32),
    )


def streaming(config: Config) -> str:
    """Name what asks for streams of tokens; "" for nothing."""
    if isinstance(config.environment, AgentEnvironment):
        return "agents (environment.kind = 'agent')"
    return "queue.segments" if config.queue.segments is not None else ""


def check_streams(version: tuple[int, ...], what: str) -> None:
    """Refuse an SGLang whose streams are not known, which `what` needs. Raises `ModelError`."""
    _refuse_older(version, STREAMS, what)


def check_candidates(version: tuple[int, ...]) -> None:
    """Refuse an SGLang that does not name the candidates of a token. Raises `ModelError`."""
    if version < NAMES_CANDIDATES:
        wanted = ".".join(map(str, NAMES_CANDIDATES))
        raise ModelError(
            f"with rollout.top_p or top_k, SGLang must be {wanted} or newer, and is {'.'.join(map(str, version))}: "
            "before, it does not say which tokens they left, and the learner would compare another distribution"
        )


def versions(spans: Sequence[Mapping[str, Answer]], count: int) -> Ints:
    """Spread SGLang's spans [{version, start, end}] over `count` tokens: one version for each.

    Raises `ModelError` if they leave a token out or name no version of ours.
    """
    made = np.full(count, -1, np.int32)
    for span in spans:
        try:
            made[span["start"] : span["end"]] = int(span["version"])
        except ValueError:
            raise ModelError(f"SGLang sampled with weights {span['version']!r}, which nobody pushed") from None
    if (made < 0).any():
        raise ModelError(f"SGLang does not say which weights sampled token {int(np.argmin(made))} of {count}")
    return made


def one_later(versions_N: Ints, oldest: int) -> Ints:
    """Let every boundary between versions be one token later, and a first token be of `oldest` at the youngest.

    SGLang prepares a step while it computes the one before: a pause in place finds one computed whose tokens it has not
    counted, so that they count as the next version's. A token that really is the next version's is taken for one older.
    """
    return np.concatenate([[np.int32(oldest)], versions_N[:-1]]).astype(np.int32)


def check_routes(version: tuple[int, ...]) -> None:
    """Refuse an SGLang that does not tell the experts of a token. Raises `ModelError`."""
    _refuse_older(version, NAMES_ROUTES, "rollout.engine.routes")


def _refuse_older(version: tuple[int, ...], wanted: tuple[int, ...], what: str) -> None:
    if version < wanted:
        least, found = (".".join(map(str, one)) for one in (wanted, version))
        raise ModelError(f"{what} need SGLang {least} or newer, and it is {found}")


def check_strings(info: Mapping[str, Answer], strings: Sequence[str]) -> None:
    """Refuse a server that cannot find `strings` in completions. Raises `ModelError`."""
    if strings and info.get("skip_tokenizer_init"):
        raise ModelError(
            f"rollout.stop has the string {strings[0]!r}, which a server finds by its tokenizer: start it without "
            "--skip-tokenizer-init, or stop at the names of tokens alone"
        )


def check_server(info: Mapping[str, Answer], kv: str, version: tuple[int, ...], *, routes: bool = False) -> None:
    """Refuse a server that makes versions or caches wrong, or keeps no routes. Raises `ModelError`."""
    if routes and not info.get("enable_return_routed_experts"):
        raise ModelError("with rollout.engine.routes a server needs --enable-return-routed-experts")
    if kv == "recompute" and version < FLUSHES_PAUSED and not info.get("disable_radix_cache"):
        raise ModelError("with rollout.engine.kv = 'recompute' an SGLang before 0.5.21 needs --disable-radix-cache")


# --- attestation ---------------------------------------------------------------------------------------------


def checksums(ranks: Sequence[Mapping[str, Answer]]) -> dict[str, str]:
    """Name the weights checker's checksum of every tensor by rank/tensor."""
    return {f"{rank}/{name}": sum_ for rank, held in enumerate(ranks) for name, sum_ in held["checksums"].items()}
