"""Messages find the tokens that stand for them: by equality, by our ids, the deepest first; a naive twin agrees."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamppo.rollout.endpoint.row import Row
from streamppo.rollout.endpoint.tree import NO_PLACE, ROOT, Tree
from streamppo.rollout.engine import Completion
from streamppo.types import Ints, Message


def user(text: str) -> Message:
    return Message(role="user", content=text)


def said(text: str | None, *calls: tuple[str, str, object], **fields: object) -> Message:
    listed = tuple({"id": one, "function": {"name": name, "arguments": given}} for one, name, given in calls)
    return Message(role="assistant", content=text, tool_calls=listed, fields=fields)


def grown(*, names: tuple[str, ...] = (), answer: Message | None = None) -> Tree:
    """One turn: "q" is tokens 0 .. 4, its answer tokens 5 .. 7."""
    tree = Tree()
    tree.add([user("q")], answer or said("a"), after=tree.match([user("q")]), opened=4, ended=7, names=names)
    return tree


def test_a_request_that_goes_on_is_stored_up_to_the_answer() -> None:
    place = grown().match([user("q"), said("a"), user("more")])
    assert (place.at, place.new_messages) == (7, [user("more")])


def test_the_same_request_again_is_stored_with_its_opening() -> None:
    place = grown().match([user("q")])
    assert (place.at, len(place.new_messages)) == (4, 0)


@pytest.mark.parametrize("other", [user("Q"), Message(role="user", content="q", name="x"), said("q")])
def test_another_first_message_is_a_new_root(other: Message) -> None:
    place = grown().match([other, said("a"), user("more")])
    assert (place.node, place.at, len(place.new_messages)) == (ROOT, NO_PLACE, 3)


def test_other_tools_are_a_new_root_and_tools_of_another_order_of_keys_are_not() -> None:
    tree, tools = Tree(), {"tools": [{"name": "sum", "strict": True}]}
    tree.add([user("q")], said("a"), tools, after=tree.match([user("q")], tools), opened=4, ended=7)
    assert tree.match([user("q")]).at == NO_PLACE
    assert tree.match([user("q")], {"tools": [{"strict": True, "name": "sum"}]}).at == 4


@pytest.mark.parametrize(
    "changed",
    [
        said(" a\n"),
        said("a", reasoning_content=""),
        said("a", refusal=None, annotations=[]),
        said("a", reasoning_content="thought"),
        said("a", reasoning="thought"),
    ],
)
def test_an_answer_is_known_however_a_program_writes_it_down(changed: Message) -> None:
    tree = grown(answer=said("a", reasoning_content="thought"))
    assert tree.match([user("q"), changed, user("more")]).at == 7


@pytest.mark.parametrize("changed", [said("b"), said("a", reasoning_content="another"), said("a", ("x", "f", "{}"))])
def test_an_edited_answer_is_none_of_ours(changed: Message) -> None:
    tree = grown(answer=said("a", reasoning_content="thought"))
    assert tree.match([user("q"), changed, user("more")]).at == NO_PLACE


@pytest.mark.parametrize("arguments", ['{"b": 2, "a": 1}', {"a": 1, "b": 2}, ' {"a":1,"b":2}'])
def test_arguments_of_calls_are_compared_as_values(arguments: object) -> None:
    tree = grown(answer=said("", ("call_1", "f", '{"a": 1, "b": 2}')))
    assert tree.match([user("q"), said(None, ("theirs", "f", arguments)), user("more")]).at == 7


def test_an_id_of_ours_names_its_answer_whatever_became_of_the_text() -> None:
    tree = grown(names=("call_1",), answer=said("long", ("call_1", "f", "{}")))
    assert tree.match([user("q"), said("", ("call_1", "g", "no json")), user("more")]).at == 7
    # Behind another context it is another message: the tokens before it are others.
    assert tree.match([user("summary"), said("long", ("call_1", "f", "{}")), user("more")]).at == NO_PLACE


def test_of_two_equal_answers_the_one_that_goes_on_deepest_is_found() -> None:
    tree = grown()
    again, longer = tree.match([user("q")]), [user("q"), said("a"), user("x")]
    tree.add(longer, said("b"), after=tree.match(longer), opened=9, ended=11)
    tree.add([user("q")], said("a"), after=again, opened=13, ended=15)
    assert tree.match([user("q"), said("a"), user("y")]).at == 15
    assert tree.match([*longer, said("b"), user("y")]).at == 11


# --- the row -------------------------------------------------------------------------------------------------


def sampled(*tokens: int) -> Completion:
    count = len(tokens)
    return Completion(np.asarray(tokens, np.int32), np.zeros(count, np.float32), np.ones(count, np.int32), "stop")


def of(*tokens: int) -> Ints:
    return np.asarray(tokens, np.int32)


def test_a_second_answer_to_one_context_begins_with_its_last_token_once_more() -> None:
    row = Row()
    assert row.add(NO_PLACE, of(1, 2, 3), sampled(10, 11), 1) == (2, 4)
    assert row.add(2, of(), sampled(20), 2) == (5, 6)
    columns = row.columns([2])
    assert columns.tokens.tolist() == [1, 2, 3, 10, 11, 3, 20]
    assert columns.branches.tolist() == [[5, 1]]
    # Of two turns one was received.
    assert columns.mask.tolist() == [False] * 6 + [True]
    assert (row.context(6).tolist(), row.context(4).tolist()) == ([1, 2, 3, 20], [1, 2, 3, 10, 11])
    # The third one is its sibling, and a message behind the first answer returns to that.
    assert row.add(5, of(), sampled(30), 3) == (7, 8)
    row.add(4, of(7), sampled(40), 4)
    assert row.columns([]).branches.tolist() == [[5, 1], [7, 1], [9, 4]]
    assert row.context(10).tolist() == [1, 2, 3, 10, 11, 7, 40]


def test_a_new_root_follows_nothing() -> None:
    row = Row()
    row.add(NO_PLACE, of(1), sampled(10), 1)
    row.add(NO_PLACE, of(2), sampled(20), 2)
    assert row.columns([]).branches.tolist() == [[2, -1]] and row.context(3).tolist() == [2, 20]
    row.add(0, of(), sampled(30), 3)
    assert row.context(5).tolist() == [1, 30] and row.columns([]).branches.tolist() == [[2, -1], [4, -1]]


# --- a naive twin ---------------------------------------------------------------------------------------------


class Known(NamedTuple):
    """A turn as the twin has it: all messages with the answer's, and all tokens."""

    messages: list[tuple[str, str]]
    context: list[int]
    tokens: list[int]


