"""An agent that talks for a number of turns, and tells how long each of its requests took: for cost/agents.py."""

import json
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

from streamppo.tasks.environments import Done

QUESTION = "1+2=3+4="
"""What it says in each turn."""


def run(prompt: str, base_url: str, api_key: str, turns: int) -> Done:
    """Ask `turns` times, each behind all that was said before; the explanation has the numbers of the requests."""
    address = urlsplit(base_url)
    connection = HTTPConnection(address.hostname or "", address.port)
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    messages, taken, tokens = [{"role": "user", "content": prompt}], list[float](), 0
    for _ in range(turns):
        begin = time.perf_counter()
        body = json.dumps({"model": "policy", "messages": messages})
        connection.request("POST", f"{address.path}/chat/completions", body, headers)
        answer = connection.getresponse()
        found = json.loads(answer.read())
        taken.append(time.perf_counter() - begin)
        if answer.status != 200:
            raise RuntimeError(f"{answer.status}: {found}")
        tokens += found["usage"]["completion_tokens"]
        said = found["choices"][0]["message"]["content"] or ""
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": QUESTION}]
    connection.close()
    # Milliseconds in three places: an explanation is short.
    return Done(1.0, {"tokens": float(tokens)}, " ".join(f"{1e3 * one:.3g}" for one in taken))
