"""Names our versions in SGLang, and reads the version of each token in its reports. Pure: does not import SGLang."""

from collections.abc import Mapping, Sequence
from uuid import uuid4

import numpy as np

from streamppo.errors import ModelError
from streamppo.rollout.sglang.link import Answer
from streamppo.types import Ints

WRITER = uuid4().hex[:8]
"""Identifies this process in version names: two runs that use one server would otherwise both push a "7"."""


def name(version: int) -> str:
    """Return the name of `version` in SGLang."""
    return f"{version}-{WRITER}"


def of_tokens(spans: Sequence[Mapping[str, Answer]], count: int) -> Ints:
    """Expand SGLang's spans [{version, start, end}] to a version for each token. Raises `ModelError` for gaps."""
    by_token = np.full(count, -1, np.int32)
    for span in spans:
        number, _, writer = str(span["version"]).partition("-")
        if writer != WRITER:
            raise ModelError(
                f"SGLang sampled with weights {span['version']!r}, which this actor never pushed: another program, or "
                "another run, updates the same server"
            )
        by_token[span["start"] : span["end"]] = int(number)
    if (by_token < 0).any():
        raise ModelError(f"SGLang does not say which weights sampled token {int(np.argmin(by_token))} of {count}")
    return by_token


def shift_boundaries(versions_N: Ints, oldest: int) -> Ints:
    """Shift every boundary between versions one token later; the first token gets `oldest`.

    SGLang prepares a step while the previous one runs. At a pause in place, one step is computed and not yet counted,
    and its tokens would belong to the next version. The first token of the next version then counts as older.
    """
    return np.concatenate([[np.int32(oldest)], versions_N[:-1]]).astype(np.int32)
