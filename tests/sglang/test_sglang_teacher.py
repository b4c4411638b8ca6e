"""The real SGLang as a teacher: log-probs of given tokens, always at temperature 1, and its tokenizer."""

import asyncio
import os
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgspec
import numpy as np
import pytest
import sglang_case as case
from test_sglang_server import KEY, SERVER, kill

from streamppo.config.teacher import Teacher as Config
from streamppo.errors import ModelError, TeacherFailed
from streamppo.rollout import teacher
from streamppo.rollout.episode import Episode
from streamppo.tasks.tokenizer import Tokenizer, character_tokenizer
from streamppo.types import floats

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
START_S = 240.0
ALPHABET = string.ascii_letters + string.digits[:9]
"""With three special tokens, as many as the model has."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    case.save(case.model(), tmp_path)
    character_tokenizer(ALPHABET).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def url(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server that has begun to answer."""
    monkeypatch.setenv("TEACHERS_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1] % 20000 + 20000
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", f"--model-path={folder}", f"--port={port}"]
    chosen = [one for one in SERVER if one != "--skip-tokenizer-init"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    server = subprocess.Popen([*command, *chosen], env=environment, start_new_session=True)
    try:
        _wait_for(f"http://127.0.0.1:{port}", server)
        yield f"http://127.0.0.1:{port}"
    finally:
        kill(server)


def _wait_for(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).is_success:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    pytest.fail(f"no server after {START_S:g} s; it ended with {server.poll()}")


def episode(prompt: np.ndarray, tokens: np.ndarray) -> Episode:
    count = len(tokens)
    columns = np.zeros(count, np.float32), np.zeros(count, np.int32), np.ones(count, np.bool_)
    return Episode(prompt, tokens, *columns, "stop", (count - 1,))


def test_given_tokens_have_the_log_probs_of_transformers_and_another_tokenizer_is_found(
    folder: Path, url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    model, given = case.model(), case.prompts(12, seed=21)
    tokens = [np.append(one[::-1], np.int32(63)).astype(np.int32) for one in case.prompts(12, seed=22)]
    swapped = tmp_path_factory.mktemp("swapped")
    character_tokenizer(ALPHABET[1] + ALPHABET[0] + ALPHABET[2:]).save_pretrained(swapped)

    async def use() -> None:
        config = Config(url=url, key_env="TEACHERS_KEY")
        made = await teacher.connect(config, Tokenizer(folder))
        assert made is not None
        pairs = list(zip(given, tokens, strict=True))
        columns = await asyncio.gather(*(made.score(episode(*pair)) for pair in pairs))
        for (prompt, completion), column in zip(pairs, columns, strict=True):
            expected = case.logprobs(model, prompt, completion)
            np.testing.assert_allclose(floats(column), expected, atol=case.CLOSE)
        assert made.report().failed == 0

        body = {"input_ids": [*map(int, (*given[0], *tokens[0]))], "return_logprob": True}
        body |= {"logprob_start_len": len(given[0]) - 1, "sampling_params": {"max_new_tokens": 0, "temperature": 0.5}}
        content = await made._client.post(f"{url}/generate", body)
        np.testing.assert_allclose(teacher.read(content, tokens[0]), floats(columns[0]), atol=case.CLOSE)
        assert msgspec.json.decode(content)["meta_info"]["completion_tokens"] == 0

        too_long = np.full(600, 5, np.int32)
        with pytest.raises(TeacherFailed, match="status 400"):
            await made.score(episode(given[0], too_long))
        await made.close()
        with pytest.raises(ModelError, match=r"token 3, 'b', is 'a' there \(2 of 64 compared tokens differ\)"):
            await teacher.connect(config, Tokenizer(swapped))
        with pytest.raises(ModelError, match="status 401"):
            await teacher.connect(Config(url=url), Tokenizer(folder))

    asyncio.run(use())
