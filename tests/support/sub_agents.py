"""Two sub-agents compute a sum each, concurrently; the agent gets both results, and answers itself."""

import asyncio

from openai import AsyncOpenAI

from streamppo.tasks.environments import Done

CLIENTS: list[AsyncOpenAI] = []


async def run(prompt: str, base_url: str, api_key: str, answer: str) -> Done:
    if not CLIENTS:
        CLIENTS.append(AsyncOpenAI(base_url=base_url, api_key="replaced", max_retries=0))
    client = CLIENTS[0].with_options(api_key=api_key)

    async def ask(*texts: str) -> str:
        roles = ("user", "assistant")
        messages = [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]
        made = await client.chat.completions.create(model="policy", messages=messages)  # pyright: ignore
        return made.choices[0].message.content or ""

    first, second = await asyncio.gather(ask(prompt), ask(f"1+{prompt}"))
    last = await ask(prompt, first, f"{second}=")
    return Done(float(answer in (first, last)), {"right": float(first == answer)})