def rendered(messages: list[tuple[str, str]]) -> list[int]:
    return [ord(one) for role, text in messages for one in f"{role[0]}{text}|"]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_every_context_is_the_one_that_a_naive_twin_finds(data: st.DataObject) -> None:
    """Requests begin anew, repeat, continue, or edit; the twin keeps every turn whole and looks at all of them."""
    tree, row, known, letters = Tree(), Row(), list[Known](), st.sampled_from("xy")
    for number in range(1, data.draw(st.integers(2, 9)) + 1):
        old = data.draw(st.sampled_from(known)) if known else None
        messages = list(old.messages) if old and data.draw(st.booleans()) else list[tuple[str, str]]()
        if messages and data.draw(st.booleans()):
            # An edit, or a request that goes back.
            messages = messages[: data.draw(st.integers(0, len(messages)))]
        if not messages or messages[-1][0] == "assistant" or data.draw(st.booleans()):
            messages.append(("user", data.draw(letters)))
        asked = [Message(role=role, content=text) for role, text in messages]
        place = tree.match(asked)
        rest = np.asarray(rendered([(one.role, one.text) for one in place.new_messages]), np.int32)
        context = [*row.context(place.at).tolist(), *rest.tolist()]
        assert context in twins(known, messages)
        answer = data.draw(letters)
        completion = sampled(1000 + number, ord(answer))
        opened, ended = row.add(place.at, rest, completion, number)
        assert row.context(opened).tolist() == context
        assert row.context(ended).tolist() == [*context, *completion.tokens.tolist()]
        tree.add(asked, said(answer), after=place, opened=opened, ended=ended)
        known.append(Known([*messages, ("assistant", answer)], context, [*context, *completion.tokens.tolist()]))
    columns = row.columns(range(1, len(known) + 1))
    # Each sampled token stands once, behind the token that it was sampled behind.
    assert [token for token in columns.tokens.tolist() if token >= 1000] == [1001 + n for n in range(len(known))]
    assert not set(columns.branches[:, 0].tolist()) & set(np.flatnonzero(columns.mask).tolist())


def twins(known: list[Known], messages: list[tuple[str, str]]) -> list[list[int]]:
    """The contexts that a request may have: behind the longest turn that it begins with, or of an equal request."""
    if equal := [one.context for one in known if one.messages[:-1] == messages]:
        return equal
    longest = max((len(one.messages) for one in known if begins(messages, one)), default=0)
    behind = [one.tokens for one in known if begins(messages, one) and len(one.messages) == longest]
    return [[*one, *rendered(messages[longest:])] for one in behind or [[]]]


def begins(messages: list[tuple[str, str]], one: Known) -> bool:
    return len(one.messages) < len(messages) and messages[: len(one.messages)] == one.messages
