"""The agent of examples/calculator_agent.py, as a witness: it writes down the tokens of every answer that it received.

Each run has a name, which is its explanation too, and a line in the file `STREAMPPO_WITNESS`: the name, and the tokens
of the answers that it received. Some runs ask twice at once, some hang up on a request, some leave a process behind.
The name of a run that hangs up begins with "gone-": whether its last answer had arrived, only the endpoint knows.
"""

import asyncio
import contextlib
import os
import random
import subprocess
from secrets import token_hex
from typing import Any

import httpx

from examples.calculator_agent import total
from streamppo.tasks.environments import Done

WITNESS = "STREAMPPO_WITNESS"
TWICE, GONE, LEAVES = 0.25, 0.1, 0.02
"""Shares of runs that ask the first question twice, that hang up, and that leave a process behind."""
IMPATIENT_S = 0.02
CLIENT = httpx.AsyncClient(trust_env=False, timeout=60)


async def run(prompt: str, base_url: str, api_key: str, answer: str) -> Done:
    """Play a run as the example does, and write down what it received."""
    chance = random.Random(token_hex(8))
    name, received = f"{'gone-' if chance.random() < GONE else 'run-'}{token_hex(8)}", list[int]()

    async def ask(messages: list[dict[str, str]], timeout_s: float | None = None) -> str | None:
        body = {"model": "policy", "messages": messages}
        answered = await CLIENT.post(
            f"{base_url}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {api_key}"},
            timeout=timeout_s or CLIENT.timeout,
        )
        if answered.status_code == 400 and answered.json()["error"]["code"] == "context_length_exceeded":
            return None
        found: Any = answered.raise_for_status().json()
        received.append(found["usage"]["completion_tokens"])
        return found["choices"][0]["message"]["content"]

    if chance.random() < LEAVES:
        subprocess.Popen(["sleep", "611"], start_new_session=True)
    messages, said = [{"role": "user", "content": prompt}], ""
    if name.startswith("gone-"):
        with contextlib.suppress(httpx.TimeoutException):
            await ask([{"role": "user", "content": f"1+{prompt}"}], IMPATIENT_S)
    if chance.random() < TWICE:
        await asyncio.gather(ask(messages), ask(messages))
    for _ in range(3):
        said = await ask(messages)
        if said is None or not said.endswith("="):
            break
        shown = total(said[:-1] or prompt.removesuffix("="))
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": f"{shown}="}]
    right = float(said == answer)
    with open(os.environ[WITNESS], "a") as file:
        # One write, so that lines of several processes stay whole.
        file.write(f"{name} {sum(received)}\n")
    return Done(right, {"right": right}, name)
