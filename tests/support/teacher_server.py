"""A teacher server in a thread: the parts of SGLang's /generate and /detokenize that a run uses.

It computes log-probs with a Hugging Face model at temperature 1; tests can add faults and delays.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

Edit = Callable[[dict[str, Any]], tuple[int, Any]]
"""(the right answer of /generate) -> (status, the answer to send)."""


@dataclass
class Server:
    """`edit` changes answers, `latency_s` delays them; `asked` are the bodies of all calls of /generate."""

    url: str = ""
    edit: Edit = lambda answer: (200, answer)
    latency_s: float = 0.0
    knows_texts: bool = True
    shift: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)


class Listening(ThreadingHTTPServer):
    """Ignores broken connections of clients that die with their actor."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def teaching(folder: Path) -> Iterator[Server]:
    """Serve the model in `folder`, and its tokenizer, if there is one."""
    torch.manual_seed(0)
    lm = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    has_tokenizer = (folder / "tokenizer_config.json").exists()
    tokenizer: Any = AutoTokenizer.from_pretrained(folder) if has_tokenizer else None
    server = Server(knows_texts=has_tokenizer)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path == "/generate":
                server.asked.append(body)
                time.sleep(server.latency_s)
                status, answer = server.edit(scored(lm, body))
            elif self.path == "/detokenize" and server.knows_texts:
                rows = [[token + server.shift for token in row] for row in body["tokens"]]
                status, answer = 200, {"text": [tokenizer.decode(row) for row in rows]}
            else:
                status, answer = 404, {"detail": "Not Found"}
            content = json.dumps(answer).encode()
            # A client may have timed out.
            with suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None: ...

    with Listening(("127.0.0.1", 0), Handler) as listening:
        Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
        server.url = f"http://127.0.0.1:{listening.server_address[1]}"
        try:
            yield server
        finally:
            listening.shutdown()


@torch.no_grad()
def scored(lm: Any, body: dict[str, Any]) -> dict[str, Any]:
    """SGLang's answer: the first token has no log-prob, and the id of the vocabulary's last token is given as 0."""
    assert body["return_logprob"] and body["sampling_params"] == {"max_new_tokens": 0}
    ids, start = body["input_ids"], body["logprob_start_len"]
    logp_LV = lm(torch.tensor([ids])).logits[0].log_softmax(-1)
    numbers = [None, *(logp_LV[at - 1, ids[at]].item() for at in range(start + 1, len(ids)))]
    named = [token if token < logp_LV.shape[1] - 1 else 0 for token in ids[start:]]
    entries = [[number, token, None] for number, token in zip(numbers, named, strict=True)]
    return {"text": "", "meta_info": {"input_token_logprobs": entries, "finish_reason": {"type": "length"}}}
