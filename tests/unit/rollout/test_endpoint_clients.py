"""Real clients, none of them told of us, against the endpoint: streaming, tools, errors, counts."""

import asyncio
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import agent_case
import pytest
from agent_case import served

from streamppo.tasks.tokenizer import Tokenizer

if TYPE_CHECKING:
    import anthropic
    import openai

TOOL = {
    "type": "function",
    "function": {"name": "sum", "description": "adds", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "sum", "arguments": {"a": 1, "b": 2}}</tool_call>'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return agent_case.tokenizer(tmp_path_factory.mktemp("tokenizer"))


def user(text: str) -> Any:
    return {"role": "user", "content": text}


def openai_of(case: agent_case.Case, **options: Any) -> "openai.AsyncOpenAI":
    import openai

    given = {"base_url": case.base_url, "api_key": case.key, "max_retries": 0, **options}
    return case.keep(openai.AsyncOpenAI(**given))


def anthropic_of(case: agent_case.Case) -> "anthropic.AsyncAnthropic":
    import anthropic

    return case.keep(anthropic.AsyncAnthropic(base_url=case.endpoint.address, api_key=case.key, max_retries=0))


def test_openai_answers_and_the_next_request_stands_behind_the_stored_tokens(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with served(tokenizer, lambda text: f"seen {text.count('[user]')}") as case:
            client = openai_of(case)
            first = await client.chat.completions.create(model="any", messages=[user("a")], temperature=0.3)
            said = first.choices[0].message
            assert (said.content, first.choices[0].finish_reason) == ("seen 1", "stop")
            assert first.usage is not None and first.usage.completion_tokens == 7
            second = await client.chat.completions.create(
                model="any", messages=[user("a"), {"role": "assistant", "content": said.content}, user("b")]
            )
            assert second.choices[0].message.content == "seen 2"
            assert case.row() == "[user]a<eos>[assistant]seen 1<eos>[user]b<eos>[assistant]seen 2<eos>"
            assert not len(case.session.row.columns([]).branches)
            assert case.counts["sampling parameters left out"] == 1
            assert [one.id for one in (await client.models.list()).data] == ["policy"]

    asyncio.run(main())


def test_openai_streams_text_as_it_is_sampled(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with served(tokenizer, lambda _: "a sentence of some length") as case:
            case.engine.pace_s = 0.002
            pieces = list[str]()
            stream = await openai_of(case).chat.completions.create(
                model="any", messages=[user("a")], stream=True, stream_options={"include_usage": True}
            )
            usage = None
            async for chunk in stream:
                pieces += [one.delta.content for one in chunk.choices if one.delta.content]
                usage = chunk.usage or usage
            assert "".join(pieces) == "a sentence of some length" and len(pieces) > 3
            assert usage is not None and usage.completion_tokens == 26
            assert case.session.undelivered == 0

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_openai_calls_tools_and_their_ids_name_the_turn(tokenizer: Tokenizer, stream: bool) -> None:
    async def main() -> None:
        async with served(tokenizer, lambda text: "3" if "[tool]" in text else f"Let me see. {CALL}") as case:
            case.engine.pace_s = 0.0005
            client = openai_of(case)
            if stream:
                async with client.chat.completions.stream(model="any", messages=[user("1+2")], tools=[TOOL]) as events:
                    async for _ in events:
                        pass
                    made = await events.get_final_completion()
            else:
                made = await client.chat.completions.create(model="any", messages=[user("1+2")], tools=[TOOL])
            choice = made.choices[0]
            assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
            (call,) = choice.message.tool_calls or []
            assert call.type == "function" and json.loads(call.function.arguments) == {"a": 1, "b": 2}
            # A program that drops the text keeps the id.
            answer = {"role": "assistant", "tool_calls": [call.model_dump()]}
            result = {"role": "tool", "tool_call_id": call.id, "content": "3"}
            last = await client.chat.completions.create(
                model="any", messages=[user("1+2"), answer, result], tools=[TOOL]
            )
            assert last.choices[0].message.content == "3"
            assert case.row().endswith(f"[assistant]Let me see. {CALL}<eos>[tool]3<eos>[assistant]3<eos>")
            assert case.row().startswith("[tools]sum <eos>[user]1+2<eos>")

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_calls_tools(tokenizer: Tokenizer, stream: bool) -> None:
    async def main() -> None:
        say = lambda text: "3" if "[tool]" in text else f"<think>hm</think>Let me see. {CALL}"  # noqa: E731
        async with served(tokenizer, say) as case:
            case.engine.pace_s = 0.0005
            client, asked = anthropic_of(case), [user("1+2")]
            given: Any = {
                "model": "any",
                "max_tokens": 200,
                "system": "Add.",
                "tools": [{"name": "sum", "description": "adds", "input_schema": {"type": "object"}}],
            }
            assert (
                await client.messages.count_tokens(**_without(given, "max_tokens"), messages=asked)
            ).input_tokens > 9
            if stream:
                async with client.messages.stream(**given, messages=asked) as events:
                    texts = [text async for text in events.text_stream]
                    made = await events.get_final_message()
                assert "".join(texts) == "Let me see."
            else:
                made = await client.messages.create(**given, messages=asked)
            assert made.stop_reason == "tool_use"
            thought, text, call = made.content
            assert thought.type == "thinking" and thought.thinking == "hm"
            assert text.type == "text" and text.text == "Let me see."
            assert call.type == "tool_use" and call.input == {"a": 1, "b": 2}
            result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "3"}]}
            more: Any = [
                *asked,
                {"role": "assistant", "content": [one.model_dump() for one in made.content]},
                {"role": "user", "content": [result]},
            ]
            last = await client.messages.create(**given, messages=more)
            assert last.content[0].type == "text" and last.content[0].text == "3"
            assert last.stop_reason == "end_turn"
            assert case.row().startswith("[tools]sum <eos>[system]Add.<eos>[user]1+2<eos>[assistant]<think>hm")
            assert case.row().endswith("<eos>[tool]3<eos>[assistant]3<eos>")
            assert not len(case.session.row.columns([]).branches)

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_openais_responses_call_tools_and_go_on(tokenizer: Tokenizer, stream: bool, stored: bool) -> None:
    """With all items sent back, or with the id of the response before alone."""
    import openai

    async def main() -> None:
        say = lambda text: "3" if "[tool]" in text else f"<think>hm</think>Let me see. {CALL}"  # noqa: E731
        async with served(tokenizer, say) as case:
            case.engine.pace_s = 0.0005
            client = openai_of(case)
            given: Any = {
                "model": "any",
                "instructions": "Add.",
                "tools": [{"type": "function", "name": "sum", "parameters": {"type": "object"}, "strict": False}],
            }
            if stream:
                async with client.responses.stream(**given, input="1+2") as events:
                    seen = [event async for event in events]
                    made = await events.get_final_response()
                texts = [one.delta for one in seen if one.type == "response.output_text.delta"]
                assert "".join(texts) == "Let me see." and len(texts) > 1
                assert [one.sequence_number for one in seen] == sorted({one.sequence_number for one in seen})
            else:
                made = await client.responses.create(**given, input="1+2")
            assert made.status == "completed" and made.output_text == "Let me see."
            assert [one.type for one in made.output] == ["reasoning", "message", "function_call"]
            call = made.output[2]
            assert call.type == "function_call" and json.loads(call.arguments) == {"a": 1, "b": 2}
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
            if stored:
                last = await client.responses.create(**given, input=[result], previous_response_id=made.id)
            else:
                items = [user("1+2"), *(one.model_dump(exclude_none=True) for one in made.output), result]
                last = await client.responses.create(**given, input=items)
            assert last.output_text == "3"
            assert case.row().startswith("[tools]sum <eos>[system]Add.<eos>[user]1+2<eos>[assistant]<think>hm")
            assert case.row().endswith("<eos>[tool]3<eos>[assistant]3<eos>")
            assert not len(case.session.row.columns([]).branches)
            with pytest.raises(openai.BadRequestError, match="no response of this run is called 'resp_x'"):
                await client.responses.create(model="m", input="a", previous_response_id="resp_x")

    asyncio.run(main())


