"""Memory of log-probs and entropies at a large vocabulary: chunked as in the learner, compared with the naive form.

    python benchmarks/cost/head_memory.py --json out.json

Each form runs forward and backward in a separate process; reported is the growth of its peak resident memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--form", choices=["chunked", "naive"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.form:
        print(json.dumps(_measure(options.form, options.tokens, options.width, options.vocabulary)))
        return
    rows = {}
    for form in ("chunked", "naive"):
        done = subprocess.run([sys.executable, *sys.argv, "--form", form], capture_output=True, text=True, check=True)
        rows[form] = json.loads(done.stdout)
    from benchmarks.lib.runs import machine

    shape = {"tokens": options.tokens, "width": options.width, "vocabulary": options.vocabulary}
    ratio = rows["naive"]["peak_mib"] / rows["chunked"]["peak_mib"]
    result = {"machine": machine(), **shape, **rows, "naive_over_chunked": round(ratio, 1)}
    print(json.dumps(result, indent=1))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


def _measure(form: str, tokens: int, width: int, vocabulary: int) -> dict[str, float]:
    import torch

    from streamppo.algorithms.chunked_head import chunked_logprobs_entropy
    from streamppo.learner.model.policy import HEAD_CHUNK

    torch.manual_seed(0)
    hidden_ND = torch.randn(tokens, width, requires_grad=True)
    weight_VD = torch.randn(vocabulary, width).mul_(0.02).requires_grad_()
    targets_N = torch.randint(vocabulary, (tokens,))
    weight_VD.grad = torch.zeros_like(weight_VD)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    if form == "chunked":
        logprobs_N, entropy_N = chunked_logprobs_entropy(hidden_ND, weight_VD, targets_N, chunk=HEAD_CHUNK)
    else:
        logp_NV = (hidden_ND @ weight_VD.T).log_softmax(-1)
        logprobs_N = logp_NV.gather(-1, targets_N[:, None]).squeeze(-1)
        entropy_N = -(logp_NV.exp() * logp_NV).sum(-1)
    (logprobs_N.sum() + entropy_N.sum()).backward()
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {"peak_mib": round(peak / 1024), "seconds": round(seconds, 2)}


if __name__ == "__main__":
    main()
