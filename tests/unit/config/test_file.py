"""The configuration refuses unknown names, and suggests the nearest."""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from conftest import MATH, REPOSITORY

from benchmarks.lib.runs import PLAIN
from streamppo import durable
from streamppo.config import file as configfile
from streamppo.config.algorithm import Algorithm, Clip
from streamppo.config.correction import FilterOffPolicyNegative, FilterTruncated, NoCorrection, RejectK3, Topr, Truncate
from streamppo.config.reward import FunctionScorer
from streamppo.config.rollout import EmbeddedEngine, SGLangEngine
from streamppo.config.sections import Config
from streamppo.config.task import DataTask
from streamppo.driver import preflight
from streamppo.errors import CheckpointError, ConfigError

AT = "algorithm.teacher.url="
RLOO = "algorithm.advantage.kind=rloo"
OWN_CRITIC = "algorithm.critic.model=policy"
TWO_SERVERS = "rollout.engine.urls=['http://localhost:1', 'http://localhost:2']"
SERVER = ("rollout.engine.kind=sglang", "rollout.engine.urls=['http://localhost:1']")
LOGLINEAR = ("algorithm.proximal=loglinear", "learner.minibatches=2")
SEGMENTS = "queue.segments={}"
LORA = "model.lora={}"
KL = ("algorithm.kl.loss_beta=0.1",)
DETACHED = "queue.segments={prefix='detached'}"
ADAPTIVE = "queue.max_lag={kind='adaptive', at_most=8}"
BEHAVIOR = ("algorithm.proximal=behavior", "algorithm.correction.kind=off")
REJECT = "algorithm.correction={kind='truncate', reject=["


def edited(tmp_path: Path, old: str, new: str) -> Path:
    text = MATH.read_text()
    assert old in text
    path = tmp_path / "edited.toml"
    path.write_text(text.replace(old, new))
    return path


def test_the_shipped_configuration_loads() -> None:
    config = configfile.load(MATH)
    assert config.name == "math"
    assert isinstance(config.algorithm.correction, Topr)


def test_overrides_reach_nested_fields_and_keep_their_types() -> None:
    config = configfile.load(MATH, ["learner.lr=3e-4", "name=other", "learner.betas=[0.8, 0.9]", "queue.too_old=drop"])
    assert (config.learner.lr, config.name, config.learner.betas) == (3e-4, "other", (0.8, 0.9))
    assert config.queue.too_old == "drop"


def test_another_kind_replaces_the_whole_table() -> None:
    config = configfile.load(MATH, ["algorithm.correction.kind=off"])
    assert config.algorithm.correction == NoCorrection()


def test_a_kind_keeps_what_was_said_of_its_table_before() -> None:
    engine = configfile.load(MATH, ["rollout.engine.mem_fraction_static=0.5", "rollout.engine.kind=sglang"])
    assert engine.rollout.engine == SGLangEngine(mem_fraction_static=0.5)
    task = configfile.load(MATH, ["task.sources.a.data=x", "task.sources.a.weight=2", "task.kind=data"]).task
    assert isinstance(task, DataTask) and task.sources["a"].weight == 2
    again = configfile.change(engine, ["rollout.engine.kv=recompute", "rollout.engine.kind=embedded"])
    assert again.rollout.engine == EmbeddedEngine(kv="recompute")


@pytest.mark.parametrize(
    ("overrides", "meant"),
    [
        (["correction.kind=off", "correction={kind='truncate', cap=3.0}"], Truncate(cap=3.0)),
        (["correction={kind='truncate', cap=3.0}", "correction.kind=off"], NoCorrection()),
        (["correction.kind=off", "correction.cap=3.0", "correction.kind=truncate"], Truncate(cap=3.0)),
        (["correction.cap=3.0", "correction.kind=truncate", "correction.cap=4.0"], Truncate(cap=4.0)),
    ],
)
def test_of_two_that_contradict_each_other_the_last_counts(overrides: list[str], meant: Any) -> None:
    config = configfile.load(MATH, [f"algorithm.{override}" for override in overrides])
    assert config.algorithm.correction == meant


def test_a_section_that_a_run_was_left_without_can_be_given_to_it(tmp_path: Path) -> None:
    configfile.save(configfile.load(MATH), tmp_path)
    config = configfile.load(tmp_path / configfile.CONFIG, ["environment.name=a:B", "environment.max_turns=3"])
    assert config.environment is not None and (config.environment.name, config.environment.max_turns) == ("a:B", 3)
    assert configfile.change(configfile.load(MATH), ["environment.name=a:B"]).environment is not None


