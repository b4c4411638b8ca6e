"""Conversations reach rewards as TRL's trainers hand them over: prompts and completions as lists of messages."""

from typing import Any

from streamppo.tasks.rewards import signature
from streamppo.tasks.rewards.signature import LoadedReward
from streamppo.types import Message, ScoredText

SEEN: dict[str, Any] = {}
TOOL = Message(role="tool", content="3", tool_call_id="1", name="add")
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def conversational(prompts: Any, completions: Any, completion_ids: Any, solution: Any, **kwargs: Any) -> list[float]:
    """As in TRL's documentation."""
    SEEN.update(prompts=prompts, completions=completions, completion_ids=completion_ids, kwargs=kwargs)
    contents = [completion[0]["content"] for completion in completions]
    return [float(content == wanted) for content, wanted in zip(contents, solution, strict=True)]


def called(*texts: ScoredText, **columns: Any) -> list[float]:
    reward = LoadedReward(signature.detect_signature(conversational, "conversational", {}), conversational)
    outcomes = signature.call(reward, texts, tuple({"solution": "46", **columns} for _ in texts))
    return [outcome.reward.total if outcome.reward else float("nan") for outcome in outcomes]


def text(*messages: Message, completion: str = "46", **more: Any) -> ScoredText:
    return ScoredText(prompt="12+34", completion=completion, finish="stop", num_tokens=1, messages=messages, **more)


USER = Message(role="user", content="12+34")


def test_a_reward_by_trls_documentation_gets_messages_and_the_rows_columns() -> None:
    assert called(text(USER), text(USER, completion="47"), level=2) == [1.0, 0.0]
    assert SEEN["prompts"][0] == [{"role": "user", "content": "12+34"}]
    assert SEEN["completions"] == [[{"role": "assistant", "content": said}] for said in ("46", "47")]
    assert SEEN["kwargs"] == {"level": [2, 2]}


def test_a_completion_that_continues_an_assistants_message_begins_with_it() -> None:
    called(text(USER, Message(role="assistant", content="It is "), completion="46"))
    assert SEEN["prompts"] == [[{"role": "user", "content": "12+34"}]]
    assert SEEN["completions"] == [[{"role": "assistant", "content": "It is 46"}]]


def test_several_turns_are_messages_with_the_environments_between() -> None:
    called(text(USER, completion="x3y", turns=("x", "y"), observations=((TOOL,),)))
    assert SEEN["completions"] == [
        [
            {"role": "assistant", "content": "x"},
            {"role": "tool", "content": "3", "tool_call_id": "1", "name": "add"},
            {"role": "assistant", "content": "y"},
        ]
    ]


def test_the_fields_of_a_prompts_messages_are_there_and_those_that_it_lacks_are_not() -> None:
    asked = Message(role="assistant", content=None, tool_calls=(CALL,), fields={"reasoning_content": "I add"})
    called(text(USER, asked, TOOL))
    assert SEEN["prompts"][0][1] == {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I add",
        "tool_calls": [CALL],
    }


def test_of_a_text_both_are_texts() -> None:
    def plain(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
        return [float((prompt, said) == ("12+34", "46")) for prompt, said in zip(prompts, completions, strict=True)]

    reward = LoadedReward(signature.detect_signature(plain, "plain", {}), plain)
    (outcome,) = signature.call(reward, (text(),), ({},))
    assert outcome.reward is not None and outcome.reward.total == 1.0
