"""One agent's run at the endpoint: its requests, their turns, and its end.

consumes     requests, from a server or a test
produces     turns, each sampled after the stored tokens of its context; an episode at the end
waits for    the engine, and for room in the row; each request under way reserves a part of the row
unblocks     the listeners of a turn

    request -> equal to an undelivered one without listeners? -> join it
            -> else a turn: room -> match -> render what is new -> generate -> add to tree and row -> read -> deliver

If its client disconnects, a turn continues, because the client may repeat the request. Turns not received by the run's
end are masked.
"""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from streamppo.config.task import AgentEnvironment
from streamppo.errors import EnvironmentFailed, PromptRefused, TaskError
from streamppo.rollout import random_numbers
from streamppo.rollout.endpoint import reply, stop_strings
from streamppo.rollout.endpoint.request import Request, RequestRefused, Turn, malformed, over_budget, run_ended
from streamppo.rollout.endpoint.row import Row
from streamppo.rollout.endpoint.tree import NO_PLACE, Tree, TreePlace
from streamppo.rollout.engine import Completion, ContextReuse, Cuts, Sampler, Sampling
from streamppo.tasks.chat_template import PLAIN
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Ints, Message, Prompt, Template

STREAMED, STREAM_S = 4, 0.2
"""Minimum tokens and seconds between two pieces of a stream. For each piece the whole turn so far is parsed."""
MOST_UNDER_WAY = 256
TAIL = 16
"""The number of a context's last tokens in which a <think> of the chat template is searched."""
TOOLS_LEFT_OUT = (
    "the chat template leaves out the tools of a request: the policy would not see them. Describe them in a message, "
    'or give the tokenizer another template; with environment.ignored = ["tools"] the request is answered all the same'
)


class SampledPolicy(NamedTuple):
    """Shared by all runs of an actor: engine, tokenizer, ends of completions, and counts of reused contexts."""

    engine: Sampler
    tokenizer: Tokenizer
    stop: Stop
    contexts: ContextReuse


