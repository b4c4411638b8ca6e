"""The `[rollout]` section of the configuration: the actors that sample, their engines, and the rules of each engine.

Other packages call the methods of an engine's configuration, and do not test the kind of the engine.
"""

import re
from collections.abc import Callable, Iterator
from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from msgspec import Meta, field, structs

from streamppo.config.base import Count, Kind, Machine, Positive, PositiveFloat, Processes, Seconds, address_fault

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of model_type for which the embedded engine and the learner compute with streamppo's code."""
MOST_CANDIDATES = 4096
"""Maximum candidates that SGLang returns for a token."""
Argument: TypeAlias = bool | int | float | str
Fit = Callable[[float], int]
"""A function from a share of the GPU's free memory to the number of cache tokens for which the weights leave room."""


class EngineKind(Kind, frozen=True):
    """Fields common to all engines."""

    kv: Literal["keep", "recompute"] = "keep"
    """Keep or recompute the KV cache of running completions at a swap."""


class EmbeddedEngine(EngineKind, frozen=True, tag="embedded"):
    """streamppo's engine in torch, on any device. The engine is fastest for the models in `FAMILIES`."""

    spare_weights: ClassVar[int] = 1
    """Number of copies of the weights in addition to the copy used for decoding."""
    start_s: ClassVar[float] = 0.0
    """Added to time limits while the engine starts: 0 s, because it starts at once."""
    routes: ClassVar[bool] = False
    """False, because the engine returns no experts to the learner."""

    def shares_weights(self, *, adapted: bool) -> bool:
        """False, because each actor holds its copy of the weights."""
        return False

    def at(self, place: int) -> Self:
        """Return the configuration of actor number `place`: all actors have the same."""
        return self

    def refuses_places(self, actors: int, evaluators: int, gpus: float) -> str:
        """Why `actors` and `evaluators` with this engine cannot run on `gpus` GPUs each; empty if they can."""
        return f"rollout.gpus ({gpus:g}) must be 1 with the embedded engine" if gpus > 1 else ""

    def cache_tokens(self, row_tokens: int, fit: Fit | None) -> int | None:
        """Return the cache's capacity in tokens: `row_tokens`, the tokens of a longest row in every slot."""
        return row_tokens


DECIDED = {
    "model_path": "by model.path",
    "dtype": "by model.dtype",
    "enable_fp32_lm_head": "by model.float32_head",
    "tp_size": "by rollout.gpus",
    "dp_size": "by rollout.actors, each with one copy of the model",
    "pp_size": "by rollout.gpus, which share every layer",
    "max_running_requests": "by rollout.slots",
    "mem_fraction_static": "by rollout.engine.mem_fraction_static",
    "max_total_tokens": "by rollout.engine.max_total_tokens",
    "random_seed": "by seed",
    "skip_tokenizer_init": "requests and answers are token ids; only a string of rollout.stop needs the tokenizer",
    "sampling_defaults": "log-probs are of the distribution that [rollout] says",
    "preferred_sampling_params": "log-probs are of the distribution that [rollout] says",
    "load_format": "all weights come from the learner",
    "host": "our engines listen on loopback",
    "enable_return_routed_experts": "by rollout.engine.routes",
}
"""SGLang arguments that `args` may not set: for each, the setting that decides its value, or a reason."""


