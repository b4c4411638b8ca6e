"""Score completions over HTTP: `python examples/reward_service.py [PORT]`, during a run of reward_service.toml.

    POST /score   {"prompt": "12+34=", "completion": "47", "finish": "stop", "columns": {"answer": "46"}, ...}
    200           {"score": 0.25, "digits": 0.5}

The number under `score` is the reward; the other one is logged as reward_digits.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def score(completion: str, answer: str) -> dict[str, float]:
    """Return a score of 1 for the answer, else half the fraction of right digits in the right position."""
    right = sum(given == wanted for given, wanted in zip(completion, answer, strict=False))
    digits = right / max(len(completion), len(answer))
    return {"score": 1.0 if completion == answer else digits / 2, "digits": digits}


class Scores(BaseHTTPRequestHandler):
    """Answers one connection; HTTP/1.1 keeps it open for the next request."""

    protocol_version = "HTTP/1.1"
    # Headers and body are sent together, without the delay of Nagle's algorithm.
    wbufsize = -1
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """Score the JSON in the request's body."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = json.dumps(score(asked["completion"], asked["columns"]["answer"])).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: object) -> None:
        """Log no line for each request."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8001
    with ThreadingHTTPServer(("127.0.0.1", port), Scores) as server:
        print(f"http://127.0.0.1:{server.server_port}/score", flush=True)
        server.serve_forever()
