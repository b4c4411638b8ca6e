"""The text of a configuration file: every line has a comment with its meaning or its reason."""

import json
import shlex
from collections.abc import Iterator
from typing import NamedTuple

from streamppo.commands.start.project.policy import PolicyModel
from streamppo.commands.start.project.rows import DataRows
from streamppo.commands.start.project.sizes import Sizes, is_small


class Line(NamedTuple):
    """`key = value  # comment`; the value is TOML."""

    key: str
    value: str
    comment: str


class Table(NamedTuple):
    """A table; the first of a file has no name."""

    name: str
    lines: list[Line]


class ProjectChoices(NamedTuple):
    """The choices of a file; `model`, `data` and `reward` are paths as in the file."""

    name: str
    model: str
    data: str
    reward: str
    policy: PolicyModel
    rows: DataRows
    sizes: Sizes


def write(chosen: ProjectChoices) -> str:
    """Write the file."""
    quoted = shlex.quote(f"{chosen.name}.toml")
    head = f"# `streamppo run {quoted}`; `streamppo check {quoted}` looks it over. Change anything.\n"
    return head + "\n".join(_table(table) for table in _tables(chosen))


def _table(table: Table) -> str:
    head = f"[{table.name}]\n" if table.name else ""
    entries = [f"{line.key} = {line.value}" for line in table.lines]
    width = max(map(len, entries))
    lines = (f"{text:<{width}}  # {line.comment}\n" for text, line in zip(entries, table.lines, strict=True))
    return head + "".join(lines)


def _tables(chosen: ProjectChoices) -> Iterator[Table]:
    sizes = chosen.sizes
    yield Table(
        "",
        [
            Line("name", _text(chosen.name), f"the run's folder is runs/{chosen.name}"),
            Line("seed", "1", "everything random comes from it"),
            Line("updates", str(sizes.updates), _passes(chosen)),
        ],
    )
    yield Table("model", list(_model(chosen)))
    yield Table("task", list(_task(chosen)))
    yield Table("reward", _reward(chosen))
    yield Table("rollout", list(_rollout(chosen)))
    yield Table("queue", _queue(sizes))
    yield Table("algorithm", _algorithm(chosen))
    yield Table("learner", list(_learner(chosen)))
    yield from _around(chosen)


def _model(chosen: ProjectChoices) -> Iterator[Line]:
    size = f"{chosen.policy.parameters:,} parameters" + ("" if chosen.policy.is_known else ", by its name")
    yield Line("path", _text(chosen.model), size)
    if chosen.sizes.places.gpus:
        yield Line("dtype", '"bfloat16"', "parameters and activations on the GPU; the optimizer's are float32")
        yield Line("gradient_checkpointing", '"full"', "activations are computed again: less memory, a third more time")


def _task(chosen: ProjectChoices) -> Iterator[Line]:
    rows, length = chosen.rows, chosen.sizes.completion
    yield Line("data", _text(chosen.data), f"{rows.total:,} rows; the reward gets their other columns too")
    yield Line("prompt", _text(rows.prompt), "the column of the prompt")
    yield Line("answer", _text(rows.answer), "the column that the reward gets as `answer`" if rows.answer else "none")
    if rows.templated:
        yield Line(
            "control_tokens", '"parse"', "prompts spell control tokens: they are written in a chat template already"
        )
    elif chosen.policy.chat and not rows.messages:
        yield Line("chat", "true", "a prompt is a user's message in the tokenizer's chat template; false: a plain text")
    yield Line("held_out", f"{chosen.sizes.held_out:g}", "share of the rows that are evaluated on, never trained on")
    longest = f"the longest prompt has {'' if chosen.policy.is_known else 'about '}{rows.longest_prompt}"
    yield Line("max_prompt_tokens", str(length.max_prompt_tokens), longest)
    left_out = f": {length.left_out:,} of {len(rows.prompts):,}" if length.left_out else ""
    yield Line("too_long", '"skip"', f"rows with a longer prompt are left out and counted{left_out}")


def _reward(chosen: ProjectChoices) -> list[Line]:
    return [
        Line("function", _text(chosen.reward), "try it: `streamppo reward-test` and this file"),
        Line("timeout_s", "30.0", "a call that takes longer fails, and its prompt is sampled again"),
        Line("correct_at", "1.0", "evaluation counts a completion as right from this reward on"),
    ]


