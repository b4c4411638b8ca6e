"""Compares what SGLang holds with what was pushed: its loaders skip a tensor that they do not know without an error.

    begin    every tensor that SGLang holds gets random values -> load -> check: each of them was written
    swap     before -> load -> check: each of them moved, unless what it is made of is the same as before

On a CPU the checksum is a hash that is known here too. So each tensor whose first one is that of what was pushed, laid
out as SGLang does, has to be exactly that after every swap.

An SGLang without checksums is compared by the values of every tensor, or by log-probs: that cannot show that an expert
was skipped, and a mixture of experts is refused.
"""

# SGLang is not part of what this project is checked with.
# pyright: reportMissingImports=false

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import layout, wire
from streamppo.rollout.sglang.client import Answer, Link

SMALL = 1 << 20
"""Elements up to which all values of a model are read back where SGLang has no weights checker; they come as text."""
ROWS = 8
"""Rows of every tensor of a larger model that are read back."""
PROBE = 16
"""Number of tokens in the text whose log-probs are compared if SGLang gives no values either."""
Means = Literal["checksums", "values", "log-probs"]
Tensors = Mapping[str, Tensor]


class WeightProbe(Protocol):
    """A means to see what SGLang holds."""

    means: Means
    exact: Collection[str]

    async def record_state(self) -> None:
        """Remember what SGLang holds, ahead of a load."""
        ...

    async def mismatches(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        """Name what is not as a load of `tensors` leaves it; the load before it was of `before`, if there was one."""
        ...


class Attestation:
    """Compares SGLang with each push, by the best means that it has for this model; `begin` makes it.

    checksums    each tensor that SGLang holds has another checksum than before, or the very one that it should have
    values       every tensor, or the first rows of every one, is that which was pushed
    log-probs    if a tensor has changed, so have the log-probs of a fixed text
    """

    def __init__(self, witness: WeightProbe) -> None:
        self._witness = witness
        self._tensors: Tensors | None = None

    @property
    def means(self) -> Means:
        """The means of the last comparison."""
        return self._witness.means

    @property
    def exact(self) -> Collection[str]:
        """SGLang's names of the tensors whose bytes are compared with those of the push."""
        return self._witness.exact

    async def record_state(self) -> None:
        """Look at SGLang ahead of a load."""
        await self._witness.record_state()

    async def check(self, tensors: Tensors) -> None:
        """Raise `WeightsError`, with a name, if SGLang does not hold `tensors`, which it has just loaded."""
        if wrong := await self._witness.mismatches(self._tensors, tensors):
            raise WeightsError(f"SGLang has not taken {wrong[0]} (compared by {self.means}, {len(wrong)} are wrong)")
        self._tensors = tensors


async def begin(link: Link, tensors: Tensors, vocabulary: int) -> Attestation:
    """Find the best means for an SGLang that is about to get its first `tensors`; until then it holds random values.

    Raises `WeightsError` for a mixture of experts in an SGLang without checksums, as on a CPU.
    """
    witness = await _by_checksums(link)
    if witness is None:
        if expert := next((name for name in tensors if ".experts." in name), None):
            raise WeightsError(
                "this SGLang gives no checksums (on a CPU it has none), and without them nobody can see "
                f"whether it has taken {expert}"
            )
        witness = Values(link, tensors, [3 + n * 7 % max(1, vocabulary - 3) for n in range(PROBE)])
    return Attestation(witness)


# --- by SGLang's weights checker -----------------------------------------------------------------------------


class Checksums:
    """Tensors that have moved have another checksum than in `seen`, by rank/name."""

    means: Means = "checksums"

    def __init__(self, link: Link, seen: Mapping[str, str]) -> None:
        self._link, self._seen = link, seen
        self.exact: Collection[str] = ()

    async def record_state(self) -> None:
        """See `Witness.before`: the checksums after the last load are those before the next."""

    async def mismatches(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        """See `Witness.wrong`."""
        seen, self._seen = self._seen, wire.checksums(await self._link.call("weights_checker", action="checksum"))
        unmoved = {key for key, checksum in self._seen.items() if checksum == seen.get(key)}
        if self._link.ranks == 1:
            known = await asyncio.to_thread(_expected_checksums, tensors)
            same = {name for name, checksum in known.items() if self._seen.get(f"0/{name}") == checksum}
            if before is None:
                self.exact = same
            elif other := set(self.exact) - same:
                return [name for name in tensors if layout.held_name(name) in other]
        return await asyncio.to_thread(_unmoved_tensors, unmoved, self._seen, before, tensors)


async def _by_checksums(link: Link) -> WeightProbe | None:
    try:
        await link.call("weights_checker", action="checksum")
        await link.call("weights_checker", action="reset_tensors")
        return Checksums(link, wire.checksums(await link.call("weights_checker", action="checksum")))
    except (ValueError, NotImplementedError):
        return None


def _expected_checksums(tensors: Tensors) -> dict[str, str]:
    """The checksum that an SGLang on a CPU has of each of its tensors, if it lays them out as `layout.held` does."""
    try:
        from sglang.srt.managers.mm_utils import tensor_hash
    except ImportError:
        return {}
    return {name: f"{tensor_hash(one):016x}" for name, one in layout.tensors_of_rank(tensors).items()}


def _unmoved_tensors(
    unmoved: set[str], held: "set[str] | Mapping[str, str]", before: Tensors | None, tensors: Tensors
) -> list[str]:
    """Name the tensors that a load of `tensors` should have moved."""
    names = sorted({_name(key) for key in unmoved})
    if before is None:
        return names
    # A changed tensor may be the same in the share of one rank, never in all of them.
    moved = {_name(key) for key in held if key not in unmoved}
    still = set(names) - moved
    suspects = [name for name in tensors if layout.held_name(name) in still]
    return [name for name in suspects if not _equal(before[name], tensors[name])]


def _name(key: str) -> str:
    return key.partition("/")[2]


def _equal(one: Tensor, other: Tensor) -> bool:
    """Compare bytes, so that a NaN equals itself."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


# --- by values -----------------------------------------------------------------------------------------------


class Values:
    """Every tensor has the values that were pushed; without values, `text` has other log-probs than before."""

    def __init__(self, link: Link, tensors: Tensors, text: Sequence[int]) -> None:
        self.means: Means = "values"
        self.exact: Collection[str] = ()
        self._link, self._text = link, text
        self._names = list(tensors)
        is_small = sum(tensor.numel() for tensor in tensors.values()) <= SMALL
        self._rows = max(len(tensor) for tensor in tensors.values()) if is_small else ROWS
        if link.ranks > 1:
            # Only the tensors that all ranks hold alike are whole in one of them.
            self._names = [name for name in self._names if tensors[name].dim() == 1 and name.endswith("norm.weight")]
        self._seen: Sequence[float] = ()

    async def record_state(self) -> None:
        """See `Witness.before`: the log-probs after the last load are those before the next."""

    async def mismatches(self, before: Tensors | None, tensors: Tensors) -> Sequence[str]:
        """See `Witness.wrong`."""
        if self.means == "values":
            rows = await self._read()
            if rows and None not in rows.values():
                return [name for name, found in rows.items() if found != tensors[name][: self._rows].float().tolist()]
            self.means = "log-probs"
        seen, self._seen = self._seen, await self._logprobs()
        if before is None or seen != self._seen:
            return []
        return [name for name in tensors if not _equal(before[name], tensors[name])]

    async def _read(self) -> Mapping[str, Answer]:
        """Read the first rows of every tensor; None for a name that SGLang does not know."""
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
