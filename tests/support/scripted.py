"""An engine with scripted completions, and a readable chat template."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from streamppo.rollout.engine import Completion, Cuts, Sampling, TokenCandidates, Usage
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Ints, Prompt, Routes

TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}<eos> {% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


class Scripted:
    """An engine that returns one of `lines` for each call; `asked` are the prompts of all calls.

    With top-p or top-k every token has the next id as a second candidate, except the last token of a call. With
    `routes` completions have routes; without `ends` they have no end-of-sequence token.
    """

    def __init__(self, tokenizer: Tokenizer, *lines: str) -> None:
        self._tokenizer = tokenizer
        self._lines = list(lines)
        self.asked: list[list[int]] = []
        self.version = 0
        self.routes, self.ends = False, True

    def routed(self, tokens: int) -> Routes:
        """[tokens, 2] routes of one layer: the token's index and the number of the call."""
        return np.stack([np.arange(tokens), np.full(tokens, self.version)], 1).astype(np.int16)

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        self.asked.append(prompt.tolist())
        line = self._lines.pop(0)
        tokens = [*self._tokenizer.ids(Prompt(text=line, columns={})), *([self._tokenizer.eos_id] if self.ends else [])]
        cut = np.asarray(tokens[: sampling.max_tokens], np.int32)
        self.version += 1
        return Completion(
            cut,
            np.full(len(cut), -0.5, np.float32),
            np.full(len(cut), self.version, np.int32),
            "stop" if len(cut) == len(tokens) else "length",
            candidates=alternatives(cut) if sampling.excludes_tokens else None,
            routes_SE=self.routed(len(prompt) + len(cut) - 1) if self.routes else None,
        )

    async def update_weights(self, version: int, tensors: Mapping[str, Any]) -> None: ...

    def usage(self) -> Usage:
        return Usage(0, 0.0, 0.0, 0, 0.0)

    async def stop(self) -> None: ...


def alternatives(tokens: Ints) -> TokenCandidates:
    """Candidates: each token and the next id; only the token itself for the last one."""
    counts = np.full(len(tokens), 2, np.int32)
    counts[-1] = 1
    return TokenCandidates(np.stack([tokens, tokens + 1], 1).ravel()[:-1], counts)
