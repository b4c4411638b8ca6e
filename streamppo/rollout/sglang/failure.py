"""Finds the reason of SGLang's failure in the output of its processes."""

import re

MEMORY = (
    "the model does not fit into the memory that SGLang may use: a larger rollout.engine.mem_fraction_static, more "
    "rollout.gpus, or a smaller model"
)
KNOWN = (
    (r"Not enough memory|out of memory|OutOfMemoryError|mem_fraction_static|mem-fraction-static", MEMORY),
    (r"[Aa]ddress already in use|port \d+ is (already in use|not available)", "a port that it needs is taken"),
    (r"No CUDA GPUs are available|no NVIDIA driver|libcuda", "there is no GPU: rollout.gpus must be 0 on a CPU"),
    (r"No module named", "a package that SGLang needs is not installed"),
)
"""Patterns in SGLang's errors, and explanations for the user."""


def reason(output: str) -> str:
    """Explain the last error in the output of SGLang's processes in one sentence; empty if there is none."""
    errors = re.findall(r"^(?:\[[^\]]*\] )?((?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*)$", output, re.MULTILINE)
    if not errors:
        return ""
    last = errors[-1].strip()
    for pattern, meaning in KNOWN:
        if re.search(pattern, last):
            return f"{meaning} ({last[:200]})"
    return last[:400]
