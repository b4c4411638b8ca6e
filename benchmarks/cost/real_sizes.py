"""Models of tens of millions of parameters on a CPU: the engine, an update beside a bare loop, a run beside TRL.

    python benchmarks/cost/real_sizes.py --json real.json [--models body head] [--parts engine update system]
        [--python OTHER/bin/python] [--rounds 3]

Random weights of Qwen2's architecture: `body` has nearly all of its parameters in 8 layers, `head` in the embeddings of
a vocabulary of 151,936 tokens. The parts:

    engine    floating-point operations a second in prefill, as a share of torch's for the same matrices; bytes of
              weights a second in decoding one row, as a share of torch's sum over memory; one thread
    update    CPU seconds of an update, over those of the bare loop of bare_update.py on the same batch; one thread
    system    sampled tokens per CPU second and per second of runs of configs/math.toml with this model, of our
              processes together and of TRL's GRPOTrainer with its best of several settings, whose first update does
              not count; equal lengths of 32 tokens, and lognormal ones with this median and at most 256

The same command continues after the parts that its `--json` has. `--python` is an interpreter with trl and streamppo.
"""

import os

# benchmarks/lib/lengths.py reads both at its import, here and in the processes of a run.
os.environ.setdefault("BENCHMARK_MEDIAN", "32")
os.environ.setdefault("BENCHMARK_LONGEST", "256")

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.cost import bare_update, cost
from benchmarks.learning import beside_trl
from benchmarks.lib import lengths, world
from benchmarks.lib.runs import PLAIN, Goal, machine, told
from benchmarks.lib.trl_run import Job
from streamppo.config import file as configfile
from streamppo.learner.batch.padded import pad
from streamppo.learner.model import hf_files
from streamppo.rollout.embedded.engine import EmbeddedEngine
from streamppo.rollout.embedded.requests import EndTokens
from streamppo.rollout.engine import Sampling
from streamppo.types import Batch

SHAPES: dict[str, dict[str, Any]] = {
    "body": {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 512},
    "head": {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6, "vocab_size": 151_936},
}
BATCH, SAMPLES = 64, 8
OVERRIDES = (
    *PLAIN,
    "algorithm.advantage={kind='grpo'}",
    f"queue.batch_size={BATCH}",
    f"queue.samples_per_prompt={SAMPLES}",
    "queue.max_lag=4",
    f"rollout.slots={BATCH}",
    f"rollout.in_flight={2 * BATCH}",
    # Random weights are not to change much: lengths do not depend on them, but numbers must stay finite.
    "learner.lr=1e-6",
)
WARM, UPDATES = 2, 8
TRL_UPDATES = 3
"""TRL's last one counts."""
CASES = ("equal", "lognormal")
GOALS = {
    "equal": Goal("sampled tokens per CPU second over TRL's, equal lengths", least=1.5),
    "lognormal": Goal("sampled tokens per CPU second over TRL's, lognormal lengths", least=3.0),
    "prefill": Goal("prefill, share of the operations a second of torch's matrix products", least=0.8),
    "decode": Goal("decoding one row, share of the bytes a second of torch's sum", least=0.6),
    "update": Goal("an update over the bare loop, CPU time", most=1.10),
}
Row = dict[str, Any]


