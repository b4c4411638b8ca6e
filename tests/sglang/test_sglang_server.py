"""SGLang servers by URL, the other transports, and caches at a swap."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import sglang_case as case
import torch

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.engine import Completion, Sampling
from streamppo.rollout.sglang import server, verify_weights

pytest_plugins = ["sglang_case"]
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]
KEY = "a key"
PROMPT = np.arange(3, 60, dtype=np.int32)
SERVER = (
    *("--device=cpu", "--host=127.0.0.1", "--attention-backend=torch_native", "--sampling-backend=pytorch"),
    *("--grammar-backend=none", "--dtype=float32", "--disable-cuda-graph", "--max-total-tokens=8192"),
    *("--max-running-requests=8", "--mem-fraction-static=0.1", "--sleep-on-idle", "--skip-server-warmup"),
    *("--skip-tokenizer-init", "--log-level=error", "--disable-overlap-schedule", f"--api-key={KEY}"),
)


def start_server(folder: str, port: int, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-W", "ignore", "-m", "sglang.launch_server", f"--model-path={folder}", f"--port={port}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen([*command, *SERVER, *more], env=environment, start_new_session=True)


def kill(started: subprocess.Popen[bytes]) -> None:
    os.killpg(started.pid, signal.SIGKILL)
    started.wait()


@pytest.fixture
def url(setting: case.Setting, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A server with the model of the shared engine."""
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    with socket.create_server(("127.0.0.1", 0)) as free:
        # SGLang takes another port 10000 above.
        port = free.getsockname()[1] % 20000 + 20000
    started = start_server(setting.folder, port)
    yield f"http://127.0.0.1:{port}"
    kill(started)


async def opened(setting: case.Setting, *overrides: str) -> Any:
    return await case.engine(setting.folder, case.tensors(setting.model), *overrides)


async def exact_swap(engine: Any, before: Any, after: Any, *, kept: bool) -> int:
    """Swap in flight; compare every log-prob with transformers. How many completions had the swap inside them."""
    given, crossed = case.prompts(4, seed=12), 0
    for prompt, done in zip(given, await case.swapped(engine, given, 400, 1, case.tensors(after)), strict=True):
        at = int((done.versions == 0).sum())
        assert done.versions.tolist() == [0] * at + [1] * (len(done.tokens) - at)
        old = case.logprobs(before, prompt, done.tokens)
        if kept and 0 < at < len(done.tokens) and abs(done.logprobs[at - 1] - old[at - 1]) > case.CLOSE:
            # The first token of the new weights may count as the last of the old ones, which is never too young.
            at -= 1
        np.testing.assert_allclose(done.logprobs[:at], old[:at], atol=case.CLOSE)
        if 0 < at < len(done.tokens):
            crossed += 1
            mixed = case.continued(before, after, prompt, done.tokens, at)
            new = mixed if kept else case.logprobs(after, prompt, done.tokens)[at:]
            np.testing.assert_allclose(done.logprobs[at:], new, atol=case.CLOSE)
    return crossed


async def waiting(engine: Any, prompt: np.ndarray) -> "asyncio.Task[Completion]":
    """Pause SGLang and send it a prompt, which it begins after the next swap."""
    await engine._session.link.call("pause_generation", mode="in_place")
    task = asyncio.create_task(engine.generate(prompt, Sampling(20)))
    await asyncio.sleep(case.BEGUN_S)
    return task


def test_a_server_is_used_and_updated_by_its_url_and_its_death_is_survived(setting: case.Setting, url: str) -> None:
    after = case.model(seed=13)

    async def refuse_a_push(engine: Any) -> None:
        """A server keeps what it computed with refused weights, for a prompt that is then sampled again."""

        async def refuse(tensors: Any) -> None:
            await asyncio.sleep(case.BEGUN_S)
            raise WeightsError("refused")

        task = await waiting(engine, PROMPT)
        engine._session.attestation.check = refuse
        with pytest.raises(WeightsError, match="refused"):
            await engine.update_weights(2, case.tensors(setting.model))
        done = await task
        assert (engine.version, engine.usage().restarts, done.cached) == (1, 1, 0)
        np.testing.assert_allclose(done.logprobs, case.logprobs(after, PROMPT, done.tokens), atol=case.CLOSE)

    async def use() -> None:
        engine = await opened(setting, f"rollout.engine.urls=['{url}']")
        try:
            assert engine._session.link.capacity == 8
            assert await exact_swap(engine, setting.model, after, kept=True) > 0
            prompt = case.prompts(1)[0]
            under_way = asyncio.ensure_future(engine.generate(prompt, Sampling(450)))
            await asyncio.sleep(case.BEGUN_S)
            under_way.cancel()
            done = await engine.generate(prompt, Sampling(20))
            np.testing.assert_allclose(done.logprobs, case.logprobs(after, prompt, done.tokens), atol=case.CLOSE)
            assert engine.usage().restarts == 0
            await refuse_a_push(engine)
        finally:
            await engine.stop()

    setting.run(use())


