"""Whether SGLang holds what was pushed: some of its loaders skip a tensor that they do not know without a word."""

import asyncio
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.link import Link

SAMPLE = 12
"""Tensors that are looked at after a push."""
ROWS = 8
"""Rows of them that are read back, where SGLang gives values."""
PROBE = 16
"""Tokens of the text whose log-probs are compared where it gives neither values nor checksums."""


class Attestation:
    """Compares what SGLang holds after a push with what was pushed, by the best means that it has for this model.

    checksums   every sampled tensor that has changed has another checksum (SGLang's weights checker)
    values      the first rows of sampled tensors are those that were pushed
    log-probs   where a tensor has changed, so have the log-probs of a fixed text
    """

    def __init__(self, shapes: Mapping[str, torch.Size], vocabulary: int) -> None:
        names = list(shapes)
        self._names = names[:: max(1, len(names) // SAMPLE)]
        self._alike = [name for name in self._names if len(shapes[name]) == 1 and name.endswith("norm.weight")]
        self._text = [3 + n * 7 % max(1, vocabulary - 3) for n in range(PROBE)]
        self.means = ""
        self._seen: Any = None
        self._tensors: dict[str, Tensor] = {}

    async def begin(self, link: Link, tensors: Mapping[str, Tensor]) -> None:
        """`tensors` are the first that `link` was given: find the best means."""
        for self.means in ("checksums", "values", "log-probs"):
            try:
                self._seen = await self._look(link)
            except (ValueError, NotImplementedError):
                continue
            if self._seen is not None:
                break
        self._tensors = {}
        await self.check(link, tensors)

    async def check(self, link: Link, tensors: Mapping[str, Tensor]) -> None:
        """Raises `WeightsError` if SGLang does not hold `tensors`."""
        seen, changed = await self._look(link), self._changed(tensors)
        match self.means:
            case "values":
                wrong = [name for name, rows in seen.items() if rows != _rows(tensors[name])]
            case "checksums":
                wrong = wire.unmoved(self._seen, seen, changed)
            case _:
                wrong = changed if changed and seen == self._seen else []
        if wrong:
            raise WeightsError(f"SGLang has not taken {wrong[0]} (compared by {self.means}, {len(wrong)} are wrong)")
        self._seen = seen
        self._tensors = {name: tensors[name].clone() for name in self._names}

    def _changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name for name, before in self._tensors.items() if not torch.equal(before, tensors[name])]

    async def _look(self, link: Link) -> Any:
        match self.means:
            case "checksums":
                return wire.checksums(await link.call("weights_checker", action="checksum"))
            case "values":
                # With several ranks only what all of them hold alike is whole in one of them.
                names = self._names if link.ranks == 1 else self._alike
                calls = [link.call("get_weights_by_name", name=name, truncate_size=ROWS) for name in names]
                rows = dict(zip(names, await asyncio.gather(*calls), strict=True))
                return None if None in rows.values() else rows
            case _:
                sampling = {"max_new_tokens": 1, "temperature": 0.0}
                probe = {"input_ids": self._text, "return_logprob": True, "logprob_start_len": 0}
                answer = await link.call("generate", sampling_params=sampling, **probe)
                return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]


def _rows(tensor: Tensor) -> list[Any]:
    return tensor[:ROWS].float().tolist()
