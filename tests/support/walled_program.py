"""A program of an agent that asks its endpoint once, then tries the actions of its words; a component has the result.

python walled_program.py "file: /etc/passwd" "port: 80"
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request


def ask() -> str:
    headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}", "Content-Type": "application/json"}
    messages = [{"role": "user", "content": os.environ["STREAMPPO_PROMPT"]}]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    asked = urllib.request.Request(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", body, headers)
    with urllib.request.urlopen(asked) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]


def connects(place: str | tuple[str, int]) -> bool:
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    with socket.socket(family) as one:
        one.settimeout(1.0)
        if isinstance(place, str) and place.startswith("@"):
            place = place.replace("@", "\0", 1)
        return one.connect_ex(place) == 0


def writes(path: str) -> bool:
    try:
        with open(path, "w") as file:
            file.write("x")
    except OSError:
        return False
    return True


def reached(what: str, value: str) -> bool:  # noqa: PLR0912
    match what:
        case "endpoint":
            return ask() == "hi"
        case "port":
            return connects(("127.0.0.1", int(value)))
        case "address":
            return connects((value, 53))
        case "socket":
            return connects(value)
        case "file":
            return os.path.exists(value)
        case "write":
            return writes(value)
        case "variable":
            return value in os.environ
        case "root":
            return os.getuid() == 0
        case "process":
            return os.path.exists(f"/proc/{value}/cmdline")
        case "memory":
            held = bytearray(int(value))
            held[:: 2**12] = b"x" * len(held[:: 2**12])
            time.sleep(1)
            return True
        case "processes":
            started = [subprocess.Popen(["sleep", "60"]) for _ in range(int(value))]
            return len(started) == int(value)
        case "time":
            time.sleep(600)
        case "print":
            for _ in range(200):
                print("x" * 2**20)
        case "raise":
            raise ValueError("what went wrong")
    return True


if __name__ == "__main__":
    said = ask()
    found = {word: float(reached(*word.split(": ", 1))) for word in sys.argv[1:]}
    print(json.dumps({"reward": sum(found.values()), "components": {"said": float(said == "hi"), **found}}))
