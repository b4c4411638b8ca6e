"""The running completions of the embedded engine, one in each row.

Rows 0 to `count` - 1 are running, so that a step works on views of the cache. When rows end, the last running rows move
into their places. `_cached` has each row's number of tokens in the cache; the next step feeds the row's newest token.
If turns are kept, rows from `count` on hold ended completions, which a prompt may continue (prefixes.py).

`admit`, `step` and `recompute` run in the engine's thread; while they run, no other method is called.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch

from streamppo.process import phase
from streamppo.rollout import random_numbers, segment_cuts
from streamppo.rollout.embedded import prefixes, spans
from streamppo.rollout.embedded.decoder import Decoder
from streamppo.rollout.embedded.prefixes import Prefix, Prefixes, Start
from streamppo.rollout.embedded.requests import EndTokens, RunningRequest
from streamppo.rollout.embedded.sampling import Draws, sample
from streamppo.rollout.embedded.spans import Span
from streamppo.rollout.engine import Completion, TokenCandidates
from streamppo.types import Ints

REORDER = 1.2
"""Long rows move to the front if attention would otherwise read more than `REORDER` times as many positions."""
GROWTH = 4
"""The cache grows to 1 + 1 / `GROWTH` times the required size."""
MOST_PAIRS = 2**24
"""Maximum number of (new token, position) pairs, with padding, in one forward pass of prompts that continue rows."""
PLAIN = np.array([1, 1, 0], np.float32)
"""Temperature, top-p and top-k of the model's unchanged distribution."""