def test_an_override_inside_a_table_that_the_file_leaves_out_means_the_default_kind() -> None:
    config = configfile.load(MATH, ["algorithm.policy_loss.dual=3.0", "rollout.engine.kv=recompute"])
    assert config.algorithm.policy_loss == Clip(dual=3.0)
    assert config.rollout.engine.kv == "recompute"


def test_an_unknown_field_is_answered_with_file_line_and_nearest_name(tmp_path: Path) -> None:
    path = edited(tmp_path, "max_grad_norm =", "max_gradnorm =")
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.startswith("max_gradnorm ="))
    with pytest.raises(ConfigError, match=rf"edited.toml:{line}: learner.max_gradnorm: .*did you mean 'max_grad_norm'"):
        configfile.load(path)


def test_an_unknown_field_inside_a_chosen_kind_knows_the_fields_of_that_kind() -> None:
    with pytest.raises(ConfigError, match=r"override algorithm.correction.capp: .*did you mean 'cap'"):
        configfile.load(MATH, ["algorithm.correction.kind=truncate", "algorithm.correction.capp=3"])


def test_an_error_in_a_table_of_tables_names_the_table() -> None:
    with pytest.raises(ConfigError, match=r"override task.sources.easy.wieght: .*did you mean 'weight'"):
        configfile.load(MATH, ["task.kind=data", "task.sources.hard.data=x", "task.sources.easy.wieght=2"])
    with pytest.raises(ConfigError, match=r"override task.sources.easy.weight: must be a number above 0, not -2"):
        configfile.load(MATH, ["task.kind=data", "task.sources.hard.data=x", "task.sources.easy.weight=-2"])


