"""Reads batches in a run's archive for the page: a list of trajectories, and the tokens of one trajectory."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from streamppo.commands.look import tree
from streamppo.commands.look.rows import RunRows
from streamppo.config.sections import Config, model_path
from streamppo.driver import report
from streamppo.driver.report import Decode
from streamppo.errors import JournalError
from streamppo.queue.store import archive
from streamppo.telemetry.report import plot
from streamppo.terminal import bounded
from streamppo.types import Batch, Floats, Ints, JsonObject, Trajectory, branches, flags, floats, ints

KEPT = 4
SHOWN_TOKENS = 4000
SHOWN_NODES, NODE_TEXT = 500, 2000
"""Maximum nodes of a tree that are shown, and characters of each."""
BEGINNING = 160
MISSING = "Advantages, ratios and the learner's log-probs of single tokens were not kept: archive.numbers was off."
RECORD_COLUMNS = {
    "values": ("value", "the critic's value before the token, at the update's start", "both"),
    "proximal_logprobs": ("learner's log-prob", "in nats, under the learner's policy at the update's start", "less"),
    "advantages": ("advantage", "the weight of its gradient: above 0, the token becomes more likely", "both"),
}
"""The learner's recorded numbers of each token, with their name, meaning and kind of colour.

"more" is deeper for larger numbers, "less" for smaller numbers; "both" shows the sign.
"""


class Trajectories:
    """Reads trajectories in the archive of the run in `folder`."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._folder = folder
        self._model = Path(model_path(config, folder))
        self._rows = RunRows(config, folder)
        self._batch = lru_cache(maxsize=KEPT)(lambda version: archive.open(folder).batch_and_record(version))

    @cached_property
    def _decode(self) -> Decode:
        return report.decoder(self._model)

    def batch(self, update: int | None) -> JsonObject:
        """Return the batch that made version `update` (default: the newest). Raises `JournalError` if there is none.

        `updates` are the first and the last update whose batches are kept, `rewards` is an SVG histogram.
        """
        batches = archive.open(self._folder)
        versions, version = batches.versions(), batches.version_before(update)
        batch, _ = self._batch(version)
        rewards = [trajectory.reward for trajectory in batch.trajectories]
        return {
            "update": version + 1,
            "updates": [versions[0] + 1, versions[-1] + 1],
            "rewards": str(plot.histogram(rewards, "reward", "trajectories")),
            "parts": _parts(batch.trajectories),
            "rows": [_row(batch, number, self._decode) for number in range(len(batch.trajectories))],
        }

    def open(self, update: int, row: int) -> JsonObject:
        """Return trajectory number `row` of a batch. Raises `JournalError` if the batch or the row is missing.

        `left_out` is the number of tokens at its end that are not shown. `row_columns` are (name, value) of the data
        row's columns. `lost` are the spans [first, end) of turns that no client received.
        """
        batch, record = self._batch(update - 1)
        trajectory = self._trajectory(update, row)
        place = trajectory.identity
        tokens = ints(trajectory.tokens)[:SHOWN_TOKENS]
        data_row = self._rows.row_of(trajectory)
        nodes = tree.nodes(batch, trajectory, self._spell) if tree.has_tree(trajectory) else []
        prompt = len(trajectory.prompt_tokens) // 4
        return {
            "update": update,
            "row": row,
            "title": f"prompt {place.prompt}, sample {place.sample}, attempt {place.attempt}, by {trajectory.actor}",
            "prompt": self._decode(ints(trajectory.prompt_tokens)),
            "reward": trajectory.reward,
            "components": trajectory.components,
            "explanation": trajectory.explanation,
            "row_columns": data_row.columns,
            "row_missing": data_row.missing,
            "texts": _texts(self._model, self._decode, tokens),
            "ids": tokens.tolist(),
            "sampled": flags(trajectory.mask)[:SHOWN_TOKENS].tolist(),
            "columns": _columns(batch, trajectory, {name: column[row] for name, column in record.items()}),
            "left_out": trajectory.num_tokens - len(tokens),
            "missing": "" if "advantages" in record else MISSING,
            "tree": [_tree_row(node, prompt) for node in nodes[:SHOWN_NODES]],
            "tree_words": tree.totals(nodes) if nodes else "",
            "lost": [(node.start - prompt, node.end - prompt) for node in nodes if not node.delivered],
        }

    def _trajectory(self, update: int, row: int) -> Trajectory:
        batch, _ = self._batch(update - 1)
        if not 0 <= row < len(batch.trajectories):
            raise JournalError(f"update {update} has no trajectory {row}: there are {len(batch.trajectories)}")
        return batch.trajectories[row]

    def _spell(self, tokens: Ints) -> str:
        if not (self._model / report.TOKENIZER).is_file():
            return self._decode(tokens)
        return _tokenizer(self._model).decode(tokens.tolist(), skip_special_tokens=False)


