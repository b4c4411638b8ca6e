"""Answer sums as a program that runs in a sandbox: it sees its endpoint, this file and Python, and nothing else.

It needs no package. What it prints is kept for failures; scorers in [reward] give the reward, for a program that runs
what a policy wrote could print its own.
"""

import json
import os
import urllib.request


def ask(text: str) -> str:
    """Ask the endpoint that the environment's variables name."""
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": text}]}).encode()
    asked = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


if __name__ == "__main__":
    with open("/tmp/answer", "w") as scratch:
        scratch.write(ask(os.environ["STREAMPPO_PROMPT"]))
