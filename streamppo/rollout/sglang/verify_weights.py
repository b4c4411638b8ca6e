"""Verifies SGLang's weights against the push, because its loaders skip unknown tensors without an error.

    begin    fill every tensor of SGLang with random values -> load -> check that each was written
    swap     load -> check that each tensor changed since the last load, unless its pushed parts are unchanged

On a CPU SGLang's checksum is a hash that can be computed here too: if a tensor's first one equals the expected one,
every later checksum must. On a GPU the checksum only shows that a tensor has changed.

Without checksums, values are compared, or log-probs if SGLang returns no values; a mixture of experts is then refused.
"""

# SGLang is not installed where this project is type-checked.
# pyright: reportMissingImports=false

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.link import Answer, Link

SMALL = 1 << 20
"""Without a weights checker, all values of a model with at most this many elements are read back, as text."""
ROWS = 8
SMALLEST = 8
"""This many of the smallest tensors are hashed first, to see whether SGLang's checksum can be computed here."""
PROBE = 16
"""Number of tokens in the text whose log-probs are compared if SGLang returns no values either."""
FUSED = (
    (r"\.(q|k|v)_proj\.", ".qkv_proj."),
    (r"\.experts\.\d+\.(gate_proj|up_proj|w1|w3)\.", ".experts.w13_"),
    (r"\.experts\.\d+\.(down_proj|w2)\.", ".experts.w2_"),
    (r"\.(gate|up)_proj\.", ".gate_up_proj."),
)
"""Patterns in the names of tensors that SGLang fuses, and the replacements that give the fused tensor's name."""
ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3")
"""The order in which parts are concatenated, along dimension 0, to a fused tensor."""
POSITIONS = "rotary_emb"
"""SGLang's modules with tables of positions, which SGLang computes and does not load."""
TEXT_MODULES = ("language_model", "model")
"""Modules of a multimodal model that contain its text model, in SGLang or in the model's files."""
Method = Literal["checksums", "values", "log-probs"]
Tensors = Mapping[str, Tensor]


