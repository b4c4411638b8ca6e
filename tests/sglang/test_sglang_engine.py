"""The real SGLang behind the `Engine` protocol, against transformers."""

import asyncio
import copy
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import sglang_case as case
import torch
from conftest import SUPPORT
from push_case import Rank, joined

from streamppo.errors import ModelError, WeightsError
from streamppo.rollout.engine import Sampling
from streamppo.rollout.sglang import verify_weights
from streamppo.rollout.sglang.push import BySharedMemory
from streamppo.rollout.weight_checks import Architecture
from streamppo.weights.replica import Replica

# What SGLang and its dependencies warn about when they are loaded is not ours.
pytest_plugins = ["sglang_case"]
pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]
CLOSE = case.CLOSE


@pytest.fixture
def fresh(setting: case.Setting) -> case.Setting:
    """The shared engine with the weights that it started with, as the next version."""
    setting.run(setting.engine.update_weights(setting.engine.version + 1, case.tensors(setting.model)))
    return setting


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(fresh: case.Setting, temperature: float) -> None:
    given = case.prompts(24)

    async def sample() -> Any:
        return await asyncio.gather(*(fresh.engine.generate(prompt, Sampling(20, temperature)) for prompt in given))

    done = fresh.run(sample())
    for prompt, completion in zip(given, done, strict=True):
        expected = case.logprobs(fresh.model, prompt, completion.tokens, temperature)
        np.testing.assert_allclose(completion.logprobs, expected, atol=CLOSE)
        assert (completion.versions == fresh.engine.version).all()
        assert (len(completion.tokens), completion.finish) == (20, "length")


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 4), (0.8, 20)])
def test_log_probs_are_among_the_candidates_that_top_p_and_top_k_left(
    fresh: case.Setting, top_p: float, top_k: int
) -> None:
    given = case.prompts(24)

    async def sample() -> Any:
        cut = (fresh.engine.generate(prompt, Sampling(20, 1.3, top_p, top_k)) for prompt in given)
        greedy = (fresh.engine.generate(prompt, Sampling(8, 0.0)) for prompt in given[:4])
        return await asyncio.gather(*cut, *greedy)

    done, sizes = fresh.run(sample()), set()
    assert all(one.candidates is None for one in done[len(given) :])
    for prompt, completion in zip(given, done, strict=False):
        text = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logits_TV = fresh.model(text).logits[0, len(prompt) - 1 : -1].float() / 1.3
        sets = np.split(completion.candidates.tokens, completion.candidates.counts.cumsum()[:-1])
        for t, (token, some) in enumerate(zip(completion.tokens.tolist(), sets, strict=True)):
            among = logits_TV[t, torch.from_numpy(some).long()].log_softmax(-1)[some.tolist().index(token)].item()
            assert completion.logprobs[t] == pytest.approx(among, abs=CLOSE)
            assert sorted(some.tolist()) == some.tolist() and len(some) <= top_k
            assert set(logits_TV[t].topk(len(some)).indices.tolist()) == set(some.tolist())
            sizes.add(len(some))
    assert len(sizes) > 1 or top_p == 1


def test_greedy_tokens_are_those_of_transformers_beside_sampled_ones(fresh: case.Setting) -> None:
    given = case.prompts(6, seed=1)

    async def sample() -> Any:
        greedy = (fresh.engine.generate(prompt, Sampling(16, 0.0)) for prompt in given)
        others = (fresh.engine.generate(prompt, Sampling(16, 1.3)) for prompt in given)
        return await asyncio.gather(*greedy, *others)

    for prompt, completion in zip(given, fresh.run(sample())[: len(given)], strict=True):
        text = torch.from_numpy(prompt.astype(np.int64))[None]
        expected = fresh.model.generate(text, max_new_tokens=16, do_sample=False)[0, len(prompt) :].numpy()
        assert completion.tokens.tolist() == expected.tolist()
        np.testing.assert_allclose(
            completion.logprobs, case.logprobs(fresh.model, prompt, completion.tokens), atol=CLOSE
        )


