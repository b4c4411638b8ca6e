"""The signatures of rewards: the parameters that each defines, and the values that these parameters get.

trajectory   score(trajectory: ScoredText, **columns)
batched      TRL's: f(prompts, completions, completion_ids, **columns), for several trajectories
verl         compute_score(data_source, solution_str, ground_truth, extra_info)
verl_batch   compute_score(data_sources, solution_strs, ground_truths, extra_infos), for several trajectories
openrlhf     reward_func(queries, prompts, labels), which OpenRLHF calls with lists of one
areal        reward_fn(prompt, completions, prompt_ids, completion_ids, **columns), whose `completions` is one text
verifiers    f(prompt, completion, info, **columns)
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from streamppo.tasks.dataset_files import Row
from streamppo.types import Message, ScoredText

Value: TypeAlias = Callable[[ScoredText, Row], object]


class Style(NamedTuple):
    """A signature. A reward has the signature if the reward has all parameters of one of `marks`.

    Parameters that are not in `parameters` get columns; `**kwargs` gets none unless `takes_columns` is True. If
    `is_batched` is True, each parameter gets a list with one value per trajectory. `answer` is the parameter that gets
    the row's answer; "" if the answer is passed as a column.
    """

    name: str
    parameters: Mapping[str, Value]
    marks: tuple[frozenset[str], ...] = ()
    is_batched: bool = False
    takes_columns: bool = False
    answer: str = ""

    def arguments(self, names: Iterable[str], texts: Sequence[ScoredText], rows: Sequence[Row]) -> dict[str, object]:
        values = {name: [self.parameters[name](*pair) for pair in zip(texts, rows, strict=True)] for name in names}
        return {name: value if self.is_batched else value[0] for name, value in values.items()}


def chat(messages: Iterable[Message]) -> list[dict[str, object]]:
    """Return messages as dicts."""
    return [message.plain() for message in messages]


def _prompt(text: ScoredText, row: Row) -> object:
    """Return the prompt; for a chat its messages, without a final assistant message, which begins the completion."""
    return chat(text.prompt_messages) if text.messages else text.prompt


def _completion(text: ScoredText, row: Row) -> object:
    return chat(text.completion_messages) if text.messages else text.completion


def _extra_info(text: ScoredText, row: Row) -> object:
    """Return the row's `extra_info` with the two entries that verl's reward managers add."""
    turns = 1 + max(1, len(text.turns)) + len(text.observations)
    return {**(row.get("extra_info") or {}), "num_turns": turns, "rollout_reward_scores": {}}


def _info(text: ScoredText, row: Row) -> object:
    """Return the row's `info`, which may be JSON in the rows of verifiers; {} if there is none."""
    info = row.get("info") or {}
    return json.loads(info) if isinstance(info, str) else info


TRAJECTORY = Style("trajectory", {}, takes_columns=True)
TRL = Style(
    "batched",
    {
        "prompts": _prompt,
        "completions": _completion,
        "completion_ids": lambda text, row: text.token_ids,
    },
    # `prompts` is not a mark, because a column may have that name.
    marks=(frozenset({"completions"}), frozenset({"completion_ids"})),
    is_batched=True,
    takes_columns=True,
)
VERL = Style(
    "verl",
    {
        "data_source": lambda text, row: text.source,
        "solution_str": lambda text, row: text.completion,
        "ground_truth": lambda text, row: row.get("answer"),
        "extra_info": _extra_info,
    },
    marks=(frozenset({"solution_str", "ground_truth"}),),
    answer="ground_truth",
)
VERL_BATCH = Style(
    "verl_batch",
    {f"{name}s": value for name, value in VERL.parameters.items()},
    marks=(frozenset({"solution_strs", "ground_truths"}),),
    is_batched=True,
    answer="ground_truths",
)
OPENRLHF = Style(
    "openrlhf",
    {
        "queries": lambda text, row: [text.prompt + text.completion],
        "prompts": lambda text, row: [text.prompt],
        "labels": lambda text, row: [row.get("answer")],
    },
    marks=(frozenset({"queries", "prompts"}), frozenset({"queries", "labels"})),
    answer="labels",
)
AREAL = Style(
    "areal",
    {
        "prompt": lambda text, row: text.prompt,
        "prompts": lambda text, row: text.prompt,
        "completions": lambda text, row: text.completion,
        # A trajectory has no ids of its prompt: a reward that uses `prompt_ids` fails.
        "prompt_ids": lambda text, row: None,
        "completion_ids": lambda text, row: text.token_ids,
    },
    marks=(frozenset({"completions", "prompt_ids"}),),
    takes_columns=True,
)
VERIFIERS = Style(
    "verifiers",
    {"prompt": _prompt, "completion": _completion, "info": _info},
    marks=(frozenset({"completion"}),),
    takes_columns=True,
)
STYLES = (VERL, VERL_BATCH, OPENRLHF, AREAL, TRL, VERIFIERS)
"""The styles of other trainers, in the order in which their marks are searched."""
FOREIGN = {
    "trainer_state": "TRL's trainer gives {}, and there is no Trainer here: give it a default",
    "log_extra": "TRL's trainer gives {}: return a Reward with its numbers as components, and give it a default",
    "log_metric": "TRL's trainer gives {}: return a Reward with its numbers as components, and give it a default",
    "environments": ("TRL's trainer gives {}, and an environment is the table [environment], and gives rewards itself"),
    **dict.fromkeys(
        ("state", "parser", "judge"),
        'verifiers gives {}: run the whole environment with task.kind = "verifiers", or give it a default',
    ),
    **dict.fromkeys(
        ("reward_router_address", "reward_model_tokenizer"),
        "verl gives {} for a reward model, which is a scorer of the kind model or judge: give it a default",
    ),
    "sample": "slime gives {}: sample.response is `trajectory.completion`, sample.label the column `answer`",
}
"""Replacements for arguments that only another trainer passes."""
