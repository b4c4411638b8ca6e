"""`try` samples what the run's own version sampled, and what others would have. Runs without Ray (thread_run.py)."""

import json
import math
import shutil
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import replay_case
import thread_run

import streamppo
from streamppo import cli
from streamppo.commands.models import archived
from streamppo.config import consent
from streamppo.config import file as configfile
from streamppo.errors import ConfigError
from streamppo.queue.store import archive
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Trajectory, ints


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of six updates at lag 0, with checkpoints of 2, 4 and 6, whose reward is that of thread_run.py."""
    return thread_run.trained(tmp_path_factory.mktemp("tried"), "learner.lr=1e-2")


@pytest.fixture(autouse=True)
def reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reward with which the run was trained."""
    monkeypatch.setattr("streamppo.tasks.library.arithmetic.score", thread_run.score)


def tried(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> Any:
    assert cli.main(["try", str(run), "--json", *options]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], run: Path, *options: str) -> str:
    assert cli.main(["try", str(run), *options]) in (1, 2)
    shown = capsys.readouterr()
    assert not shown.out and "Traceback" not in shown.err
    return shown.err


def of_batch(run: Path, version: int, tokens: int = 1) -> Trajectory:
    """A completion that `version` sampled, of so many tokens at least."""
    return next(one for one in archive.open(run).batch(version).trajectories if one.num_tokens >= tokens)


def named(one: Trajectory) -> tuple[str, ...]:
    return "--prompt", str(one.identity.prompt), "--sample", str(one.identity.sample)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("version", [0, 2, 4])
@pytest.mark.parametrize("at", [0, 2])
def test_with_the_run_s_random_numbers_its_own_version_samples_the_archived_completion(
    run: Path, capsys: pytest.CaptureFixture[str], version: int, at: int
) -> None:
    one = of_batch(run, version, 3)
    told = tried(capsys, run, *named(one), "--version", str(version), "--at", str(at), "-n", "2")
    (found,) = told["versions"]
    assert (found["is_same"], found["differs"], found["begin"]) == (True, None, version)
    assert (told["update"], told["sample"], told["reward"]) == (version + 1, one.identity.sample, one.reward)
    text = "".join(told[name] for name in ("before", "archived"))
    assert text.replace("<eos>", "") == _decoded(run, one) and bool(told["before"]) == bool(at)
    assert len(found["continuations"]) == 2 and all(each["reward"] is not None for each in found["continuations"])