def test_a_swap_changes_the_distribution_at_the_token_that_the_spans_name(fresh: case.Setting) -> None:
    before, after = fresh.model, case.model(seed=5)
    first, given = fresh.engine.version, case.prompts(6, seed=2)
    done = fresh.run(case.swapped(fresh.engine, given, 300, first + 1, case.tensors(after)))
    crossed = 0
    for prompt, completion in zip(given, done, strict=True):
        at = int((completion.versions == first).sum())
        assert completion.versions.tolist() == [first] * at + [first + 1] * (len(completion.tokens) - at)
        kept = case.logprobs(before, prompt, completion.tokens)
        np.testing.assert_allclose(completion.logprobs[:at], kept[:at], atol=CLOSE)
        if 0 < at < len(completion.tokens):
            crossed += 1
            assert abs(completion.logprobs[at] - kept[at]) > 10 * CLOSE
            expected = case.continued(before, after, prompt, completion.tokens, at)
            np.testing.assert_allclose(completion.logprobs[at:], expected, atol=CLOSE)
    assert crossed > 0


def test_a_prompt_never_begins_with_the_cache_of_an_older_version(fresh: case.Setting) -> None:
    """The same prompt again is served from the cache of its own version, and not from that of the one before."""
    engine, after = fresh.engine, case.model(seed=6)
    prompt = np.arange(3, 60, dtype=np.int32)
    first, again = [fresh.run(engine.generate(prompt, Sampling(4))).cached for _ in range(2)]
    assert (first, again) == (0, len(prompt) - 1)
    fresh.run(engine.update_weights(engine.version + 1, case.tensors(after)))
    done = fresh.run(engine.generate(prompt, Sampling(20)))
    assert done.cached == 0
    np.testing.assert_allclose(done.logprobs, case.logprobs(after, prompt, done.tokens), atol=CLOSE)


def test_a_paused_engine_samples_nothing_and_goes_on(fresh: case.Setting) -> None:
    engine, (prompt,) = fresh.engine, case.prompts(1, seed=3)

    async def pause() -> Any:
        under_way = asyncio.ensure_future(engine.generate(prompt, Sampling(450)))
        await asyncio.sleep(case.BEGUN_S)
        await engine._session.link.call("pause_generation", mode="in_place")
        await asyncio.sleep(1.0)
        was_done = under_way.done()
        await engine._session.link.call("continue_generation")
        return was_done, await under_way

    was_done, completion = fresh.run(pause())
    assert not was_done
    np.testing.assert_allclose(completion.logprobs, case.logprobs(fresh.model, prompt, completion.tokens), atol=CLOSE)


def test_a_completion_that_nobody_waits_for_is_aborted(fresh: case.Setting) -> None:
    engine = fresh.engine
    waiting = engine._session.link._engine.tokenizer_manager.rid_to_state

    async def abandon() -> None:
        under_way = [asyncio.ensure_future(engine.generate(prompt, Sampling(400))) for prompt in case.prompts(4)]
        await asyncio.sleep(case.BEGUN_S)
        assert len(waiting) == 4
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
        while waiting:
            await asyncio.sleep(0.05)

    fresh.run(asyncio.wait_for(abandon(), 60))