class DecodingRows:
    """Admits, steps and ends completions, at most one in each row of the decoder.

    A prompt and its completion have at most `max_tokens` tokens. Of `prompted` prompt tokens, `reused` were cached or
    shared with another sample; `kv_ages` counts the reused tokens by the number of versions since their computation.
    """

    def __init__(self, decoder: Decoder, ends: EndTokens, max_tokens: int) -> None:
        capacity, width = decoder.rows, decoder.room
        self._decoder, self._max_tokens = decoder, max_tokens
        self._ends = np.zeros(decoder.vocabulary, np.bool_)
        # Models without an end token may have -1, or an id beyond the vocabulary, in their settings.
        self._ends[[token for token in sorted(ends.ids) if 0 <= token < len(self._ends)]] = True
        self._completes = ends.completes
        self._unknown = torch.tensor(ends.unknown, dtype=torch.int64, device=decoder.device) if ends.unknown else None
        self._capacity = capacity
        self.requests: list[RunningRequest] = []
        self.tokens = self.prompted = self.reused = self._recomputed = 0
        self.kv_ages: Counter[int] = Counter()
        self._prefixes: Prefixes | None = None
        self._cut_requests: list[RunningRequest] = []
        self._cached = np.zeros(capacity, np.int64)
        self._length = np.zeros(capacity, np.int64)
        self._limit = np.zeros(capacity, np.int64)
        self._root = np.zeros(capacity, np.int64)
        self._next_cut = np.zeros(capacity, np.int64)
        self._sampling = np.zeros((capacity, 3), np.float32)
        self._seeds = np.zeros(capacity, np.uint64)
        self._sampled = np.zeros((capacity, width), np.int32)
        self._logprobs = np.zeros((capacity, width), np.float32)
        self._versions = np.zeros((capacity, width), np.int32)

    @property
    def count(self) -> int:
        return len(self.requests)

    def keep_turns(self) -> None:
        """Keep ended rows for prompts that continue them, while there is room."""
        self._prefixes = Prefixes()

    def reserve(self, room: int) -> None:
        if room <= self._decoder.room:
            return
        self._decoder.reserve(room)
        wider = ((0, 0), (0, room - self._sampled.shape[1]))
        self._sampled, self._versions = np.pad(self._sampled, wider), np.pad(self._versions, wider)
        self._logprobs = np.pad(self._logprobs, wider)

    @phase("prefill")
    def admit(self, requests: Sequence[RunningRequest], version: int) -> list[RunningRequest]:
        """Prefill new rows and sample their first tokens. Returns the requests that end with their first token."""
        longest = max(len(request.prompt) + request.limit for request in requests)
        if longest > self._decoder.room:
            # The cache gets more tokens than required, so that it is rarely enlarged.
            self.reserve(min(longest + longest // GROWTH, self._max_tokens))
        first = self.count
        rows = np.arange(first, first + len(requests))
        starts = np.zeros(len(requests), np.int64)
        if self._prefixes is not None:
            requests, starts = self._copy_prefixes(requests, self._prefixes, version)
        self.requests += requests
        lengths = np.array([len(request.prompt) for request in requests])
        self._cached[rows], self._length[rows] = lengths, 0
        self._limit[rows] = [request.limit for request in requests]
        self._next_cut[rows] = [request.next_cut() for request in requests]
        self._seeds[rows] = [request.sampling.seed or 0 for request in requests]
        samplings = [request.sampling for request in requests]
        self._sampling[rows] = np.array([(s.temperature, s.top_p, s.top_k) for s in samplings], np.float32)
        prompts, new = [request.prompt for request in requests], int((starts == 0).sum())
        logits = [self._prefill(prompts[:new], first)] if new else []
        logits += self._extend(prompts[new:], starts[new:], first + new)
        return self._advance(rows, logits[0] if len(logits) == 1 else torch.cat(logits), version)

    @phase("decode")
    def step(self, version: int) -> list[RunningRequest]:
        """Sample one token for every running row. Returns the requests that end with this token."""
        rows = np.arange(self.count)
        step_spans, device = self._plan_spans(), self._decoder.device
        at, fed = self._cached[rows], self._sampled[rows, self._length[rows] - 1].astype(np.int64)
        logits_BV = self._decoder.step(torch.from_numpy(fed).to(device), torch.from_numpy(at).to(device), step_spans)
        self._cached[rows] += 1
        return self._advance(rows, logits_BV, version)

    def recompute(self, version: int) -> None:
        """Recompute the cache of every running row with the weights of `version`; ended rows are dropped."""
        self._recomputed = version
        if self._prefixes is not None:
            self._prefixes.clear()
        if not self.requests:
            return
        texts = [
            np.concatenate([request.prompt, self._sampled[row, : self._length[row] - 1]])
            for row, request in enumerate(self.requests)
        ]
        self._prefill(texts, 0)

    def cut_before(self, version: int) -> None:
        """Cut the due running completions before a swap to `version`; see segment_cuts.py."""
        by_age = [
            (row, request.cuts, request.handed)
            for row, request in enumerate(self.requests)
            if request.cuts and request.cuts.max_age and self._length[row] > request.handed
        ]
        running = [(cuts, cuts.oldest_after(handed, int(self._versions[row, handed]))) for row, cuts, handed in by_age]
        for index in segment_cuts.segments_to_cut(version, running):
            self._cut_row(by_age[index][0])

    def hand_over(self) -> None:
        """Pass the cut segments to `Cuts.take` of their requests. Must be called in the event loop."""
        cut, self._cut_requests = self._cut_requests, []
        for request in cut:
            segment, request.segment = request.segment, None
            if segment and request.cuts and not request.done.done():
                request.cuts.take(segment)

    def remove_cancelled(self) -> None:
        self._free(np.array([row for row, request in enumerate(self.requests) if request.done.done()], np.int64))

    def _plan_spans(self) -> list[Span]:
        lengths, max_tokens = self._cached[: self.count] + 1, self._decoder.room
        in_place = spans.divide(lengths, max_tokens)
        if max(span.longest for span in in_place) <= spans.SHORT:
            return in_place
        first, best = spans.move_long_rows_first(lengths, max_tokens)
        if spans.cost(in_place) <= REORDER * spans.cost(best):
            return in_place
        leads = np.isin(np.arange(self.count), first)
        front, back = np.flatnonzero(~leads[: len(first)]), np.flatnonzero(leads[len(first) :]) + len(first)
        self._copy(np.concatenate([back, front]), np.concatenate([front, back]))
        return best

    def _copy_prefixes(
        self, requests: Sequence[RunningRequest], prefixes: Prefixes, version: int
    ) -> tuple[list[RunningRequest], np.ndarray]:
        """Copy cached prefixes to the prompts' rows; return the requests (first those without prefix) and lengths."""
        first, end = self.count, self.count + len(requests)
        running = [
            (row, Prefix(request.prompt, len(request.prompt), int(self._root[row]), request.computed))
            for row, request in enumerate(self.requests)
            if self._root[row] < len(request.prompt)
        ]
        prefix_starts = prefixes.starts([request.prompt for request in requests], running)
        for request, start in zip(requests, prefix_starts, strict=True):
            self._note_reuse(request, start, version)
        num_new = [
            start.common and len(request.prompt) - start.common
            for request, start in zip(requests, prefix_starts, strict=True)
        ]
        order = np.argsort(num_new, kind="stable")
        starts = [prefix_starts[n] for n in order]
        self._root[first:end] = [start.root for start in starts]
        copies = [(start.row, row, start.common) for row, start in enumerate(starts, first) if start.common]
        copies += prefixes.make_room(first, end, self._capacity)
        if copies:
            sources, targets, lengths = (np.array(column) for column in zip(*copies, strict=True))
            self._copy_cache(sources, targets, int(lengths.max()))
        return [requests[n] for n in order], np.array([start.common for start in starts])

    def _note_reuse(self, request: RunningRequest, start: Start, version: int) -> None:
        new = np.full(len(request.prompt) - start.common, version, np.int32)
        request.computed, request.cached = np.concatenate([start.computed, new]), start.common
        ages, counts = np.unique(version - np.maximum(start.computed, self._recomputed), return_counts=True)
        self.kv_ages.update(dict(zip(ages.tolist(), counts.tolist(), strict=True)))

    def _extend(self, prompts: Sequence[Ints], starts: np.ndarray, first: int) -> list[torch.Tensor]:
        """Fill the cache from row `first` on with `prompts`, whose first `starts` tokens are cached. Returns logits."""
        device, logits = self._decoder.device, list[torch.Tensor]()
        lengths = np.array([len(prompt) for prompt in prompts], np.int64)
        new, begin = lengths - starts, 0
        self.prompted += int(lengths.sum())
        self.reused += int(starts.sum())
        while begin < len(prompts):
            pairs = np.arange(1, len(prompts) - begin + 1) * new[begin:] * np.maximum.accumulate(lengths[begin:])
            part = slice(begin, begin + max(1, int((pairs <= MOST_PAIRS).sum())))
            tokens_BP = np.zeros((len(new[part]), int(new[part].max())), np.int64)
            for row, prompt, start in zip(tokens_BP, prompts[part], starts[part], strict=True):
                row[: len(prompt) - start] = prompt[start:]
            tokens, behind, counts = (
                torch.from_numpy(array).to(device) for array in (tokens_BP, starts[part], new[part])
            )
            logits.append(self._decoder.extend(tokens, behind, counts, first + begin, int(lengths[part].max())))
            begin = part.stop
        return logits

    def _prefill(self, texts: Sequence[Ints], first: int) -> torch.Tensor:
        """Fill rows from `first` on with `texts`, in a pass for each width, which affects rounding. Returns logits."""
        widths = np.array([spans.width(len(text)) for text in texts])
        if (widths == widths[0]).all():
            return self._prefill_alike(texts, np.arange(first, first + len(texts)))
        logits = list[torch.Tensor]()
        order = np.argsort(widths, kind="stable")
        for places in np.split(order, np.flatnonzero(np.diff(widths[order])) + 1):
            logits.append(self._prefill_alike([texts[place] for place in places], first + places))
        return torch.cat(logits)[torch.from_numpy(np.argsort(order)).to(self._decoder.device)]

    def _prefill_alike(self, texts: Sequence[Ints], rows: np.ndarray) -> torch.Tensor:
        """Fill the cache of `rows` with `texts`; equal texts, as of samples of a prompt, are computed once."""
        places: dict[bytes, int] = {}
        prompts = np.array([places.setdefault(text.tobytes(), len(places)) for text in texts])
        different = [np.frombuffer(text, np.int32) for text in places]
        lengths = np.array([len(text) for text in different])
        total = sum(len(text) for text in texts)
        shared = total - int(lengths.sum())
        self.prompted, self.reused = self.prompted + total, self.reused + shared
        self.kv_ages[0] += shared
        tokens_BP = np.zeros((len(different), min(spans.width(int(lengths.max())), self._decoder.room)), np.int64)
        for row, text in zip(tokens_BP, different, strict=True):
            row[: len(text)] = text
        device = self._decoder.device
        return self._decoder.prefill(
            torch.from_numpy(tokens_BP).to(device),
            torch.from_numpy(lengths).to(device),
            torch.from_numpy(rows).to(device),
            torch.from_numpy(prompts).to(device),
        )

    @torch.inference_mode()
    def _advance(self, rows: np.ndarray, logits_BV: torch.Tensor, version: int) -> list[RunningRequest]:
        if self._unknown is not None:
            logits_BV.index_fill_(1, self._unknown, -torch.inf)
        length = self._length[rows]
        uniform_B = torch.from_numpy(random_numbers.uniform(self._seeds[rows], length)).to(self._decoder.device)
        sampled = sample(logits_BV, self._draws(rows), uniform_B)
        tokens = sampled.tokens_B.cpu().numpy()
        self._sampled[rows, length] = tokens
        self._logprobs[rows, length] = sampled.logprobs_B.cpu().numpy()
        self._versions[rows, length] = version
        if sampled.candidates_BV is not None:
            self._store_candidates(rows, sampled.candidates_BV)
        self._length[rows] += 1
        self.tokens += len(rows)
        stopped = self._ends[tokens]
        if self._completes is not None:
            stopped |= [self._completes(self._sampled[row, : self._length[row]]) for row in rows]
        is_complete = stopped | (self._length[rows] >= self._limit[rows])
        for row in rows[~is_complete & (self._length[rows] >= self._next_cut[rows])]:
            self._cut_row(int(row))
        completed = [self.requests[row] for row in rows[is_complete]]
        for row, stop, request in zip(rows[is_complete], stopped[is_complete], completed, strict=True):
            request.completion = self._completion(int(row), "stop" if stop else "length")
        self._free(rows[is_complete])
        return completed

    def _store_candidates(self, rows: np.ndarray, candidates_BV: torch.Tensor) -> None:
        rows_with_candidates = [n for n, row in enumerate(rows) if self.requests[row].sampling.excludes_tokens]
        candidates_CV = candidates_BV[rows_with_candidates]
        counts = candidates_CV.sum(-1).cpu().numpy()
        tokens = candidates_CV.nonzero()[:, 1].to(torch.int32).cpu().numpy()
        for n, candidates in zip(rows_with_candidates, np.split(tokens, counts.cumsum()[:-1]), strict=True):
            is_vocabulary = len(candidates) == candidates_CV.shape[1]
            self.requests[rows[n]].candidates.append(candidates[:0] if is_vocabulary else candidates)

    def _draws(self, rows: np.ndarray) -> Draws | None:
        parameters = self._sampling[rows]
        if (parameters == PLAIN).all():
            return None
        temperature, top_p, top_k = torch.from_numpy(parameters).to(self._decoder.device).unbind(1)
        return Draws(temperature, top_p, top_k.long())

    def _cut_row(self, row: int) -> None:
        """Cut a segment at the last token of a running row. A segment not yet handed over becomes a part of it."""
        request = self.requests[row]
        if request.segment is None:
            self._cut_requests.append(request)
        request.segment, request.handed = self._completion(row, "cut"), int(self._length[row])
        self._next_cut[row] = request.next_cut()

    def _completion(self, row: int, finish: Literal["stop", "length", "cut"]) -> Completion:
        request, length = self.requests[row], int(self._length[row])
        return Completion(
            tokens=self._sampled[row, :length].copy(),
            logprobs=self._logprobs[row, :length].copy(),
            versions=self._versions[row, :length].copy(),
            finish=finish,
            candidates=_join_candidates(request.candidates) if request.sampling.excludes_tokens else None,
            cached=request.cached,
        )

    def _free(self, rows: np.ndarray) -> None:
        """Free `rows` (ascending): the last running rows move into their places, or are exchanged if turns are kept."""
        num_left = self.count - len(rows)
        is_running = np.ones(self.count, np.bool_)
        is_running[rows] = False
        holes, last = rows[rows < num_left], np.flatnonzero(is_running[num_left:]) + num_left
        keeps_prefixes = self._prefixes is not None and bool((self._cached[rows] >= prefixes.LEAST_TOKENS).any())
        if len(holes) and keeps_prefixes:
            self._copy(np.concatenate([last, holes]), np.concatenate([holes, last]))
        elif len(holes):
            self._copy(last, holes)
        if self._prefixes is not None and keeps_prefixes:
            for row, request in enumerate(self.requests[num_left:], num_left):
                length = self._length[row]
                text = np.concatenate([request.prompt, self._sampled[row, :length]])
                # The step that samples token t computes the keys and values of token t - 1.
                computed = np.concatenate([request.computed, self._versions[row, 1:length]])
                self._prefixes.add(row, Prefix(text, int(self._cached[row]), int(self._root[row]), computed))
        del self.requests[num_left:]

    def _copy(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Copy rows `sources` to rows `targets`. All rows are read before one is written, so rows can be exchanged."""
        self._copy_cache(sources, targets, int(self._cached[sources].max()))
        for column in (
            self._cached,
            self._length,
            self._limit,
            self._root,
            self._next_cut,
            self._sampling,
            self._seeds,
        ):
            column[targets] = column[sources]
        length = int(self._length[targets].max())
        for column in (self._sampled, self._logprobs, self._versions):
            column[targets, :length] = column[sources, :length]
        moved = [self.requests[row] for row in sources]
        for target, request in zip(targets, moved, strict=True):
            self.requests[target] = request

    def _copy_cache(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        device = self._decoder.device
        self._decoder.copy(torch.from_numpy(sources).to(device), torch.from_numpy(targets).to(device), length)


def _join_candidates(sets: Sequence[Ints]) -> TokenCandidates:
    return TokenCandidates(np.concatenate(sets), np.array([len(candidates) for candidates in sets], np.int32))
