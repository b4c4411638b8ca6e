"""Head kernels on a GPU: against float64, against the head without kernels, and what their sizes cost.

python -m benchmarks.head_tuning OUT.json
"""

import json
import os
import sys
import time
from itertools import product

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch

from streamppo.algorithms import chunked_head as ours
from streamppo.algorithms.candidates import Candidates

BEGIN = time.monotonic()
ROWS: list[str] = []
FOUND: dict[str, object] = {}
SERVES = ours.has_kernels


def note(name: str, value: object) -> None:
    FOUND[name] = value
    ROWS.append(f"{name:46s} {value}")
    print(f"[{time.monotonic() - BEGIN:5.1f}s] {ROWS[-1]}", flush=True)


def guarded(work):
    try:
        work()
    except Exception as error:
        note(work.__name__, f"FAILED {type(error).__name__}: {' '.join(str(error).split())[:400]}")
    torch.cuda.empty_cache()


def fused(on: bool) -> None:
    ours.has_kernels = SERVES if on else (lambda *_: False)


def ms(work, repeats: int = 5) -> float:
    work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize()
    return round(sorted(a.elapsed_time(b) for a, b in zip(marks, marks[1:]))[repeats // 2], 2)


def peak(work) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**30, 2)


def distance(one, other) -> float:
    one, other = one.detach().double(), other.detach().double()
    return float((one - other).norm() / other.norm().clamp(min=1e-30))


def e(values) -> str:
    return " ".join(f"{value:.1e}" for value in values)


def sets_of(tokens: int, vocabulary: int, targets, most: int) -> Candidates:
    """Random sets with the target among them; every fourth token has the whole vocabulary."""
    g = torch.Generator().manual_seed(5)
    rows = []
    for n, target in enumerate(targets.tolist()):
        if n % 4 == 0:
            rows.append(torch.empty(0, dtype=torch.int32))
            continue
        some = torch.randint(vocabulary, (1 + (n * 37) % most,), generator=g)
        rows.append(torch.cat([some, torch.tensor([target])]).unique().int())
    counts = torch.tensor([len(row) for row in rows])
    return Candidates(torch.cat(rows), counts.cumsum(0) - counts, counts).to(torch.device("cuda"))


def small() -> None:
    """Every feature against float64, at the kernels and without."""
    N, D = 300, 256
    shapes = (ours.Shape(), ours.Shape(0.3, 0.0), ours.Shape(1.3, 5.0))
    worst: dict[str, list[float]] = {}
    for vocabulary, dtype, shape, with_bias, with_sets, temperature in product(
        (2048, 2001), (torch.float32, torch.bfloat16, torch.float16), shapes, (False, True), (False, True), (1.0, None)
    ):
        if with_bias != (temperature is None) or (vocabulary == 2001 and dtype != torch.bfloat16):
            continue
        g = torch.Generator("cuda").manual_seed(1)
        r = lambda *size: torch.randn(*size, device="cuda", generator=g)
        leaves = [r(N, D).to(dtype), (0.1 * (r(vocabulary, D) + r(D))).to(dtype)]
        leaves += [r(vocabulary).to(dtype)] if with_bias else []
        targets, up = torch.randint(vocabulary, (N,), device="cuda", generator=g), r(2, N)
        heat = 0.5 + torch.rand(N, device="cuda", generator=g) if temperature is None else 1.0
        sets = sets_of(N, vocabulary, targets, 60) if with_sets else None

        def scored(dtype=None):
            own = [(leaf if dtype is None else leaf.to(dtype)).detach().requires_grad_() for leaf in leaves]
            out = ours.chunked_logprobs_entropy(
                *own[:2],
                targets,
                temperature=heat,
                chunk=128,
                candidates=sets,
                bias_V=own[2] if with_bias else None,
                shape=shape,
            )
            return [*out, *torch.autograd.grad((torch.stack(out) * up).sum(), own)]

        fused(False)
        exact, today = scored(torch.float64), scored()
        fused(True)
        ours.PIECE = N * 512
        made, again = scored(), scored()
        assert all(torch.equal(a, b) for a, b in zip(made, again)), "not the same bits"
        for name, other in (("kernels", made), ("today", today)):
            key = f"{str(dtype)[6:]} {'sets ' if with_sets else ''}{'bias+T' if with_bias else ''} cap{shape.soft_cap:g} {name}"
            errors = [distance(a, b) for a, b in zip(other, exact)]
            old = worst.setdefault(key, [0.0] * 4)
            worst[key] = [max(a, b) if b == b else float("nan") for a, b in zip(old, errors[:4])]
    ours.PIECE = 2**27
    for key, errors in worst.items():
        note(f"f64 {key}", e(errors))
    ratio = max(
        max(a / max(b, 1e-7) for a, b in zip(worst[key], worst[key.replace("kernels", "today")]))
        for key in worst
        if "kernels" in key
    )
    note("worst distance kernels / today", round(ratio, 2))


TOKENS, WIDTH, VOCABULARY = 8192, 896, 151_936


def big() -> None:
    torch.manual_seed(0)
    global hidden, weight, targets, up
    hidden = torch.randn(TOKENS, WIDTH, device="cuda").bfloat16().requires_grad_()
    weight = (
        (0.02 * (torch.randn(VOCABULARY, WIDTH, device="cuda") + torch.randn(WIDTH, device="cuda")))
        .bfloat16()
        .requires_grad_()
    )
    targets, up = torch.randint(VOCABULARY, (TOKENS,), device="cuda"), torch.randn(2, TOKENS, device="cuda") / TOKENS
    names = ("logprobs", "entropy", "grad_hidden", "grad_weight")
    fused(False)
    wide = ours.has_wide_products
    ours.has_wide_products = lambda *_: False
    exact = step()
    ours.has_wide_products = wide
    today = step()
    note("distance to float32: " + " ".join(names) + " today", e(map(distance, today, exact)))
    fused(True)
    made, again = step(), step()
    note("distance to float32 kernels", e(map(distance, made, exact)))
    note("same bits twice", all(torch.equal(a, b) for a, b in zip(made, again)))


def step(grads: bool = True, temperature: float = 1.0, **options):
    scores = ours.chunked_logprobs_entropy(hidden, weight, targets, chunk=4096, temperature=temperature, **options)
    if not grads:
        return list(scores)
    return [*scores, *torch.autograd.grad((torch.stack(scores) * up).sum(), (hidden, weight))]


def forward():
    with torch.no_grad():
        return ours.chunked_logprobs_entropy(hidden, weight, targets, chunk=4096)


def times() -> None:
    from streamppo.algorithms import head_kernels as kernels

    for on in (False, True):
        fused(on)
        name = "kernels" if on else "today"
        note(f"ms step {name}", ms(step))
        note(f"ms forward {name}", ms(forward))
        note(f"ms step T=0.7 {name}", ms(lambda: step(temperature=0.7)))
        note(f"GiB step {name}", peak(step))
    for block, warps in ((1024, 4), (4096, 8), (4096, 16), (8192, 16)):
        kernels.BLOCK, kernels.WARPS = block, warps
        note(f"ms step BLOCK {block} WARPS {warps}, forward", (ms(step), ms(forward)))
    kernels.BLOCK, kernels.WARPS = 2048, 8
    for piece in (2**25, 2**26, 2**28):
        ours.PIECE = piece
        note(f"ms step PIECE 2^{piece.bit_length() - 1}, GiB", (ms(step), peak(step)))
    ours.PIECE = 2**27


def sets() -> None:
    for most in (50, 2000):
        options = {"candidates": sets_of(TOKENS, VOCABULARY, targets.cpu(), most)}
        for on in (False, True):
            fused(on)
            note(f"ms step candidates to {most} {'kernels' if on else 'today'}", ms(lambda: step(**options), 3))


def profile() -> None:
    from torch.profiler import ProfilerActivity, profile

    fused(True)
    step()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as made:
        step()
        torch.cuda.synchronize()
    events = [one for one in made.key_averages() if one.self_device_time_total > 0]
    for one in sorted(events, key=lambda one: -one.self_device_time_total)[:14]:
        note(f"  {one.key[:60]}", f"{one.self_device_time_total / 1e3:.2f} ms x{one.count}")


def products() -> None:
    """The products alone, and ways to add them."""
    P = 15_232
    gradient = torch.randn(2 * TOKENS, P, device="cuda").bfloat16()
    total = torch.zeros(2 * TOKENS, WIDTH, device="cuda")
    piece, right = weight.detach()[:P], hidden.detach().repeat(2, 1)
    wide = ours.WIDE.multiply
    logits = torch.empty(TOKENS, P, device="cuda")
    note("ms piece: logits", ms(lambda: wide(hidden.detach(), piece.T)))
    note("ms piece: hidden", ms(lambda: wide(gradient, piece)))
    note("ms piece: weight", ms(lambda: wide(gradient.T, right)))
    note("ms piece: hidden by halves", ms(lambda: (wide(gradient[:TOKENS], piece), wide(gradient[TOKENS:], piece))))
    note("ms piece: hidden added", ms(lambda: total.add_(wide(gradient, piece))))
    note("ms copy of a piece's logits", ms(lambda: logits.copy_(logits)))

    def addmm():
        note("ms piece: hidden addmm", ms(lambda: torch.addmm(total, gradient, piece, out_dtype=torch.float32)))

    def addmm_in_place():
        note(
            "ms piece: hidden addmm out",
            ms(lambda: torch.addmm(total, gradient, piece, out_dtype=torch.float32, out=total)),
        )

    guarded(addmm)
    guarded(addmm_in_place)


def main() -> None:
    import triton

    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    note("device", f"{torch.cuda.get_device_name()} torch {torch.__version__} triton {triton.__version__}")
    note("kernels serve", SERVES(torch.device("cuda", 0), torch.bfloat16))
    if SERVES(torch.device("cuda", 0), torch.bfloat16):
        for work in (small, big, times, profile, products, sets):
            guarded(work)
    open(sys.argv[1], "w").write(json.dumps(FOUND, indent=1))
    print("\n".join(["", *(row for row in ROWS if not row.startswith("f64"))]))


if __name__ == "__main__":
    main()
