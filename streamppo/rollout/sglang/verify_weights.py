"""Verifies SGLang's weights against the push, because its loaders skip unknown tensors without an error.

    begin    fill every tensor of SGLang with random values -> load -> check that each was written
    swap     load -> check that each tensor changed since the last load, unless its pushed parts are unchanged

On a CPU SGLang's checksum is a hash that can be computed here too: if a tensor's first one equals the expected one,
every later checksum must. On a GPU the checksum only shows that a tensor has changed.
"""

# SGLang is not installed where this project is type-checked.
# pyright: reportMissingImports=false

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.link import Link

SMALLEST = 8
"""This many of the smallest tensors are hashed first, to see whether SGLang's checksum can be computed here."""
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
Tensors = Mapping[str, Tensor]


class Attestation:
    """Verifies each push by the checksums of SGLang's tensors before and after a load.

    Of a multimodal model with `encoders`, only the text model's tensors are checked. `exact` are SGLang's names of the
    tensors whose checksum must equal the push's.
    """

    def __init__(self, link: Link, encoders: Sequence[str] = ()) -> None:
        self.exact: Collection[str] = ()
        self._link, self._encoders = link, encoders
        skipped = [*(f"{name}." for name in encoders), POSITIONS]
        self._fields: dict[str, object] = {"skip_tensor_list": skipped} if encoders else {}
        self._checksums: Mapping[str, str] = {}
        self._tensors: Tensors | None = None

    async def begin(self) -> None:
        """Fill every tensor with random values before the first load. Raises `WeightsError` if the checker fails."""
        try:
            await self._link.call("weights_checker", action="reset_tensors", **self._fields)
            self._checksums = await self._read_checksums()
        except ValueError as error:
            raise WeightsError(f"SGLang's weights checker, which verifies each load, fails: {error}") from error

    async def check(self, tensors: Tensors) -> None:
        """Raise `WeightsError`, with a tensor's name, if SGLang does not hold the just loaded `tensors`."""
        file_names = {self._bare(name): name for name in tensors}
        bare_tensors = {bare: tensors[name] for bare, name in file_names.items()}
        if wrong := await self._wrong(self._tensors, bare_tensors):
            name = file_names.get(wrong[0], wrong[0])
            raise WeightsError(f"SGLang has not loaded {name} (by its checksum; {len(wrong)} tensors are wrong)")
        self._tensors = bare_tensors

    async def _wrong(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        previous, self._checksums = self._checksums, await self._read_checksums()
        unchanged_keys = {key for key, checksum in self._checksums.items() if checksum == previous.get(key)}
        if self._link.ranks == 1 and before is None:
            self.exact = await asyncio.to_thread(self._known, tensors)
        elif self.exact and (wrong := set(self.exact) - await asyncio.to_thread(self._equal, self.exact, tensors)):
            return [name for name in tensors if held_name(name) in wrong]
        return await asyncio.to_thread(_unchanged_tensors, unchanged_keys, self._checksums, before, tensors)

    async def _read_checksums(self) -> Mapping[str, str]:
        """Return the checksum of every tensor, by rank/name."""
        answer = wire.checksums(await self._link.call("weights_checker", action="checksum", **self._fields))
        return {f"{key.partition('/')[0]}/{self._bare(_tensor_name(key))}": value for key, value in answer.items()}

    def _bare(self, name: str) -> str:
        """Drop the names of modules around a multimodal model's layers, which differ between SGLang and the files.

        Example: SGLang's model.layers.0.mlp.down_proj.weight is model.language_model.layers.0.mlp.down_proj.weight in
        the files of a Qwen3-VL. Names of other models are returned unchanged.
        """
        return ".".join(part for part in name.split(".") if part not in TEXT_MODULES) if self._encoders else name

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
