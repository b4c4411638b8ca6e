"""Good and faulty agents, loaded by name like a user's agent."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import httpx

from streamppo.tasks.environments import Done
from streamppo.types import Reward


async def ask(base_url: str, api_key: str, *messages: Any, read_s: float = 60, **more: Any) -> Any:
    async with httpx.AsyncClient(trust_env=False, timeout=httpx.Timeout(60, read=read_s)) as client:
        body = {"model": "any", "messages": list(messages), **more}
        answer = await client.post(
            f"{base_url}/chat/completions", json=body, headers={"Authorization": f"Bearer {api_key}"}
        )
        return answer.json()


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


async def one_turn(prompt: str, base_url: str, api_key: str, answer: str = "") -> float:
    made = await ask(base_url, api_key, user(prompt))
    return float(made["choices"][0]["message"]["content"] == answer)


class OfAReaL:
    """AReaL's docs/tutorial/agentic_rl, with its row and its endpoint."""

    def __init__(self, **kwargs: Any) -> None:
        self.kwargs = kwargs

    async def run(self, data: dict[str, Any], **extra_kwargs: Any) -> float:
        assert extra_kwargs.get("http_client") is None and "data" not in extra_kwargs
        said = await ask(extra_kwargs["base_url"], extra_kwargs["api_key"], *data["messages"])
        return float(said["choices"][0]["message"]["content"] == data["answer"])


class OfNobody:
    """A workflow that is no agent."""

    async def arun_episode(self, engine: Any, data: Any) -> None: ...


async def two_turns(prompt: Any, base_url: str, api_key: str) -> Done:
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    first = await ask(base_url, api_key, user(text))
    said = first["choices"][0]["message"]
    await ask(base_url, api_key, user(text), said, user("more"))
    return Done(2.0, {"polite": 1.0}, "well done")


async def parallel(prompt: str, base_url: str, api_key: str) -> Reward:
    await asyncio.gather(*(ask(base_url, api_key, user(prompt)) for _ in range(3)))
    return Reward(score=0.5, turns=(1.0, 2.0, 4.0))


async def posts(prompt: str, base_url: str, api_key: str) -> None:
    made = await ask(base_url, api_key, user(prompt))
    headers = {"Authorization": f"Bearer {api_key}"}
    async with httpx.AsyncClient(trust_env=False) as client:
        for body in ({"reward": 0.25, "response_id": made["id"]}, {"reward": 1.0}):
            assert (await client.post(f"{base_url}/reward", json=body, headers=headers)).status_code == 200
        for body in ({"reward": "much"}, {"reward": 1.0, "response_id": "another"}):
            assert (await client.post(f"{base_url}/reward", json=body, headers=headers)).status_code == 400


async def until_refused(prompt: str, base_url: str, api_key: str) -> float:
    for turn in range(50):
        if "error" in await ask(base_url, api_key, user(f"{prompt}{turn}")):
            return float(turn)
    return -1.0


async def raises_when_refused(prompt: str, base_url: str, api_key: str) -> float:
    raise ValueError(f"refused at {await until_refused(prompt, base_url, api_key)}")


async def never_calls(prompt: str, base_url: str, api_key: str) -> float:
    print("no proxy is set")
    return 1.0


async def gives_nothing(prompt: str, base_url: str, api_key: str) -> None:
    await ask(base_url, api_key, user(prompt))


async def gives_a_text(prompt: str, base_url: str, api_key: str) -> str:
    await ask(base_url, api_key, user(prompt))
    return "good"


async def gives_nan(prompt: str, base_url: str, api_key: str) -> float:
    await ask(base_url, api_key, user(prompt))
    return float("nan")


async def raises(prompt: str, base_url: str, api_key: str) -> float:
    await ask(base_url, api_key, user(prompt))
    print("about to fail")
    raise ValueError("no such tool")


async def tells_its_key(prompt: str, base_url: str, api_key: str) -> float:
    print(f"asking {base_url.removesuffix('/v1')}/key/{api_key}/v1")
    raise ValueError(f"401 for {api_key}")


async def explains_its_key(prompt: str, base_url: str, api_key: str) -> Done:
    await ask(base_url, api_key, user(prompt))
    return Done(1.0, explanation=f"asked with {api_key}")


async def hangs(prompt: str, base_url: str, api_key: str) -> float:
    print("waiting for the browser")
    await asyncio.sleep(600)
    return 1.0


async def swallows(prompt: str, base_url: str, api_key: str) -> float:
    with suppress(BaseException):
        await asyncio.sleep(600)
    return 0.0


def is_slow(prompt: str, base_url: str, api_key: str) -> float:
    time.sleep(0.7)
    return 1.0


async def cancels(prompt: str, base_url: str, api_key: str) -> float:
    client = asyncio.get_running_loop().create_future()
    client.cancel()
    await client
    return 1.0


def hangs_without_awaiting(prompt: str, base_url: str, api_key: str) -> float:
    while True:
        time.sleep(600)


