"""The `model.lora` part of the configuration: adapters that are trained on the policy's frozen weights."""

from collections.abc import Iterator

from streamppo.config.base import Positive, Section
from streamppo.config.kl import Kl


class Lora(Section, frozen=True):
    """Low-rank adapters (arXiv:2106.09685): W + alpha / rank * B A; only A and B are trained and pushed."""

    rank: Positive = 16
    """Rows of A and columns of B."""
    alpha: Positive = 32
    """The product B A is scaled by alpha / rank."""
    targets: tuple[str, ...] = ()
    """Name suffixes of the linear layers with an adapter; empty is all but the head, experts and their routers."""

    @property
    def scale(self) -> float:
        """The LoRA scale: W + scale * B A."""
        return self.alpha / self.rank

    def contradictions(self) -> Iterator[str]:
        """Targets must be distinct names; an empty one would match every module."""
        if "" in self.targets or len(set(self.targets)) < len(self.targets):
            yield f"targets ({', '.join(self.targets)}) must be names, each once"

    def refuses(self, kl: Kl) -> Iterator[str]:
        """Yield a sentence for every choice that needs separate reference weights: here it is the frozen policy."""
        if kl.follow_every:
            yield f"algorithm.kl.follow_every ({kl.follow_every}) moves the reference, which model.lora keeps frozen"
        if kl.offload:
            yield "algorithm.kl.offload: with model.lora the reference is the policy itself, without its adapters"
