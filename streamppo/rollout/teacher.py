"""A teacher that is a server: it scores every finished completion, and its log-probs travel with the trajectory.

    POST URL/generate     prompt + completion and max_new_tokens = 0: SGLang's log-probs of the tokens that it is given
    POST URL/detokenize   once, at the start: the texts of token ids by the server's tokenizer

The learner never asks it, so that an update can be made again from the archive when the server is gone.
"""

import asyncio
import logging
from collections.abc import Sequence
from typing import Annotated, NamedTuple, TypeAlias

import msgspec
import numpy as np
from msgspec import Meta

from streamppo.config.teacher import Teacher as TeacherConfig
from streamppo.errors import ModelError, Retryable, TaskError, TeacherFailed
from streamppo.rollout.episode import Episode
from streamppo.tasks.rewards.client import Client
from streamppo.tasks.rewards.guard import Guard
from streamppo.tasks.rewards.outcome import QUOTED
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Floats, Ints, ScorerReport, branches, utf8_safe

COMPARED = 4096
"""Tokens at most whose texts are compared, evenly over the policy's."""
LAST = 0
"""SGLang gives this in place of the id of its vocabulary's last token."""

TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]

log = logging.getLogger(__name__)


class TeacherScores(NamedTuple):
    """The log-probs of T tokens, or else the `reason` why there are none."""

    logprobs: Floats | None = None
    reason: str = ""
    retryable: bool = False


class MetaInfo(msgspec.Struct):
    """The part of SGLang's answer that is read: (log-prob, id, text) of every token; the first has no log-prob."""

    input_token_logprobs: list[tuple[float | None, TokenId, str | None]]


class TeacherAnswer(msgspec.Struct):
    """SGLang's answer to /generate."""

    meta_info: MetaInfo


class Texts(msgspec.Struct):
    """SGLang's answer to /detokenize."""

    text: list[str]


