"""Gets log-probs of every finished completion from a teacher on a server. The trajectory includes them.

POST URL/generate     prompt + completion with max_new_tokens = 0: SGLang's log-probs of the given tokens
POST URL/detokenize   once, at the start: the texts of token ids by the server's tokenizer
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
"""Maximum number of tokens whose texts are compared, evenly spread over the policy's vocabulary."""
LAST_TOKEN = 0
"""SGLang reports this id in place of the last id of its vocabulary."""

TokenId: TypeAlias = Annotated[int, Meta(ge=0, lt=2**31)]

log = logging.getLogger(__name__)


class TeacherScores(NamedTuple):
    """The log-probs [T] of T tokens, or the `reason` for the failure, and when a retry may succeed."""

    logprobs: Floats | None = None
    reason: str = ""
    retryable: bool = False
    after_s: float = 0.0


class MetaInfo(msgspec.Struct):
    """The used fields of SGLang's answer: (log-prob, id, text) of every token; the first log-prob is null."""

    input_token_logprobs: list[tuple[float | None, TokenId, str | None]]


class TeacherAnswer(msgspec.Struct):
    """SGLang's answer to /generate."""

    meta_info: MetaInfo


class Texts(msgspec.Struct):
    """SGLang's answer to /detokenize."""

    text: list[str]


class TeacherClient:
    """Gets log-probs from the server at `config.url`, with `config`'s timeout, concurrency and retries."""

    def __init__(self, config: TeacherConfig) -> None:
        self._url = config.url.rstrip("/")
        self._timeout_s = config.timeout_s
        self._client = Client(config.key_env, config.concurrency)
        self._guard = Guard("teacher", config, self._ask)

    async def score(self, episode: Episode) -> bytes:
        """Return the log-probs [T] of an episode as a column, 0 for unsampled tokens. Raises `TeacherFailed`."""
        if episode.branches:
            logprobs = await self._score_paths(episode)
        else:
            logprobs = await self._logprobs(episode.prompt_tokens, episode.tokens)
        column = np.where(episode.mask, logprobs, np.float32(0))
        if not np.isfinite(column).all():
            raise TeacherFailed(f"{self._url}: a log-prob is not finite")
        return column.astype("<f4").tobytes()

    async def _score_paths(self, episode: Episode) -> Floats:
        """Return the log-probs [T]. A token on several paths has the log-prob that it has on the first of them."""
        prompt, width = len(episode.prompt_tokens), len(episode.prompt_tokens) + len(episode.tokens)
        row, sampled = np.concatenate([episode.prompt_tokens, episode.tokens]), np.zeros(width, np.bool_)
        sampled[prompt:] = episode.mask
        calls: list[tuple[Ints, int]] = []
        for path in branches.paths(episode.branches, width):
            if len(new := np.flatnonzero(sampled[path])):
                calls.append((path, int(new[0])))
                sampled[path] = False
        path_scores = await asyncio.gather(*(self._logprobs(row[path[:at]], row[path[at:]]) for path, at in calls))
        logprobs = np.zeros(width, np.float32)
        for (path, at), numbers in reversed(list(zip(calls, path_scores, strict=True))):
            logprobs[path[at:]] = numbers
        return logprobs[prompt:]

    async def _logprobs(self, prompt: Ints, tokens: Ints) -> Floats:
        scored = await self._guard.score(prompt, tokens)
        if scored.logprobs is None:
            raise TeacherFailed(scored.reason)
        return scored.logprobs

    async def check(self, tokenizer: Tokenizer) -> None:
        """Raise `ModelError` if the server gives no log-probs, or its tokenizer differs from the policy's."""
        probe = np.asarray(tokenizer.spread(2), np.int32)
        scored = await self._guard.score(probe[:1], probe[1:])
        if scored.logprobs is None:
            raise ModelError(f"the teacher cannot be reached: {scored.reason}")
        tokens = tokenizer.spread(COMPARED)
        server_texts = await self._texts(tokens)
        # Servers may clean up spaces, so a difference in spaces does not mean another vocabulary.
        pairs = zip(tokens, tokenizer.texts(tokens), server_texts, strict=True) if server_texts else ()
        differences = [pair for pair in pairs if pair[1].strip() != pair[2].strip()]
        if differences:
            token, policy_text, server_text = differences[0]
            raise ModelError(
                f"the teacher at {self._url} must have the policy's tokenizer: token {token}, {policy_text!r}, is "
                f"{server_text!r} there ({len(differences)} of {len(tokens)} compared tokens differ)"
            )

    def report(self) -> ScorerReport:
        return self._guard.report(0)

    async def close(self) -> None:
        await self._client.close()

    async def _ask(self, prompt: Ints, tokens: Ints) -> TeacherScores:
        body = {
            "input_ids": [*prompt.tolist(), *tokens.tolist()],
            "return_logprob": True,
            # The answer begins with the prompt's last token, which has no log-prob.
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
            after_s = error.after_s if isinstance(error, Retryable) else 0.0
            return TeacherScores(reason=reason, retryable=isinstance(error, Retryable), after_s=after_s)

    async def _texts(self, tokens: Sequence[int]) -> list[str]:
        body = {"tokens": [[token] for token in tokens], "skip_special_tokens": False}
        try:
            async with asyncio.timeout(self._timeout_s):
                content = await self._client.post(f"{self._url}/detokenize", body)
            texts = msgspec.json.decode(content, type=Texts).text
            if len(texts) != len(tokens):
                raise TaskError(f"{len(texts)} texts for {len(tokens)} tokens")
        except (TaskError, msgspec.MsgspecError, UnicodeDecodeError, TimeoutError) as error:
            log.warning("the teacher's tokenizer cannot be compared with the policy's: %s", repr(error)[:QUOTED])
            return []
        return texts


def read(content: bytes, tokens: Ints) -> Floats:
    """Read the log-probs [T] of `tokens` [T] in SGLang's answer. Raises `TaskError` for log-probs of other tokens."""
    entries = msgspec.json.decode(content, type=TeacherAnswer).meta_info.input_token_logprobs[1:]
    ids = np.array([entry[1] for entry in entries], np.int64)
    if len(ids) != len(tokens):
        raise TaskError(f"{len(ids)} log-probs for {len(tokens)} tokens: the server truncates, or is not SGLang")
    if ((ids != tokens) & (ids != LAST_TOKEN)).any():
        place = int(np.argmax((ids != tokens) & (ids != LAST_TOKEN)))
        raise TaskError(f"a log-prob of token {ids[place]} in place of {tokens[place]}")
    return np.array([np.nan if entry[0] is None else entry[0] for entry in entries], np.float32)


async def connect(config: TeacherConfig, tokenizer: Tokenizer) -> TeacherClient | None:
    """Return the client of the teacher's server, checked; None without a `url`. Raises `ModelError` or `TaskError`."""
    if not config.url:
        return None
    client = TeacherClient(config)
    try:
        await client.check(tokenizer)
    except ModelError:
        await client.close()
        raise
    log.info("the teacher is at %s", config.url)
    return client
