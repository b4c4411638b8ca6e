"""The `[algorithm.teacher]` part of the configuration: the model that scores the policy's tokens, and its place."""

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from streamppo.config.base import Calls, NonNegative, PositiveFloat, address_fault


class Teacher(Calls, frozen=True):
    """On-policy distillation: a second model scores the tokens that the policy sampled. Bounds on calls: of `url`."""

    model: str = ""
    """A local folder or hub name of a causal LM with the policy's tokenizer, on the learner's ranks."""
    url: str = ""
    """In place of `model`: an SGLang server's address, such as http://10.0.0.9:30000, asked by the rollout actors."""
    key_env: str = ""
    """The environment variable that holds the server's key (its --api-key)."""
    weight: PositiveFloat = 1.0
    """Weight of log teacher - log proximal of each token."""
    signal: Literal["advantage", "reward"] = "advantage"
    """It is added to the token's own advantage, with discount 0, or to its reward, for the estimator to discount."""
    others: NonNegative = 1.0
    """Weight of the rewards' advantages beside signal = "advantage"; at 0 the policy learns from the teacher alone."""
    offload: bool = False
    """The teacher's `model` waits in CPU memory and visits the GPU for its pass, layer by layer."""

    def contradictions(self) -> Iterator[str]:
        """Two teachers, settings of none or of the other place, and two weights for one sum."""
        if self.model and self.url:
            yield f"a teacher has one place: model ({self.model!r}) on the learner's ranks, or url ({self.url!r})"
        if not self.on and self._changed("weight", "signal", "others", "offload", *OF_SERVER):
            yield "a teacher needs a place: set algorithm.teacher.model or algorithm.teacher.url"
        if self.model:
            for name in self._changed(*OF_SERVER):
                yield f"{name} ({getattr(self, name)!r}) is for a teacher at a url"
        if self.url:
            yield from self._of_url()
        if self.signal == "reward" and self.others != 1:
            yield f'others ({self.others:g}) is for signal = "advantage": beside "reward" the scorers have weights'

    @property
    def on(self) -> bool:
        """True if there is a teacher."""
        return bool(self.model or self.url)

    def refuses_sampling(self, temperature: float, *, cuts: bool) -> str:
        """Reason that a server cannot score tokens that were sampled so; empty if it can."""
        if self.url and temperature != 1:
            return (
                f"rollout.temperature ({temperature:g}) must be 1 with algorithm.teacher.url: SGLang gives the "
                "log-probs of given tokens at temperature 1 alone, which would be compared with another distribution's"
            )
        if self.url and cuts:
            return (
                "rollout.top_p and top_k must be off with algorithm.teacher.url: the server's log-probs are of the "
                "whole vocabulary, and the policy's would be among the tokens that these leave (a teacher by model can)"
            )
        return ""

    def _changed(self, *names: str) -> list[str]:
        """The fields among `names` that are not as they are by default."""
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        return [name for name in names if getattr(self, name) != defaults[name]]

    def _of_url(self) -> Iterator[str]:
        yield from address_fault(self.url)
        try:
            parts = urlsplit(self.url)
            whole = parts.port != 0 and bool(parts.hostname)
        except ValueError:
            yield f"url ({self.url!r}) is no address: its host or port cannot be read"
            return
        if not whole or parts.query or parts.fragment or any(map(str.isspace, self.url)):
            yield f"url ({self.url!r}) must be a server's address and nothing behind it: http://10.0.0.9:30000"
        if parts.path.rstrip("/").endswith(("/generate", "/v1")):
            yield f"url ({self.url!r}) must end before {parts.path}: SGLang's own /generate is asked there"
        if self.offload:
            yield "offload is for a teacher by model: one at a url takes no memory of the learner"


OF_SERVER = (*Calls.__struct_fields__, "key_env")
"""Fields that say how a server is asked; no update on a given batch depends on them."""
