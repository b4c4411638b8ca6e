"""Sessions of agents under requests, edits, retries, disconnects and sub-agents in any order.

A model knows who listens to which turn and what was received. The oracle of a context is what a program that keeps no
tree would send: its messages, rendered by hand.
"""

import asyncio
from collections import Counter
from typing import Any, NamedTuple

import agent_case
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamppo.config.task import AgentEnvironment
from streamppo.errors import EnvironmentFailed
from streamppo.rollout.endpoint.request import Request, RequestRefused, Turn
from streamppo.rollout.endpoint.session import SampledPolicy, Session
from streamppo.rollout.engine import Completion, ContextReuse, Cuts, Sampling
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Ints, Message, Prompt, branches

Said = tuple[tuple[str, str], ...]
ROUNDS = 12
"""Rounds of the loop in which a turn comes to its next wait."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


class Waits:
    """An engine whose completions end when a test says so, in any order."""

    version = 0

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.under_way: list[tuple[str, int, asyncio.Future[str]]] = []
        self.ended: list[tuple[str, str]] = []

    async def generate(self, prompt: Ints, sampling: Sampling, cuts: Cuts | None = None) -> Completion:
        context, ending = self._tokenizer.spell(prompt.tolist()), asyncio.get_running_loop().create_future()
        call = (context, sampling.max_tokens, ending)
        self.under_way.append(call)
        try:
            said = await ending
        finally:
            self.under_way.remove(call)
        ids = [*self._tokenizer.ids(Prompt(text=said, columns={})), self._tokenizer.eos_id]
        tokens = np.asarray(ids, np.int32)[: sampling.max_tokens]
        self.ended.append((context, self._tokenizer.spell(tokens.tolist())))
        numbers = np.full(len(tokens), -0.5, np.float32), np.zeros(len(tokens), np.int32)
        return Completion(tokens, *numbers, "stop" if len(tokens) == len(ids) else "length")


class Listener(NamedTuple):
    """A connection that waits for a turn, and the messages that it sent."""

    turn: Turn
    said: Said


def rendered(said: Said) -> str:
    """The text of a conversation, with the opening of the next turn."""
    return "".join(f"[{role}]{text}<eos>" for role, text in said) + "[assistant]"


class Play:
    """One session, and the model of who listens and what was received."""

    def __init__(self, tokenizer: Tokenizer, limits: AgentEnvironment) -> None:
        self.engine, self.counts = Waits(tokenizer), Counter[str]()
        policy = SampledPolicy(self.engine, tokenizer, Stop(), ContextReuse())  # pyright: ignore
        self.session = Session("k", policy, Sampling(8), limits, counts=self.counts)
        self.listening: list[Listener] = []
        self.asked: list[tuple[Turn, Said]] = []
        self.received: set[str] = set()
        self.contexts: list[str] = []

    async def ask(self, said: Said) -> None:
        """Send a request; it joins a turn exactly if nobody listens to an equal one that nobody received."""
        heard = {one.turn.id for one in self.listening}
        open_ones = [
            turn.id
            for turn, other in self.asked
            if other == said and turn.id not in heard | self.received and turn.error is None
        ]
        request = Request(tuple(Message(role=role, content=text) for role, text in said))
        try:
            turn = self.session.begin(request)
        except RequestRefused as error:
            assert error.reason == "over budget"
            return
        known = {one.id for one, _ in self.asked}
        assert (turn.id in known) == bool(open_ones) and (not open_ones or turn.id in open_ones)
        if turn.id not in known:
            self.asked.append((turn, said))
            self.contexts.append(rendered(said))
        self.listening.append(Listener(turn, said))
        await self.settle()

    async def leave(self, at: int) -> None:
        """End a connection: an ended turn was received by it, of one under way it hung up."""
        one = self.listening.pop(at)
        received = one.turn.reply is not None
        self.session.leave(one.turn, delivered=received)
        if received:
            self.received.add(one.turn.id)

    async def settle(self) -> None:
        for _ in range(ROUNDS):
            await asyncio.sleep(0)

    def known(self) -> list[Said]:
        """Conversations with the answers that were received."""
        return [(*said, ("assistant", turn.reply.content)) for turn, said in self.asked if turn.reply is not None]


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_each_token_is_stored_once_behind_the_context_that_was_asked_for(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    limits = AgentEnvironment(agent="a:b", max_turns=9, max_tokens=data.draw(st.sampled_from([4096, 60])))
    asyncio.run(_played(Play(tokenizer, limits), data))


async def _played(play: Play, data: st.DataObject) -> None:
    letters = st.sampled_from("xy")
    for _ in range(data.draw(st.integers(3, 16))):
        step = data.draw(st.sampled_from(["ask", "ask", "end a turn", "leave"]))
        if step == "ask":
            await play.ask(_request(play, data))
        elif step == "end a turn" and play.engine.under_way:
            _, _, ending = data.draw(st.sampled_from(play.engine.under_way))
            ending.set_result(data.draw(letters) * data.draw(st.sampled_from([1, 2, 9])))
            await play.settle()
        elif step == "leave" and play.listening:
            await play.leave(data.draw(st.integers(0, len(play.listening) - 1)))
    play.session.end()
    await play.settle()
    while play.listening:
        await play.leave(0)
    check(play)


def _request(play: Play, data: st.DataObject) -> Said:
    """A new conversation, one that was sent before, one that continues, or one with an edited history."""
    letters, old = st.sampled_from("xy"), [said for _, said in play.asked]
    kind = data.draw(st.sampled_from(["new", "again", "continues", "continues", "edited"]))
    if kind == "again" and old:
        return data.draw(st.sampled_from(old))
    known = play.known()
    if kind == "new" or not known:
        return (("user", data.draw(letters)),)
    said = data.draw(st.sampled_from(known))
    if kind == "edited":
        at = data.draw(st.integers(0, len(said) - 1))
        said = (*said[:at], (said[at][0], data.draw(st.sampled_from("xyz"))), *said[at + 1 :])
    return (*said, ("user", data.draw(letters)))


def check(play: Play) -> None:
    session, engine = play.session, play.engine
    assert not session.failure and session.row.length <= session._limits.max_tokens
    spell = session._policy.tokenizer.spell
    # Each generation was asked for once, and saw what the program's messages say.
    assert not Counter(context for context, _ in engine.ended) - Counter(play.contexts)
    assert len(engine.ended) == len(session.turns)
    columns = session.row.columns(range(1, len(session.turns) + 1))
    assert int(columns.mask.sum()) == session.sampled == sum(turn.tokens for turn in session.turns)
    places = np.flatnonzero(columns.mask)
    ends = np.cumsum([turn.tokens for turn in session.turns], dtype=np.int64) - 1
    for end, turn, (context, answer) in zip(places[ends], session.turns, engine.ended, strict=True):
        # In the row the path up to a turn's end is the engine's input and its answer, token by token.
        assert spell(session.row.context(int(end)).tolist()) == context + answer
        assert spell(columns.tokens[end + 1 - turn.tokens : end + 1].tolist()) == answer
        assert turn.delivered == (turn.id in play.received)
    assert session.sampled - session.undelivered == sum(one.tokens for one in session.turns if one.id in play.received)
    if len(session.row):
        prompt = session.row.prompt
        assert branches.flaw(columns.branches.astype("<i4").tobytes(), prompt, columns.mask[prompt:]) is None
    try:
        received = session.received_turns()
    except EnvironmentFailed as error:
        assert not play.received and error.tokens == session.sampled
        return
    assert [one.id for one in received] == [one.id for one in session.turns if one.id in play.received]
    trained: Any = session.row.columns([one.number for one in received]).mask
    assert int(trained.sum()) == session.sampled - session.undelivered