class SGLangEngine(EngineKind, frozen=True, tag="sglang"):
    """SGLang 0.5.21 or newer. Every actor starts an engine on its GPUs, or uses a running server."""

    urls: tuple[str, ...] = ()
    """Addresses of running servers, one for each actor; empty: each actor starts an engine."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable with the servers' API key."""
    transport: Literal["tensor", "group"] = "tensor"
    """How weights reach SGLang: in shared memory ("tensor"), or by a process group's broadcast ("group")."""
    mem_fraction_static: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    """Share of the free GPU memory for weights and cache."""
    max_total_tokens: Count = 0
    """Maximum tokens of the cache; 0 is as many as fit into mem_fraction_static."""
    args: dict[str, Argument] = field(default_factory=dict[str, Argument])
    """Further arguments of SGLang, such as { schedule_policy = "lpm" }."""
    routes: bool = False
    """The learner uses the experts that SGLang chose for each token (R3)."""
    start_s: Seconds = 900.0
    """Time limit for a start of the engine, or for the wait for a server at urls."""
    spare_weights: ClassVar[int] = 0
    """0, because SGLang loads weights in place."""

    def at(self, place: int) -> Self:
        """Return the configuration of actor number `place`, whose `urls` has only this actor's server."""
        return structs.replace(self, urls=self.urls[place : place + 1])

    def shares_weights(self, *, adapted: bool) -> bool:
        """True if all engines of a machine load from the same shared memory; False with urls or adapters."""
        return self.transport == "tensor" and not self.urls and not adapted

    def contradictions(self) -> Iterator[str]:
        if self.args and self.urls:
            yield "args are for engines that actors start: the servers at urls have their own arguments"
        for name in self.args:
            if elsewhere := DECIDED.get(name):
                yield f"args.{name} is decided elsewhere: {elsewhere}"
        for url in self.urls:
            yield from address_fault(url, "urls")
            if self.urls.count(url) > 1:
                yield f"urls must differ: two actors would update the server at {url!r}"
            if self.transport == "tensor" and not re.match(r"https?://(localhost|127\.|\[::1\])", url):
                yield f"transport = 'tensor' is memory of one machine: with urls ({url!r}) it must be 'group'"

    def refuses_places(self, actors: int, evaluators: int, gpus: float) -> str:
        """Why `actors` and `evaluators` with this engine cannot run on `gpus` GPUs each; empty if they can."""
        if gpus > 1 and gpus % 1:
            return f"rollout.gpus ({gpus:g}) must be below 1 or a whole number"
        if self.urls and gpus and self.transport != "group":
            return f"rollout.gpus ({gpus:g}) must be 0: the servers at rollout.engine.urls have their own GPUs"
        if self.urls and actors + evaluators != len(self.urls):
            which = f"rollout.actors ({actors})" + (f" and evaluation.actors ({evaluators})" if evaluators else "")
            together = " together" if evaluators else ""
            return f"{which} must be {len(self.urls)}{together}: one for each of rollout.engine.urls, to update it"
        return ""

    def cache_tokens(self, row_tokens: int, fit: Fit | None) -> int | None:
        """Return the cache's capacity in tokens; None for a server at `urls`. `fit` is None on a CPU.

        On a GPU the cache fills mem_fraction_static, up to `max_total_tokens`. On a CPU its capacity is
        `max_total_tokens` or, if that is 0, `row_tokens`, the tokens of a longest row in every slot.
        """
        if self.urls:
            return None
        if fit is None:
            return self.max_total_tokens or row_tokens
        filled = fit(self.mem_fraction_static)
        return min(filled, self.max_total_tokens or filled)


class Rollout(Machine, frozen=True):
    """The actors that sample completions."""

    engine: EmbeddedEngine | SGLangEngine = EmbeddedEngine()
    """The engine that samples the tokens."""
    threads: Positive = 1
    """CPU threads."""
    actors: Processes = 1
    """Number of rollout actors; `streamppo scale` changes it."""
    in_flight: Positive = 64
    """Maximum trajectories that an actor samples or scores at the same time."""
    slots: Positive = 64
    """Maximum completions that an engine decodes at the same time."""
    max_tokens: Positive = 256
    """Maximum tokens of one completion."""
    stop: tuple[str, ...] = ()
    """Names of tokens and other strings that also end a completion."""
    limit: str = ""
    """A function from (prompt, identity) to a lower max_tokens."""
    temperature: PositiveFloat = 1.0
    """Temperature of sampling, and of the learner's log-probs."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling in training; log-probs are those of the nucleus."""
    top_k: Count = 0
    """Top-k sampling in training; log-probs are those of the k tokens; 0 is off."""

    @property
    def excludes_tokens(self) -> bool:
        return excludes_tokens(self.top_p, self.top_k)

    def contradictions(self) -> Iterator[str]:
        if "" in self.stop:
            yield 'stop has "", which would end a completion at its first token'
        if self.top_k == 1:
            yield "top_k (1) leaves every token without an alternative: all log-probs are 0, and nothing is learned"
        is_bounded = self.top_k <= MOST_CANDIDATES and (self.top_k or self.top_p == 1)
        if isinstance(self.engine, SGLangEngine) and not is_bounded:
            yield (
                f"top_k ({self.top_k}) must be 2 to {MOST_CANDIDATES} with top_p ({self.top_p:g}) and SGLang: it "
                "returns a token's candidates, which the learner needs, only if top_k bounds their number"
            )


def excludes_tokens(top_p: float, top_k: int) -> bool:
    """Return True if top-p or top-k exclude tokens of the vocabulary."""
    return top_p < 1 or top_k > 0
