"""What a GPU computes is what the CPU computes. `pytest -m gpu`"""

import asyncio
from pathlib import Path

import learner_case as case
import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from streamppo.learner.packing import pack
from streamppo.rollout.embedded import EmbeddedEngine
from streamppo.rollout.engine import Sampling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_the_engine_samples_on_cuda_with_the_log_probs_of_transformers(dtype: torch.dtype, atol: float) -> None:
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    config = Qwen3Config(vocab_size=97, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2, **sizes)
    model = Qwen3ForCausalLM(config).eval().to("cuda", dtype)
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}

    async def generate() -> list[tuple[np.ndarray, np.ndarray]]:
        engine = EmbeddedEngine(
            config, weights, version=0, slots=4, max_total_tokens=64, eos_ids=set(), seed=0, dtype=dtype, device="cuda"
        )
        requests = [np.arange(2, 5 + n, dtype=np.int32) for n in range(9)]
        done = await asyncio.gather(*(engine.generate(prompt, Sampling(20)) for prompt in requests))
        await engine.stop()
        return [
            (np.concatenate([prompt, completion.tokens]), completion.logprobs)
            for prompt, completion in zip(requests, done, strict=True)
        ]

    for tokens, logprobs in asyncio.run(generate()):
        ids = torch.from_numpy(tokens).long().to("cuda")[None]
        with torch.no_grad():
            logp = model(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected = logp[:-1].gather(-1, ids[0, 1:, None]).squeeze(-1)[-len(logprobs) :].cpu().numpy()
        np.testing.assert_allclose(logprobs, expected, atol=atol, rtol=0)


@pytest.mark.parametrize("overrides", [[], ["algorithm.advantage.kind=vtrace"], ["algorithm.kl.loss_beta=0.1"]])
def test_an_update_on_cuda_over_nccl_is_the_update_on_the_cpu_over_gloo(tmp_path: Path, overrides: list[str]) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case.save_model(tmp_path / "model")
    results = {}
    for device, backend in (("cpu", "gloo"), ("cuda", "nccl")):
        with case.group(0, 1, tmp_path / f"store-{device}", backend):
            updater = case.updater(case.config_of(*overrides), tmp_path / "model", device)
            metrics = updater.update(pack(case.batch()).to(updater.device)).metrics
            results[device] = ({name: tensor.cpu() for name, tensor in case.whole(updater.policy).items()}, metrics)
    for name, tensor in results["cpu"][0].items():
        torch.testing.assert_close(results["cuda"][0][name], tensor, rtol=0, atol=1e-5, msg=name)
    assert results["cuda"][1]["policy_loss"] == pytest.approx(results["cpu"][1]["policy_loss"], abs=1e-5)