async def hangs_up(prompt: str, base_url: str, api_key: str) -> float:
    try:
        await ask(base_url, api_key, user(prompt), read_s=0.3)
    except httpx.ReadTimeout:
        await asyncio.sleep(0.5)
    return 1.0


async def hangs_up_once(prompt: str, base_url: str, api_key: str) -> float:
    """Give up the first request after a timeout, then make another request."""
    try:
        await ask(base_url, api_key, user(prompt), read_s=0.3)
    except httpx.ReadTimeout:
        await asyncio.sleep(0.8)
    await ask(base_url, api_key, user("another"))
    return 1.0


async def dies(prompt: str, base_url: str, api_key: str) -> float:
    os._exit(3)


async def wants_a_column(prompt: str, base_url: str, api_key: str, colour: str) -> float:
    return 1.0


async def prints_much(prompt: str, base_url: str, api_key: str) -> float:
    await ask(base_url, api_key, user(prompt))
    for _ in range(200):
        print("x" * 2**20)
    return 1.0


async def forks(prompt: str, base_url: str, api_key: str) -> float:
    """Leave two programs running: one in its process group, one in a new session."""
    for away in (False, True):
        subprocess.Popen(["sleep", "611"], start_new_session=away)
    await ask(base_url, api_key, user(prompt))
    return 1.0


AWAY = """
import os, sys, time
while os.path.exists(sys.argv[1]):
    if os.fork():
        os._exit(0)
    with open(sys.argv[1] + ".lives", "w") as file:
        file.write(str(time.time()))
    time.sleep(0.002)
"""


async def forks_away(prompt: str, base_url: str, api_key: str, answer: str) -> float:
    """Leave a process that forks and exits every 2 ms while the file `answer` exists."""
    subprocess.Popen([sys.executable, "-S", "-c", AWAY, answer])
    while not os.path.exists(answer + ".lives"):
        await asyncio.sleep(0.01)
    await ask(base_url, api_key, user(prompt))
    return 1.0


async def leaves_a_task(prompt: str, base_url: str, api_key: str) -> float:
    asyncio.create_task(asyncio.sleep(600))  # noqa: RUF006
    await ask(base_url, api_key, user(prompt))
    return 1.0


def asks_from_the_environment() -> None:
    names = "OPENAI_BASE_URL", "OPENAI_API_KEY"
    asyncio.run(ask(*(os.environ[name] for name in names), user("from the run before")))


async def leaves_a_thread(prompt: str, base_url: str, api_key: str) -> float:
    """Leave a thread that asks later, with the key that the environment has by then."""
    await ask(base_url, api_key, user(prompt))
    if prompt == "first":
        threading.Timer(0.5, asks_from_the_environment).start()
    else:
        await asyncio.sleep(1.5)
    return float(os.getpid())


async def leaves_a_stubborn_task(prompt: str, base_url: str, api_key: str) -> float:
    """Leave a task that continues when it is cancelled."""

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                await asyncio.sleep(2.0)
                asks_from_the_environment()

    if prompt == "first":
        asyncio.create_task(stubborn())  # noqa: RUF006
    await ask(base_url, api_key, user(prompt))
    await asyncio.sleep(0.0 if prompt == "first" else 2.0)
    return float(os.getpid())


async def works_in_a_thread(prompt: str, base_url: str, api_key: str) -> float:
    """Use a thread of asyncio's, which waits for work when the run has ended."""
    await asyncio.to_thread(time.sleep, 0.01)
    await ask(base_url, api_key, user(prompt))
    return float(os.getpid())


async def imports_in_a_run(prompt: str, base_url: str, api_key: str) -> float:
    import sympy

    await ask(base_url, api_key, user(prompt))
    return float(sympy.Integer(1))


async def reads_the_environment(prompt: str) -> float:
    names = "OPENAI_BASE_URL", "OPENAI_API_KEY"
    await ask(*(os.environ[name] for name in names), user(os.environ["STREAMPPO_PROMPT"]))
    assert os.environ["ANTHROPIC_BASE_URL"] + "/v1" == os.environ["OPENAI_BASE_URL"]
    return 1.0


def program(last: str) -> None:
    """An agent as a program: make one request, then do as `last` says and print the result."""
    names = "OPENAI_BASE_URL", "OPENAI_API_KEY"
    asyncio.run(ask(*(os.environ[name] for name in names), user(os.environ["STREAMPPO_PROMPT"])))
    if last == "much":
        for _ in range(200):
            print("x" * 2**20)
        last = '{"reward": 1.0}'
    if last == "fork":
        subprocess.Popen(["sleep", "612"], start_new_session=True)
        last = '{"reward": 1.0}'
    if last == "hang":
        print("waiting", flush=True)
        time.sleep(600)
    if last == "chatty":
        print("x" * 100 + "\n", end="", file=sys.stderr)
        last = "no reward"
    if last == "fail":
        print("what went wrong", file=sys.stderr)
        sys.exit(3)
    print(last)


if __name__ == "__main__":
    program(sys.argv[1])