class Session:
    """One agent's run. `refused`: a request exceeded the bounds `limits`. `counts` counts events of all runs."""

    def __init__(
        self,
        key: str,
        policy: SampledPolicy,
        sampling: Sampling,
        limits: AgentEnvironment,
        template: Template = PLAIN,
        *,
        counts: Counter[str],
    ) -> None:
        self.key, self.ended, self.refused = key, False, False
        self.row, self.turns = Row(), list[Turn]()
        self.rewards = list[float]()
        self.failure = ""
        self._policy, self._sampling, self._limits = policy, sampling, limits
        self._num_begun = 0
        self._template, self._counts = template, counts
        self._tree = Tree()
        self._under_way = list[Turn]()
        self._requests, self._reserved = 0, 0
        self._turned_away = Counter[tuple[object, ...]]()
        self._freed = asyncio.Event()

    @property
    def ignored(self) -> Sequence[str]:
        return self._limits.ignored

    @property
    def sampled(self) -> int:
        return sum(turn.tokens for turn in self.turns)

    @property
    def undelivered(self) -> int:
        return sum(turn.tokens for turn in self.turns if not turn.delivered)

    def begin(self, request: Request, *, again: bool = False) -> Turn:
        """Begin a request's turn, or join an equal request's turn without listeners. Raises `RequestRefused`.

        With `again`, a repeated request may also join a delivered turn. The caller listens until it calls `leave`.
        """
        if self.ended:
            raise run_ended()
        self._counts["requests"] += 1
        request = self._with_conversation(request)
        if (turn := self._abandoned_turn(request, again=again)) is not None:
            self._counts["joined"] += 1
            turn.listeners += 1
            return turn
        if self._requests >= self._limits.max_turns:
            self.refused = True
            raise over_budget(f"the run has made its {self._limits.max_turns} requests (environment.max_turns)")
        if len(self._under_way) >= MOST_UNDER_WAY:
            self._turned_away[request.key()] += 1
            raise RequestRefused(
                429, "rate_limit_exceeded", f"{MOST_UNDER_WAY} requests are under way", "too many at once"
            )
        self._requests += 1
        turn = Turn(f"resp_{secrets.token_hex(12)}", request, asyncio.get_running_loop().create_future(), listeners=1)
        self._under_way.append(turn)
        turn.task = asyncio.create_task(self._run_turn(turn))
        turn.task.add_done_callback(partial(self._end_turn, turn))
        return turn

    def begin_all(self, request: Request, *, again: bool = False) -> list[Turn]:
        """Begin a turn for each answer that a request asks for, as `begin` does. Raises `RequestRefused`."""
        turns = list[Turn]()
        try:
            for _ in range(request.answers):
                turns.append(self.begin(request, again=again))
        except RequestRefused:
            for turn in turns:
                self.leave(turn, delivered=False)
            raise
        return turns

    def leave(self, turn: Turn, *, delivered: bool) -> None:
        """Stop listening to a turn. `delivered` is true if the client received all of it."""
        turn.listeners -= 1
        turn.delivered |= delivered
        if not delivered and turn.error is None:
            self._counts["disconnected"] += 1

    def add_reward(self, reward: float, turn_id: str = "") -> None:
        """Add a reward to the run, or to the turn that has this id. Raises `RequestRefused`."""
        if self.ended:
            raise run_ended()
        if not turn_id:
            self.rewards.append(reward)
            return
        turn = next((turn for turn in self.turns if turn.id == turn_id or turn_id in turn.names), None)
        if turn is None:
            raise malformed(f"no response of this run is called {turn_id!r}", "reward for an unknown response")
        turn.reward += reward

    def end(self) -> None:
        """End the run: cancel the turns under way, and refuse every later request."""
        self.ended = True
        for turn in self._under_way:
            if turn.task is not None and not turn.task.done():
                self._counts["cut off at the end"] += 1
                turn.task.cancel()

    def _with_conversation(self, request: Request) -> Request:
        if not request.after:
            return request
        turn = next((earlier for earlier in self.turns if earlier.id == request.after), None)
        if turn is None or turn.reply is None:
            raise malformed(f"no response of this run is called {request.after!r}", "unknown response")
        answer, messages = turn.reply.message, request.messages
        recorded = Message(
            role="assistant",
            content=answer.content,
            tool_calls=answer.tool_calls,
            fields={**answer.fields, "id": turn.id},
        )
        before, first = turn.request.messages, messages[:1]
        if first and first[0].role == "system":
            # The request's instructions replace those of the earlier request.
            conversation = before[1:] if before[0].role == "system" else before
            before, messages = (*first, *conversation), messages[1:]
        return request._replace(messages=(*before, recorded, *messages))

    def _abandoned_turn(self, request: Request, *, again: bool) -> Turn | None:
        """Return a turn of an equal request that nobody waits for: an undelivered or, with `again`, a delivered one."""
        waiting = [turn for turn in (*self._under_way, *self.turns) if not turn.listeners and not turn.delivered]
        written = [turn for turn in reversed(self.turns) if turn.delivered and not turn.listeners] if again else []
        if not waiting and not written:
            return None
        key = request.key()
        if self._turned_away[key] and again:
            # The first attempt of this request was refused, so no delivered turn belongs to it.
            self._turned_away[key] -= 1
            written = []
        return next((turn for turn in (*waiting, *written) if turn.error is None and turn.request.key() == key), None)

    async def _run_turn(self, turn: Turn) -> None:
        try:
            await self._sample(turn)
        except RequestRefused as error:
            self._refuse(turn, error)
        except TaskError as error:
            self._refuse(turn, malformed(str(error)))
        except PromptRefused as error:
            self.refused = True
            self._refuse(turn, over_budget(str(error)))

    def _end_turn(self, turn: Turn, task: asyncio.Task[None]) -> None:
        """Wake the listeners of a turn. An error of the engine or of the endpoint fails the run."""
        self._under_way.remove(turn)
        if task.cancelled():
            turn.error = run_ended()
        elif (error := task.exception()) is not None:
            self.failure = self.failure or f"the engine failed: {type(error).__name__}: {error}"
            self._refuse(turn, RequestRefused(500, "server_error", self.failure, "engine failed"))
        if not turn.admitted.done():
            turn.admitted.set_result(None)
        turn.changed.set()

    def _refuse(self, turn: Turn, error: RequestRefused) -> None:
        turn.error = error
        self._counts[error.reason] += 1

    async def _sample(self, turn: Turn) -> None:
        request = turn.request
        place, new_tokens, tokens = await self._wait_for_room(request)
        turn.ended_before = len(self.turns)
        reserved = max(1, len(new_tokens)) + tokens
        self._reserved += reserved
        try:
            context = np.concatenate([self.row.context(place.at), new_tokens])
            tail = self._policy.tokenizer.spell(context[-TAIL:].tolist())
            turn.opened, turn.context = tail.rstrip().endswith(reply.THINK), len(context)
            turn.admitted.set_result(None)
            seed = random_numbers.seed_of_turn(self._sampling.seed, self._num_begun)
            self._num_begun += 1
            sampling = self._sampling._replace(max_tokens=tokens, seed=seed)
            show = partial(self._show_progress, turn)
            # Stop strings and a tokenizer's parser need the whole turn.
            is_shown = request.stream and not (self._policy.stop.strings or request.stop)
            is_shown = is_shown and self._policy.tokenizer.response_parser() is None
            cuts = Cuts(show, max_tokens=STREAMED) if is_shown else None
            completion = await self._generate(request, context, sampling, cuts)
            self._policy.contexts.add(len(context) - len(new_tokens), completion.cached)
            self._store(turn, place, new_tokens, context, completion)
        finally:
            self._reserved -= reserved
            self._freed.set()

    async def _generate(self, request: Request, context: Ints, sampling: Sampling, cuts: Cuts | None) -> Completion:
        generate = partial(self._policy.engine.generate, context, sampling)
        completes = Stop(strings=request.stop).make_check(self._policy.tokenizer.spell)
        return await (generate(cuts) if completes is None else stop_strings.until(completes, generate))

    def _store(self, turn: Turn, place: TreePlace, new_tokens: Ints, context: Ints, completion: Completion) -> None:
        request, setting = turn.request, turn.request.setting
        if len(self.turns) > turn.ended_before:
            # Another turn may have stored more of the context meanwhile.
            later = self._tree.match(request.messages, setting)
            new_later = self._render(later, request)
            if np.array_equal(np.concatenate([self.row.context(later.at), new_later]), context):
                place, new_tokens = later, new_later
        opened, ended = self.row.add(place.at, new_tokens, completion, len(self.turns) + 1)
        turn.new = tuple(place.new_messages)
        assert np.array_equal(self.row.context(opened), context), "the engine has seen what the row stores"
        self._finish(turn, completion, context)
        assert turn.reply is not None
        forms = {"names": (turn.id, *turn.names), "also": (turn.spelled,) if turn.spelled else ()}
        self._tree.add(request.messages, turn.reply.message, setting, after=place, opened=opened, ended=ended, **forms)

    def _finish(self, turn: Turn, completion: Completion, context: Ints) -> None:
        assert completion.finish != "cut"
        tokenizer = self._policy.tokenizer
        if turn.request.logprobs:
            texts = [tokenizer.spell([token]) for token in completion.tokens.tolist()]
            turn.logprobs = list(zip(texts, completion.logprobs.tolist(), strict=True))
        turn.finish, turn.tokens, turn.cached = completion.finish, len(completion.tokens), completion.cached
        ends, parse = self._policy.stop, tokenizer.response_parser(context.tolist(), turn.request.tools)
        turn.text = ends.text(completion.tokens, completion.finish, tokenizer.completion)
        if completion.finish == "stop" and (text := turn.text) and turn.request.stop:
            turn.text = Stop(strings=turn.request.stop).text(completion.tokens, "stop", lambda _: text)
            turn.stop_string = next((string for string in turn.request.stop if string in text), "")
            turn.spelled = reply.read(text, opened=turn.opened, parse=parse).message
        turn.reply = reply.read(turn.text, opened=turn.opened, parse=parse)
        turn.names = (turn.message_id, *(call.id for call in turn.reply.calls))
        self.turns.append(turn)
        turn.number = len(self.turns)

    def _show_progress(self, turn: Turn, part: Completion) -> None:
        now = time.monotonic()
        if now - turn.shown_s < STREAM_S:
            return
        turn.shown_s = now
        text = self._policy.tokenizer.completion(part.tokens)
        # The last character may be incomplete.
        turn.partial = reply.read_partial(text.rstrip("\N{REPLACEMENT CHARACTER}"), opened=turn.opened)
        turn.changed.set()

    async def _wait_for_room(self, request: Request) -> tuple[TreePlace, Ints, int]:
        """Wait until the row has room; return the turn's place, new tokens and token limit. Raises `RequestRefused`."""
        limits = self._limits
        limit = min(self._sampling.max_tokens, request.max_tokens or self._sampling.max_tokens)
        while True:
            place = self._tree.match(request.messages, request.setting)
            new_tokens = self._render(place, request)
            # The first context is the prompt, which does not count towards max_tokens.
            new = max(1, len(new_tokens)) if len(self.row) or self._reserved else 0
            room = limits.max_tokens - self.row.length - self._reserved - new
            if room >= limit or not self._reserved:
                break
            self._freed.clear()
            await self._freed.wait()
        if room < 1:
            self.refused = True
            raise over_budget(
                f"the run's {limits.max_tokens} tokens (environment.max_tokens) leave no room for this request: it "
                f"adds {new} tokens to {self.row.length}"
            )
        return place, new_tokens, min(room, limit)

    def _render(self, place: TreePlace, request: Request) -> Ints:
        """Return the tokens of a context's new messages. Raises `TaskError` for messages that the template refuses."""
        if not place.new_messages:
            return np.zeros(0, np.int32)
        template = Template(
            arguments={**self._template.arguments, **request.arguments},
            tools=request.tools,
            control_tokens=self._template.control_tokens,
        )
        tokenizer, messages = self._policy.tokenizer, tuple(place.new_messages)
        if not tokenizer.has_template:
            return self._render_plain(place, messages, template)
        if place.at == NO_PLACE:
            if tokenizer.chat.leaves_out_tools(messages, template):
                raise TaskError(TOOLS_LEFT_OUT)
            text = "\n\n".join(message.text for message in messages)
            return tokenizer.encode(Prompt(text=text, columns={}, messages=messages, template=template))
        # Some templates write a tool's answer only after the message that calls the tool.
        *before, turn = request.messages[: -len(messages)]
        calls = turn.tool_calls if messages[0].role == "tool" else ()
        return tokenizer.observation(messages, template, self.row.token(place.at), calls, before)

    def _render_plain(self, place: TreePlace, messages: Sequence[Message], template: Template) -> Ints:
        if template.tools:
            raise TaskError("the model's tokenizer has no chat template: no tools can be described to it")
        text = "".join(message.text for message in messages)
        if place.at == NO_PLACE:
            return self._policy.tokenizer.encode(Prompt(text=text, columns={}, template=template))
        return self._policy.tokenizer.observation(text, template)

    def count(self, request: Request) -> int:
        """Count the tokens of a request's context. Raises `TaskError` for messages that the template refuses."""
        place = self._tree.match(request.messages, request.setting)
        return len(self.row.context(place.at)) + len(self._render(place, request))

    def received_turns(self) -> list[Turn]:
        """Return the received turns, in the order of their ends. Raises `EnvironmentFailed` if none was received."""
        delivered = [turn for turn in self.turns if turn.delivered]
        if self.failure:
            raise EnvironmentFailed(self.failure, self.sampled)
        if not delivered:
            reason = "made no request" if not self.turns else "received no answer: it hung up on each of its requests"
            raise EnvironmentFailed(f"the agent {reason}", self.sampled)
        return delivered