class TeacherClient:
    """Asks the server at `config.url` for log-probs, within the bounds of `config`; `connect` makes it."""

    def __init__(self, config: TeacherConfig) -> None:
        self._url = config.url.rstrip("/")
        self._timeout_s = config.timeout_s
        self._client = Client(config.key_env, config.concurrency)
        self._guard = Guard("teacher", config, self._ask)

    async def score(self, episode: Episode) -> bytes:
        """Return the column [T] of log-probs of an episode, 0 for tokens that the policy did not sample.

        Each path of an episode with branches is a call of its own. Raises `TeacherFailed`.
        """
        if episode.branches:
            logprobs = await self._score_paths(episode)
        else:
            logprobs = await self._scored(episode.prompt_tokens, episode.tokens)
        column = np.where(episode.mask, logprobs, np.float32(0))
        if not np.isfinite(column).all():
            raise TeacherFailed(f"{self._url}: a log-prob is not finite")
        return column.astype("<f4").tobytes()

    async def _score_paths(self, episode: Episode) -> Floats:
        """The log-probs [T]: each sampled token's by the first path that has it."""
        prompt, width = len(episode.prompt_tokens), len(episode.prompt_tokens) + len(episode.tokens)
        row, sampled = np.concatenate([episode.prompt_tokens, episode.tokens]), np.zeros(width, np.bool_)
        sampled[prompt:] = episode.mask
        calls: list[tuple[Ints, int]] = []
        for path in branches.paths(episode.branches, width):
            if len(new := np.flatnonzero(sampled[path])):
                calls.append((path, int(new[0])))
                sampled[path] = False
        found = await asyncio.gather(*(self._scored(row[path[:at]], row[path[at:]]) for path, at in calls))
        logprobs = np.zeros(width, np.float32)
        for (path, at), numbers in reversed(list(zip(calls, found, strict=True))):
            logprobs[path[at:]] = numbers
        return logprobs[prompt:]

    async def _scored(self, prompt: Ints, tokens: Ints) -> Floats:
        scored = await self._guard.score(prompt, tokens)
        if scored.logprobs is None:
            raise TeacherFailed(scored.reason)
        return scored.logprobs

    async def check(self, tokenizer: Tokenizer) -> None:
        """Raise `ModelError` if the server gives no log-probs, or reads the policy's tokens as other texts."""
        probed = np.asarray(tokenizer.spread(2), np.int32)
        scored = await self._guard.score(probed[:1], probed[1:])
        if scored.logprobs is None:
            raise ModelError(f"the teacher cannot be asked: {scored.reason}")
        tokens = tokenizer.spread(COMPARED)
        theirs = await self._texts(tokens)
        # How spaces are cleaned up is no matter of the vocabulary.
        pairs = zip(tokens, tokenizer.texts(tokens), theirs, strict=True) if theirs else ()
        strange = [found for found in pairs if found[1].strip() != found[2].strip()]
        if strange:
            token, ours, other = strange[0]
            raise ModelError(
                f"the teacher at {self._url} must have the policy's tokenizer: token {token}, {ours!r}, is {other!r} "
                f"there ({len(strange)} of {len(tokens)} compared tokens differ)"
            )

    def report(self) -> ScorerReport:
        """Return the counters of its calls."""
        return self._guard.report(0)

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def _ask(self, prompt: Ints, tokens: Ints) -> TeacherScores:
        body = {
            "input_ids": [*prompt.tolist(), *tokens.tolist()],
            "return_logprob": True,
            # The last token of the prompt is the first of the answer, and has no log-prob.
            "logprob_start_len": len(prompt) - 1,
            "sampling_params": {"max_new_tokens": 0},
        }
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await self._client.post(f"{self._url}/generate", body)
            return TeacherScores(read(content, tokens))
        except TimeoutError:
            return TeacherScores(reason=f"no log-probs after {self._timeout_s:g} s")
        except (TaskError, msgspec.MsgspecError, UnicodeDecodeError) as error:
            reason = utf8_safe(f"{type(error).__name__}: {error}")[:QUOTED]
            return TeacherScores(reason=reason, retryable=isinstance(error, Retryable))

    async def _texts(self, tokens: Sequence[int]) -> list[str]:
        """Return the text of each of `tokens` by the server's tokenizer; none if it does not tell."""
        body = {"tokens": [[token] for token in tokens], "skip_special_tokens": False}
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await self._client.post(f"{self._url}/detokenize", body)
            found = msgspec.json.decode(content, type=Texts).text
            if len(found) != len(tokens):
                raise TaskError(f"{len(found)} texts for {len(tokens)} tokens")
        except (TaskError, msgspec.MsgspecError, UnicodeDecodeError, TimeoutError) as error:
            log.warning("the teacher's tokenizer cannot be compared with the policy's: %s", repr(error)[:QUOTED])
            return []
        return found


def read(content: bytes, tokens: Ints) -> Floats:
    """Read the log-probs of `tokens` [T] in SGLang's answer. Raises `TaskError` unless they are of these."""
    entries = msgspec.json.decode(content, type=TeacherAnswer).meta_info.input_token_logprobs[1:]
    ids = np.array([entry[1] for entry in entries], np.int64)
    if len(ids) != len(tokens):
        raise TaskError(f"{len(ids)} log-probs for {len(tokens)} tokens: it has cut them off, or is no SGLang")
    if ((ids != tokens) & (ids != LAST)).any():
        place = int(np.argmax((ids != tokens) & (ids != LAST)))
        raise TaskError(f"a log-prob of token {ids[place]} in place of {tokens[place]}")
    return np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)


async def connect(config: TeacherConfig, tokenizer: Tokenizer) -> TeacherClient | None:
    """Return the teacher that is a server, checked; None without one. Raises `ModelError` or `TaskError`."""
    if not config.url:
        return None
    made = TeacherClient(config)
    try:
        await made.check(tokenizer)
    except ModelError:
        await made.close()
        raise
    log.info("the teacher is at %s", config.url)
    return made
