"""The `[model]` section of the configuration: the policy, its adapters, and the small built-in model."""

from collections.abc import Iterator
from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta

from streamppo.config.base import Count, Fraction, Positive, Section
from streamppo.config.regularisation import Kl

BUILTIN = "builtin:tiny"
"""The model.path of a small model that the run creates."""
HEAD_WIDTH = 8
"""Width of an attention head of builtin:tiny."""
JOINED = ("flash_attention_2", "flash_attention_3", "flash_attention_4", "varlen")
"""Attention kernels for packed rows without padding, in 16 bits on a GPU. "varlen" is part of torch."""


class Lora(Section, frozen=True):
    """Low-rank adapters: W + alpha / rank * B A; only A and B are trained and pushed (arXiv:2106.09685)."""

    rank: Positive = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32
    """The product B A is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Name suffixes of the transformer's linear layers with an adapter; empty: all except experts and routers."""

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def contradictions(self) -> Iterator[str]:
        if "" in self.targets or len(set(self.targets)) < len(self.targets):
            yield f"targets ({', '.join(self.targets)}) must be names, each once"

    def refuses(self, kl: Kl) -> Iterator[str]:
        """Yield a sentence for every setting of `kl` that needs a separate reference model."""
        if kl.follow_every:
            yield f"algorithm.kl.follow_every ({kl.follow_every}) moves the reference, which model.lora keeps frozen"
        if kl.offload:
            yield "algorithm.kl.offload: with model.lora the reference is the policy itself, without its adapters"


class Tiny(Section, frozen=True):
    """The model "builtin:tiny": its size, and a supervised warm-up that teaches the format of answers."""

    hidden_size: Positive = 64
    """Width of the hidden states; every attention head has width 8."""
    layers: Annotated[int, Meta(ge=1, le=128)] = 2
    """Number of layers."""
    max_steps: Count = 200
    """Maximum supervised steps of the warm-up."""
    target_accuracy: Fraction = 0.22
    """The warm-up ends at this greedy accuracy on training problems."""

    def contradictions(self) -> Iterator[str]:
        if self.hidden_size % HEAD_WIDTH:
            yield f"hidden_size ({self.hidden_size}) must be a multiple of {HEAD_WIDTH}, the width of a head"


class Model(Section, frozen=True):
    """The policy."""

    path: str
    """Folder or hub name of a causal LM, or "builtin:tiny"."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of parameters and activations."""
    float32_head: bool = True
    """Compute logits in float32 (arXiv:2506.13585)."""
    attention: Literal[
        "auto", "sdpa", "eager", "varlen", "flash_attention_2", "flash_attention_3", "flash_attention_4"
    ] = "auto"
    """The learner's attention; "auto" is flash-attn or "varlen" for bfloat16 on a GPU, otherwise "sdpa"."""
    share_prompts: bool = True
    """Compute a prompt once for all its samples in a micro-batch; not with "eager" attention."""
    gradient_checkpointing: Literal["auto", "off", "full", "offloaded"] = "auto"
    """Recompute activations from layers' inputs ("offloaded": kept on the CPU); "auto" is "full" if memory is short."""
    compile: bool = False
    """Compile the learner's layers, which takes minutes."""
    lora: Lora | None = None
    """Train adapters on frozen weights; `{}` chooses the defaults."""
    clock: str = ""
    """Time in chat templates (2026-01-31T12:00); empty: the run's start."""
    tiny: Tiny = Tiny()
    """The model behind "builtin:tiny"."""

    def contradictions(self) -> Iterator[str]:
        if self.clock and not _is_time(self.clock):
            yield f"clock ({self.clock!r}) is a date, or a date and a time: 2026-01-31 or 2026-01-31T12:00"
        if self.attention in JOINED and self.dtype != "bfloat16":
            yield f'attention = "{self.attention}" computes in 16 bits: it needs dtype = "bfloat16"'

    def refuses(self, setting: str) -> Iterator[str]:
        """Yield a sentence for every setting that excludes `setting`, which needs streamppo's attention."""
        for name, refused in {"attention": self.attention == "eager", "compile": self.compile}.items():
            if refused:
                yield f"{setting} is not possible with model.{name} = {getattr(self, name)!r}"


def _is_time(text: str) -> bool:
    try:
        datetime.fromisoformat(text)
    except ValueError:
        return False
    return True
