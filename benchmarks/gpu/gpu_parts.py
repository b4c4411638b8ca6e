"""The parts of benchmarks/gpu/gpu_day.py: each is a function that returns its result and does its own imports.

python -m benchmarks.gpu.gpu_parts NAME OUT.json
"""

import asyncio
import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

ROOT = Path(__file__).parents[2]
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
REPEATS = 7 if ON_GPU else 2
Result = dict[str, object]


class LeftOut(Exception):
    """The reason why a part does not run here."""


def main() -> None:
    name, out = sys.argv[1:]
    try:
        found: Result = {"result": PARTS[name]()}
    except LeftOut as reason:
        found = {"left_out": str(reason)}
    Path(out).write_text(json.dumps(found))


def need(*packages: str, gpu: bool = False) -> None:
    """Raise `LeftOut` if a package or a required GPU is missing."""
    if missing := [name for name in packages if importlib.util.find_spec(name) is None]:
        raise LeftOut(f"{', '.join(missing)} not installed")
    if gpu and not ON_GPU:
        raise LeftOut("no GPU here")


def timed(work: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of the first call, a warm-up, and the median and the spread (max - min) of the others."""
    seconds = [_seconds(work) for _ in range(REPEATS + 1)]
    first, rest = 1e3 * seconds[0], [1e3 * one for one in seconds[1:]]
    return {
        "first_ms": round(first, 2),
        "median_ms": round(statistics.median(rest), 3),
        "spread_ms": round(max(rest) - min(rest), 3),
    }


def _seconds(work: Callable[[], object]) -> float:
    if ON_GPU:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    if ON_GPU:
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def peak_mib(work: Callable[[], object]) -> float | None:
    """Peak MiB allocated by `work`, above the memory in use before it; None on a CPU."""
    if not ON_GPU:
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)


# --- the parts -----------------------------------------------------------------------------------------------


def device() -> Result:
    """The device, with the speed of its matrix products and its memory: the roofline of the other parts."""
    size = 8192 if ON_GPU else 256
    left = torch.randn(size, size, device=DEVICE)
    half = left.bfloat16()
    work = {"float32": lambda: left @ left, "bfloat16": lambda: half @ half, "copy": left.clone}
    if ON_GPU:
        work["bfloat16_to_float32"] = lambda: torch.mm(half, half, out_dtype=torch.float32)
    found: Result = {}
    for name, one in work.items():
        ms = timed(one)["median_ms"]
        amount = 2 * left.nbytes if name == "copy" else 2 * size**3
        found[name] = {
            "ms": ms,
            "gb_per_s" if name == "copy" else "tflops": round(amount / ms / 1e6 / (1 if name == "copy" else 1e3), 2),
        }
    if ON_GPU:
        properties = torch.cuda.get_device_properties(0)
        found |= {"name": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
    return found | {"threads": torch.get_num_threads()}


def head() -> Result:
    """Forward and backward of the head, by kind of matrix product and with kernels: time, memory and distance.

    Distances are from the float32 results at full size and, under "float64", from float64 results of 1,024 tokens at
    temperature 0.7.
    """
    from streamppo.algorithms import chunked_head as ours

    tokens, width, vocabulary = (8192, 896, 151_936) if ON_GPU else (64, 32, 500)
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=DEVICE).bfloat16().requires_grad_()
    weight = (0.02 * (torch.randn(vocabulary, width, device=DEVICE) + torch.randn(width, device=DEVICE))).bfloat16()
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device=DEVICE)
    has_kernels = ours.has_kernels(weight.device, weight.dtype)

    def step(dtype: torch.dtype = torch.bfloat16, rows: int = tokens, **options: Any) -> list[torch.Tensor]:
        leaves = hidden[:rows].to(dtype), weight.to(dtype)
        scores = ours.chunked_logprobs_entropy(*leaves, targets[:rows], chunk=4096, **options)
        return [*scores, *torch.autograd.grad((scores[0] + 0.1 * scores[1]).sum() / rows, leaves)]

    def forward() -> object:
        with torch.no_grad():
            return ours.chunked_logprobs_entropy(hidden, weight, targets, chunk=4096)

    multiply = ours.WIDE.multiply if ON_GPU else lambda left, right: left.float() @ right.float()
    few: dict[str, Any] = {"rows": min(tokens, 1024), "temperature": 0.7}
    choices: dict[str, tuple[bool, int, bool, Callable[..., list[torch.Tensor]]]] = {
        "float32": (False, 2, False, step),
        "wide_two_parts": (True, 2, False, step),
        "wide_one_part": (True, 1, False, step),
        "bfloat16": (False, 1, False, partial(step, float32_matmul=False)),
        **({"kernels": (True, 2, True, step)} if has_kernels else {}),
    }
    found: Result = {"kernels": {"left_out": "they do not run here"}}
    exact: list[torch.Tensor] = []
    exact_64: list[torch.Tensor] = []
    for name, (wide, parts, kernels, work) in choices.items():
        ours.has_wide_products = lambda one, other, wide=wide: wide and one.dtype == other.dtype == torch.bfloat16
        ours.WIDE, ours.has_kernels = ours.Products(multiply, parts), lambda *_, kernels=kernels: kernels
        exact, exact_64 = exact or work(), exact_64 or step(torch.float64, **few)
        again = work()
        distances = {"distance": _distances(again, exact), "float64": _distances(work(**few), exact_64)}
        same_bits = all(torch.equal(one, other) for one, other in zip(again, work(), strict=True))
        del again
        forward_ms = timed(forward)["median_ms"]
        found[name] = {
            **timed(work),
            "forward_ms": forward_ms,
            "peak_mib": peak_mib(work),
            "same_bits": same_bits,
            **distances,
        }
        print(name, found[name], flush=True)
    return found


def _distances(made: list[torch.Tensor], exact: list[torch.Tensor]) -> dict[str, float]:
    """The relative distance of each of a head's results: |made - exact| / |exact|."""
    names = ("logprobs", "entropy", "grad_hidden", "grad_weight")
    return {name: _distance(one, other) for name, one, other in zip(names, made, exact, strict=True)}


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm())