class WeightProbe(Protocol):
    """A method of verifying SGLang's weights."""

    method: Method
    exact: Collection[str]

    async def mismatches(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        """Return the names of tensors that are wrong after `before` and then `tensors` were loaded."""
        ...


class Attestation:
    """Verifies each push by the best method that SGLang has for this model; made by `begin`.

    checksums    each tensor of SGLang has a new checksum, or exactly the expected one
    values       every tensor, or the first rows of every tensor, equals the pushed one
    log-probs    if a tensor has changed, the log-probs of a fixed text have changed too
    """

    def __init__(self, probe: WeightProbe) -> None:
        self._probe = probe
        self._tensors: Tensors | None = None

    @property
    def method(self) -> Method:
        """The method of the last comparison."""
        return self._probe.method

    @property
    def exact(self) -> Collection[str]:
        """SGLang's names of the tensors whose checksum must equal the push's."""
        return self._probe.exact

    async def check(self, tensors: Tensors) -> None:
        """Raise `WeightsError`, with a tensor's name, if SGLang does not hold the just loaded `tensors`."""
        if wrong := await self._probe.mismatches(self._tensors, tensors):
            raise WeightsError(f"SGLang has not loaded {wrong[0]} (compared by {self.method}, {len(wrong)} are wrong)")
        self._tensors = tensors


async def begin(link: Link, tensors: Tensors, vocabulary: int, encoders: Sequence[str] = ()) -> Attestation:
    """Choose the best method before an SGLang with random values first loads `tensors`. Raises `WeightsError`."""
    probe = await _by_checksums(CheckedTensors(link, encoders))
    if probe is None:
        if expert := next((name for name in tensors if ".experts." in name), None):
            raise WeightsError(f"this SGLang gives no checksums, without which a load of {expert} cannot be verified")
        probe = Values(link, tensors, [3 + n * 7 % max(1, vocabulary - 3) for n in range(PROBE)])
    return Attestation(probe)


class CheckedTensors:
    """The checked tensors of SGLang: all, or, of a multimodal model with `encoders`, those of its text model."""

    def __init__(self, link: Link, encoders: Sequence[str]) -> None:
        self.link, self._encoders = link, encoders
        skipped = [*(f"{name}." for name in encoders), POSITIONS]
        self._fields: dict[str, object] = {"skip_tensor_list": skipped} if encoders else {}

    async def reset(self) -> None:
        """Fill every tensor with random values."""
        await self.link.call("weights_checker", action="reset_tensors", **self._fields)

    async def checksums(self) -> Mapping[str, str]:
        """Return the checksum of every tensor, by rank/name."""
        answer = wire.checksums(await self.link.call("weights_checker", action="checksum", **self._fields))
        return {f"{key.partition('/')[0]}/{self.bare(_tensor_name(key))}": value for key, value in answer.items()}

    def bare(self, name: str) -> str:
        """Drop the names of modules around a multimodal model's layers, which differ between SGLang and the files.

        Example: SGLang's model.layers.0.mlp.down_proj.weight is model.language_model.layers.0.mlp.down_proj.weight in
        the files of a Qwen3-VL. Names of other models are returned unchanged.
        """
        return ".".join(part for part in name.split(".") if part not in TEXT_MODULES) if self._encoders else name


class Checksums:
    """Compares checksums of the tensors `held` before and after a load; before the first load they are `previous`."""

    method: Method = "checksums"

    def __init__(self, held: CheckedTensors, previous: Mapping[str, str]) -> None:
        self._held, self._checksums = held, previous
        self.exact: Collection[str] = ()

    async def mismatches(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        file_names = {self._held.bare(name): name for name in tensors}
        tensors = {bare: tensors[name] for bare, name in file_names.items()}
        before = None if before is None else {bare: before[name] for bare, name in file_names.items()}
        wrong = await self._wrong(before, tensors)
        return [file_names.get(name, name) for name in wrong]

    async def _wrong(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        previous, self._checksums = self._checksums, await self._held.checksums()
        unchanged_keys = {key for key, checksum in self._checksums.items() if checksum == previous.get(key)}
        if self._held.link.ranks == 1 and before is None:
            self.exact = await asyncio.to_thread(self._known, tensors)
        elif self.exact and (wrong := set(self.exact) - await asyncio.to_thread(self._equal, self.exact, tensors)):
            return [name for name in tensors if held_name(name) in wrong]
        return await asyncio.to_thread(_unchanged_tensors, unchanged_keys, self._checksums, before, tensors)

    def _known(self, tensors: Tensors) -> set[str]:
        """Return SGLang's names of tensors with the pushed tensors' checksums; empty if the smallest differ."""
        sizes: dict[str, int] = {}
        for name, tensor in tensors.items():
            held = held_name(name)
            sizes[held] = sizes.get(held, 0) + tensor.nbytes
        smallest = sorted(sizes, key=lambda name: sizes[name])[:SMALLEST]
        return self._equal(sizes, tensors) if self._equal(smallest, tensors) else set()

    def _equal(self, held: Collection[str], tensors: Tensors) -> set[str]:
        mapped = {name: tensor for name, tensor in tensors.items() if held_name(name) in held}
        known = _expected_checksums(mapped) if mapped else {}
        return {name for name, checksum in known.items() if self._checksums.get(f"0/{name}") == checksum}


async def _by_checksums(held: CheckedTensors) -> WeightProbe | None:
    try:
        await held.checksums()
        await held.reset()
        return Checksums(held, await held.checksums())
    except (ValueError, NotImplementedError):
        return None


def _expected_checksums(tensors: Tensors) -> dict[str, str]:
    try:
        from sglang.srt.managers.mm_utils import tensor_hash
    except ImportError:
        return {}
    return {name: f"{tensor_hash(tensor):016x}" for name, tensor in tensors_of_rank(tensors)}


def _unchanged_tensors(
    unchanged_keys: set[str], held: "set[str] | Mapping[str, str]", before: Tensors | None, tensors: Tensors
) -> list[str]:
    names = sorted({_tensor_name(key) for key in unchanged_keys})
    if before is None:
        return names
    # A changed tensor may be unchanged in one rank's shard, but not in all shards.
    changed = {_tensor_name(key) for key in held if key not in unchanged_keys}
    unchanged = set(names) - changed
    suspects = [name for name in tensors if held_name(name) in unchanged]
    return [name for name in suspects if not _equal(before[name], tensors[name])]


def _tensor_name(key: str) -> str:
    return key.partition("/")[2]


def _equal(first: Tensor, second: Tensor) -> bool:
    """Compare as bytes, so that a NaN equals itself."""
    return torch.equal(first.reshape(-1).view(torch.uint8), second.reshape(-1).view(torch.uint8))


class Values:
    """Compares the values of SGLang's tensors with the pushed values, or, without values, log-probs of `text`."""

    def __init__(self, link: Link, tensors: Tensors, text: Sequence[int]) -> None:
        self.method: Method = "values"
        self.exact: Collection[str] = ()
        self._link, self._text = link, text
        self._names = list(tensors)
        is_small = sum(tensor.numel() for tensor in tensors.values()) <= SMALL
        self._rows = max(len(tensor) for tensor in tensors.values()) if is_small else ROWS
        if link.ranks > 1:
            # Only tensors that are replicated on all ranks can be read whole from one rank.
            self._names = [name for name in self._names if tensors[name].dim() == 1 and name.endswith("norm.weight")]
        self._logprobs_before: Sequence[float] = ()

    async def mismatches(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        if self.method == "values":
            rows = await self._read()
            if rows and None not in rows.values():
                return [name for name, values in rows.items() if values != tensors[name][: self._rows].float().tolist()]
            self.method = "log-probs"
        previous, self._logprobs_before = self._logprobs_before, await self._logprobs()
        if before is None or previous != self._logprobs_before:
            return []
        return [name for name in tensors if not _equal(before[name], tensors[name])]

    async def _read(self) -> Mapping[str, Answer]:
        try:
            calls = [
                self._link.call("get_weights_by_name", name=name, truncate_size=self._rows) for name in self._names
            ]
            return dict(zip(self._names, await asyncio.gather(*calls), strict=True))
        except (ValueError, NotImplementedError):
            return {}

    async def _logprobs(self) -> Sequence[float]:
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        probe = {"input_ids": self._text, "return_logprob": True, "logprob_start_len": 0}
        answer = await self._link.call("generate", sampling_params=sampling, **probe)
        return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def held_name(name: str) -> str:
    """Return SGLang's name of the tensor that contains the model file's tensor `name`."""
    for part, fused in FUSED:
        name = re.sub(part, fused, name)
    return name


def tensors_of_rank(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in the layout of a single SGLang rank; experts are stacked, [experts, rows, columns]."""
    parts: dict[str, dict[int, dict[int, Tensor]]] = {}
    for name, tensor in tensors.items():
        expert = re.search(r"\.experts\.(\d+)\.", name)
        position = next((at for at, part in enumerate(ORDER) if f".{part}." in name), 0)
        parts.setdefault(held_name(name), {}).setdefault(int(expert[1]) if expert else -1, {})[position] = tensor
    for name, blocks in parts.items():
        joined = [_joined([part for _, part in sorted(block.items())]) for _, block in sorted(blocks.items())]
        yield name, joined[0] if -1 in blocks else torch.stack(joined)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
