"""Every rule fires on a run made to show its sign, and none on a good run; a sign ends when it no longer holds."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from conftest import REPOSITORY

from streamppo.config.sections import Config
from streamppo.telemetry import diagnosis, metrics_file, progress
from streamppo.telemetry.diagnosis import Diagnosis
from streamppo.telemetry.diagnosis_rules import EARLY, RULES
from streamppo.telemetry.evidence import WINDOW
from streamppo.telemetry.metrics_file import Line

DEFAULT_RUN = Path(__file__).with_name("default_run.jsonl")
"""The lines of 60 updates of configs/math.toml, four digits of each number."""
LETTERS: Any = json.loads(Path(__file__).with_name("letters_runs.json").read_text())
"""Runs of the project that `init` makes, three digits of each number; the fallen one had algorithm.advantage.lam 0."""
ENGINES = {"idle_share": 0.1}
HEALTHY = {
    "reward": 0.2,
    "length": 10.0,
    "truncated": 0.0,
    "tokens": 100.0,
    "tokens_too_old": 0.0,
    "tokens_trained": 100.0,
    "equal_groups": 0.2,
    "behavior_kl": 0.01,
    "ess": 0.9,
    "mismatch": 0.001,
    "explained_variance": 0.3,
    "value_loss": 0.1,
    "entropy": 0.7,
    "proximal_kl": 0.001,
    "clip_fraction_high": 0.01,
    "clip_fraction_low": 0.01,
    "ratio_p01": 0.9,
    "ratio_p99": 1.1,
    "grad_norm": 1.0,
    "steps": 4.0,
    "bad_steps": 0.0,
    "empty_steps": 0.0,
    "wait_s": 0.1,
    "update_s": 1.0,
    "push_ms": 3.0,
}


def updates(count: int, begin: int = 1, **changed: float) -> list[Line]:
    """So many updates of a healthy run, but for `changed`."""
    more: Any = {**HEALTHY, **changed, "lag_histogram": {"0": 1}}
    return [{"update": version, "wall_s": 1.0 * version, **more} for version in range(begin, begin + count)]


def after(**changed: float) -> list[Line]:
    """Sixty updates, the last twenty of which are not healthy."""
    return [*updates(2 * WINDOW), *updates(WINDOW, 2 * WINDOW + 1, **changed)]


def for_long(**changed: float) -> list[Line]:
    """Sixty updates, the last forty of which are not healthy."""
    return [*updates(WINDOW), *updates(2 * WINDOW, WINDOW + 1, **changed)]


def once(**changed: float) -> list[Line]:
    """Sixty updates, one of which is not healthy."""
    return [*updates(2 * WINDOW), *updates(1, 2 * WINDOW + 1, **changed), *updates(WINDOW - 1, 2 * WINDOW + 2)]


def spikes(count: int, behind: float = HEALTHY["reward"]) -> list[Line]:
    """Sixty updates, so many of which have a large KL, with the reward `behind` them."""
    begin = 2 * WINDOW + 8
    high = updates(count, begin + 1, reference_kl=0.02, behavior_kl=0.9)
    return [*updates(begin), *high, *updates(WINDOW - 8 - count, begin + count + 1, reward=behind)]


def spike(before: float, behind: float, count: int = 1) -> list[Line]:
    """Sixty updates of a task at reward `before`; behind spikes of the gradient in the last twenty at `behind`."""
    middle = 2 * WINDOW + 8
    return [
        *updates(middle, reward=before),
        *updates(count, middle + 1, reward=before, grad_norm=30.0),
        *updates(WINDOW - 8 - count, middle + count + 1, reward=behind),
    ]


def evaluation(version: int, accuracy: float, failed: int = 0) -> Line:
    return {
        "evaluation": version,
        "wall_s": 1.0,
        "accuracy": accuracy,
        "count": 500,
        "failed": failed,
        "versions": (version, version),
    }


def summary(**changed: Any) -> Any:
    return {"dropped": {"too_old": 0}, "trajectories": 1000, "failed": {}, "engines": ENGINES, **changed}


def engine(name: str, share: float) -> Line:
    """The line of a rollout actor whose turns have reused a share of their contexts."""
    told = {"version": 1, "tokens": 9, "busy_s": 1.0, "idle_s": 0.0, "context_reused": share, "sampled": None}
    return cast(Line, {"engine": name, "wall_s": 1.0, **told})


FALLING = [evaluation(0, 0.3), *updates(WINDOW), evaluation(20, 0.6), *updates(WINDOW, 21, reward=0.5)]
SIGNS: dict[str, tuple[list[Line], Any, str]] = {
    "policy hardly moves": (
        after(clip_fraction_high=0.0, clip_fraction_low=0.0, ratio_p01=1.0, ratio_p99=1.0002),
        None,
        "between 1.0000 and 1.0002 after 4 steps",
    ),
    "clip fraction": (after(clip_fraction_high=0.3), None, "31% of the trained tokens"),
    "KL spikes": (spikes(4), None, "behavior_kl was 0.9 nats, 0.01 in the median"),
    "entropy collapse": (after(entropy=0.05), None, "entropy 0.05 nats a token, 0.7 in the first 20"),
    "gradient spikes": (spike(0.3, 0.3, 4), None, "grad_norm was 30, 1 in the median"),
    "contexts are computed again": (
        [engine("a", 0.9), engine("a", 0.5), engine("b", 0.4), *updates(WINDOW)],
        None,
        "55% of the tokens of earlier turns were computed again",
    ),
    "cuts rest on the critic": (
        after(segments_cut=0.66, explained_variance=-0.05),
        None,
        "66% of the segments end in a cut, and the critic explains nothing there (-0.05)",
    ),
    "value loss diverges": (after(value_loss=0.5), None, "value loss 0.5, and 0.1 at its lowest"),
    "explained variance": (for_long(explained_variance=-0.4), None, "explained variance -0.40"),
    "worse than at the start": (
        [
            evaluation(0, 0.4),
            *updates(WINDOW),
            evaluation(20, 0.5),
            *updates(WINDOW, 21, reward=0.1),
            evaluation(40, 0.0),
        ],
        None,
        "held-out accuracy 0.000, and 0.400 at first; the best is 0.500, of version 20",
    ),
    "reward rises while held-out falls": (
        [*FALLING, evaluation(40, 0.4), *updates(WINDOW, 41, reward=0.6), evaluation(60, 0.35)],
        None,
        "0.350 after 0.600 of version 20, while the reward rose from 0.200 to 0.600",
    ),
    "ESS collapse": (
        [*updates(2 * WINDOW), *updates(6, 2 * WINDOW + 1, ess=0.1), *updates(WINDOW - 6, 2 * WINDOW + 7)],
        None,
        "ess is at most 0.10 in a quarter",
    ),
    "lag at its bound": (after(tokens_too_old=12.0), None, "12% of the tokens are beyond queue.max_lag (8)"),
    "engine and learner differ": (after(mismatch=0.2), None, "mismatch 0.2 nats"),
    "length drifts": (after(length=31.0), None, "31.0 tokens a completion, 10.0 in the first 20"),
    "completions are cut off": (after(truncated=0.4), None, "40% of the completions"),
    "equal groups": (after(equal_groups=0.95), None, "95% of the trajectories"),
    "failures": (updates(WINDOW), summary(failed={"reward": 100}), "100 attempts failed, 1000 trajectories"),
    "failures depend on length": (
        updates(WINDOW),
        summary(attempts={"length_test": {"failed": 44, "trained": 900, "z": 6.5, "longer": 0.81}}),
        "longer than trained ones in 81% of the pairs (z = 6.5, 44 prompts against 900)",
    ),
    "steps without a token": (after(empty_steps=4.0, steps=1.0), None, "80 of 100 steps"),
    "starved learner": (after(wait_s=0.97), None, "waits 97%"),
    "blocked engines": (updates(WINDOW), summary(engines={"idle_share": 0.8}), "80% of their time"),
}


def test_the_documentation_has_the_rules_as_they_are() -> None:
    text = (REPOSITORY / "docs" / "diagnosis.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| sign")]
    assert rows == [f"| {rule.name} | {rule.fires} |" for rule in RULES]


@pytest.fixture
def grpo(math_config: Callable[..., Config]) -> Config:
    return math_config("algorithm.advantage.kind=grpo")


@pytest.mark.parametrize("rule", [rule.name for rule in RULES])
def test_a_rule_fires_on_a_run_made_to_show_its_sign_and_no_other_does(rule: str, grpo: Config) -> None:
    lines, at_end, said = SIGNS[rule]
    found = diagnosis.diagnose_lines(grpo, lines, at_end)
    assert [one.name for one in found] == [rule]
    assert said in found[0].numbers


@pytest.mark.parametrize(
    "lines", [[], [engine("a", 0.5)], [engine("a", 0.1), {"part": 2, "wall_s": 2.0, "version": 0}]]
)
def test_contexts_of_short_turns_of_enough_reuse_or_of_an_earlier_part_are_no_sign(lines: Any, grpo: Config) -> None:
    assert diagnosis.diagnose_lines(grpo, [*lines, *updates(2 * WINDOW)], None) == []


def test_no_rule_fires_on_a_healthy_run(grpo: Config) -> None:
    assert diagnosis.diagnose_lines(grpo, updates(3 * WINDOW), summary()) == []


def test_no_rule_fires_on_a_default_run(tmp_path: Path, math_config: Callable[..., Config]) -> None:
    (tmp_path / metrics_file.METRICS).write_bytes(DEFAULT_RUN.read_bytes())
    lines = metrics_file.read(tmp_path)
    assert sum("update" in line for line in lines) == 60
    assert diagnosis.diagnose_lines(math_config(), lines, None) == []


@pytest.mark.parametrize(
    ("lines", "at_end", "said"),
    [
        (once(bad_steps=2.0), None, "2 optimizer steps were left out"),
        ([*updates(WINDOW), evaluation(20, 0.2, failed=60)], None, "60 of 560 held-out prompts"),
        (updates(WINDOW), summary(dropped={"too_old": 90}), "90 trajectories beyond queue.max_lag (8) were dropped"),
    ],
)
def test_rules_see_the_same_sign_in_other_numbers(lines: list[Line], at_end: Any, said: str, grpo: Config) -> None:
    (finding,) = diagnosis.diagnose_lines(grpo, lines, at_end)
    assert said in finding.numbers


def test_a_task_that_is_solved_has_little_entropy_and_equal_groups_and_that_is_no_fault(grpo: Config) -> None:
    lines = after(reward=0.95, entropy=0.01, equal_groups=0.97, explained_variance=-0.5)
    assert diagnosis.diagnose_lines(grpo, lines, None) == []


def test_groups_may_be_equal_where_samples_are_not_compared(math_config: Callable[..., Config]) -> None:
    assert diagnosis.diagnose_lines(math_config(), after(equal_groups=0.95), None) == []


def test_one_step_an_update_cannot_clip_and_that_is_no_fault(grpo: Config) -> None:
    still = {"clip_fraction_high": 0.0, "clip_fraction_low": 0.0, "ratio_p01": 1.0, "ratio_p99": 1.0}
    assert diagnosis.diagnose_lines(grpo, after(steps=1.0, **still), None) == []


def test_a_finding_is_new_once_and_tells_from_when_to_when_it_was_seen(grpo: Config) -> None:
    diagnosed = Diagnosis(grpo)
    new = {line["update"]: diagnosed.add(line) for line in updates(100, ess=0.1) if "update" in line}
    assert [version for version, findings in new.items() if findings] == [WINDOW]
    finding = diagnosed.findings["ESS collapse"]
    assert (finding.first, finding.last) == (20, 100)
    assert diagnosed.newest == finding


def test_a_run_shorter_than_a_window_is_not_judged_by_its_updates(grpo: Config) -> None:
    assert diagnosis.diagnose_lines(grpo, updates(WINDOW - 1, ess=0.1), summary()) == []


def test_completions_that_are_nearly_all_cut_off_are_told_after_a_few_updates(grpo: Config) -> None:
    diagnosed = Diagnosis(grpo)
    new = [finding for line in updates(EARLY, truncated=0.99) for finding in diagnosed.add(line)]
    assert [(one.name, one.first) for one in new] == [("completions are cut off", EARLY)]
    assert new[0].numbers == "nearly all completions (99%) are cut off by rollout.max_tokens (5)"
    assert "raise the limit of tokens" in new[0].advice


@pytest.mark.parametrize("share", [0.0, 0.5, 0.89])
def test_a_few_updates_judge_nothing_less(share: float, grpo: Config) -> None:
    assert diagnosis.diagnose_lines(grpo, updates(EARLY, truncated=share, ess=0.1), None) == []


def letters(name: str) -> list[Line]:
    """The lines of a run of the project that `init` makes."""
    run = LETTERS["runs"][name]
    lines: Any = [
        {"evaluation": version, "wall_s": 0.0, "accuracy": accuracy, "count": count, "failed": 0, "versions": (0, 0)}
        for version, accuracy, count in run["evaluations"]
    ]
    for update, wall_s, *values in run["updates"]:
        known = {key: value for key, value in zip(LETTERS["names"], values, strict=True) if value is not None}
        lines.append({"update": update, "wall_s": wall_s, **known, "push_ms": 1.0, "lag_histogram": {"0": 1}})
    # An evaluation ends a little after its update.
    return sorted(lines, key=lambda one: (one.get("update", one.get("evaluation")), "evaluation" in one))


@pytest.mark.parametrize("name", [name for name in LETTERS["runs"] if name != "fallen"])
def test_no_sign_is_ever_seen_in_a_good_run_of_the_shipped_project(
    name: str, math_config: Callable[..., Config]
) -> None:
    assert diagnosis.diagnose_lines(math_config(), letters(name), summary()) == []


def test_a_run_that_fell_has_its_signs_with_causes_first(math_config: Callable[..., Config]) -> None:
    found = diagnosis.diagnose_lines(math_config(), letters("fallen"), summary())
    names = ["explained variance", "entropy collapse", "completions are cut off", "worse than at the start"]
    assert [one.name for one in found] == names
    assert [one.holds for one in found] == [False, True, True, True]


def test_completions_that_are_cut_off_from_the_beginning_are_a_cause(grpo: Config) -> None:
    lines = [evaluation(0, 0.4), *updates(3 * WINDOW, truncated=0.95, ess=0.1), evaluation(60, 0.1)]
    names = [one.name for one in diagnosis.diagnose_lines(grpo, lines, None)]
    assert names == ["completions are cut off", "ESS collapse", "worse than at the start"]


def test_little_entropy_is_no_sign_while_the_reward_rises(grpo: Config) -> None:
    rising = [
        line for n in range(3) for line in updates(WINDOW, 1 + n * WINDOW, reward=0.2 + 0.1 * n, entropy=0.7 / 9**n)
    ]
    assert diagnosis.diagnose_lines(grpo, rising, None) == []


@pytest.mark.parametrize(
    ("reward", "entropy", "is_sign"),
    [
        (0.2, 0.06, True),
        (0.2, 0.08, False),
        (0.6, 0.03, True),
        (0.6, 0.05, False),
        (0.75, 0.015, True),
        (0.9, 0.001, False),
    ],
)
def test_the_fewer_answers_are_wrong_the_less_entropy_is_a_collapse(
    reward: float, entropy: float, is_sign: bool, grpo: Config
) -> None:
    # The reward rose long before, and does so no more.
    lines = [*updates(WINDOW), *updates(5 * WINDOW, WINDOW + 1, reward=reward, entropy=entropy, grad_norm=1.0)]
    late = Diagnosis(grpo)
    for line in lines:
        late.add(line)
    assert [one.name for one in late.findings.values() if one.holds] == ["entropy collapse"] * is_sign


def test_a_policy_that_had_learned_and_falls_with_its_entropy_has_collapsed(grpo: Config) -> None:
    falling = [
        line
        for n, reward in enumerate((0.2, 0.6, 0.85, 0.6, 0.5))
        for line in [
            *updates(WINDOW, 1 + n * WINDOW, reward=reward, entropy=0.7 / 5**n),
            evaluation((n + 1) * WINDOW, reward),
        ]
    ]
    found = {one.name: one for one in diagnosis.diagnose_lines(grpo, falling, None)}
    assert found["entropy collapse"].holds and found["entropy collapse"].first > 3 * WINDOW


def test_rewards_that_are_high_hide_no_collapse_of_what_is_held_out(grpo: Config) -> None:
    lines = [
        *updates(2 * WINDOW),
        *updates(WINDOW, 2 * WINDOW + 1, reward=0.9, entropy=0.02),
        *[evaluation(version, 0.1) for version in (70, 80)],
        *updates(4 * WINDOW, 3 * WINDOW + 1, reward=0.9, entropy=0.02),
    ]
    assert [one.name for one in diagnosis.diagnose_lines(grpo, lines, None)] == ["entropy collapse"]


@pytest.mark.parametrize(
    ("before", "behind", "count", "is_sign"),
    [
        (0.99, 0.99, 1, False),
        (0.99, 0.93, 1, False),
        (0.99, 0.75, 1, True),
        (0.99, 0.2, 1, True),
        (0.99, 0.99, 4, False),
        (0.3, 0.3, 1, False),
        (0.3, 0.3, 3, False),
        (0.3, 0.3, 4, True),
        (0.3, 0.1, 1, True),
    ],
)
def test_a_rare_large_gradient_is_a_sign_if_the_reward_falls_behind_it(
    before: float, behind: float, count: int, is_sign: bool, grpo: Config
) -> None:
    found = diagnosis.diagnose_lines(grpo, spike(before, behind, count), None)
    assert [one.name for one in found] == ["gradient spikes"] * is_sign


@pytest.mark.parametrize(
    ("lines", "is_sign"), [(spikes(1), False), (spikes(3), False), (spikes(4), True), (spikes(1, 0.05), True)]
)
def test_a_rare_large_kl_is_a_sign_if_the_reward_falls_behind_it(
    lines: list[Line], is_sign: bool, grpo: Config
) -> None:
    assert [one.name for one in diagnosis.diagnose_lines(grpo, lines, None)] == ["KL spikes"] * is_sign


@pytest.mark.parametrize("correct_at", ["0.0", "-1.0"])
def test_a_bound_of_right_answers_may_be_zero_or_below(correct_at: str, math_config: Callable[..., Config]) -> None:
    config = math_config(f"reward.correct_at={correct_at}")
    assert diagnosis.diagnose_lines(config, after(entropy=0.05, grad_norm=1.0), None) == []


def test_a_policy_that_learns_to_end_in_its_first_updates_shows_no_sign(grpo: Config) -> None:
    lines = [*updates(WINDOW, truncated=0.38), *updates(2 * WINDOW, WINDOW + 1, truncated=0.05)]
    assert diagnosis.diagnose_lines(grpo, lines, None) == []


def test_one_update_with_many_cuts_among_others_with_none_rests_on_no_critic(grpo: Config) -> None:
    cut = updates(1, 2 * WINDOW + 1, segments_cut=0.74, explained_variance=-0.05)
    lines = [*updates(2 * WINDOW), *cut, *updates(WINDOW - 1, 2 * WINDOW + 2, explained_variance=-0.05)]
    assert diagnosis.diagnose_lines(grpo, lines, None) == []


@pytest.mark.parametrize(
    ("overrides", "idle", "is_sign"),
    [
        (["queue.max_lag=0"], 0.8, False),
        (["queue.max_lag=1"], 0.8, False),
        (["queue.max_lag=2"], 0.8, True),
        (["queue.max_lag=2", "queue.segments={}"], 0.8, False),
        (["queue.max_lag=3", "queue.segments={}"], 0.8, True),
        (["queue.max_lag=2"], 0.6, False),
        (["queue.max_lag=2", "rollout.engine.kind=sglang", "rollout.gpus=1"], 0.6, True),
    ],
)
def test_engines_that_take_turns_with_the_learner_or_lend_it_their_cores_are_not_blocked(
    overrides: list[str], idle: float, is_sign: bool, math_config: Callable[..., Config]
) -> None:
    found = diagnosis.diagnose_lines(math_config(*overrides), updates(WINDOW), summary(engines={"idle_share": idle}))
    assert [one.name for one in found] == ["blocked engines"] * is_sign


@pytest.mark.parametrize(
    ("overrides", "share", "is_sign"),
    [
        ([], 0.84, False),
        ([], 0.97, True),
        (["rollout.engine.kind=sglang", "rollout.gpus=1"], 0.84, True),
        (["rollout.engine.kind=sglang", "rollout.gpus=1"], 0.7, False),
    ],
)
def test_a_learner_that_lends_its_cores_to_engines_is_not_starved(
    overrides: list[str], share: float, is_sign: bool, math_config: Callable[..., Config]
) -> None:
    found = diagnosis.diagnose_lines(math_config(*overrides), after(wait_s=share), None)
    assert [one.name for one in found] == ["starved learner"] * is_sign


@pytest.mark.parametrize(
    ("accuracies", "is_sign"),
    [
        ((0.3, 0.6, 0.4), False),
        ((0.3, 0.6, 0.4, 0.6), False),
        ((0.3, 1.0, 0.99, 0.99), False),
        ((0.3, 0.6, 0.4, 0.4), True),
    ],
)
def test_one_evaluation_below_the_best_is_no_fall(accuracies: tuple[float, ...], is_sign: bool, grpo: Config) -> None:
    lines: list[Line] = []
    for n, accuracy in enumerate(accuracies):
        lines += [evaluation(n * WINDOW, accuracy), *updates(WINDOW, 1 + n * WINDOW, reward=0.1 * (n + 1))]
    assert [one.name for one in diagnosis.diagnose_lines(grpo, lines, None)] == [
        "reward rises while held-out falls"
    ] * is_sign


def test_accuracy_that_falls_with_the_reward_is_another_sign(grpo: Config) -> None:
    lines = [*FALLING, *updates(2 * WINDOW, 41, reward=0.1), evaluation(60, 0.45), evaluation(80, 0.45)]
    assert diagnosis.diagnose_lines(grpo, lines, None) == []


@pytest.mark.parametrize(
    "rule", [name for name, (_, at_end, _) in SIGNS.items() if at_end is None and "start" not in name]
)
def test_a_sign_is_over_when_the_updates_no_longer_show_it(rule: str, grpo: Config) -> None:
    lines, _, _ = SIGNS[rule]
    diagnosed = Diagnosis(grpo)
    for line in lines:
        diagnosed.add(line)
    diagnosed.close(None)
    assert diagnosed.findings[rule].holds
    last = max(line["update"] for line in lines if "update" in line)
    # All is healthy again, the held-out accuracy too.
    more = [
        *(engine(name, 0.8) for name in "ab"),
        evaluation(last, 0.6),
        *updates(WINDOW, last + 1),
        evaluation(last + WINDOW, 0.6),
        *updates(WINDOW, last + 21),
    ]
    told = [finding for line in more for finding in diagnosed.add(line)]
    assert [(one.name, one.holds) for one in told] == [(rule, False)]
    assert not diagnosed.findings[rule].holds and diagnosed.findings[rule].last <= last


def test_each_evaluation_is_examined_once_however_many_checks_follow(
    grpo: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []

    class Counted(progress.ScoredVersion):
        def __new__(cls, version: int, *fields: Any) -> "Counted":
            made.append(version)
            return super().__new__(cls, version, *fields)

    monkeypatch.setattr(progress, "ScoredVersion", Counted)
    lines = [line for window in range(9) for line in (evaluation(window, 0.4), *updates(WINDOW, 1 + WINDOW * window))]
    assert diagnosis.diagnose_lines(grpo, lines, None) == []
    assert made == list(range(9))