def test_an_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="kinds are arithmetic, data"):
        configfile.load(MATH, ["task.kind=algebra"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.lr=-1", "learner.lr"),
        ("learner.lr=fast", "learner.lr"),
        ("queue.samples_per_prompt=3", "multiple of queue.samples_per_prompt"),
        ("learner.minibatches=7", "multiple of learner.minibatches"),
        ("name=a/b", "name of a folder"),
        ("algorithm.advantage.gamma=1.5", "algorithm.advantage.gamma"),
        ("seed=-1", "override seed: must be a whole number of at least 0, not -1"),
        ('rollout.engine={kind="sglang", mem_fraction=0.3}', r"^override rollout.engine.mem_fraction: .* did you mean"),
        ("learner.lr", "not of the form"),
        ("name.x=1", "'name' is a value"),
        ("name=a/b", r"^override name \('a/b'\) must be"),
        ("updates=3\nseed=5", r"^override 'updates=3\\nseed=5' sets more than one field: give each by itself$"),
        ("updates=3\n[learner]\nlr=1", "sets more than one field"),
        (f"updates={9**30}", f"of at least 1 and at most {2**63 - 1}, not {9**30}$"),
    ],
)
def test_a_bad_value_is_refused_by_name(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configfile.load(MATH, [override])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.advantage.kind=rloo", "queue.samples_per_prompt=1"], "'rloo' compares the samples of a prompt"),
        (["algorithm.zero_variance=mask"], "needs an advantage that compares"),
        (["algorithm.resample.component=right"], "and zero_variance is 'keep'"),
        (["algorithm.resample.mean=[0.9, 0.1]"], r"mean must be empty or \[smallest, largest\]"),
        (["algorithm.resample.mean=[0.5]"], r"mean must be empty or \[smallest, largest\]"),
        (["algorithm.curriculum={}"], "curriculum finds groups without a signal: it needs an advantage"),
        (["algorithm.curriculum={floor=0.6}"], r"floor \(0.6\) must be at most repeat \(0.5\)"),
        (["algorithm.kl.reward_beta=0.1", "algorithm.kl.loss_beta=0.1"], "allow_both"),
        (["algorithm.kl.target=6"], r"target \(6.0\) adapts reward_beta, which is 0"),
        (["algorithm.critic.epochs=2"], r"epochs \(2\) needs a second transformer"),
        (["algorithm.critic.max_grad_norm=1"], r"max_grad_norm \(1.0\) needs a second transformer"),
        ([RLOO, "algorithm.critic.model=policy"], "advantage 'rloo' uses no critic"),
        ([RLOO, "algorithm.critic.warmup_updates=5"], "advantage 'rloo' uses no critic"),
        ([OWN_CRITIC, "algorithm.critic.minibatches=7"], r"\(512\) .* algorithm.critic.minibatches \(7\)"),
        (["model.tiny.hidden_size=20"], r"hidden_size \(20\) must be a multiple of 8"),
        (
            ["algorithm.correction.kind=mask", "algorithm.correction.band=[6, 5]"],
            "band must rise: 6.0 is not below 5.0",
        ),
        ([f"{REJECT}{{kind='geometric', band=[2.0, 1.0]}}]}}"], r"reject\[0\]: band must rise: 2.0 is not below 1.0"),
        ([f"{REJECT}{{kind='k3', at_most=1}}, {{kind='k3', at_most=2}}]}}"], "reject has the kind 'k3' 2 times"),
        (["algorithm.correction={kind='reject', reject=[]}"], "reject has no rule: choose kind = 'off'"),
        (["algorithm.correction={kind='truncate', cap=1, floor=1}"], r"floor \(1\) must be below cap \(1\)"),
        (["algorithm.negative_weight=1.5"], "negative_weight"),
        (
            ["algorithm.correction.kind=topr", "algorithm.policy_loss.kind=sequence_clip"],
            "correction 'topr' depends on the sign of each token's advantage",
        ),
        (
            ["algorithm.negative_weight=0.5", "algorithm.policy_loss.kind=sequence_clip"],
            r"negative_weight \(0.5\) depends on the sign of each token's advantage",
        ),
        (
            ["algorithm.correction.kind=topr", "algorithm.proximal=behavior"],
            "correction 'topr' weighs by proximal / behavior, which is 1",
        ),
        (["algorithm.filters=[{kind='truncated'}, {kind='truncated'}]"], "filters has the kind 'truncated' 2 times"),
        (["algorithm.policy_loss.dual=0.5"], r"dual \(0.5\) must be above 1"),
        (
            ["algorithm.advantage.kind=vtrace", "algorithm.advantage.clip=[1, 0.5]"],
            r"second of clip \(0.5\), must be at least 1",
        ),
        ([*LOGLINEAR], "anyway: the value head"),
        ([*LOGLINEAR, OWN_CRITIC, "algorithm.advantage.kind=vtrace"], "anyway: V-trace"),
        ([*LOGLINEAR, RLOO, "algorithm.correction.kind=second_moment"], "anyway: the second-moment correction"),
        (
            [*LOGLINEAR, RLOO, "algorithm.correction={kind='function', function='a:b'}"],
            "the custom correction",
        ),
        ([*LOGLINEAR, RLOO, "algorithm.kl.reward_beta=0.1"], "anyway: the KL in the reward"),
        ([*LOGLINEAR, RLOO, "algorithm.target_kl=0.01"], r"target_kl \(0.01\).* bound the lag, not the update's step"),
        (
            ["algorithm.advantage.kind=maxrl", "algorithm.kl.reward_beta=0.1"],
            "'maxrl' needs scores that are not negative",
        ),
        (["algorithm.teacher.weight=0.5"], "a teacher needs a model or a url"),
        (["algorithm.teacher.timeout_s=5"], "a teacher needs a model or a url"),
        (["algorithm.teacher={model='x', url='http://a:1'}"], "a teacher is either a model .* or at a url"),
        (["algorithm.teacher={model='x', timeout_s=5}"], r"timeout_s \(5.0\) is for a teacher at a url"),
        (["algorithm.teacher={url='http://a:1', offload=true}"], "offload applies to teacher.model"),
        ([f"{AT}a:1"], r"url \('a:1'\) must begin with http"),
        ([f"{AT}http://"], "must be only a server's address"),
        ([f"{AT}http://a:x"], "is not an address"),
        ([f"{AT}http://a:1?key=b"], "must be only a server's address"),
        ([f"{AT}http://a:1/generate"], r"must end before /generate"),
        ([f"{AT}http://a:1/v1/"], r"must end before /v1/"),
        ([f"{AT}http://a:1", "rollout.temperature=0.7"], r"rollout.temperature \(0.7\) must be 1 with"),
        ([f"{AT}http://a:1", "rollout.top_p=0.9"], r"rollout.top_p and top_k must be off with"),
        ([f"{AT}http://a:1", "rollout.top_k=8"], r"rollout.top_p and top_k must be off with"),
        (["algorithm.teacher={model='x', signal='reward', others=0.5}"], r"others \(0.5\) is for signal"),
        (
            ["algorithm.advantage.kind=maxrl", "algorithm.teacher={model='x', signal='reward'}"],
            "scores that are not negative, and a teacher's can be",
        ),
        (
            ["algorithm.advantage={kind='gdpo', weights={a=1.0}}", "algorithm.teacher={model='x', signal='reward'}"],
            "'gdpo' compares components of the reward, which a teacher's signal is not",
        ),
        (
            ["queue.batch_size=16", "algorithm.kl={reward_beta=0.1, target=6.0, horizon=3}"],
            r"horizon \(3\) must be above",
        ),
        ([RLOO, "algorithm.zero_variance=mask", "algorithm.teacher.model=x"], "in which the teacher has a signal"),
        ([RLOO, "algorithm.curriculum={}", "algorithm.teacher.model=x"], "skips rows of equal scores, in which the"),
        ([*LOGLINEAR, RLOO, "algorithm.teacher.model=x"], "anyway: the teacher, whose log-probs"),
        (
            ["learner.transport={kind='folder'}", "cluster.own_disks=true", "checkpoint.remote=s3://x"],
            "needs a path with cluster.own_disks",
        ),
        (
            ["rollout.engine.kind=sglang", "rollout.engine.routes=true", "model.compile=true"],
            "replaces each router's choice",
        ),
        (["rollout.engine.kind=sglang", "rollout.engine.routes=true", "queue.segments={}"], "are trained on earlier"),
        (
            ["rollout.engine.kind=sglang", "rollout.engine.args={enable_return_routed_experts=true}"],
            "decided elsewhere: by rollout.engine.routes",
        ),
        (["rollout.engine.kind=sglang", "rollout.engine.urls=['localhost:1']"], "must begin with http"),
        ([*SERVER, "rollout.engine.urls=['http://10.0.0.1:1']"], "memory of one machine"),
        ([*SERVER, "rollout.actors=2"], r"rollout.actors \(2\) must be 1"),
        (["rollout.engine.kind=sglang", TWO_SERVERS], r"rollout.actors \(1\) must be 2: one for each"),
        (
            [*SERVER, "evaluation.actors=1"],
            r"actors \(1\) and evaluation.actors \(1\) must be 1 together: one for each",
        ),
        (["learner.gpus=0.4", "rollout.gpus=0.6", "evaluation.actors=1"], "its share of the 2 engines"),
        ([*SERVER, "rollout.engine.urls=['http://localhost:1', 'http://localhost:1']"], "urls must differ"),
        (["rollout.engine.kind=sglang", "rollout.top_p=0.9"], r"top_k \(0\) must be 2 to 4096 with top_p \(0.9\)"),
        (["rollout.engine.kind=sglang", "rollout.top_k=5000"], r"top_k \(5000\) must be 2 to 4096"),
        (["rollout.top_k=1"], r"top_k \(1\) leaves every token without an alternative"),
        ([LOGLINEAR[0], RLOO], r"learner.epochs \(1\) times learner.minibatches \(1\)"),
        (
            ["algorithm.kl.loss_beta=0.1", "algorithm.kl.loss_estimator=k1"],
            "'k1' in the loss has a gradient that is 0 on average",
        ),
        (["algorithm.correction={kind='mask', band=[1.5, 5.0]}"], r"band \(1.5, 5.0\) must contain 1"),
        ([f"{REJECT}{{kind='outlier', band=[0.5, 0.9]}}]}}"], r"band \(0.5, 0.9\) must contain 1"),
        (["algorithm.proximal=behavior"], r"correction 'truncate' weighs by proximal / behavior, which is 1"),
        ([*BEHAVIOR, "algorithm.policy_loss.kind=reinforce"], "'reinforce' has no ratio"),
        ([*BEHAVIOR, "algorithm.target_kl=0.01"], r"queue.max_lag \(8\) that includes the age of the data"),
        ([*BEHAVIOR, "learner.lr_by_ess=on"], "scores a batch before its first step"),
        ([SEGMENTS, "queue.max_lag=0"], "segments need max_lag of at least 1"),
        (["queue.admission=mean"], "needs both admission = 'mean' and too_old = 'keep'"),
        (["queue.too_old=keep"], "needs both admission = 'mean' and too_old = 'keep'"),
        ([ADAPTIVE, "queue.admission=mean", "queue.too_old=keep"], "no bound on age to adapt"),
        ([ADAPTIVE, *BEHAVIOR, "algorithm.target_kl=0.01"], r"queue.max_lag \(8\) that includes the age of the data"),
        (["queue.max_lag={kind='adaptive'}"], "missing required field `at_most`"),
        (["queue.max_lag={kind='adaptive', at_most=8, ess=1}"], "must be a number above 0 and below 1, not 1"),
        ([SEGMENTS, "queue.too_old=windowed"], "too_old = 'windowed' is about whole completions"),
        ([SEGMENTS, "queue.too_old=drop"], "too_old = 'drop' is about whole completions"),
        ([LORA, *KL, "algorithm.kl.follow_every=2"], "moves the reference, which model.lora keeps frozen"),
        ([LORA, *KL, "algorithm.kl.offload=true"], "the reference is the policy itself, without its adapters"),
        (["model.lora={targets = ['q_proj', 'q_proj']}"], "must be names, each once"),
        ([DETACHED, "model.attention=eager"], "'detached' is not possible with model.attention = 'eager'"),
        ([DETACHED, "model.compile=true"], "'detached' is not possible with model.compile = True"),
        ([SEGMENTS, RLOO], "algorithm.advantage = 'rloo' has none: choose gae or vtrace"),
        ([SEGMENTS, "algorithm.advantage.kind=sequence"], "algorithm.advantage = 'sequence' has none"),
        ([SEGMENTS, "algorithm.advantage={kind='gae', adaptive_alpha=0.05}"], "needs a completion's length"),
        ([SEGMENTS, "algorithm.whiten.over=group", "queue.samples_per_prompt=4"], "parts are trained on in different"),
        ([SEGMENTS, "algorithm.positive_nll=0.1"], "a segment has no answer yet"),
        ([SEGMENTS, "algorithm.teacher.url=http://localhost:1"], "queue.segments are parts"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configfile.load(MATH, [*PLAIN, *overrides])


@pytest.mark.parametrize(
    "overrides",
    [
        [*BEHAVIOR],
        [ADAPTIVE],
        [ADAPTIVE, *BEHAVIOR, "queue.too_old=windowed"],
        [*BEHAVIOR, "algorithm.advantage.kind=vtrace", "algorithm.kl.reward_beta=0.1"],
        [*BEHAVIOR, "algorithm.target_kl=0.01", "queue.max_lag=0"],
        [*LOGLINEAR, RLOO],
        [*LOGLINEAR, OWN_CRITIC],
        [*LOGLINEAR, RLOO, "algorithm.kl.loss_beta=0.1"],
        [RLOO, "algorithm.advantage.kind=maxrl", "algorithm.kl.loss_beta=0.1"],
        [OWN_CRITIC, "algorithm.critic.epochs=4", "algorithm.critic.minibatches=8", "algorithm.critic.max_grad_norm=2"],
    ],
)
def test_choices_that_agree_are_taken(overrides: list[str]) -> None:
    configfile.load(MATH, overrides)


def test_the_benchmark_of_the_algorithms_leaves_no_kind_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    choices = importlib.import_module("benchmarks.learning.algorithms").CHOICES
    runs = [configfile.load(MATH, [*PLAIN, *overrides]).algorithm for overrides in choices.values()]
    kinds = get_type_hints(Algorithm)
    for field in ("policy_loss", "correction", "advantage", "exploration"):
        assert {type(getattr(run, field)) for run in runs} == set(get_args(kinds[field])), field
    assert {run.proximal for run in runs} == set(get_args(kinds["proximal"]))
    (filters, _) = get_args(kinds["filters"])
    assert {type(one) for run in runs for one in run.filters} == set(get_args(filters))


def test_every_snippet_of_the_documentation_is_taken() -> None:
    """The first column of the tables in docs/algorithms.md: a value under its field, or a whole assignment."""
    several_steps = ["learner.minibatches=2", OWN_CRITIC]
    taken, field = 0, None
    for line in (REPOSITORY / "docs" / "algorithms.md").read_text().splitlines():
        head = re.match(r"\| `(algorithm\.\w+) =` \|", line)
        field = head[1] if head else field if line.startswith("|") else None
        row = re.match(r"\| `(?:(learner|model) = )?([\[{\"][^`]+)`", line)
        if head or not row or not (where := row[1] or field):
            continue
        written = row[2].replace("...", 'kind = "truncate"')
        value = tomllib.loads(f"x = {written}")["x"]
        overrides = [f"{where}={written}"]
        if isinstance(value, dict):
            overrides = [f"{where}.{name}={_toml(part)}" for name, part in value.items()]
        without = ["algorithm.correction.kind=off"] * (value == "behavior") + ["learner.exact=false"] * (
            "compile" in row[2]
        )
        configfile.load(
            MATH, [*PLAIN, *overrides] + without + several_steps * ("loglinear" in line or '"kl_cov"' in row[2])
        )
        taken += 1
    assert taken > 40


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(part)}" for name, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else repr(value)


LISTS = """
[algorithm.correction]
kind = "truncate"
reject = [
  { kind = "outlier", band = [0.01, 100.0] },
  { kind = "k3", at_mosst = 0.01 },
]
[[algorithm.filters]]
kind = "truncated"
[[algorithm.filters]]
kind = "off_policy_negative"
delta = 0.1
"""


def test_a_list_of_kinds_is_read_and_a_mistake_in_it_stands_at_the_list(tmp_path: Path) -> None:
    correction = next(text for text in MATH.read_text().splitlines() if text.startswith("correction ="))
    path = edited(tmp_path, correction, "")
    path.write_text(path.read_text() + LISTS.replace("at_mosst", "at_most"))
    read = configfile.load(path).algorithm
    assert isinstance(read.correction, Truncate) and read.correction.reject[1] == RejectK3(at_most=0.01)
    assert read.filters == (FilterTruncated(), FilterOffPolicyNegative(delta=0.1))
    path.write_text(path.read_text().replace("at_most", "at_mosst").replace("delta = 0.1", "delta = -1"))
    lines = path.read_text().splitlines()
    reject, filters = lines.index("reject = [") + 1, lines.index("[[algorithm.filters]]") + 1
    with pytest.raises(ConfigError) as refused:
        configfile.load(path)
    assert str(refused.value).splitlines() == [
        f"{path}:{reject}: algorithm.correction.reject[1].at_mosst: unknown field 'at_mosst': did you mean 'at_most'?",
        f"{path}:{reject}: algorithm.correction.reject[1]: missing required field `at_most`",
        f"{path}:{filters}: algorithm.filters[1].delta: must be a number above 0, not -1",
    ]
    with pytest.raises(ConfigError, match=r"override algorithm\.filters: must be a list, each of it a table, not 3"):
        configfile.load(MATH, ["algorithm.filters=3"])
    with pytest.raises(ConfigError, match=r"override algorithm.filters\[0\].kind: unknown kind \"truncatd\""):
        configfile.load(MATH, ["algorithm.filters=[{kind='truncatd'}]"])


def test_a_correction_that_is_left_out_is_truncation_and_none_takes_a_word(tmp_path: Path) -> None:
    line = next(text for text in MATH.read_text().splitlines() if text.startswith("correction ="))
    path = edited(tmp_path, line, "")
    assert configfile.load(path).algorithm.correction == Truncate()
    assert configfile.load(path, ["algorithm.correction=off"]).algorithm.correction == NoCorrection()


@pytest.mark.parametrize("beside", [False, True])
def test_paths_of_a_linked_file_are_those_beside_the_link_or_else_beside_its_target(
    beside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, links = tmp_path / "a project", tmp_path / "links"
    for folder in (project, links):
        folder.mkdir()
    monkeypatch.chdir(links)
    fields = 'model.path = "model"\nrollout.limit = "mine.py:limit"\ntask.data = "rows.jsonl"\n'
    (project / "mine.toml").write_text(fields + 'reward.function = "mine.py:score"\n')
    Path("mine.toml").symlink_to("../a project/mine.toml")
    for folder in (project, *[links] * beside):
        (folder / "model").mkdir()
        for name in ("mine.py", "rows.jsonl"):
            (folder / name).touch()
    config, place = configfile.load(Path("mine.toml")), links if beside else project
    assert isinstance(config.task, DataTask) and isinstance(config.reward.scorers["reward"], FunctionScorer)
    (source,) = config.task.sources.values()
    paths = [config.model.path, config.rollout.limit, source.data, config.reward.scorers["reward"].function]
    assert paths == [f"{place}/{name}" for name in ("model", "mine.py:limit", "rows.jsonl", "mine.py:score")]


def test_a_missing_file_and_broken_toml_are_config_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        configfile.load(tmp_path / "none.toml")
    for name in ("broken.toml", "broken.yaml", "broken"):
        (tmp_path / name).write_text("name: x")
        with pytest.raises(ConfigError, match=f"{name}: not TOML"):
            configfile.load(tmp_path / name)
    for encoding in ("latin-1", "utf-16"):
        (tmp_path / "other.toml").write_text("name = 'é'", encoding=encoding)
        with pytest.raises(ConfigError, match=r"other.toml: not UTF-8"):
            configfile.load(tmp_path / "other.toml")


def test_the_tree_survives_its_own_encoding() -> None:
    config = configfile.load(MATH)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=Config) == config


def test_dry_run_prints_the_resolved_tree_and_flags_may_stand_between_overrides() -> None:
    command = [sys.executable, "-m", "streamppo", "run", str(MATH), "--dry-run", "learner.lr=0.5", "name=x"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    resolved = tomllib.loads(done.stdout)
    assert (resolved["learner"]["lr"], resolved["name"]) == (0.5, "x")


@pytest.mark.parametrize("arguments", [["--help"], ["run", str(MATH), "--dry-run"], ["run", str(MATH), "x=1"]])
def test_help_dry_run_and_config_errors_import_nothing_heavy(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom streamppo.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'ray', 'transformers', 'sglang'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True)


def test_a_choice_between_kinds_is_a_type() -> None:
    assert isinstance(configfile.load(MATH).algorithm.policy_loss, Clip)


@pytest.mark.parametrize("kind", ["pipe", "device", "link to nothing"])
def test_a_folder_with_something_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.toml").write_text("")
    assert configfile.existing(tmp_path) == tmp_path
    strange = tmp_path / "metrics.jsonl"
    if kind == "pipe":
        os.mkfifo(strange)
    else:
        strange.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl: neither a file nor a folder"):
        configfile.existing(tmp_path)


def test_the_lock_of_an_editor_in_a_runs_folder_is_no_fault(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    configfile.save(math_config(), tmp_path)
    (tmp_path / ".#config.toml").symlink_to("user@machine.4711:1790000000")
    assert configfile.existing(tmp_path) == tmp_path
    assert not list(preflight._links(tmp_path))


def test_a_byte_order_mark_before_the_configuration_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "math.toml").write_bytes(b"\xef\xbb\xbf" + MATH.read_bytes())
    assert configfile.load(tmp_path / "math.toml") == configfile.load(MATH)


def test_a_file_that_goes_while_a_running_run_is_looked_at_is_no_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(Path, "iterdir", lambda one: iter([one / "config.toml", one / "inputs.json.tmp"]))
    assert configfile.existing(tmp_path) == tmp_path
    monkeypatch.setattr(Path, "is_file", lambda one: True)
    assert configfile.existing(tmp_path) == tmp_path


def test_a_link_where_a_file_is_written_aside_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("theirs")
    (tmp_path / "report.html.tmp").symlink_to(other)
    durable.write(tmp_path / "report.html", b"ours")
    assert (other.read_text(), (tmp_path / "report.html").read_bytes()) == ("theirs", b"ours")


@pytest.mark.parametrize(("data", "is_hollow"), [((), True), ((0,), True), ((700,), True), ((0, 300, 900), False)])
def test_a_file_of_holes_alone_is_not_read(
    tmp_path: Path, data: tuple[int, ...], is_hollow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 1,000 blocks some are data."""
    monkeypatch.setattr(durable, "HOLLOW_BYTES", 2**20)
    monkeypatch.setattr(durable, "HOLLOW_RATIO", 400)
    with (tmp_path / "file").open("wb") as file:
        for block in data:
            file.seek(4096 * block)
            file.write(b"x" * 4096)
        file.truncate(4096 * 1000)
    assert durable.is_hollow(tmp_path / "file") is is_hollow
    with pytest.raises(OSError, match="a sparse file") if is_hollow else nullcontext():
        assert len(durable.read(tmp_path / "file")) == 4096 * 1000
    with durable.reading(tmp_path / "file") as opened:
        assert opened.read(1) == (b"x" if 0 in data else b"\0")
