"""The `[rollout]` section of the configuration: the actors that generate, their engines, and the rules of each engine.

Other packages call an engine's methods and never test which engine it is.
"""

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Literal, Self, TypeAlias

from msgspec import Meta, field, structs

from streamppo.config.base import Count, Kind, Machine, Positive, PositiveFloat, Processes, Seconds

FAMILIES = ("llama", "qwen2", "qwen3")
"""Values of model_type for which the embedded engine has a forward pass of its own, and the learner its own layers."""
MOST_CANDIDATES = 4096
"""Maximum candidates of a token that SGLang returns."""
Argument: TypeAlias = bool | int | float | str
Fit = Callable[[float], int]
"""(share of a GPU's free memory) -> cache tokens that fit into it next to the weights."""


class EngineKind(Kind, frozen=True):
    """Fields common to all engines."""

    kv: Literal["keep", "recompute"] = "keep"
    """At a swap, keep the cache of running completions or recompute it."""


class EmbeddedEngine(EngineKind, frozen=True, tag="embedded"):
    """Our own torch engine: any device, small models. Its own forward pass is the faster one."""

    @property
    def spare_weights(self) -> int:
        """Copies of the weights besides those for decoding."""
        return 1

    def shares_weights(self, *, adapted: bool) -> bool:
        """False: each engine loads the weights in a form of its own."""
        return False

    def at(self, place: int) -> Self:
        """The engine of actor number `place`: the same for all."""
        return self

    @property
    def start_s(self) -> float:
        """Time limit of its start in seconds: none, it starts at once."""
        return 0.0

    @property
    def routes(self) -> bool:
        """It runs no mixture of experts."""
        return False

    def refuses_learner(self, *, compiled: bool, segments: bool) -> Iterator[str]:
        """Reasons against a learner with these settings: none."""
        return iter(())

    def refuses_sampling(self, top_p: float, top_k: int) -> str:
        """Reason against this sampling: none."""
        return ""

    def refuses_places(self, actors: int, evaluators: int, gpus: float) -> str:
        """Reason that `actors` and `evaluators` of it cannot run with `gpus` GPUs each; empty if they can."""
        return f"rollout.gpus ({gpus:g}) must be 1 with the embedded engine" if gpus > 1 else ""

    def cache_tokens(self, row_tokens: int, fit: Fit | None) -> int | None:
        """Capacity of its cache in tokens: `row_tokens`, the longest rows of all slots."""
        return row_tokens


DECIDED = {
    "model_path": "by model.path",
    "dtype": "by model.dtype",
    "enable_fp32_lm_head": "by model.float32_head",
    "tp_size": "by rollout.gpus",
    "dp_size": "by rollout.actors, each with one copy of the model",
    "pp_size": "by rollout.gpus, which share every layer",
    "max_running_requests": "by rollout.slots",
    "attention_backend": "by rollout.engine.attention_backend",
    "mem_fraction_static": "by rollout.engine.mem_fraction_static",
    "max_total_tokens": "by rollout.engine.max_total_tokens",
    "disable_radix_cache": "by rollout.engine.prefix_cache",
    "random_seed": "by seed",
    "skip_tokenizer_init": "requests and answers are token ids; only a string of rollout.stop needs the tokenizer",
    "sampling_defaults": "log-probs are of the distribution that [rollout] says",
    "preferred_sampling_params": "log-probs are of the distribution that [rollout] says",
    "load_format": "all weights come from the learner",
    "host": "our engines listen on loopback",
    "enable_return_routed_experts": "by rollout.engine.routes",
}
"""SGLang arguments that have their own field here or are fixed, with the reason."""


