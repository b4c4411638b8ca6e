"""Writes the text of a configuration file, in which every line has a comment."""

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from streamppo.commands.start.project.policy import PolicyModel
from streamppo.commands.start.project.rows import DataRows
from streamppo.commands.start.project.sizes import Sizes, is_small


class Line(NamedTuple):
    """The line `key = value  # comment`, whose value is TOML."""

    key: str
    value: str
    comment: str


class Table(NamedTuple):
    """A TOML table of the configuration file. The first table has no name."""

    name: str
    lines: list[Line]


class ProjectChoices(NamedTuple):
    """The choices for a configuration file. `model`, `data` and `rewards` are the paths that the file gets."""

    name: str
    model: str
    data: str
    rewards: Sequence[str]
    policy: PolicyModel
    rows: DataRows
    sizes: Sizes


def write(choices: ProjectChoices) -> str:
    """Return the text of the file."""
    quoted = shlex.quote(f"{choices.name}.toml")
    head = f"# `streamppo run {quoted}`; `streamppo check {quoted}` checks it.\n"
    return head + "\n".join(_table(table) for table in _tables(choices))


def _table(table: Table) -> str:
    head = f"[{table.name}]\n" if table.name else ""
    entries = [f"{line.key} = {line.value}" for line in table.lines]
    width = max(map(len, entries))
    lines = (f"{text:<{width}}  # {line.comment}\n" for text, line in zip(entries, table.lines, strict=True))
    return head + "".join(lines)


def _tables(choices: ProjectChoices) -> Iterator[Table]:
    sizes = choices.sizes
    name = Line("name", _text(choices.name), f"the run's folder is runs/{choices.name}")
    prompts, rows = sizes.batch_size // sizes.samples, max(1, int(choices.rows.total * (1 - sizes.held_out)))
    passes = f"updates of {prompts} prompts; {-(-rows // prompts)} updates see all rows once"
    updates = Line("updates", str(sizes.updates), passes)
    yield Table("", [name, Line("seed", "1", "seed of all randomness"), updates])
    yield Table("model", list(_model(choices)))
    yield Table("task", list(_task(choices)))
    yield from _reward(choices.rewards)
    yield Table("rollout", list(_rollout(choices)))
    yield Table("queue", _queue(sizes))
    yield Table("algorithm", _algorithm())
    yield Table("learner", list(_learner(choices)))
    yield from _further_tables(choices)


def _model(choices: ProjectChoices) -> Iterator[Line]:
    size = choices.policy.size + ("" if choices.policy.is_known else ", by its name")
    yield Line("path", _text(choices.model), size)
    if choices.sizes.places.gpus:
        yield Line(
            "dtype", '"bfloat16"', "type of weights and activations in passes; the optimizer keeps float32 weights"
        )


def _task(choices: ProjectChoices) -> Iterator[Line]:
    rows, length = choices.rows, choices.sizes.completion
    yield Line("data", _text(choices.data), f"{rows.total:,} rows; the reward gets their other columns too")
    yield Line("prompt", _text(rows.prompt), "the column of the prompt")
    of_answer = "the column that the reward gets as `answer`" if rows.answer else "none"
    if rows.answer == rows.prompt:
        of_answer = (
            "its last message, which is no part of the prompt" if "answer" in rows.columns else "its last message"
        )
    yield Line("answer", _text(rows.answer), of_answer)
    if rows.columns:
        pairs = ", ".join(f"{_key(name)} = {_text(column)}" for name, column in rows.columns.items())
        yield Line("columns", f"{{ {pairs} }}", "the reward's argument = the column")
    if rows.templated:
        comment = "prompts are already written in a chat template, with its control tokens"
        yield Line("control_tokens", '"parse"', comment)
    elif choices.policy.chat and not rows.messages:
        yield Line("chat", "true", "a prompt is a user's message in the tokenizer's chat template; false: a plain text")
    yield Line("held_out", f"{choices.sizes.held_out:g}", "share of the rows for evaluation only")
    longest = f"the longest prompt has {'' if choices.policy.is_known else 'about '}{rows.longest_prompt}"
    yield Line("max_prompt_tokens", str(length.max_prompt_tokens), longest)
    left_out = f": {length.left_out:,} of {len(rows.prompts):,}" if length.left_out else ""
    yield Line("too_long", '"skip"', f"rows with a longer prompt are left out and counted{left_out}")


