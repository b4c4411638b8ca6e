"""Compares what SGLang holds with what was pushed: some of its loaders skip a tensor without an error."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from streamppo.errors import WeightsError
from streamppo.rollout.sglang import wire
from streamppo.rollout.sglang.link import Answer, Link

SAMPLE = 12
"""Number of tensors that are compared after a push."""
ROWS = 8
"""Number of their rows that are read back, if SGLang gives values."""
PROBE = 16
"""Number of tokens in the text whose log-probs are compared if SGLang gives neither values nor checksums."""
Means = Literal["checksums", "values", "log-probs"]


class Sample(NamedTuple):
    """The compared part of a model: some tensors, those of them that all ranks hold alike, and a text."""

    names: Sequence[str]
    alike: Sequence[str]
    text: Sequence[int]


class Attestation:
    """Compares SGLang with each push, by the best means that it has for this model; `begin` makes it.

    checksums   every sampled tensor that has changed has another checksum (SGLang's weights checker)
    values      the first rows of sampled tensors are those that were pushed
    log-probs   if a tensor has changed, so have the log-probs of a fixed text
    """

    def __init__(self, link: Link, sample: Sample, means: Means, seen: Answer) -> None:
        self.means: Means = means
        self._link, self._sample, self._seen = link, sample, seen
        self._tensors: dict[str, Tensor] = {}

    async def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise `WeightsError` if SGLang does not hold `tensors`."""
        seen, changed = await _look(self._link, self._sample, self.means), self._changed(tensors)
        match self.means:
            case "values":
                wrong = [name for name, rows in seen.items() if rows != tensors[name][:ROWS].float().tolist()]
            case "checksums":
                wrong = wire.unmoved(self._seen, seen, changed)
            case "log-probs":
                wrong = changed if changed and seen == self._seen else []
        if wrong:
            raise WeightsError(f"SGLang has not taken {wrong[0]} (compared by {self.means}, {len(wrong)} are wrong)")
        self._seen = seen
        self._tensors = {name: tensors[name].clone() for name in self._sample.names}

    def _changed(self, tensors: Mapping[str, Tensor]) -> list[str]:
        return [name for name, before in self._tensors.items() if not torch.equal(before, tensors[name])]


async def begin(link: Link, tensors: Mapping[str, Tensor], vocabulary: int) -> Attestation:
    """Find the best means for an SGLang that was given its first `tensors`, and check that it holds them.

    Raises `WeightsError` if it does not.
    """
    names = list(tensors)[:: max(1, len(tensors) // SAMPLE)]
    alike = [name for name in names if tensors[name].dim() == 1 and name.endswith("norm.weight")]
    sample = Sample(names, alike, [3 + n * 7 % max(1, vocabulary - 3) for n in range(PROBE)])
    attestation = await _by_best_means(link, sample)
    await attestation.check(tensors)
    return attestation


async def _by_best_means(link: Link, sample: Sample) -> Attestation:
    tries: tuple[Means, ...] = ("checksums", "values")
    for means in tries:
        try:
            seen = await _look(link, sample, means)
        except (ValueError, NotImplementedError):
            continue
        if seen is not None:
            return Attestation(link, sample, means, seen)
    return Attestation(link, sample, "log-probs", await _look(link, sample, "log-probs"))


async def _look(link: Link, sample: Sample, means: Means) -> Answer:
    """Read what SGLang holds, by `means`; None if it has no values to give."""
    match means:
        case "checksums":
            return wire.checksums(await link.call("weights_checker", action="checksum"))
        case "values":
            # With several ranks, only the tensors that all of them hold alike are whole in one of them.
            names = sample.names if link.ranks == 1 else sample.alike
            calls = [link.call("get_weights_by_name", name=name, truncate_size=ROWS) for name in names]
            rows = dict(zip(names, await asyncio.gather(*calls), strict=True))
            return None if None in rows.values() else rows
        case "log-probs":
            sampling = {"max_new_tokens": 1, "temperature": 0.0}
            probe = {"input_ids": sample.text, "return_logprob": True, "logprob_start_len": 0}
            answer = await link.call("generate", sampling_params=sampling, **probe)
            return [entry[0] for entry in answer["meta_info"]["input_token_logprobs"][1:]]
