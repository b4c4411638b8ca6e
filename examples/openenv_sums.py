"""Play an environment of OpenEnv: the policy says each action, the environment answers it and gives the reward.

python examples/openenv_sums.py     the environment's server, at OPENENV_URL: sums, with a second chance
"""

import os
from urllib.parse import urlsplit

import httpx
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

from streamppo.tasks.environments import Done

SERVER = os.environ.get("OPENENV_URL", "http://127.0.0.1:8123")
CLIENT = httpx.AsyncClient(trust_env=False, timeout=60)
TRIES = 2


class Say(Action):
    """An answer."""

    text: str


class Shown(Observation):
    """A question."""

    text: str


class Sums(Environment[Say, Shown, State]):
    """Asks again after a wrong answer."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, question: str = "", answer: str = "", **_: object) -> Shown:
        """Begin with a question."""
        self.question, self.answer, self.tries = question, answer, 0
        return Shown(text=question)

    def step(self, action: Say, timeout_s=None, **_: object) -> Shown:
        """Take an answer: half the reward at the second try."""
        self.tries += 1
        right = action.text == self.answer
        return Shown(text=self.question, done=right or self.tries == TRIES, reward=right / self.tries)

    @property
    def state(self) -> State:
        """Count the steps."""
        return State(step_count=self.tries)


async def run(prompt: str, base_url: str, api_key: str, answer: str) -> Done:
    """Play one episode: an observation's text is a user's message, and the policy's answer the action."""
    messages, reward, steps = list[dict[str, str]](), 0.0, 0
    async with GenericEnvClient(base_url=SERVER) as world:
        result = await world.reset(question=prompt, answer=answer)
        while not result.done:
            messages.append({"role": "user", "content": result.observation["text"]})
            said = await ask(base_url, api_key, messages)
            if said is None:
                break
            messages.append({"role": "assistant", "content": said})
            result, steps = await world.step({"text": said}), steps + 1
            reward += result.reward or 0.0
    return Done(reward, {"first": float(result.done and steps == 1)})


async def ask(base_url: str, api_key: str, messages: list[dict[str, str]]) -> str | None:
    """Ask once, as any client does; None when the run has spent its requests or tokens."""
    headers = {"Authorization": f"Bearer {api_key}"}
    body = {"model": "policy", "messages": messages}
    answer = await CLIENT.post(f"{base_url}/chat/completions", json=body, headers=headers)
    if answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded":
        return None
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


if __name__ == "__main__":
    import uvicorn

    address = urlsplit(SERVER)
    app = create_fastapi_app(Sums, Say, Shown, max_concurrent_envs=256)
    uvicorn.run(app, host=address.hostname, port=address.port, log_level="warning")