def test_other_weights_do_not_and_nobody_says_that_they_do(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = tried(capsys, run, *named(of_batch(run, 2)), "--version", "6", "-n", "1")
    assert told["versions"][0]["is_same"] is None


@pytest.mark.slow
def test_a_version_without_a_checkpoint_is_made_again_and_samples_its_completions_too(run: Path) -> None:
    one, before = of_batch(run, 5, 2), {path: path.read_bytes() for path in run.rglob("*.zip")}
    words = ("streamppo", "try", str(run), *named(one), "--version", "5", "--at", "1", "-n", "3")
    done = replay_case.command(*words, "--json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["versions"]
    assert (found["version"], found["begin"], found["is_same"]) == (5, 4, True)
    assert {path: path.read_bytes() for path in run.rglob("*.zip")} == before
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["00000002", "00000004", "00000006"]
    shown = replay_case.command(*words).stdout
    assert "version 5 (replayed from version 4): mean reward " in shown
    assert "version 5 with the random numbers of the run: the archived completion, token for token" in shown


def test_a_damaged_completion_is_not_called_the_same(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The proof can fail."""
    one = of_batch(run, 4, 3)
    find: Any = archived.find

    def altered(*of: Any) -> Any:
        found = find(*of)
        tokens = found.recorded.tokens.copy()
        tokens[1] = tokens[1] + 1 if tokens[1] < 10 else tokens[1] - 1
        return found._replace(recorded=found.recorded._replace(tokens=tokens))

    monkeypatch.setattr(archived, "find", altered)
    (found,) = tried(capsys, run, *named(one), "--version", "4", "-n", "1")["versions"]
    assert (found["is_same"], found["differs"]) == (False, 1)
    cli.main(["try", str(run), *named(one), "--version", "4", "-n", "1"])
    assert "another completion from token 1 on: machine, threads" in capsys.readouterr().out


def test_the_critic_of_the_version_says_what_the_learner_recorded(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch, learned = archive.open(run).batch_and_record(4)
    one = of_batch(run, 4, 3)
    values = learned["values"][batch.trajectories.index(one)]
    for at in (0, 2):
        told = tried(capsys, run, *named(one), "--version", "4", "2", "--at", str(at), "-n", "1")
        assert told["recorded_value"] == pytest.approx(float(values[at]))
        assert told["versions"][0]["value"] == pytest.approx(float(values[at]), abs=1e-5)
        assert abs(told["versions"][1]["value"] - float(values[at])) > 1e-4, "another version's critic says another"


@pytest.mark.slow
def test_two_versions_are_compared_in_pairs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (*named(of_batch(run, 4, 2)), "--at", "1")
    told = tried(capsys, run, *options, "--version", "0", "6", "-n", "8")
    rewards = [[each["reward"] for each in version["continuations"]] for version in told["versions"]]
    assert len(set(rewards[0])) > 1, "they differ"
    for version, own in zip(told["versions"], rewards, strict=True):
        assert version["mean"] == pytest.approx(statistics.fmean(own))
        assert version["error"] == pytest.approx(statistics.stdev(own) / math.sqrt(8))
    paired = [second - first for first, second in zip(*rewards, strict=True)]
    assert told["difference"] == pytest.approx(statistics.fmean(paired))
    assert told["difference_error"] == pytest.approx(statistics.stdev(paired) / math.sqrt(8))
    again = tried(capsys, run, *options, "--version", "6", "-n", "8")
    assert again["versions"][0]["continuations"] == told["versions"][1]["continuations"], "whatever stands beside it"
    assert again["difference"] is None and again["versions"][0]["value"] == told["versions"][1]["value"]
    assert cli.main(["try", str(run), *options, "--version", "0", "6", "-n", "2"]) == 0
    shown = capsys.readouterr().out
    assert "version 6 minus 0: " in shown
    first, second = (version["continuations"][1]["text"] for version in told["versions"])
    assert repr(first) in shown and repr(second) in shown


def test_continuations_begin_behind_the_token_and_differ(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = of_batch(run, 4, 3)
    told = tried(capsys, run, *named(one), "--version", "0", "--at", "2", "-n", "12")
    texts = {each["text"] for each in told["versions"][0]["continuations"]}
    assert len(texts) > 3
    assert all(each["tokens"] <= 3 for each in told["versions"][0]["continuations"]), "5 tokens, 2 of them before"


def test_a_text_is_a_prompt_whose_reward_fails_where_it_needs_the_answer(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tried(capsys, run, "--prompt", "12+34=", "--version", "2", "-n", "2")
    (found,) = told["versions"]
    assert told["prompt"] == "12+34=" and found["mean"] is not None and told["update"] is None
    monkeypatch.undo()
    (found,) = tried(capsys, run, "--prompt", "12+34=", "--version", "2", "-n", "2")["versions"]
    assert found["mean"] is None and [bool(one["text"]) for one in found["continuations"]] == [True, True]
    assert "answer" in found["continuations"][0]["reason"]


def test_a_prompt_that_was_never_issued_is_sampled_from_its_beginning(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = tried(capsys, run, "--prompt", "4000", "--version", "2", "-n", "2")
    assert told["number"] == 4000 and told["update"] is None and told["versions"][0]["mean"] is not None


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--prompt", "0", "--version", "9"), "version 9 was never made; the newest is 6"),
        (("--prompt", "4000", "--version", "2", "--at", "1"), "no such completion of prompt 4000 was trained on"),
        (("--prompt", "0", "--sample", "77", "--version", "2"), "no such completion of prompt 0"),
        (("--prompt", "0", "--version", "2", "--at", "50"), "--at 50: the completion has "),
        (("--prompt", "1+1=", "--version", "2", "--at", "1"), "--at, --sample and --attempt belong to an archived"),
        (("--prompt", "0", "--version", "2", "2"), "a version is named twice"),
        (("--prompt", "0", "--version"), "--version requires at least 1 element"),
        (("--prompt", "", "--version", "2"), "--prompt is the number of a prompt"),
        (("--prompt", "0", "--version", "2", "-n", "0"), "Must be >= 1"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(
    run: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...], reason: str
) -> None:
    assert reason in refused(capsys, run, *options)


def test_other_data_than_the_run_s_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    one = of_batch(run, 2)
    monkeypatch.setattr("streamppo.tasks.task.Task.prompt", lambda *_: streamppo.types.Prompt("1+1=", {}))  # pyright: ignore
    assert "the context of token 0 is not the recorded one" in refused(capsys, run, *named(one), "--version", "2")


def test_a_run_of_somebody_else_is_refused_until_one_agrees(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "foreign"
    shutil.copytree(run, copy)
    config = configfile.change(configfile.load(copy / configfile.CONFIG), ['reward.function="theirs.py:score"'])
    configfile.save(config, copy)
    (copy / consent.FILE).unlink(missing_ok=True)
    assert "you have not agreed yet" in refused(capsys, copy, "--prompt", "0", "--version", "2")


def test_an_agent_is_refused_by_name(run: Path) -> None:
    from streamppo.commands.trial import TrialQuestion

    config = configfile.change(
        configfile.load(run / configfile.CONFIG), ["environment.kind=agent", "environment.agent=mine.py:run"]
    )
    with pytest.raises(ConfigError, match="trains an agent"):
        TrialQuestion((2,), "0").refuse_agent(config)


def test_in_python_it_is_an_object(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replay_case.start_by_fork(monkeypatch)
    one = of_batch(run, 4, 2)
    found = streamppo.try_versions(run, [4], one.identity.prompt, sample=one.identity.sample, at=1, n=2)
    assert found.versions[0].is_same is True and len(found.versions[0].continuations) == 2
    assert found.at == 1 and found.sample == one.identity.sample
    with pytest.raises(ConfigError, match="--at 50"):
        streamppo.try_versions(run, [4], one.identity.prompt, at=50)


def _decoded(run: Path, one: Trajectory) -> str:
    tokenizer = Tokenizer(run / "model")
    return tokenizer.spell(ints(one.tokens).tolist()).replace("<eos>", "")


# --- completions of several segments -------------------------------------------------------------------------


def test_segments_are_one_completion_and_one_that_is_missing_is_named(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = of_batch(run, 4, 4)
    cut = [_segment(whole, number, 2 * number, 2 * number + 2) for number in range(2)]
    parts = [archived._Part(one, 5, np.zeros(2, np.float32)) for one in cut]
    monkeypatch.setattr(archived, "_parts", lambda *_: parts[::-1])
    found = archived.find(run, whole.identity.prompt, None, None)
    assert found is not None and found.recorded.tokens.tolist() == ints(whole.tokens)[:4].tolist()
    assert found.recorded.prompt_tokens.tolist() == ints(whole.prompt_tokens).tolist()
    assert found.reward == whole.reward and found.sampled_by(4) and not found.sampled_by(3)
    monkeypatch.setattr(archived, "_parts", lambda *_: parts[:1])
    found = archived.find(run, whole.identity.prompt, None, None)
    assert found is not None and found.reward is None and not found.sampled_by(4), "it is not whole"
    monkeypatch.setattr(archived, "_parts", lambda *_: parts[1:])
    with pytest.raises(streamppo.errors.JournalError, match="segment 0 of prompt"):  # pyright: ignore
        archived.find(run, whole.identity.prompt, None, None)


def _segment(whole: Trajectory, number: int, start: int, end: int) -> Trajectory:
    from msgspec import structs

    return structs.replace(
        whole,
        identity=structs.replace(whole.identity, segment=number),
        prompt_tokens=whole.prompt_tokens + whole.tokens[: 4 * start],
        tokens=whole.tokens[4 * start : 4 * end],
        versions=whole.versions[4 * start : 4 * end],
        mask=whole.mask[start:end],
        prefix=start,
        finish=whole.finish if number else "cut",
    )