def _row(batch: Batch, number: int, decode: Decode) -> JsonObject:
    trajectory = batch.trajectories[number]
    return {
        "row": number,
        "title": f"{trajectory.identity.prompt}.{trajectory.identity.sample}",
        "reward": trajectory.reward,
        "components": trajectory.components,
        "tokens": trajectory.num_tokens,
        "lag": batch.version - trajectory.oldest_version,
        "finish": trajectory.finish,
        "begins": decode(ints(trajectory.tokens)[:BEGINNING])[:BEGINNING],
    }


def _tree_row(node: tree.TreeNode, prompt: int) -> JsonObject:
    return {
        "kind": node.kind,
        "name": node.name,
        "level": node.level,
        "behind": node.behind,
        "text": bounded(node.text, NODE_TEXT),
        "notes": list(node.notes()),
        "received": node.delivered,
        "token": node.start - prompt if prompt <= node.start < prompt + SHOWN_TOKENS else None,
    }


def _parts(trajectories: Sequence[Trajectory]) -> list[JsonObject]:
    columns: dict[str, list[float]] = {"reward": [trajectory.reward for trajectory in trajectories]}
    for trajectory in trajectories:
        for name, value in trajectory.components.items():
            columns.setdefault(f"reward: {name}", []).append(value)
    return [
        {"name": name, "mean": sum(column) / len(column), "lowest": min(column), "highest": max(column)}
        for name, column in columns.items()
    ]


def _columns(batch: Batch, trajectory: Trajectory, record: Mapping[str, Floats]) -> list[JsonObject]:
    mask, versions, logprobs = flags(trajectory.mask), ints(trajectory.versions), floats(trajectory.logprobs)
    columns = [
        _column("lag", "versions between sampling and training", "more", batch.version - versions, mask),
        _column("version", "the version that sampled the token", "more", versions, mask),
        _column("young enough", "1 if max_lag allows training on it", "more", versions >= batch.min_version, mask),
        _column("log-prob", "in nats, under the policy that sampled it; dark: unlikely", "less", logprobs, mask),
    ]
    for name in (name for name in RECORD_COLUMNS if name in record):
        columns.append(_column(*RECORD_COLUMNS[name], record[name], mask))
    if "proximal_logprobs" in record:
        difference = record["proximal_logprobs"] - logprobs
        columns.append(_column("log-ratio", "in nats, learner's log-prob - log-prob", "both", difference, mask))
        text = "learner's probability / probability at sampling"
        columns.append(_column("ratio", text, "more", np.exp(difference), mask))
    if trajectory.token_rewards:
        rewards = floats(trajectory.token_rewards)
        columns.append(_column("reward", "the token's part of the reward", "both", rewards, mask))
    if trajectory.branches:
        prompt = len(trajectory.prompt_tokens) // 4
        piece, _ = branches.seen(trajectory.branches, prompt + trajectory.num_tokens)
        text = "the number of its branch, in the order of time; 0 is the prompt's"
        columns.append(_column("branch", text, "more", piece[prompt:], mask))
    if trajectory.candidate_counts:
        text = "the number of tokens within top-p and top-k; 0 is the whole vocabulary"
        columns.append(_column("candidates", text, "more", ints(trajectory.candidate_counts), mask))
    if trajectory.teacher_logprobs:
        teacher = floats(trajectory.teacher_logprobs)
        columns.append(_column("teacher's log-prob", "in nats, under the teacher", "less", teacher, mask))
        columns.append(_column("difference", "teacher's log-prob - log-prob", "both", teacher - logprobs, mask))
    return columns


def _column(name: str, text: str, kind: str, values: NDArray[np.generic], mask: NDArray[np.bool_]) -> JsonObject:
    shown = np.asarray(values[:SHOWN_TOKENS], dtype=np.float64).tolist()
    numbers = zip(shown, mask[:SHOWN_TOKENS], strict=True)
    known = [value if is_sampled and math.isfinite(value) else None for value, is_sampled in numbers]
    return {"name": name, "help": text, "kind": kind, "values": known}


def _texts(model: Path, decode: Decode, tokens: Ints) -> list[str]:
    """Return the text that each token adds. If several tokens spell a character, the last token adds it."""
    if not (model / report.TOKENIZER).is_file():
        return [decode(tokens[place : place + 1]) for place in range(len(tokens))]
    tokenizer, stream = _tokenizer(model), DecodeStream(skip_special_tokens=False)
    return [stream.step(tokenizer, token) or "" for token in tokens.tolist()]


@lru_cache(maxsize=2)
def _tokenizer(model: Path) -> Tokenizer:
    return report.read_tokenizer(model)
