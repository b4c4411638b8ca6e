"""The engines that a configuration may choose, and the rules of each."""

import re
from typing import Annotated, Literal

from msgspec import Meta

from streamppo.config.base import Count, Kind, Seconds


class EmbeddedEngine(Kind, frozen=True, tag="embedded"):
    """Our own torch engine: any device, small models."""

    kv: Literal["keep", "recompute"] = "keep"
    """What a weight swap does with the cache of running completions."""


class SGLangEngine(Kind, frozen=True, tag="sglang"):
    """SGLang, 0.5.17 or newer: every actor starts one on its GPUs, or uses a server that runs already."""

    url: str = ""
    """A running server or router, such as "http://10.0.0.7:30000"; without one every actor starts its own engine."""
    api_key_env: str = "SGLANG_API_KEY"
    """The environment variable that holds the key of the server at `url`."""
    kv: Literal["keep", "recompute"] = "keep"
    """What a weight swap does with the cache of running completions."""
    transport: Literal["tensor", "group", "disk"] = "tensor"
    """How an actor hands weights to SGLang: shared memory of one machine, a process group's broadcast, or a folder."""
    folder: str = ""
    """With transport = "disk": a folder that the actor and SGLang can both reach."""
    attention_backend: str = ""
    """SGLang's name of an attention backend; empty takes SGLang's choice, and torch_native on a CPU."""
    mem_fraction_static: Annotated[float, Meta(gt=0, lt=1)] = 0.8
    """Share of the GPU memory free at its start that weights and cache get; a learner there needs the rest."""
    max_total_tokens: Count = 0
    """Tokens that the cache holds; 0 fills mem_fraction_static, and on a CPU is `slots` completions of full length."""
    prefix_cache: bool = True
    """Prompts share the cache of what they begin with, within one version."""
    start_s: Seconds = 900.0
    """An engine that has not started after so long has failed."""

    def __post_init__(self) -> None:
        """What belongs to one transport alone."""
        if (self.transport == "disk") != bool(self.folder):
            raise ValueError('folder is for transport = "disk", which needs it')
        if self.url and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url ({self.url!r}) must begin with http:// or https://")
        if self.transport == "tensor" and self.url and not re.match(r"https?://(localhost|127\.|\[::1\])", self.url):
            raise ValueError(
                f"transport = 'tensor' is memory of one machine: with url ({self.url!r}) it must be 'group' or 'disk'"
            )
