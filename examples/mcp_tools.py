"""Answer with the tools of an MCP server: the agent starts it, shows its tools to the policy, and calls them.

python examples/mcp_tools.py     the server, over standard input and output: any other server takes its place in SERVER
"""

import json
import sys

from mcp import Client, MCPError, StdioServerParameters
from mcp.server import MCPServer
from openai import AsyncOpenAI, BadRequestError

from streamppo.tasks.environments import Done

SERVER = StdioServerParameters(command=sys.executable, args=[__file__])
server = MCPServer("sums")


@server.tool()
def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


async def run(prompt: str, base_url: str, api_key: str, answer: str) -> Done:
    """Ask until the policy calls no tool any more; its answer is right if it ends with the row's."""
    messages, calls = [{"role": "user", "content": prompt}], 0
    async with Client(SERVER) as tools, AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as policy:
        listed = [as_function(one) for one in (await tools.list_tools()).tools]
        while True:
            try:
                made = await policy.chat.completions.create(model="policy", messages=messages, tools=listed)
            except BadRequestError as error:
                if error.code != "context_length_exceeded":
                    raise
                return Done(0.0, {"calls": float(calls)})
            said = made.choices[0].message
            if not said.tool_calls:
                return Done(float((said.content or "").strip().endswith(answer)), {"calls": float(calls)})
            messages.append(said.model_dump(exclude_none=True))
            for call in said.tool_calls:
                calls += 1
                found = await result(tools, call.function.name, call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": found})


def as_function(tool) -> dict:
    """Write a tool as OpenAI's requests have it."""
    shown = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": shown}


async def result(tools: Client, name: str, arguments: str) -> str:
    """Call a tool; a call that is none is answered with its fault, so that the policy can learn from it."""
    try:
        made = await tools.call_tool(name, json.loads(arguments))
    except (MCPError, ValueError) as error:
        return f"error: {error}"
    return "".join(one.text for one in made.content if one.type == "text")


if __name__ == "__main__":
    server.run()