def update() -> Result:
    """Updates of half a billion parameters: tokens/s, memory against the estimate of `check`, sum of weight bits."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "update.json"
        variants = ["base", "sdpa", "full", "fsdp", "fa4", *["compiled"] * ON_GPU]
        command = [sys.executable, "-m", "benchmarks.gpu.gpu_update", "--json", str(out), "--variants", *variants]
        # The output is not captured: after a time limit, its last lines have the results of the variants.
        subprocess.run(command, cwd=ROOT, check=False)
        if not out.exists():
            raise RuntimeError("gpu_update has written no results")
        return json.loads(out.read_text())


def layers() -> Result:
    """Forward and backward of a transformer, by attention implementation and gradient checkpointing."""
    return _transformers(["off", "full"], compiled=False)


def compiled() -> Result:
    """As `layers`, with compiled layers. On a CPU no kernels are compiled, which would take minutes."""
    from streamppo.learner.attention import layers as of_model

    if not ON_GPU:
        of_model.torch.compile = partial(torch.compile, backend="aot_eager")
    return _transformers(["off", "full"], compiled=True)


def _transformers(kinds: list[str], *, compiled: bool) -> Result:
    found: Result = {}
    for implementation in _attentions():
        for checkpointing in kinds:
            name = f"{implementation} {checkpointing}"
            try:
                found[name] = _transformer(implementation, checkpointing, compiled)
            except Exception as error:
                found[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            gc.collect()
            torch.cuda.empty_cache()
    return found


def _attentions() -> list[str]:
    from streamppo.learner.attention import attention, varlen

    own = [varlen.register()] if varlen.is_available() else []
    return ["sdpa", *own, *(name for name in attention.RUNS_ON if ON_GPU and attention.is_flash_installed(name))]


def _transformer(implementation: str, checkpointing: Any, compiled: bool) -> Result:
    from transformers import Qwen2Config, Qwen2Model

    from streamppo.learner.attention import attention
    from streamppo.learner.attention import layers as of_model

    sizes: dict[str, Any] = {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
    }
    if not ON_GPU:
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    sizes |= {"num_key_value_heads": 2, "vocab_size": 1000, "attn_implementation": implementation}
    body: Any = Qwen2Model(Qwen2Config(**sizes))
    body.to(DEVICE, torch.bfloat16)
    if compiled:
        of_model.compile_layers(body)
    of_model.checkpoint_activations(body, checkpointing)
    rows, width = (16, 1024) if ON_GPU else (2, 16)
    inputs = torch.randint(1000, (rows, width))
    reading = attention.layout(implementation)(inputs, torch.full((rows,), width), torch.device(DEVICE))

    def step() -> None:
        body.zero_grad(set_to_none=True)
        body(**reading.arguments, use_cache=False).last_hidden_state.float().square().mean().backward()

    times = timed(step)
    matrices = sum(parameter.numel() for layer in body.layers for parameter in layer.parameters())
    tflops = 6 * matrices * rows * width / times["median_ms"] / 1e9
    return {**times, "peak_mib": peak_mib(step), "tflops_without_recomputing": round(tflops, 2)}


def push() -> Result:
    """The steps of a push from the learner's GPU to an engine's: milliseconds for `bytes`."""
    from streamppo.weights import buckets
    from streamppo.weights.content import hash_tensor
    from streamppo.weights.replica import Replica

    count, rows = (32, 4096) if ON_GPU else (4, 64)
    masters = {f"w{n}": torch.randn(rows, 4096, device=DEVICE) for n in range(count)}
    on_cpu = {name: one.bfloat16().cpu() for name, one in masters.items()}
    on_device = [one.bfloat16() for one in masters.values()]
    made, flat = buckets.pack_whole(1, on_cpu, 256 * 2**20)
    pinned = {name: one.pin_memory() for name, one in on_cpu.items()} if ON_GPU else on_cpu
    steps: Mapping[str, Callable[[], object]] = {
        "cast_then_copy": lambda: [one.bfloat16().cpu() for one in masters.values()],
        "copy_then_cast": lambda: [one.cpu().bfloat16() for one in masters.values()],
        "pack_and_hash": lambda: buckets.pack_whole(1, on_cpu, 256 * 2**20),
        "unpack": lambda: Replica().take(made, flat),
        "hash_on_device": lambda: [hash_tensor(one) for one in on_device],
        "to_device": lambda: [one.to(DEVICE, copy=True) for one in on_cpu.values()],
        "to_device_pinned": lambda: [one.to(DEVICE, copy=True, non_blocking=True) for one in pinned.values()],
    }
    return {"bytes": sum(one.nbytes for one in on_cpu.values()), **{name: timed(one) for name, one in steps.items()}}


def end_to_end() -> Result:
    """The default task in bfloat16, learner and embedded engine in one process: accuracy and speed."""
    from benchmarks.gpu import gpu_loop

    with tempfile.TemporaryDirectory() as folder, _alone(Path(folder)):
        return asyncio.run(gpu_loop.train(Path(folder), DEVICE, seconds=50.0 if ON_GPU else 5.0))


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A process group with only this process, on the device of a rank."""
    import torch.distributed as dist

    from streamppo.learner import device as of_rank

    # On a GPU the engine's sampling has no deterministic form, and learner and engine are one process here.
    of_rank.acquire(float(ON_GPU), exact=False)
    dist.init_process_group(
        "nccl" if ON_GPU else "gloo", init_method=f"file://{folder / 'store'}", rank=0, world_size=1
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def tests() -> Result:
    """`pytest -m gpu tests/numerics/test_cuda.py`: counts of outcomes, and the reason of each failure."""
    need("pytest")
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        # Without the options of pyproject.toml, pytest needs no plugins, and warnings fail no test.
        command = [sys.executable, "-m", "pytest", "-v", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
        command += ["-o", "addopts=", "-W", "ignore", "tests/numerics/test_cuda.py"]
        subprocess.run(command, cwd=ROOT, check=False)
        if not report.exists():
            raise RuntimeError("pytest has written no report")
        cases = list(ElementTree.parse(report).iter("testcase"))
    failed = {case.get("name"): _message(case) for case in cases if case.find("failure") is not None}
    failed |= {case.get("name"): _message(case) for case in cases if case.find("error") is not None}
    skipped = sum(case.find("skipped") is not None for case in cases)
    return {"passed": len(cases) - len(failed) - skipped, "skipped": skipped, "failed": failed}


def _message(case: ElementTree.Element) -> str:
    found = case.find("failure")
    found = case.find("error") if found is None else found
    return "" if found is None else found.get("message", "")[:500]


def ray_run() -> Result:
    """`streamppo run configs/math.toml`; learner and embedded engine share the GPU."""
    need("ray", gpu=True)
    return _run("configs/math.toml", "updates=120", "evaluation.every=0", "model.dtype=bfloat16")


def sglang_run() -> Result:
    """`streamppo run configs/math-sglang.toml`; learner and SGLang share the GPU.

    SGLang computes in plain torch: its Triton kernels take no heads as narrow as those of builtin:tiny.
    """
    need("ray", "sglang", gpu=True)
    plain = ('rollout.engine.args={attention_backend="torch_native", sampling_backend="pytorch"}',)
    sizes = ("updates=10", "evaluation.every=0", "model.dtype=bfloat16", "rollout.engine.mem_fraction_static=0.3")
    return _run("configs/math-sglang.toml", *sizes, *plain)


def _run(config: str, *overrides: str) -> Result:
    from benchmarks.lib.runs import run

    made = run(ROOT / config, [*overrides, "learner.gpus=0.5", "rollout.gpus=0.5"])
    last = made.updates[len(made.updates) // 2 :]
    shown = ("update_s", "score_s", "train_s", "wait_s", "push_ms", "lag_mean", "mismatch", "reward")
    # Updates without tokens of lag 0 have no mismatch.
    columns = {name: [line[name] for line in last if name in line] for name in shown}
    means = {name: statistics.mean(column) for name, column in columns.items() if column}
    return {"summary": made.summary, "later_half": means}


PARTS: Mapping[str, Callable[[], Result]] = {
    "device": device,
    "head": head,
    "update": update,
    "layers": layers,
    "compiled": compiled,
    "push": push,
    "end_to_end": end_to_end,
    "tests": tests,
    "ray_run": ray_run,
    "sglang_run": sglang_run,
}

if __name__ == "__main__":
    main()
