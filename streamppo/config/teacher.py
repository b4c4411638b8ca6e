"""The `[algorithm.teacher]` part of the configuration: the model whose log-probs teach the policy."""

from collections.abc import Iterator
from typing import Literal
from urllib.parse import urlsplit

from streamppo.config.base import Calls, NonNegative, PositiveFloat, address_fault


class Teacher(Calls, frozen=True):
    """On-policy distillation from a second model. The limits on calls apply only to `url`."""

    model: str = ""
    """Folder or hub name of a causal LM with the policy's tokenizer."""
    url: str = ""
    """Instead of `model`, address of an SGLang server: http://10.0.0.9:30000."""
    key_env: str = ""
    """Environment variable with the server's API key."""
    weight: PositiveFloat = 1.0
    """Weight of the signal: the teacher's log-prob - the proximal log-prob."""
    signal: Literal["advantage", "reward"] = "advantage"
    """Add the signal to the advantages, or to the rewards."""
    others: NonNegative = 1.0
    """Weight of the advantages from rewards; 0: only the teacher's signal."""
    offload: bool = False
    """Keep `model` in CPU memory, and copy it layer by layer to the GPU."""

    def contradictions(self) -> Iterator[str]:
        if self.model and self.url:
            yield f"a teacher is either a model ({self.model!r}) on the learner's ranks or at a url ({self.url!r})"
        if not self.on and self._changed("weight", "signal", "others", "offload", *SERVER_FIELDS):
            yield "a teacher needs a model or a url: set algorithm.teacher.model or algorithm.teacher.url"
        if self.model:
            for name in self._changed(*SERVER_FIELDS):
                yield f"{name} ({getattr(self, name)!r}) is for a teacher at a url"
        if self.url:
            yield from self._url_mistakes()
        if self.signal == "reward" and self.others != 1:
            yield f'others ({self.others:g}) is for signal = "advantage": with "reward" use the weights of scorers'

    @property
    def on(self) -> bool:
        return bool(self.model or self.url)

    def refuses_sampling(self, temperature: float, *, excludes_tokens: bool) -> str:
        """Return why a teacher's server cannot give log-probs for this sampling; "" if it can."""
        if self.url and temperature != 1:
            return (
                f"rollout.temperature ({temperature:g}) must be 1 with algorithm.teacher.url: SGLang gives "
                "log-probs of given tokens only at temperature 1, and they would be compared with another distribution"
            )
        if self.url and excludes_tokens:
            return (
                "rollout.top_p and top_k must be off with algorithm.teacher.url: the server's log-probs are over the "
                "whole vocabulary, and the policy's would be over fewer tokens (algorithm.teacher.model supports them)"
            )
        return ""

    def _changed(self, *names: str) -> list[str]:
        """Return the fields among `names` whose values differ from their defaults."""
        defaults = dict(zip(self.__struct_fields__, self.__struct_defaults__, strict=True))
        return [name for name in names if getattr(self, name) != defaults[name]]

    def _url_mistakes(self) -> Iterator[str]:
        yield from address_fault(self.url)
        try:
            parts = urlsplit(self.url)
            has_host = parts.port != 0 and bool(parts.hostname)
        except ValueError:
            yield f"url ({self.url!r}) is not an address: its host or port cannot be read"
            return
        if not has_host or parts.query or parts.fragment or any(map(str.isspace, self.url)):
            yield f"url ({self.url!r}) must be only a server's address: http://10.0.0.9:30000"
        if parts.path.rstrip("/").endswith(("/generate", "/v1")):
            yield f"url ({self.url!r}) must end before {parts.path}: SGLang's own /generate is called there"
        if self.offload:
            yield "offload applies to teacher.model: with teacher.url the learner holds no teacher"


SERVER_FIELDS = (*Calls.__struct_fields__, "key_env")
"""Fields about calls to the teacher's server. They do not affect the weights that an update makes from a batch."""
