"""Agents of published frameworks, none of them told of us, call a tool at the endpoint and get the policy's answer."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import agent_case
import pytest
from agent_case import Case, served

from streamppo.tasks.tokenizer import Tokenizer

CALL = '<tool_call>{"name": "sum_of", "arguments": {"a": 1, "b": 2}}</tool_call>'
ANSWER = "The sum is 3."


def sum_of(a: int, b: int) -> int:
    """Adds.

    Args:
        a: first
        b: second
    """
    return a + b


async def openai_agents(case: Case, *, is_streamed: bool, serves_responses: bool = False) -> str:
    agents, openai = pytest.importorskip("agents"), pytest.importorskip("openai")
    agents.set_tracing_disabled(True)
    kind = agents.OpenAIResponsesModel if serves_responses else agents.OpenAIChatCompletionsModel
    client = case.keep(openai.AsyncOpenAI(base_url=case.base_url, api_key=case.key))
    model = kind(model="policy", openai_client=client)
    agent = agents.Agent(name="adder", instructions="Add.", tools=[agents.function_tool(sum_of)], model=model)
    if not is_streamed:
        return (await agents.Runner.run(agent, "1+2")).final_output
    run = agents.Runner.run_streamed(agent, "1+2")
    async for _ in run.stream_events():
        pass
    return run.final_output


async def langchain(case: Case, *, is_streamed: bool) -> str:
    agents, models = pytest.importorskip("langchain.agents"), pytest.importorskip("langchain_openai")
    model = models.ChatOpenAI(model="policy", base_url=case.base_url, api_key=case.key, streaming=is_streamed)
    agent = agents.create_agent(model, [sum_of])
    state = await agent.ainvoke({"messages": [("user", "1+2")]})
    return state["messages"][-1].content


async def pydantic_ai(case: Case, *, is_streamed: bool) -> str:
    ai = pytest.importorskip("pydantic_ai")
    models, providers = pytest.importorskip("pydantic_ai.models.openai"), pytest.importorskip("pydantic_ai.providers")
    provider = providers.infer_provider_class("openai")(base_url=case.base_url, api_key=case.key)
    agent = ai.Agent(models.OpenAIChatModel("policy", provider=provider), tools=[sum_of])
    if not is_streamed:
        return (await agent.run("1+2")).output
    texts = list[str]()
    async with agent.run_stream_events("1+2") as events:
        async for event in events:
            texts += [event.result.output] if isinstance(event, ai.AgentRunResultEvent) else []
    return texts[-1]


async def agno(case: Case, *, is_streamed: bool) -> str:
    agents, models = pytest.importorskip("agno.agent"), pytest.importorskip("agno.models.openai.like")
    model = models.OpenAILike(id="policy", base_url=case.base_url, api_key=case.key)
    agent = agents.Agent(model=model, tools=[sum_of], telemetry=False)
    if not is_streamed:
        return (await agent.arun("1+2")).content
    return "".join([str(getattr(event, "content", "") or "") async for event in agent.arun("1+2", stream=True)])


async def dspy(case: Case, *, is_streamed: bool) -> str:
    library = pytest.importorskip("dspy")
    model = library.LM("openai/policy", api_base=case.base_url, api_key=case.key, cache=False)

    def predict() -> str:
        with library.context(lm=model):
            return library.Predict("question -> answer")(question="1+2").answer

    return await asyncio.to_thread(predict)


async def smolagents(case: Case, *, is_streamed: bool) -> str:
    library = pytest.importorskip("smolagents")
    model = library.OpenAIServerModel("policy", api_base=case.base_url, api_key=case.key)
    agent = library.ToolCallingAgent([library.tool(sum_of)], model, max_steps=3, verbosity_level=0)
    return await asyncio.to_thread(agent.run, "1+2")


def responses(case: Case, *, is_streamed: bool) -> Awaitable[str]:
    return openai_agents(case, is_streamed=is_streamed, serves_responses=True)


def says(text: str) -> str:
    """The policy: it calls the tool, and then answers; in the form that DSPy or smolagents asks for."""
    if "[[ ## answer ## ]]" in text:
        return f"[[ ## answer ## ]]\n{ANSWER}\n\n[[ ## completed ## ]]"
    if text.count("[assistant]") == 1:
        return CALL
    if "final_answer" in text:
        return f'<tool_call>{{"name": "final_answer", "arguments": {{"answer": "{ANSWER}"}}}}</tool_call>'
    return ANSWER


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("agent", [openai_agents, responses, langchain, pydantic_ai, agno, dspy, smolagents])
@pytest.mark.filterwarnings("default")
def test_an_agent_of_a_framework_calls_a_tool_and_its_run_is_one_row(
    agent: Callable[..., Awaitable[str]], is_streamed: bool, tmp_path: Path
) -> None:
    if is_streamed and agent in (dspy, smolagents):
        pytest.skip("it has no other way")
    tokenizer: Tokenizer = agent_case.tokenizer(tmp_path)
    # smolagents forces a call, which the endpoint refuses unless it is told to ignore that.
    limits: dict[str, Any] = {"ignored": ("tool_choice",)} if agent is smolagents else {}

    async def main() -> None:
        async with served(tokenizer, says, **limits) as case:
            assert ANSWER in await asyncio.wait_for(agent(case, is_streamed=is_streamed), 60)
            assert case.row().rstrip("<eos>").endswith(ANSWER) or agent in (dspy, smolagents)
            assert case.counts["requests"] == (1 if agent is dspy else 2)
            # smolagents writes its calls anew, as texts: its second request does not continue the first.
            assert len(case.session.row.columns([]).branches) == (agent is smolagents)

    asyncio.run(main())
