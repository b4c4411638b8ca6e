"""The same turns at the endpoint on the real SGLang and on the embedded engine, asked for by OpenAI's client."""

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest
import sglang_case as case
import torch
from conftest import MATH
from transformers import Qwen2Config, Qwen2ForCausalLM

from streamppo.config import file as configfile
from streamppo.config.task import AgentEnvironment
from streamppo.rollout import build
from streamppo.rollout.endpoint.request import Turn
from streamppo.rollout.endpoint.row import RowColumns
from streamppo.rollout.endpoint.server import Endpoint
from streamppo.rollout.endpoint.session import SampledPolicy, Session
from streamppo.rollout.engine import ContextReuse, Sampling
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
CLOSE = 2e-5
TEMPLATE = """\
{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}\
{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}<|im_end|>
{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
END = "<|im_end|>"
TOOL: Any = {"type": "function", "function": {"name": "sum", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "sum", "arguments": {"a": 12, "b": 34}}</tool_call>'
QUESTION = "How much is 12+34, says the tool?"
SAID = (("user", QUESTION), ("assistant", CALL), ("tool", "46"), ("assistant", "It is 46."), ("user", "Sure?"))
SAID = (*SAID, ("assistant", "Yes."))
TOKENS = 70
"""Tokens of an answer, at most; a tool call has 55."""


class Asked(NamedTuple):
    """All that an engine made of the questions: the row, its turns, and what OpenAI's client received."""

    row: RowColumns
    turns: list[Turn]
    received: list[Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows one conversation by heart, with a tool call and the special tokens of Qwen's models."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = character_tokenizer("".join(map(chr, range(32, 127))) + "\n")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    messages = [{"role": role, "content": text} for role, text in SAID]
    text: Any = tokenizer.apply_chat_template(messages, tools=[TOOL], tokenize=False)
    ids = torch.tensor([tokenizer.encode(text)])
    torch.manual_seed(0)
    shape = {**case.SHAPE, "vocab_size": 128, "initializer_range": 0.05}
    made = Qwen2ForCausalLM(Qwen2Config(**shape, eos_token_id=tokenizer.eos_token_id))
    optimizer = torch.optim.Adam(made.parameters(), lr=3e-3)
    for _ in range(200):
        optimizer.zero_grad()
        made(ids, labels=ids).loss.backward()
        optimizer.step()
    made.save_pretrained(path)
    return path


def asked(folder: Path, engine: str, *stop: str) -> Asked:
    """Ask the questions of an engine, which samples greedily."""
    limits = ("environment.max_tokens=440", f"rollout.max_tokens={TOKENS}", f"rollout.stop={list(stop)}")
    kind = f"rollout.engine.kind={engine}"
    config = configfile.load(MATH, [kind, "environment.agent=a:b", "reward={}", "rollout.slots=4", *limits])
    tokenizer, held = Tokenizer(folder), Qwen2ForCausalLM.from_pretrained(folder)

    async def main() -> Asked:
        built = await build.engine(config, "rollout-0", str(folder), 0, case.tensors(held))
        endpoint = Endpoint("127.0.0.1")
        await endpoint.start()
        policy = SampledPolicy(built, tokenizer, build.stop(config, str(folder), tokenizer), ContextReuse())
        environment = AgentEnvironment(agent="a:b", max_turns=20, max_tokens=440)
        session = endpoint.open(
            lambda key: Session(key, policy, Sampling(TOKENS, 0.0), environment, counts=endpoint.counts)
        )
        async with openai.AsyncOpenAI(base_url=f"{endpoint.address}/v1", api_key=session.key, max_retries=0) as client:
            received = await converse(client)
        await endpoint.stop()
        await built.stop()
        assert session.undelivered == 0 and not session.failure
        return Asked(session.row.columns(range(1, len(session.turns) + 1)), session.turns, received)

    return asyncio.run(main())


async def converse(client: openai.AsyncOpenAI) -> list[Any]:
    """Ask as an agent does: with a tool, up to a limit, streamed, and what the model has never seen."""
    messages, received = list[Any](), list[Any]()

    async def ask(role: str, text: str, **options: Any) -> None:
        calls = received and received[-1].choices[0].message.tool_calls
        told = {"role": role, "content": text, **({"tool_call_id": calls[0].id} if role == "tool" and calls else {})}
        messages.append(told)
        made = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL], **options)
        received.append(made)
        messages.append(made.choices[0].message.model_dump(exclude_none=True))

    await ask("user", QUESTION)
    await ask("tool", "46")
    # Its end is the last token that the limit allows; then it is one less.
    await ask("user", "Sure?", max_tokens=5)
    del messages[-2:]
    await ask("user", "Sure?", max_tokens=4)
    stream: Any = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": QUESTION}], tools=[TOOL], stream=True
    )
    async for chunk in stream:
        received += [one.delta.content for one in chunk.choices if one.delta.content]
    for text in ("What?", "12+34", "Hm. How much?"):
        made = await client.chat.completions.create(model="policy", messages=[{"role": "user", "content": text}])
        received.append(made)
    return received


def plain(turn: Turn) -> tuple[object, ...]:
    """A turn without its random ids and without what its engine had in the cache."""
    assert turn.reply is not None
    calls = [(call.name, call.arguments) for call in turn.reply.calls]
    return turn.text, turn.finish, turn.tokens, turn.context, turn.reply.content, calls


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stop", [(), (" 46.",)], ids=["tokens", "a-string"])
def test_turns_have_the_tokens_texts_and_log_probs_of_the_embedded_engine(folder: Path, stop: tuple[str, ...]) -> None:
    expected, found = asked(folder, "embedded", *stop), asked(folder, "sglang", *stop)
    spelt = Tokenizer(folder).texts(found.row.tokens.tolist())
    assert "".join(spelt) == Tokenizer(folder).spell(expected.row.tokens.tolist())
    assert [plain(turn) for turn in found.turns] == [plain(turn) for turn in expected.turns]
    for name in ("tokens", "versions", "mask", "branches"):
        np.testing.assert_array_equal(getattr(found.row, name), getattr(expected.row, name), name)
    np.testing.assert_allclose(found.row.logprobs, expected.row.logprobs, atol=CLOSE, rtol=0)
    assert found.row.logprobs[found.row.mask].min() < -0.1, "not all is known by heart"
    # The end of a turn is one of its tokens, and no part of its text.
    said = [text for role, text in SAID if role == "assistant"]
    answers = [CALL, "It is" if stop else "It is 46.", "Yes.", "Yes.", CALL]
    assert [turn.text for turn in found.turns[:5]] == answers
    assert "".join(np.array(spelt)[found.row.mask]).startswith(
        f"{said[0]}{END}{said[1]}{'' if stop else END}Yes.{END}Yes."
    )
    assert [(turn.tokens, turn.finish) for turn in found.turns[2:4]] == [(5, "stop"), (4, "length")]
    first, second = found.received[:2]
    assert first.choices[0].finish_reason == "tool_calls" and first.choices[0].message.content is None
    assert (second.choices[0].finish_reason, second.choices[0].message.content) == ("stop", answers[1])
    # With overlap scheduling a further step has begun when the end of a turn is read: its last token is cached, too.
    known = [turn.context + turn.tokens for turn in found.turns[:2]]
    assert [turn.cached for turn in found.turns[1:3]] == known
    assert [turn.cached for turn in expected.turns[1:3]] == [count - 1 for count in known]
    assert second.usage.prompt_tokens_details.cached_tokens == known[0]
