"""The tokens left by top-p and top-k sampling. N tokens, V vocabulary, M candidates of all tokens together."""

from typing import NamedTuple

import torch
from torch import Tensor


class Candidates(NamedTuple):
    """The candidates of each token. `starts` and `counts` have an entry per token; `tokens_M` joins all candidates.

        candidates of token n = tokens_M[starts[n] : starts[n] + counts[n]]

    A count of 0 means the whole vocabulary. The engine records the candidates: top-p on the learner's logits would
    give other candidates ("Keep Sampling Mask", DeepSeek-V3.2, https://arxiv.org/abs/2512.02556). The results of `at`
    share the original's `tokens_M`.
    """

    tokens_M: Tensor
    starts: Tensor
    counts: Tensor

    def at(self, places: Tensor | slice | tuple[Tensor, Tensor | slice]) -> "Candidates":
        """The candidates of the tokens at `places`, an index into `starts` and `counts`."""
        return self._replace(starts=self.starts[places], counts=self.counts[places])

    def to(self, device: torch.device) -> "Candidates":
        """The same candidates on `device`."""
        return Candidates(*(column.to(device) for column in self))

    def outside(self, vocabulary: int) -> Tensor:
        """[N, V]: True for vocabulary entries that are not candidates. `starts` and `counts` must be [N]."""
        rows_M = torch.repeat_interleave(self.counts)
        first_N = self.counts.cumsum(0) - self.counts
        number_M = torch.arange(len(rows_M), device=rows_M.device) - first_N[rows_M]
        tokens_M = self.tokens_M[self.starts[rows_M] + number_M].long()
        outside_NV = (self.counts > 0)[:, None].repeat(1, vocabulary)
        outside_NV[rows_M, tokens_M] = False
        return outside_NV