def test_a_load_that_takes_long_is_no_death_of_the_server(
    setting: case.Setting, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused server samples nothing, and so answers no check that asks for a token."""
    after, long_s = case.model(seed=18), 1.5
    monkeypatch.setattr(server, "SILENT_S", long_s)

    async def use() -> None:
        engine = await opened(setting, f"rollout.engine.urls=['{url}']")
        try:
            carrier, prompt = engine._session.carrier, case.prompts(1)[0]
            carry = carrier.carry

            async def carry_slowly(version: int, *, flush: bool) -> None:
                await asyncio.sleep(3 * long_s)
                await carry(version, flush=flush)

            monkeypatch.setattr(carrier, "carry", carry_slowly)
            under_way = asyncio.ensure_future(engine.generate(prompt, Sampling(450)))
            await asyncio.sleep(case.BEGUN_S)
            await engine.update_weights(1, case.tensors(after))
            await under_way
            assert (engine.version, engine.usage().restarts) == (1, 0)
        finally:
            await engine.stop()

    setting.run(use())


def test_tokens_of_weights_that_another_program_pushed_are_refused(setting: case.Setting, url: str) -> None:
    """Another run would push its own version 0, and another program any name."""

    async def use() -> None:
        engine = await opened(setting, f"rollout.engine.urls=['{url}']")
        try:
            prompt = case.prompts(1)[0]
            assert set((await engine.generate(prompt, Sampling(5))).versions) == {0}
            link = engine._session.link
            for name in ("0", "0-ffffffff", "default"):
                await link.call("update_weight_version", new_version=name, abort_all_requests=False)
                with pytest.raises(ModelError, match=f"sampled with weights '{name}', which this actor never pushed"):
                    await engine.generate(prompt, Sampling(5))
            await engine.update_weights(1, case.tensors(setting.model))
            assert set((await engine.generate(prompt, Sampling(5))).versions) <= {0, 1}
        finally:
            await engine.stop()

    setting.run(use())


def test_a_server_that_would_truncate_rows_is_refused(setting: case.Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    port = 22987
    started = start_server(setting.folder, port, "--context-length=128")
    try:
        with pytest.raises(ModelError, match=r"rows of at most 128 tokens, and prompt and completion have up to 5\d\d"):
            setting.run(opened(setting, f"rollout.engine.urls=['http://127.0.0.1:{port}']", "rollout.max_tokens=500"))
    finally:
        kill(started)


def test_a_server_that_dies_and_comes_back_is_given_the_version_that_was_served(
    setting: case.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", KEY)
    port, after, prompt = 21987, case.model(seed=14), case.prompts(1)[0]

    async def use() -> None:
        servers = [start_server(setting.folder, port)]
        try:
            engine = await opened(setting, f"rollout.engine.urls=['http://127.0.0.1:{port}']")
            await engine.update_weights(1, case.tensors(after))
            under_way = asyncio.ensure_future(engine.generate(prompt, Sampling(450)))
            await asyncio.sleep(case.BEGUN_S)
            kill(servers[0])
            servers.append(start_server(setting.folder, port))
            done = await under_way
            np.testing.assert_allclose(done.logprobs, case.logprobs(after, prompt, done.tokens), atol=case.CLOSE)
            assert (done.versions == 1).all()
            assert engine.usage().restarts == 1
            await engine.stop()
        finally:
            for started in servers:
                if started.poll() is None:
                    kill(started)

    setting.run(use())


def test_a_server_refuses_a_wrong_key_in_one_sentence(
    setting: case.Setting, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "another key")
    with pytest.raises(ModelError, match="refuses the key"):
        setting.run(opened(setting, f"rollout.engine.urls=['{url}']"))


def test_weights_also_come_by_a_process_group(setting: case.Setting) -> None:
    # Several parts, so that a version holds only when the last has come.
    parts = "learner.bucket_bytes=50000"

    async def use() -> None:
        engine = await opened(setting, "rollout.engine.transport=group", parts)
        try:
            assert await exact_swap(engine, setting.model, case.model(seed=15), kept=True) > 0
        finally:
            await engine.stop()

    setting.run(use())


def test_a_process_group_ends_with_its_session_on_both_sides(setting: case.Setting, url: str) -> None:
    # Of this process, whose only groups are those with SGLang.
    groups = torch.distributed.distributed_c10d._world.pg_map
    names: list[str] = []

    async def use() -> None:
        engine = await opened(setting, f"rollout.engine.urls=['{url}']", "rollout.engine.transport=group")
        try:
            names.append(engine._session.carrier._name)
            engine._end_session("ended by a test")
            while engine.usage().restarts < 1 or engine.usage().is_starting:
                await asyncio.sleep(0.1)
            names.append(engine._session.carrier._name)
            assert len(groups) == 1
            await engine.update_weights(1, case.tensors(case.model(seed=15)))
        finally:
            await engine.stop()

    setting.run(use())
    assert not groups
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        for name in names:
            answer = client.post("/destroy_weights_update_group", json={"group_name": name})
            assert "does not exist" in answer.text


def test_a_recomputed_cache_is_exactly_that_of_the_new_weights(setting: case.Setting, tmp_path: Path) -> None:
    """A llama, whose end token ends completions."""
    before, after = case.model("llama"), case.model("llama", seed=16)
    folder = case.save(before, tmp_path)

    async def use() -> None:
        engine = await case.engine(folder, case.tensors(before), "rollout.engine.kv=recompute")
        try:
            attestation, own = engine._session.attestation, case.tensors(before)
            assert set(attestation.exact) == {name for name, _ in verify_weights.tensors_of_rank(own)}
            ends = await asyncio.gather(*(engine.generate(prompt, Sampling(450)) for prompt in case.prompts(8)))
            assert all((done.tokens == 1).nonzero()[0].tolist() == [len(done.tokens) - 1] for done in ends)
            assert {done.finish for done in ends} == {"stop"}
            crossed = 0
            while not crossed:
                crossed = await exact_swap(engine, before, after, kept=False)
                await engine.update_weights(0, case.tensors(before))
        finally:
            await engine.stop()

    setting.run(asyncio.wait_for(use(), 200))


@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_a_request_that_waits_over_a_swap_is_of_the_new_version_and_its_cache_is_used_by_no_other(
    setting: case.Setting, kv: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, before, after = setting.engine, setting.model, case.model(seed=17)
    monkeypatch.setattr(engine, "_setup", engine._setup._replace(kv=kv))
    monkeypatch.setattr(engine._session, "_kv", kv)
    first = engine.version + 1

    async def use() -> list[Completion]:
        await engine.update_weights(first, case.tensors(before))
        await engine.generate(PROMPT[:-1], Sampling(1, 0.0))
        task = await waiting(engine, PROMPT)
        await engine.update_weights(first + 1, case.tensors(after))
        return [await task, await engine.generate(PROMPT, Sampling(20))]

    waited, later = setting.run(use())
    new = case.logprobs(after, PROMPT, waited.tokens)
    if kv == "keep":
        # As a running completion: on the cache of the older weights, and one token late.
        assert waited.cached == len(PROMPT) - 1
        assert waited.versions.tolist() == [first] + [first + 1] * 19
        new = case.continued(before, after, PROMPT, waited.tokens, 0)
    else:
        assert (waited.cached, set(waited.versions)) == (0, {first + 1})
    np.testing.assert_allclose(waited.logprobs, new, atol=case.CLOSE)
    assert (later.cached, set(later.versions)) == (0, {first + 1})
    np.testing.assert_allclose(later.logprobs, case.logprobs(after, PROMPT, later.tokens), atol=case.CLOSE)
