"""Play addition as an agent that is independent of the trainer: it calls a chat endpoint, and has two tools.

12+34=       the user's message
=            a call of the first tool, which computes the question: it returns 46=
10+2=        a call of the second tool, which computes this sum: it returns 12=
46           no call: the final answer
"""

import httpx

from streamppo.tasks.environments import Done

CLIENT = httpx.AsyncClient(trust_env=False, timeout=60)


async def run(prompt: str, base_url: str, api_key: str, answer: str) -> Done:
    """Call the policy until it calls no tool; return 1 for the right answer, else 0."""
    messages, calls = [{"role": "user", "content": prompt}], 0
    while True:
        said = await ask(base_url, api_key, messages)
        if said is None:
            return Done(0.0, {"tool": 1.0, "right": 0.0})
        if not said.endswith("="):
            right = float(said == answer)
            return Done(right, {"tool": float(calls > 0), "right": right})
        calls += 1
        shown = total(said[:-1] or prompt.removesuffix("="))
        messages += [{"role": "assistant", "content": said}, {"role": "tool", "content": f"{shown}="}]


async def ask(base_url: str, api_key: str, messages: list[dict[str, str]]) -> str | None:
    """Return the policy's next message; None if the run has used up its requests or tokens."""
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"model": "policy", "messages": messages}
    answer = await CLIENT.post(f"{base_url}/chat/completions", json=body, headers=headers)
    if answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded":
        return None
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def total(expression: str) -> str:
    """Compute a sum of whole numbers; "+" if the expression is not one."""
    numbers = expression.split("+")
    return str(sum(map(int, numbers))) if all(number.isdigit() for number in numbers) else "+"