def _without(given: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key != name}


def test_clients_know_our_refusals(tokenizer: Tokenizer) -> None:
    import anthropic
    import openai

    async def main() -> None:
        async with served(tokenizer, max_turns=1) as case:
            client = openai_of(case)
            with pytest.raises(openai.BadRequestError, match="response_format is not possible here"):
                await client.chat.completions.create(
                    model="m", messages=[user("a")], response_format={"type": "json_object"}
                )
            with pytest.raises(openai.BadRequestError, match="tool_choice is not possible here"):
                await client.chat.completions.create(
                    model="m", messages=[user("a")], tools=[TOOL], tool_choice="required"
                )
            await client.chat.completions.create(model="m", messages=[user("a")])
            with pytest.raises(openai.BadRequestError) as spent:
                await client.chat.completions.create(model="m", messages=[user("b")])
            assert spent.value.code == "context_length_exceeded" and case.session.refused
            with pytest.raises(anthropic.BadRequestError, match=r"made its 1 requests"):
                await anthropic_of(case).messages.create(model="m", max_tokens=5, messages=[user("b")])
            wrong = openai_of(case, api_key="sp-1-guess")
            with pytest.raises(openai.AuthenticationError, match="no run has this key"):
                await wrong.models.list()
            case.endpoint.close(case.session)
            with pytest.raises(openai.APIStatusError, match="has ended") as ended:
                await client.models.list()
            assert ended.value.status_code == 410
            with pytest.raises(anthropic.APIStatusError, match="has ended"):
                await anthropic_of(case).messages.create(model="m", max_tokens=5, messages=[user("b")])
            assert case.counts["unknown key"] == 1 and case.counts["after its end"] == 2
            assert case.counts["over budget"] == 2

    asyncio.run(main())