def test_weights_that_do_not_fit_are_refused_and_the_old_version_serves_on(fresh: case.Setting) -> None:
    engine, version = fresh.engine, fresh.engine.version
    wrong = case.tensors(case.model(seed=7))
    wrong["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(WeightsError, match=r"model.norm.weight has shape \(3,\)"):
        fresh.run(engine.update_weights(version + 1, wrong))
    del wrong["model.norm.weight"]
    with pytest.raises(WeightsError, match="no tensor 'model"):
        fresh.run(engine.update_weights(version + 1, wrong))
    case.assert_serves(fresh, fresh.model, version)
    assert engine.usage().restarts == 0


def test_deltas_of_two_ranks_are_served_and_what_arrives_damaged_never_reaches_sglang(fresh: case.Setting) -> None:
    engine, moving = fresh.engine, copy.deepcopy(fresh.model)
    present, first = case.tensors(moving), engine.version + 1
    ranks = [Rank(present, rank, 2, bucket_bytes=1 << 20) for rank in range(2)]
    replica = Replica()
    for version in range(first, first + 4):
        packed = joined([rank.push(version, present, delta=version > first) for rank in ranks])
        assert (packed.push.base_version is None) == (version == first), "all but the first go as deltas"
        replica.take(*packed)
        fresh.run(engine.update_weights(version, replica.tensors, replica.contents))
        case.assert_serves(fresh, moving, version)
        with torch.no_grad():
            # Random signs on one element in thirty: another model, in which most elements are as they were.
            for name, parameter in moving.named_parameters():
                parameter.view(-1)[version % 30 :: 30] *= -1
                present[name].copy_(parameter)
    replica.tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3
    restarts = engine.usage().restarts
    with pytest.raises(WeightsError, match=r"layers.1.mlp.down_proj.weight differs from what was pushed \(1 tensors"):
        fresh.run(engine.update_weights(first + 4, replica.tensors, replica.contents))
    assert (engine.version, engine.usage().restarts) == (first + 3, restarts)


def test_weights_that_sglang_does_not_take_are_noticed_and_the_old_version_serves_on(
    fresh: case.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, version = fresh.engine, fresh.engine.version

    async def nothing(*arguments: Any, **options: Any) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(engine._session.carrier, "carry", nothing)
        with pytest.raises(WeightsError, match="SGLang has not loaded"):
            fresh.run(engine.update_weights(version + 1, case.tensors(case.model(seed=8))))
    case.assert_serves(fresh, fresh.model, version)
    assert engine.usage().restarts == 1


def test_weights_that_kill_sglang_are_refused_and_the_old_version_serves_on(
    fresh: case.Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, version, restarts = fresh.engine, fresh.engine.version, fresh.engine.usage().restarts
    wrong = case.tensors(fresh.model)
    wrong["model.norm.weight"] = torch.zeros(3)
    monkeypatch.setattr("streamppo.rollout.sglang.engine.check_fit", lambda expected, tensors: None)
    with pytest.raises(WeightsError, match=rf"died while it loaded version {version + 1} \(\w+Error"):
        fresh.run(engine.update_weights(version + 1, wrong))
    case.assert_serves(fresh, fresh.model, version)
    assert engine.usage().restarts == restarts + 1


def test_weights_that_are_not_finite_fail_the_completion(fresh: case.Setting) -> None:
    engine, (prompt,) = fresh.engine, case.prompts(1)
    diverged = case.tensors(fresh.model)
    diverged["lm_head.weight"][5] = torch.nan
    fresh.run(engine.update_weights(engine.version + 1, diverged))
    with pytest.raises(ModelError, match="not finite"):
        fresh.run(engine.generate(prompt, Sampling(20)))


@pytest.mark.parametrize("which", [0, 1])
def test_an_engine_process_that_is_killed_is_started_again_and_its_prompts_are_sampled_again(
    fresh: case.Setting, which: int
) -> None:
    engine, given = fresh.engine, case.prompts(4, seed=9)
    after = case.model(seed=10)
    version, restarts = engine.version + 1, engine.usage().restarts
    victims = [child.pid for child in engine._session.link._processes]

    async def kill() -> Any:
        await engine.update_weights(version, case.tensors(after))
        under_way = [asyncio.ensure_future(engine.generate(prompt, Sampling(300))) for prompt in given]
        await asyncio.sleep(case.BEGUN_S)
        os.kill(victims[which], signal.SIGKILL)
        completions = await asyncio.gather(*under_way)
        while engine.usage().restarts == restarts:
            await asyncio.sleep(0.1)
        return completions

    for prompt, completion in zip(given, fresh.run(asyncio.wait_for(kill(), 120)), strict=True):
        assert (completion.versions == version).all()
        np.testing.assert_allclose(completion.logprobs, case.logprobs(after, prompt, completion.tokens), atol=CLOSE)
    case.assert_serves(fresh, after, version)
    assert engine.usage().restarts == restarts + 1
    assert not any(case.alive(victim) for victim in victims)


def test_no_process_is_left_when_the_actor_is_killed(setting: case.Setting) -> None:
    program = (
        "import asyncio, time, sglang_case as case\n"
        "async def main():\n"
        f"    engine = await case.engine({setting.folder!r}, case.tensors(case.model()))\n"
        "    print(*[child.pid for child in engine._session.link._processes], flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    script = Path(setting.folder) / "actor.py"
    script.write_text(program)
    path = os.pathsep.join([str(SUPPORT), str(SUPPORT.parent), *sys.path])
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", script],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as actor:
        assert actor.stdout is not None
        processes = [int(pid) for pid in actor.stdout.readline().split()]
        assert len(processes) >= 2
        actor.kill()
    deadline = time.monotonic() + 60
    while any(case.alive(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(case.alive(process) for process in processes)


def test_the_experts_of_every_token_are_those_that_transformers_chooses(run: case.Run, tmp_path: Path) -> None:
    made = case.model("qwen3_moe")
    chosen: list[torch.Tensor] = []
    for layer in made.model.layers:
        layer.mlp.gate.register_forward_hook(lambda module, inputs, output: chosen.append(output[2]))
    folder = case.save(made, tmp_path)
    engine = run(case.engine(folder, case.tensors(made), "rollout.engine.routes=true"))
    try:
        for prompt in [*case.prompts(4), case.prompts(4)[0]]:
            done = run(engine.generate(prompt, Sampling(9)))
            chosen.clear()
            case.logprobs(made, prompt, done.tokens)
            expected = torch.cat(chosen, 1)[:-1].numpy()
            assert done.routes_SE.shape == (len(prompt) + 8, 4)
            assert (np.sort(done.routes_SE.reshape(-1, 2, 2)) == np.sort(expected.reshape(-1, 2, 2))).mean() > 0.99
    finally:
        run(engine.stop())


def test_a_mixture_of_experts_is_served_with_every_tensor_attested_and_experts_that_are_not_taken_are_noticed(
    run: case.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = case.model("qwen3_moe")
    folder = case.save(made, tmp_path)
    engine = run(case.engine(folder, case.tensors(made)))
    setting = case.Setting(engine, made, folder, run)
    try:
        case.assert_serves(setting, made, 0)
        held = dict(verify_weights.tensors_of_rank(Architecture(made.config).as_saved(case.tensors(made))))
        attestation = engine._session.attestation
        assert set(attestation.exact) == held.keys() and sum("experts" in name for name in held) == 4
        other = case.model("qwen3_moe", seed=1)
        run(engine.update_weights(1, case.tensors(other)))
        case.assert_serves(setting, other, 1)
        stage = engine._session.carrier.stage

        async def without_experts(tensors: Any) -> None:
            await stage({name: one for name, one in tensors.items() if ".experts." not in name})

        monkeypatch.setattr(engine._session.carrier, "stage", without_experts)
        with pytest.raises(WeightsError, match=r"SGLang has not loaded \S+\.experts\.0\.\w+_proj"):
            run(engine.update_weights(2, case.tensors(case.model("qwen3_moe", seed=2))))
        case.assert_serves(setting, other, 1)
    finally:
        run(engine.stop())


def _opened(payloads: list[Any], pipe: Any) -> None:
    """A tensor-parallel rank of SGLang: opens its handles, and reports their content."""
    from sglang.srt.model_executor.model_runner_components.weight_updater import FlattenedTensorBucket
    from sglang.srt.utils import MultiprocessingSerializer

    held = [MultiprocessingSerializer.deserialize(payload) for payload in payloads]
    parts = [FlattenedTensorBucket(flattened_tensor=one["flattened_tensor"], metadata=one["metadata"]) for one in held]
    pipe.send({name: tensor.float().tolist() for part in parts for name, tensor in part.reconstruct_tensors()})
    pipe.recv()


def test_tensor_parallel_ranks_read_one_bucket_whose_memory_is_used_for_the_next_version() -> None:
    calls: list[list[Any]] = []

    class TwoRanks:
        ranks = 2

        async def call(self, name: str, **fields: Any) -> None:
            calls.append(fields["serialized_named_tensors"])

    async def pushed(carrier: BySharedMemory, tensors: dict[str, torch.Tensor]) -> list[int]:
        await carrier.stage(tensors)
        await carrier.carry(1, flush=False)
        return [flat.data_ptr() for flat, _ in carrier._staged]

    carrier = BySharedMemory(cast("Any", TwoRanks()), 3000, server=False)
    tensors = {
        "a": torch.randn(3, 7),
        "b": torch.randn(5).to(torch.bfloat16),
        "c": torch.randn(900),
        "d": torch.ones(1),
    }
    first = asyncio.run(pushed(carrier, tensors))
    expected = {name: tensor.float().tolist() for name, tensor in tensors.items()}
    assert asyncio.run(pushed(carrier, tensors)) == first and len(first) == 3
    context, pipes = multiprocessing.get_context("spawn"), []
    for rank in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(
            target=_opened, args=([payloads[rank] for payloads in calls[-3:]], theirs), daemon=True
        )
        process.start()
        pipes.append((process, ours))
    for process, pipe in pipes:
        assert pipe.recv() == expected
        pipe.send(None)
        process.join()