def make(name: str, folder: Path) -> Path:
    """Write a model of `SHAPES` with random weights, without end tokens, and a tokenizer with all of its tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    size = SHAPES[name]["vocab_size"]
    pieces = ["<pad>", "<eos>", "<unk>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    pieces += [f"w{number}" for number in range(len(pieces), size)]
    made = Tokenizer(models.BPE({piece: number for number, piece in enumerate(pieces)}, merges=[], unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    config = Qwen2Config(
        **SHAPES[name],
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    hf_files.write(Qwen2ForCausalLM(config), tokenizer, folder / f"{name}-with-end")
    lengths.without_end(folder / f"{name}-with-end", folder / name)
    return folder / name


# --- engine ------------------------------------------------------------------------------------------------------


def engine(model: Path, rounds: int) -> Row:
    """Rates of the embedded engine and of torch on this machine, alternating, with one thread."""
    lm = Qwen2ForCausalLM.from_pretrained(model).eval()
    body = sum(parameter.numel() for name, parameter in lm.named_parameters() if "embed" not in name)
    head = lm.config.vocab_size * lm.config.hidden_size
    found: dict[str, list[float]] = {"prefill": [], "matrices": [], "decode": [], "memory": []}
    for _ in range(rounds):
        found["matrices"].append(_matrix_flops(lm.config))
        found["prefill"].append(_prefill_flops(lm, body, head))
        found["memory"].append(_memory_bytes(lm))
        found["decode"].append(4 * (body + head) * _decode_steps(lm))
    shares = {
        "prefill": [one / all_ for one, all_ in zip(found["prefill"], found["matrices"], strict=True)],
        "decode": [one / all_ for one, all_ in zip(found["decode"], found["memory"], strict=True)],
    }
    rates = {f"{name} G/s": round(statistics.median(rate) / 1e9, 2) for name, rate in found.items()}
    return {**rates, "shares": shares}


PROMPT, PROMPTS = 256, 8
STEPS = 128


def _matrix_flops(config: Qwen2Config) -> float:
    """Operations a second of the matrix products of a layer on `PROMPT` * `PROMPTS` tokens."""
    wide, inner, rows = config.hidden_size, config.intermediate_size, PROMPT * PROMPTS
    shapes = [(wide, wide + wide // 2), (wide, wide), (wide, 2 * inner), (inner, wide)]
    operands = [(torch.randn(rows, one), torch.randn(other, one)) for one, other in shapes]
    times = 2 * config.num_hidden_layers
    begin = time.perf_counter()
    for _ in range(times):
        for rows_NK, weight_MK in operands:
            torch.nn.functional.linear(rows_NK, weight_MK)
    return times * sum(2 * rows * one * other for one, other in shapes) / (time.perf_counter() - begin)


def _memory_bytes(lm: Qwen2ForCausalLM) -> float:
    """Bytes a second of a sum over as much memory as the weights."""
    memory = torch.ones(sum(parameter.numel() for parameter in lm.parameters()))
    memory.sum()
    begin = time.perf_counter()
    for _ in range(10):
        memory.sum()
    return 10 * 4 * len(memory) / (time.perf_counter() - begin)


def _prefill_flops(lm: Qwen2ForCausalLM, body: int, head: int) -> float:
    """Operations a second of the products with weights, of prompts that end after one token."""
    seconds = _engine_seconds(lm, PROMPTS, PROMPT, 1)
    return PROMPTS * (2.0 * PROMPT * body + 2.0 * head) / seconds


def _decode_steps(lm: Qwen2ForCausalLM) -> float:
    """Steps a second of one row."""
    return STEPS / _engine_seconds(lm, 1, 6, STEPS)


def _engine_seconds(lm: Qwen2ForCausalLM, rows: int, prompt: int, tokens: int) -> float:
    tensors = {name: parameter.detach() for name, parameter in lm.named_parameters()}
    generator = np.random.default_rng(0)
    prompts = [generator.integers(3, 300, prompt, dtype=np.int32) for _ in range(rows)]

    async def generate() -> float:
        made = EmbeddedEngine(lm.config, tensors, version=0, slots=rows, max_total_tokens=512, ends=EndTokens(), seed=0)
        await made.generate(prompts[0][:6], Sampling(2))
        begin = time.perf_counter()
        await asyncio.gather(*(made.generate(one, Sampling(tokens)) for one in prompts))
        seconds = time.perf_counter() - begin
        await made.stop()
        return seconds

    return asyncio.run(generate())


# --- update ------------------------------------------------------------------------------------------------------


def update(model: Path, rounds: int) -> Row:
    """CPU seconds of an update of `BATCH` rows with lognormal lengths, and of the bare loop on them, alternating."""
    overrides = [*OVERRIDES, *lengths.overrides("lognormal"), "algorithm.advantage={kind='gae', lam=1.0}"]
    config = configfile.load(bare_update.CONFIG, [*overrides, "algorithm.entropy=0.01"])

    async def measure() -> dict[str, list[float]]:
        made = await world.build(config, model, slots=BATCH, max_total_tokens=lengths.LONGEST + 8)
        rows = await world.next_batch(made, 0, 0)
        cut = [lengths.draw("lognormal", *divmod(place, SAMPLES)) for place in range(BATCH)]
        short = [_cut(row, length) for row, length in zip(rows, cut, strict=True)]
        batch = pad(Batch(version=0, min_version=0, trajectories=tuple(short)))
        bare, adamw = bare_update.loaded(model, config)
        found: dict[str, list[float]] = {"update": [], "bare": []}
        for _ in range(rounds + 1):
            found["update"].append(_cpu_s(partial(made.updater.update, batch)))
            found["bare"].append(_cpu_s(partial(bare_update.bare_update, bare, adamw, config, batch, share=True)))
        await made.engine.stop()
        return {name: some[1:] for name, some in found.items()}

    found = asyncio.run(measure())
    ratios = [one / other for one, other in zip(found["update"], found["bare"], strict=True)]
    seconds = {f"{name} CPU s": round(statistics.median(some), 2) for name, some in found.items()}
    return {**seconds, "shares": {"update": ratios}}


def _cut(row: Any, length: int) -> Any:
    import msgspec

    columns = {name: getattr(row, name)[: 4 * length] for name in ("tokens", "logprobs", "versions")}
    return msgspec.structs.replace(row, **columns, mask=row.mask[:length])


def _cpu_s(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


# --- system ------------------------------------------------------------------------------------------------------


def tokens(shape: str, first: int, last: int) -> float:
    """The mean sampled tokens of the batches from `first` to before `last`."""
    prompts = BATCH // SAMPLES
    drawn = (
        lengths.draw(shape, prompt, sample)
        for prompt, sample in product(range(first * prompts, last * prompts), range(SAMPLES))
    )
    return sum(drawn) / (last - first)


def ours(model: Path, shape: str) -> Row:
    """Run streamppo with the lengths of `shape`."""
    found = cost.measure(UPDATES, [*OVERRIDES, *lengths.overrides(shape), f"model.path={model}"], warm=WARM)
    return _rates(found["all"], found["wall"], tokens(shape, WARM, WARM + UPDATES), phases=found)


def theirs(model: Path, shape: str, threads: int, parts: int, python: str) -> Row:
    """Run TRL with the lengths of `shape`."""
    job = Job(
        config=str(bare_update.CONFIG),
        overrides=OVERRIDES,
        model=str(model),
        threads=threads,
        parts=parts,
        begin=time.time(),
        shape=shape,
        updates=100,
        stop_after=TRL_UPDATES,
        evaluate_every=1000,
        target=2.0,
    )
    found = beside_trl.trained(job, python)
    first = min(beside_trl.WARM, TRL_UPDATES - 1)
    return _rates(found["cpu_ms"], found["wall_ms"], tokens(shape, first, TRL_UPDATES))


def _rates(cpu_ms: float, wall_ms: float, tokens_: float, phases: Mapping[str, float] | None = None) -> Row:
    rates = {"tokens per CPU second": 1e3 * tokens_ / cpu_ms, "tokens per second": 1e3 * tokens_ / wall_ms}
    return {"tokens": tokens_, **{name: round(rate, 1) for name, rate in rates.items()}, "phases": phases}


# --- all of it ---------------------------------------------------------------------------------------------------


def judge(results: Mapping[str, Row]) -> list[Row]:
    """The verdict on every goal that was measured, by model."""
    verdicts: list[Row] = []
    for name in SHAPES:
        for part in ("engine", "update"):
            for goal, shares in results.get(f"{name} {part}", {}).get("shares", {}).items():
                verdicts.append({"model": name, **GOALS[goal].verdict(*shares)})
        for shape in CASES:
            mine = results.get(f"{name} {shape}, streamppo")
            others = [row for key, row in results.items() if key.startswith(f"{name} {shape}, TRL")]
            if mine and others:
                best = max(row["tokens per CPU second"] for row in others)
                verdicts.append({"model": name, **GOALS[shape].verdict(mine["tokens per CPU second"] / best)})
    return verdicts


def parts_of(options: argparse.Namespace, folder: Path) -> dict[str, Callable[[], Row]]:
    """All measurements by name, in their order."""
    found: dict[str, Callable[[], Row]] = {}
    for name in options.models:
        model = folder / name
        if "engine" in options.parts:
            found[f"{name} engine"] = partial(engine, model, options.rounds)
        if "update" in options.parts:
            found[f"{name} update"] = partial(update, model, options.rounds)
        for shape in CASES if "system" in options.parts else ():
            found[f"{name} {shape}, streamppo"] = partial(ours, model, shape)
            # Logits of a whole batch with a tail of lengths do not fit into memory.
            parts = 1 if shape == "equal" else 8
            for threads in (1, 2):
                way = f"{name} {shape}, TRL, {threads} threads, {parts} micro-batches"
                found[way] = partial(theirs, model, shape, threads, parts, options.python)
    return found


def main() -> None:
    """Measure what is missing, write it to `--json` after each part, and print all rows and verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument(
        "--parts", nargs="+", choices=("engine", "update", "system"), default=("engine", "update", "system")
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args()
    stored = json.loads(options.json.read_text()) if options.json.exists() else {"results": {}}
    results: dict[str, Row] = stored["results"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        world.alone(folder)
        for name in options.models:
            make(name, folder)
        for name, measure in parts_of(options, folder).items():
            if name not in results:
                results[name] = measure()
                print(
                    name,
                    json.dumps({key: value for key, value in results[name].items() if key != "phases"}),
                    flush=True,
                )
                content = {"machine": machine(), "shapes": SHAPES, "goals": judge(results), "results": results}
                options.json.write_text(json.dumps(content, indent=1) + "\n")
        torch.distributed.destroy_process_group()
    print(*(f"{verdict['model']:6} {told(verdict)}" for verdict in judge(results)), sep="\n")


if __name__ == "__main__":
    main()
