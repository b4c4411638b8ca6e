"""The tokens of one agent's run, turn by turn in the order in which turns end, and their branches.

    places      0 1 2 3 4 5 6 7 8 9 ...          token 9 follows token 3 if (9, 3) is a branch, else token 8
    context     the tokens from a root to a place: the engine's input for the next one

The first turn's context is the row's prompt. A branch begins with an unsampled token, so that every sampled token
follows the token before it in the row. So a second answer to a context begins with a copy of the context's last token.
"""

from collections.abc import Collection, Iterable
from typing import NamedTuple

import numpy as np

from streamppo.rollout.endpoint.tree import NO_PLACE
from streamppo.rollout.engine import Completion, TokenCandidates
from streamppo.types import Flags, Floats, Ints, Routes, turns
from streamppo.types.turns import TurnPlace


class RowColumns(NamedTuple):
    """All columns of a row, including the prompt's tokens; `mask` and `candidates` have only the requested turns."""

    tokens: Ints
    logprobs: Floats
    versions: Ints
    mask: Flags
    branches: Ints
    candidates: TokenCandidates | None
    routes_SE: Routes | None


class Row:
    """The tokens of a run; `add` adds a turn. `prompt` is the number of tokens before the first turn."""

    def __init__(self) -> None:
        self.prompt = 0
        self._tokens, self._versions = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._logprobs = np.zeros(0, np.float32)
        self._turn = np.zeros(0, np.int32)
        self._branches: dict[int, int] = {}
        self._turns: list[TurnPlace] = []
        self._candidates: dict[int, TokenCandidates] = {}
        self._routes: Routes | None = None

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def length(self) -> int:
        return len(self) - self.prompt

    def token(self, at: int) -> int:
        return int(self._tokens[at])

    def context(self, at: int) -> Ints:
        """Join the tokens from the root to place `at`."""
        return self._tokens[self._path(at)]

    def add(self, at: int, unsampled: Ints, completion: Completion, turn: int) -> tuple[int, int]:
        """Add the tokens `unsampled` and `turn` after `context(at)`; return the last places of both."""
        sibling = not len(unsampled) and at != len(self) - 1
        if sibling:
            unsampled, at = self._tokens[at : at + 1], self._predecessor(at)
        begin, count = len(self), len(completion.tokens)
        if begin and at != begin - 1:
            self._branches[begin] = at
        path = self._path(at)
        version = self._versions[at] if at >= self.prompt else completion.versions[0]
        self._append(unsampled, np.zeros(len(unsampled), np.float32), np.full(len(unsampled), version, np.int32), 0)
        self.prompt = self.prompt or len(self)
        opened = len(self) - 1
        self._append(completion.tokens, completion.logprobs, completion.versions, turn)
        self._turns.append(TurnPlace(opened + 1, len(self), completion.cached, 0))
        if completion.candidates is not None:
            self._candidates[turn] = completion.candidates
        if completion.routes_SE is not None:
            self._store_routes(
                np.concatenate([path, np.arange(begin, len(self), dtype=np.int32)]), completion.routes_SE
            )
        return opened, opened + count

    def columns(self, sampled: Iterable[int]) -> RowColumns:
        """Return the row's columns; `mask` has the tokens of the turns `sampled`."""
        mask = np.isin(self._turn, [*sampled])
        branches = np.asarray(sorted(self._branches.items()), np.int32).reshape(-1, 2)
        routes = self._routes if self._routes is None else self._routes[: len(self) - 1]
        logprobs = np.where(mask, self._logprobs, np.float32(0))
        return RowColumns(self._tokens, logprobs, self._versions, mask, branches, self._join_candidates(mask), routes)

    def turn_column(self, delivered: Collection[int]) -> bytes:
        """Return the trajectory's column `turns`; `delivered` has the numbers of the received turns."""
        return turns.column(
            place._replace(delivered=int(number in delivered)) for number, place in enumerate(self._turns, 1)
        )

    def _append(self, tokens: Ints, logprobs: Floats, versions: Ints, turn: int) -> None:
        self._tokens = np.concatenate([self._tokens, tokens])
        self._logprobs = np.concatenate([self._logprobs, logprobs])
        self._versions = np.concatenate([self._versions, versions])
        self._turn = np.concatenate([self._turn, np.full(len(tokens), turn, np.int32)])

    def _predecessor(self, at: int) -> int:
        return self._branches.get(at, at - 1)

    def _path(self, at: int) -> Ints:
        parts: list[np.ndarray] = []
        while at != NO_PLACE:
            begin = max((start for start in self._branches if start <= at), default=0)
            parts.append(np.arange(begin, at + 1))
            at = self._predecessor(begin)
        return np.concatenate(parts[::-1]).astype(np.int32) if parts else np.zeros(0, np.int32)

    def _store_routes(self, path: Ints, routes_SE: Routes) -> None:
        known = np.full((len(self), routes_SE.shape[1]), -1, np.int16)
        if self._routes is not None:
            known[: len(self._routes)] = self._routes
        # The first token of a branch copies the last token of its context, and has no routes yet.
        path = path[: len(routes_SE)]
        missing = (known[path] == -1).all(axis=1)
        known[path[missing]] = routes_SE[: len(path)][missing]
        self._routes = known

    def _join_candidates(self, mask: Flags) -> TokenCandidates | None:
        if not self._candidates:
            return None
        counts, tokens = np.zeros(len(self), np.int32), list[Ints]()
        for turn, candidates in self._candidates.items():
            places = (self._turn == turn) & mask
            if places.any():
                counts[places] = candidates.counts
                tokens.append(candidates.tokens)
        return TokenCandidates(np.concatenate(tokens), counts[self.prompt :])
