"""Solve problems of reasoning-gym in several turns: a wrong answer is told, and the question comes again.

4 + 3 =       the problem
6             the policy's first try, which reasoning-gym's own verifier finds wrong
4 + 3 =       the problem again
7             right at the second try: half the reward
"""

import ast
import json
from functools import cache

import httpx
import reasoning_gym

from streamppo.tasks.environments import Done

CLIENT = httpx.AsyncClient(trust_env=False, timeout=60)
TRIES = 3


async def run(prompt: str, base_url: str, api_key: str, dataset: str, parameters: str, entry: str) -> Done:
    """Ask until an answer is right, three times at most."""
    messages, best, solved, number = [{"role": "user", "content": prompt}], 0.0, False, 0
    while not solved and number < TRIES and (said := await ask(base_url, api_key, messages)) is not None:
        number += 1
        score = float(verifier(dataset, parameters).score_answer(said.strip(), ast.literal_eval(entry)))
        best, solved = max(best, score / number), score == 1.0
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": prompt}]
    return Done(best, {"solved": float(solved), "first": float(solved and number == 1)})


async def ask(base_url: str, api_key: str, messages: list[dict[str, str]]) -> str | None:
    """Ask once, as any client does; None when the run has spent its requests or tokens."""
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"model": "policy", "messages": messages}
    answer = await CLIENT.post(f"{base_url}/chat/completions", json=body, headers=headers)
    if answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded":
        return None
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


@cache
def verifier(dataset: str, parameters: str):
    """Make the data set that scores a problem."""
    return reasoning_gym.create_dataset(dataset, **json.loads(parameters))