def test_a_client_that_times_out_and_tries_again_joins_its_generation(tokenizer: Tokenizer) -> None:
    """The retry is the client's own: it hangs up after its timeout, and sends the request once more."""

    async def main() -> None:
        async with served(tokenizer) as case:
            case.engine.gate.clear()
            client = openai_of(case, timeout=0.3, max_retries=3)
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("a")]))
            while not case.counts.get("joined"):
                await asyncio.sleep(0.01)
            case.engine.gate.set()
            assert (await asking).choices[0].message.content == "hi"
            assert len(case.engine.asked) == 1 and case.counts["disconnected"] >= 1
            assert case.session.undelivered == 0

    asyncio.run(main())


def test_equal_requests_beside_each_other_are_siblings(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with served(tokenizer, max_tokens=4096) as case:
            client = openai_of(case)
            asked = [client.chat.completions.create(model="m", messages=[user("a")]) for _ in range(4)]
            await asyncio.gather(*asked)
            columns = case.session.row.columns([])
            assert len(case.engine.asked) == 4 and len({tuple(one) for one in case.engine.asked}) == 1
            assert len(columns.branches) == 3
            assert case.row() == "[user]a<eos>[assistant]" + "]".join(["hi<eos>"] * 4)

    asyncio.run(main())


def test_openai_gets_several_answers_to_one_request_each_a_branch_of_its_own(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        said = iter(["one", "two", "three", "four"])
        async with served(tokenizer, lambda _: next(said), max_tokens=4096, max_turns=5) as case:
            client = openai_of(case)
            answer = await client.chat.completions.create(model="m", messages=[user("a")], n=3)
            assert [choice.index for choice in answer.choices] == [0, 1, 2]
            assert [choice.message.content for choice in answer.choices] == ["one", "two", "three"]
            assert answer.usage is not None and answer.usage.completion_tokens == len("one two three") - 2 + 3
            assert answer.usage.prompt_tokens == len(case.engine.asked[0])
            assert len(case.session.row.columns([]).branches) == 2 and case.session.undelivered == 0
            chosen = {"role": "assistant", "content": "two"}
            more = await client.chat.completions.create(model="m", messages=[user("a"), chosen, user("b")], n=1)
            assert more.choices[0].message.content == "four"
            assert case.engine.text(case.engine.asked[3]).startswith("[user]a<eos>[assistant]two<eos>[user]b")
            for refused, sentence in (({"n": 2}, "environment.max_turns"), ({"n": 0}, "n is a number of answers")):
                with pytest.raises(Exception, match=sentence):
                    await client.chat.completions.create(model="m", messages=[user("c")], **refused)

    asyncio.run(main())


def test_several_answers_that_a_client_asks_for_again_are_the_ones_under_way(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with served(tokenizer, max_tokens=4096) as case:
            case.engine.gate.clear()
            client = openai_of(case, timeout=0.3, max_retries=3)
            asking = asyncio.create_task(client.chat.completions.create(model="m", messages=[user("a")], n=2))
            while case.counts.get("joined", 0) < 2:
                await asyncio.sleep(0.01)
            case.engine.gate.set()
            assert [choice.message.content for choice in (await asking).choices] == ["hi", "hi"]
            assert len(case.engine.asked) == 2 and case.session.undelivered == 0

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_openai_gets_the_log_probs_that_the_tokens_were_sampled_with(tokenizer: Tokenizer, stream: bool) -> None:
    async def main() -> None:
        async with served(tokenizer, lambda _: "hi you") as case:
            client = openai_of(case)
            asked: Any = {"model": "m", "messages": [user("a")], "logprobs": True}
            if stream:
                chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
                (given,) = [chunk.choices[0].logprobs for chunk in chunks if chunk.choices[0].logprobs]
            else:
                given = (await client.chat.completions.create(**asked)).choices[0].logprobs
            assert given is not None and given.content is not None
            assert [one.token for one in given.content] == [*"hi you", "<eos>"]
            assert {one.logprob for one in given.content} == {-0.5}
            assert bytes(given.content[0].bytes or ()) == b"h" and given.content[0].top_logprobs == []
            plain = await client.chat.completions.create(model="m", messages=[user("b")])
            assert plain.choices[0].logprobs is None

    asyncio.run(main())


LITELLM = """
import json, sys
import litellm
given = json.loads(sys.argv[1])
message = litellm.completion(messages=[{"role": "user", "content": "1+2"}], **given).choices[0].message
result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "3"}
last = litellm.completion(messages=[{"role": "user", "content": "1+2"}, message, result], **given)
print(last.choices[0].message.content)
"""


@pytest.mark.slow
def test_litellm_finds_the_endpoint_as_any_openai_server(tokenizer: Tokenizer) -> None:
    if find_spec("litellm") is None:
        pytest.skip("litellm is not installed")

    async def main() -> None:
        async with served(tokenizer, lambda text: "3" if "[tool]" in text else CALL) as case:
            given = {"model": "openai/policy", "api_base": case.base_url, "api_key": case.key, "tools": [TOOL]}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-W", "ignore", "-c", LITELLM, json.dumps(given)),
                stdout=asyncio.subprocess.PIPE,
                env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
            )
            printed, _ = await process.communicate()
            assert printed.decode().split() == ["3"]
            assert not len(case.session.row.columns([]).branches)

    asyncio.run(main())


def test_a_key_in_the_address_is_a_key(tokenizer: Tokenizer) -> None:
    async def main() -> None:
        async with served(tokenizer) as case:
            client = openai_of(case, base_url=f"{case.endpoint.address}/key/{case.key}/v1", api_key="none")
            assert (await client.chat.completions.create(model="m", messages=[user("a")])).choices

    asyncio.run(main())


def test_without_a_chat_template_texts_stand_one_behind_another(tmp_path: Path) -> None:
    """Without a chat template a context is the texts of its messages, and tools are refused."""
    import openai

    async def main() -> None:
        async with served(agent_case.tokenizer(tmp_path, None), lambda _: "46") as case:
            client = openai_of(case)
            await client.chat.completions.create(model="m", messages=[user("12+34=")])
            asked: Any = [user("12+34="), {"role": "assistant", "content": "46"}, {"role": "tool", "content": "46="}]
            await client.chat.completions.create(model="m", messages=asked)
            assert case.row() == "12+34=46<eos>46=46<eos>"
            with pytest.raises(openai.BadRequestError, match="no chat template"):
                await client.chat.completions.create(model="m", messages=[user("a")], tools=[TOOL])

    asyncio.run(main())
