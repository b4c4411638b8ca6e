"""A kind whose other fields all have defaults may be written as its bare name, in a file and on the command line."""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import tomli_w
from conftest import MATH
from msgspec import inspect

from streamppo.config import file as configfile
from streamppo.config.algorithm import Gae, Grpo, VTrace
from streamppo.config.correction import FilterTruncated, NoCorrection
from streamppo.config.overrides import parse
from streamppo.config.rollout import SGLangEngine
from streamppo.config.sections import Config
from streamppo.config.task import DataTask
from streamppo.errors import ConfigError


def choices(node: inspect.Type, at: str = "") -> Iterator[tuple[str, str, bool]]:
    """(dotted name, kind, whether it stands in a list) of every choice that the kind alone may say."""
    match node:
        case inspect.StructType(fields=fields, tag_field="kind", tag=tag) if at:
            if not any(field.required for field in fields):
                yield at, str(tag), False
        case inspect.StructType(fields=fields):
            for field in fields:
                yield from choices(field.type, f"{at}.{field.encode_name}" if at else field.encode_name)
        case inspect.UnionType(types=types):
            for option in types:
                yield from choices(option, at)
        case inspect.VarTupleType(item_type=item):
            yield from ((name, kind, True) for name, kind, _ in choices(item, at))
        case _:
            return


CHOICES = list(choices(inspect.type_info(Config)))
BESIDE = {
    "sequence_clip": ["algorithm.correction.kind=truncate", "algorithm.negative_weight=1"],
    "data": ["task.data=rows.jsonl"],
    "sequence": ["algorithm.critic.model=head"],
    "kl_cov": ["learner.minibatches=2"],
    "agent": ["environment.agent=mine:run"],
    "bubblewrap": ["environment.command=['python']"],
}
"""Overrides without which a choice contradicts the rest of the configuration, by its kind."""


def test_there_are_choices_of_every_section() -> None:
    assert len(CHOICES) > 30
    assert {name.split(".")[0] for name, _, _ in CHOICES} == {
        "task", "algorithm", "rollout", "learner", "telemetry", "environment"
    }  # fmt: skip


@pytest.mark.sampled(21)
@pytest.mark.parametrize(("name", "kind", "listed"), CHOICES, ids=str)
def test_a_bare_kind_is_its_table(name: str, kind: str, listed: bool, tmp_path: Path) -> None:
    beside = BESIDE.get(kind, [])
    table = f"[{{kind='{kind}'}}]" if listed else f"{{kind='{kind}'}}"
    meant = configfile.load(MATH, [f"{name}={table}", *beside])
    bare = f'["{kind}"]' if listed else kind
    emptied = [] if listed else [f"{name}={{}}"] * (name != "task")
    assert configfile.load(MATH, [*emptied, f"{name}={bare}", *beside]) == meant
    tree = tomllib.loads(MATH.read_text())
    *sections, last = name.split(".")
    inner = tree
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[last] = [kind] if listed else kind
    path = tmp_path / "bare.toml"
    path.write_text(tomli_w.dumps(tree))
    assert configfile.load(path, beside) == meant


def test_a_bare_kind_on_the_command_line_keeps_the_rest_of_its_table_as_the_kind_itself_does() -> None:
    assert configfile.load(MATH, ["algorithm.advantage=gae"]).algorithm.advantage == Gae(lam=1.0)
    assert configfile.load(MATH, ["algorithm.advantage=grpo"]).algorithm.advantage == Grpo()
    lam = ["algorithm.advantage.lam=0.5", "algorithm.advantage=vtrace"]
    assert configfile.load(MATH, lam).algorithm.advantage == VTrace(lam=0.5)


def test_fields_are_added_to_a_bare_kind_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "bare.toml"
    engine = 'rollout.engine = "sglang"\n'
    path.write_text(engine + MATH.read_text().replace("[rollout]\n", "[other]\n").partition("[other]")[0])
    config = configfile.load(path, ["rollout.engine.mem_fraction_static=0.5", "algorithm.correction=off"])
    assert config.rollout.engine == SGLangEngine(mem_fraction_static=0.5)
    assert config.algorithm.correction == NoCorrection()


def test_kinds_stand_in_tables_beside_bare_ones() -> None:
    filters = "algorithm.filters=['truncated', {kind='off_policy_negative', delta=0.1}]"
    assert configfile.load(MATH, [filters]).algorithm.filters[0] == FilterTruncated()


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("algorithm.advantage=grppo", 'override algorithm.advantage.kind: unknown kind "grppo": kinds are gae'),
        ("algorithm.correction=function", "override algorithm.correction: missing required field `function`"),
        ("queue.max_lag=adaptive", "override queue.max_lag: missing required field `at_most`"),
        ("queue.max_lag=adaptiv", "override queue.max_lag: must be a whole number of at least 0 or a table"),
        ("algorithm.filters=['truncatd']", 'override algorithm.filters[0].kind: unknown kind "truncatd"'),
        ("algorithm.filters=truncated", "override algorithm.filters: must be a list"),
    ],
)
def test_a_word_that_is_no_kind_or_not_enough_is_refused_by_name(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        configfile.load(MATH, [override])
    assert str(refused.value).startswith(said)


def test_a_task_with_data_is_a_data_task_and_a_file_gives_a_run_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('model.path = "m"\ntask.data = "rows.jsonl"\nreward.function = "a:b"\n')
    config = configfile.load(path)
    assert config.name == "mine"
    assert isinstance(config.task, DataTask) and config.task.sources["data"].data == "rows.jsonl"
    assert configfile.load(path, ["name=other"]).name == "other"


@pytest.mark.parametrize("text", ["2024-11-30", "7", "1e3", "true", "'7'"])
def test_a_text_field_takes_what_would_be_a_number_a_date_or_a_truth_value(text: str, tmp_path: Path) -> None:
    rows = ["task={}", "task.kind=data", f"task.data={tmp_path}", f"task.prompt={text}", f"reward.function={text}"]
    config = configfile.load(MATH, [f"name={text}", f"telemetry.project={text}", *rows])
    meant = text.strip("'")
    assert (config.name, config.telemetry.project) == (meant, meant)
    assert isinstance(config.task, DataTask) and config.task.sources["data"].prompt == meant
    assert msgspec.to_builtins(config)["reward"]["scorers"]["reward"]["function"] == meant
    with pytest.raises(ConfigError, match="updates: must be a whole number of at least 1, not 2024-11-30"):
        configfile.load(MATH, ["updates=2024-11-30"])


@pytest.mark.parametrize(
    "quoted",
    [
        'telemetry.trackers=["wandb", "mlflow"]',
        'algorithm.correction={kind = "topr"}',
        'queue.max_lag={kind="adaptive",at_most=16,ess=0.5}',
        'algorithm.correction={ kind = "truncate", level = "token", cap = 3 }',
        'model.lora={rank=8,targets=["q_proj", "v_proj"]}',
        'rollout.stop=["</s>", "the end", "1.2.3"]',
        "learner.betas=[0.9, 0.999]",
    ],
)
def test_words_in_lists_and_tables_need_no_quotes(quoted: str) -> None:
    (bare,) = parse([quoted.replace('"', "")])
    assert bare.value == parse([quoted])[0].value