class SGLangEngine(EngineKind, frozen=True, tag="sglang"):
    """SGLang, 0.5.17 or newer: every actor starts one on its GPUs, or uses a running server."""

    urls: tuple[str, ...] = ()
    """Running servers, one for each actor; if empty, actors start their own."""
    api_key_env: str = "SGLANG_API_KEY"
    """Environment variable with the key of `urls`."""
    transport: Literal["tensor", "group", "disk"] = "tensor"
    """Transport to SGLang: shared memory, a process group's broadcast, or a folder."""
    folder: str = ""
    """For "disk": a folder that actor and SGLang see."""
    attention_backend: str = ""
    """SGLang's attention backend; empty is its choice."""
    mem_fraction_static: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    """Share of the free GPU memory for weights and cache."""
    max_total_tokens: Count = 0
    """Tokens of the cache; 0 fills mem_fraction_static."""
    prefix_cache: bool = True
    """Prompts share the cache of a common prefix."""
    args: dict[str, Argument] = field(default_factory=dict[str, Argument])
    """Further arguments by SGLang's names: { schedule_policy = "lpm" }."""
    routes: bool = False
    """The learner uses the experts that SGLang reports (R3)."""
    start_s: Seconds = 900.0
    """Time limit for the engine's start."""

    def at(self, place: int) -> Self:
        """The engine of actor number `place`: of `urls` only the server with this index."""
        return structs.replace(self, urls=self.urls[place : place + 1])

    @property
    def spare_weights(self) -> int:
        """Copies of the weights besides those for decoding: none, it loads in place."""
        return 0

    def shares_weights(self, *, adapted: bool) -> bool:
        """True if engines of a machine load a version from common memory; with adapters each actor merges its own."""
        return self.transport == "tensor" and not self.urls and not adapted

    def contradictions(self) -> Iterator[str]:
        """Fields that need or exclude others, and valid `urls`."""
        if (self.transport == "disk") != bool(self.folder):
            yield 'folder is for transport = "disk", which needs it'
        if self.args and self.urls:
            yield "args are for engines that actors start: the servers at urls have their own arguments"
        for name in self.args:
            if elsewhere := DECIDED.get(name):
                yield f"args.{name} is decided elsewhere: {elsewhere}"
        for url in self.urls:
            if not url.startswith(("http://", "https://")):
                yield f"urls ({url!r}) must begin with http:// or https://"
            if self.urls.count(url) > 1:
                yield f"urls must differ: two actors would update the server at {url!r}"
            if self.transport == "tensor" and not re.match(r"https?://(localhost|127\.|\[::1\])", url):
                yield f"transport = 'tensor' is memory of one machine: with urls ({url!r}) it must be 'group' or 'disk'"

    def refuses_sampling(self, top_p: float, top_k: int) -> str:
        """Reason against this sampling; empty if it is possible."""
        if top_k <= MOST_CANDIDATES and (top_k or top_p == 1):
            return ""
        return (
            f"top_k ({top_k}) must be 2 to {MOST_CANDIDATES} with top_p ({top_p:g}) and SGLang: it returns a "
            "token's candidates, which the learner needs, only if top_k bounds their number"
        )

    def refuses_learner(self, *, compiled: bool, segments: bool) -> Iterator[str]:
        """Reasons against a learner that is `compiled`, or that trains on `segments`."""
        if self.routes and compiled:
            yield "rollout.engine.routes replaces each router's choice, and model.compile fuses a layer's operations"
        if self.routes and segments:
            yield "rollout.engine.routes arrive at the end of a completion, and queue.segments are trained on earlier"

    def refuses_places(self, actors: int, evaluators: int, gpus: float) -> str:
        """Reason that `actors` and `evaluators` of it cannot run with `gpus` GPUs each; empty if they can."""
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
        """Capacity of its cache in tokens; `fit` is None on a CPU. Returns None for a server at `urls`.

        On a GPU the cache fills its share of the memory; on a CPU it holds `row_tokens`, the longest rows of all slots.
        `max_total_tokens` replaces `row_tokens` and bounds the share.
        """
        if self.urls:
            return None
        if fit is None:
            return self.max_total_tokens or row_tokens
        filled = fit(self.mem_fraction_static)
        return min(filled, self.max_total_tokens or filled)


class Rollout(Machine, frozen=True):
    """The actors that generate."""

    engine: EmbeddedEngine | SGLangEngine = EmbeddedEngine()
    """The engine that samples the tokens."""
    threads: Positive = 1
    """CPU threads."""
    actors: Processes = 1
    """Rollout actors; `streamppo scale` changes their number."""
    in_flight: Positive = 64
    """Trajectories of one actor in flight, rewards included."""
    slots: Positive = 64
    """Completions that one engine decodes at once."""
    max_tokens: Positive = 256
    """Maximum tokens of one completion."""
    stop: tuple[str, ...] = ()
    """Further stops: names of added tokens, and strings."""
    limit: str = ""
    """`package.module:name` or `path/file.py:name`: (prompt, identity) -> a lower max_tokens."""
    temperature: PositiveFloat = 1.0
    """Sampling temperature, of the learner's log-probs too."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Nucleus sampling in training; below 1, log-probs are over the candidates."""
    top_k: Count = 0
    """Top-k sampling in training, as with top_p; 0 is off."""

    @property
    def excludes_tokens(self) -> bool:
        """See `excludes_tokens`."""
        return excludes_tokens(self.top_p, self.top_k)

    def contradictions(self) -> Iterator[str]:
        """Sampling without a training signal, or that the engine does not support."""
        if "" in self.stop:
            yield 'stop has "", which would end a completion at its first token'
        if self.top_k == 1:
            yield "top_k (1) leaves every token without an alternative: all log-probs are 0, and nothing is learned"
        if refused := self.engine.refuses_sampling(self.top_p, self.top_k):
            yield refused


def excludes_tokens(top_p: float, top_k: int) -> bool:
    """Return True if top-p or top-k exclude tokens of the vocabulary."""
    return top_p < 1 or top_k > 0