def _reward(functions: Sequence[str]) -> Iterator[Table]:
    correct = Line("correct_at", "1.0", "evaluation counts a completion as right from this reward on")
    if len(functions) == 1:
        function = Line("function", _text(functions[0]), "test it by `streamppo reward-test` with this file")
        timeout = Line("timeout_s", "30.0", "a call that takes longer fails, and its prompt is sampled again")
        yield Table("reward", [function, timeout, correct])
        return
    yield Table("reward", [correct])
    lines: dict[str, Line] = {}
    for function in functions:
        attribute = function.rpartition(":")[2]
        name = attribute if attribute not in lines else f"{attribute}_{len(lines)}"
        value = f'{{ kind = "function", function = {_text(function)}, weight = 1.0 }}'
        lines[name] = Line(_key(name), value, f"a term of the sum, logged as reward_{name}")
    yield Table("reward.scorers", list(lines.values()))


def _rollout(choices: ProjectChoices) -> Iterator[Line]:
    sizes, places = choices.sizes, choices.sizes.places
    if places.gpus:
        engine = f'{{ kind = "sglang", mem_fraction_static = {places.memory_share:g} }}'
        yield Line("engine", engine, "the share of a GPU's free memory that weights and cache get")
        yield Line("actors", str(places.actors), "engines, a GPU each" if places.gpus == 1 else "engines")
        yield Line("gpus", f"{places.gpus:g}", "GPUs of an engine" + _shared(sizes))
        yield Line("threads", "4", "CPU threads of an engine")
    else:
        yield Line("engine", '"embedded"', 'streamppo\'s engine for any machine; "sglang" is for GPUs')
    yield Line("slots", str(sizes.slots), "completions that an engine decodes at once")
    yield Line("in_flight", str(sizes.in_flight), "completions in the slots or waiting for a reward")
    yield Line("max_tokens", str(sizes.completion.max_tokens), sizes.completion.reason)
    yield Line("temperature", "1.0", "temperature of sampling and of log-probs")


def _queue(sizes: Sizes) -> list[Line]:
    prompts = sizes.batch_size // sizes.samples
    return [
        Line("batch_size", str(sizes.batch_size), f"completions of an update: {prompts} prompts"),
        Line("samples_per_prompt", str(sizes.samples), "completions of a prompt, which are compared with each other"),
        Line("max_lag", "8", "maximum age of a trained token, in updates; 0 is synchronous"),
        Line("too_old", '"mask"', "older tokens are left out of the loss"),
    ]


def _algorithm() -> list[Line]:
    return [
        Line("advantage", '"grpo"', "compares the completions of a prompt, without a critic"),
        Line("zero_variance", '"mask"', "no training on prompts whose completions all score the same"),
        Line("correction", '"topr"', "a negative advantage weighs less if its completion has become unlikely"),
        Line("negative_weight", "0.25", "further factor for negative advantages, which mislead most in old data"),
    ]


def _learner(choices: ProjectChoices) -> Iterator[Line]:
    sizes, places = choices.sizes, choices.sizes.places
    small = is_small(choices.policy)
    if sizes.micro_batch_tokens:
        tokens = str(sizes.micro_batch_tokens)
        yield Line("micro_batch_tokens", tokens, "tokens of a forward and backward pass; fewer tokens need less memory")
    yield Line("lr", f"{sizes.lr:g}", "the rate for a model of this size; twice as high may diverge")
    yield Line("betas", "[0.9, 0.999]", "AdamW's moments")
    yield Line("minibatches", "4", "optimizer steps in an update")
    yield Line("warmup_updates", "5" if small else "10", "first updates, in which lr rises from 0")
    yield Line("decay", '"linear"' if small else '"constant"', "decay of lr after the warm-up")
    if small:
        yield Line("final_lr_share", "0.1", "the last lr as a share of lr")
    yield Line("max_grad_norm", "0.5" if small else "1.0", "larger gradients are scaled to this norm")
    if places.gpus:
        yield Line("ranks", str(places.ranks), "processes that train, with a shard of the model each")
        yield Line("gpus", f"{places.gpus:g}", "GPUs of a rank" + _shared(sizes))
        yield Line("threads", "4", "CPU threads of a rank")


def _further_tables(choices: ProjectChoices) -> Iterator[Table]:
    sizes = choices.sizes
    every = Line("every", str(sizes.updates // 10), "updates between two evaluations")
    yield Table("evaluation", [every, Line("prompts", str(sizes.evaluated), "held-out rows of an evaluation")])
    every = Line("every", str(sizes.updates // 4), "updates between two; `streamppo resume` needs them")
    yield Table("checkpoint", [every])
    if sizes.object_store_mib > 256:
        store = Line("object_store_mib", str(sizes.object_store_mib), "room for three versions of the weights")
        yield Table("cluster", [store])
    if not is_small(choices.policy):
        stall = Line("stall_s", "1800.0", "a run without an update for this long stops with the reason")
        yield Table("watchdog", [stall])


def _shared(sizes: Sizes) -> str:
    return ": rank and engine share one" if 0 < sizes.places.gpus < 1 else ""


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