def _rollout(chosen: ProjectChoices) -> Iterator[Line]:
    sizes, places = chosen.sizes, chosen.sizes.places
    if places.gpus:
        engine = f'{{ kind = "sglang", mem_fraction_static = {places.memory_share:g} }}'
        yield Line("engine", engine, "the share of a GPU's free memory that weights and cache get")
        yield Line("actors", str(places.actors), "engines, a GPU each" if places.gpus == 1 else "engines")
        yield Line("gpus", f"{places.gpus:g}", "GPUs of an engine" + _shared(sizes))
        yield Line("threads", "4", "CPU threads of an engine")
    else:
        yield Line("engine", '"embedded"', 'our own, for any machine; "sglang" is for GPUs')
    yield Line("slots", str(sizes.slots), "completions that an engine decodes at once")
    yield Line("in_flight", str(sizes.in_flight), "with those whose reward is waited for")
    yield Line("max_tokens", str(sizes.completion.max_tokens), sizes.completion.reason)
    yield Line("temperature", "1.0", "of sampling; log-probs are taken at the same one")


def _queue(sizes: Sizes) -> list[Line]:
    prompts = sizes.batch_size // sizes.samples
    return [
        Line("batch_size", str(sizes.batch_size), f"completions of an update: {prompts} prompts"),
        Line("samples_per_prompt", str(sizes.samples), "completions of a prompt, which are compared with each other"),
        Line("max_lag", "8", "updates that data may be old, if the learner would wait otherwise; 0 is synchronous"),
        Line("too_old", '"mask"', "tokens that are older stay out of the loss"),
    ]


def _algorithm(chosen: ProjectChoices) -> list[Line]:
    lines = [
        Line("advantage", '"grpo"', "a completion against the others of its prompt; no critic is needed"),
        Line("zero_variance", '"mask"', "prompts whose completions all score the same have no signal"),
    ]
    if not is_small(chosen.policy):
        return [*lines, Line("correction", '"truncate"', "old tokens weigh proximal / behavior, at most 2")]
    return [
        *lines,
        Line("correction", '"topr"', "negative advantages weigh less, the less likely their completion is now"),
        Line("negative_weight", "0.25", "and a quarter: of old data, negative advantages mislead most"),
    ]


def _learner(chosen: ProjectChoices) -> Iterator[Line]:
    sizes, places = chosen.sizes, chosen.sizes.places
    small = is_small(chosen.policy)
    yield Line("lr", f"{sizes.lr:g}", "the rate for a model of this size; twice as high may diverge")
    if small:
        yield Line("betas", "[0.9, 0.999]", "AdamW's moments")
        yield Line("minibatches", "4", "steps an update")
    yield Line("warmup_updates", "5" if small else "10", "updates over which it rises from 0")
    yield Line("decay", '"linear"' if small else '"constant"', "its course after that")
    if small:
        yield Line("final_lr_share", "0.1", "share of lr at the end")
    yield Line("max_grad_norm", "0.5" if small else "1.0", "longer gradients are cut to this length")
    if places.gpus:
        yield Line("ranks", str(places.ranks), "processes that train, with a shard of the model each")
        yield Line("gpus", f"{places.gpus:g}", "GPUs of a rank" + _shared(sizes))
        yield Line("threads", "4", "CPU threads of a rank")


def _around(chosen: ProjectChoices) -> Iterator[Table]:
    sizes = chosen.sizes
    yield Table(
        "evaluation",
        [
            Line("every", str(sizes.updates // 10), "updates between two evaluations"),
            Line("prompts", str(sizes.evaluated), "rows of a look"),
        ],
    )
    yield Table(
        "checkpoint", [Line("every", str(sizes.updates // 4), "updates between two; `streamppo resume` uses them")]
    )
    if sizes.object_store_mib > 256:
        store = Line("object_store_mib", str(sizes.object_store_mib), "three versions of the weights in transit")
        yield Table("cluster", [store])
    if not is_small(chosen.policy):
        stall = Line("stall_s", "1800.0", "a run without an update for this long stops with the reason")
        yield Table("watchdog", [stall])


def _passes(chosen: ProjectChoices) -> str:
    prompts = chosen.sizes.batch_size // chosen.sizes.samples
    rows = max(1, int(chosen.rows.total * (1 - chosen.sizes.held_out)))
    return f"updates of {prompts} prompts; all rows are seen once in {-(-rows // prompts)}"


def _shared(sizes: Sizes) -> str:
    return ": rank and engine share one" if 0 < sizes.places.gpus < 1 else ""


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)
