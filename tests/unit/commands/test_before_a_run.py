"""`run` reports errors before it has a folder or a process, and notes settings that are probably not meant."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hollow_weights
import pytest
from conftest import MATH, REPOSITORY
from transformers import Qwen2Config

from benchmarks.lib.runs import PLAIN
from streamppo import loop
from streamppo.cli import main
from streamppo.commands.checks import machine
from streamppo.config import file as configfile
from streamppo.tasks.tokenizer import character_tokenizer

DATA = "task={kind='data', data='rows.jsonl', held_out=0}"
MOVED = ": if it was moved, correct its path, in a run by `streamppo resume RUN section.field=PATH`"
LACKING = {
    "reward: reward.function 'nowhere:score': importing nowhere failed": ["reward.function=nowhere:score"],
    "task: 'nowhere.jsonl' is not a file or folder here (looked at ": ["task={kind='data', data='nowhere.jsonl'}"],
    f"task: '/moved/rows.jsonl' is not a file or folder here{MOVED}": ["task={kind='data', data='/moved/rows.jsonl'}"],
    f"model: '/moved/model' is not a folder here{MOVED}": ["model.path=/moved/model"],
    "engine: SGLang is not installed": ["rollout.engine.kind=sglang"],
    "model: './nowhere' is not a folder here (looked at ": ["model.path=./nowhere"],
    "GPUs: the run requests 1; this machine has 0": ["learner.gpus=1"],
    "must be a multiple of": ["queue.batch_size=7"],
    "object store: cluster.object_store_mib (1000000000)": ["cluster.object_store_mib=1000000000"],
    "builtin:tiny reads 256 characters at once": [DATA],
    "environment: environment.name 'nowhere:World'": ["environment.name=nowhere:World"],
    "rollout: rollout.limit 'nowhere:limit'": ["rollout.limit=nowhere:limit"],
}


@pytest.fixture(autouse=True)
def _somewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(machine, "gpus_here", lambda: 0)
    Path("rows.jsonl").write_text(f'{{"prompt": "{"a" * 500}", "answer": "b"}}\n' * 4)


@pytest.mark.parametrize("sentence", LACKING)
def test_a_run_that_lacks_something_is_refused_before_it_has_a_folder(
    capsys: pytest.CaptureFixture[str], sentence: str
) -> None:
    assert main(["run", str(MATH), *LACKING[sentence]]) == 2
    assert sentence in capsys.readouterr().err
    assert list(Path().iterdir()) == [Path("rows.jsonl")]


@pytest.mark.parametrize(("name", "long"), [("TMPDIR", True), ("RAY_TMPDIR", True), ("RAY_TMPDIR", False)])
def test_a_temporary_folder_with_a_path_too_long_for_sockets_is_refused_with_the_remedy(
    name: str, long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setenv("TMPDIR", "/tmp/" + "long" * 20)
    monkeypatch.setenv(name, "/tmp/" + "long" * 20 if long else "/tmp")
    found = [finding.text for finding in machine.places(configfile.load(MATH)) if finding.subject == "sockets"]
    assert [text.partition(": ")[2][:14] for text in found] == ["set RAY_TMPDIR"] * long


def model_folder(positions: int) -> None:
    """Write the folder `model`: a model of so many positions with a tokenizer of characters and a chat template."""
    Path("model").mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    heads = {"num_key_value_heads": 2, "vocab_size": 200}
    hollow_weights.write(Path("model"), Qwen2Config(**sizes, **heads, max_position_embeddings=positions))
    made = character_tokenizer("abcdefgh")
    made.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    made.save_pretrained("model")


LONG = "task={{kind='data', data='rows.jsonl', held_out=0, max_prompt_tokens={}, too_long='{}'}}"


@pytest.mark.parametrize(
    ("positions", "row", "task", "is_refused"),
    [
        (64, {"prompt": "a" * 100}, LONG.format(1024, "error"), True),
        (64, {"prompt": [{"role": "user", "content": "a" * 100}]}, LONG.format(1024, "error"), True),
        (64, {"prompt": "a" * 100}, LONG.format(1024, "skip"), True),
        (64, {"prompt": "a" * 100}, LONG.format(48, "truncate"), False),
        (64, {"prompt": "a" * 20}, LONG.format(1024, "error"), False),
        (256, {"prompt": "a" * 100}, LONG.format(1024, "error"), False),
    ],
)
def test_prompts_that_all_exceed_the_models_context_are_refused_before_a_process_starts(
    positions: int,
    row: dict[str, Any],
    task: str,
    is_refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("rows.jsonl").write_text(f"{json.dumps({**row, 'answer': 'a'})}\n" * 8)
    model_folder(positions)
    monkeypatch.setattr(loop, "run", lambda *_, **__: 0)
    assert main(["run", str(MATH), task, "model.path=model"]) == (2 if is_refused else 0)
    said = "context: all of the first 8 prompts leave no room for a completion in the model's context of "
    said += f"{positions} tokens"
    assert (said in capsys.readouterr().err) == is_refused
    assert Path("runs").exists() != is_refused


def test_transformers_is_not_imported_where_the_bytes_of_prompts_fit_the_context() -> None:
    Path("rows.jsonl").write_text('{"prompt": "aaaa", "answer": "a"}\n' * 8)
    model_folder(1024)
    here = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    code = (
        "import sys; from pathlib import Path; from streamppo.config import file;"
        "from streamppo.commands.checks import check;"
        f"task = {LONG.format(64, 'error')!r};"
        f"check.check_lightly(file.load(Path({str(MATH)!r}), [task, 'model.path=model']));"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, env=here).returncode == 0


@pytest.mark.parametrize(("kib", "is_refused"), [(4, True), (255 * 2**10, True), (256 * 2**10, False)])
def test_a_limit_of_file_sizes_below_rays_object_store_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kib: int, *, is_refused: bool
) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda _: (kib * 2**10, -1))
    monkeypatch.setattr(loop, "run", lambda *_, **__: 0)
    assert main(["run", str(MATH)]) == (2 if is_refused else 0)
    said = (
        f"file size: no file may be larger than {kib} KiB here, and Ray's object store is a file of 256 MiB: ulimit -f"
    )
    assert (said in capsys.readouterr().err) == is_refused


@pytest.mark.parametrize("words", [["run", str(MATH)], ["check", str(MATH)], ["list"], ["init", "x"], ["resume", "/x"]])
def test_a_current_folder_that_is_gone_is_told_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(words) == 1
    assert "RunError: the current folder has been deleted: change to another one" in capsys.readouterr().err


def test_a_cluster_may_have_elsewhere_what_is_not_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "run", lambda *_, **__: 0)
    assert main(["run", str(MATH), "learner.gpus=1", "cluster.address=auto"]) == 0


def test_neither_torch_nor_transformers_nor_ray_is_imported_for_a_mistake() -> None:
    here = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    for command in ("run", "check"):
        code = (
            f"import sys; from streamppo.cli import main; main(['{command}', '{MATH}', 'reward.function=nowhere:x']);"
            "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray', 'zarr')))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=here)
        assert done.returncode == 0 and "importing nowhere failed" in done.stdout + done.stderr


NOTES = {
    'algorithm.correction is "off" with max_lag (8) and 2 steps': [
        "algorithm.correction.kind=off",
        "learner.minibatches=2",
    ],
    'algorithm.kl.loss_beta (0.1) with correction "off" and max_lag (8)': [
        "algorithm.correction.kind=off",
        "algorithm.kl.loss_beta=0.1",
    ],
    "queue.admission is 'mean': queue.max_lag (8) bounds the mean lag of completions, not that of a token": [
        "queue.admission=mean",
        "queue.too_old=keep",
    ],
    "algorithm.correction.cap (0.5) is below 1": ["algorithm.correction.cap=0.5"],
    "algorithm.policy_loss 'gspo' depends on current / proximal, which is 1 if an update is one step": [
        "algorithm.policy_loss.kind=gspo",
        "algorithm.aggregation=sequence-mean-token-mean",
    ],
    "algorithm.policy_loss 'reinforce' has no ratio, and 2 steps on each batch": [
        "algorithm.policy_loss.kind=reinforce",
        "learner.epochs=2",
    ],
    "algorithm.policy_loss 'sequence_clip' is one loss for a response; aggregation 'token-mean'": [
        "algorithm.policy_loss.kind=sequence_clip",
        "learner.epochs=2",
    ],
    "algorithm.zero_variance is 'mask': groups of equal scores are not trained on, though the KL in the reward": [
        "algorithm.advantage.kind=rloo",
        "algorithm.zero_variance=mask",
        "algorithm.kl.reward_beta=0.1",
    ],
    "algorithm.zero_variance is 'mask': groups of equal scores are not trained on, though baseline_shift (-0.1)": [
        "algorithm.advantage={kind='dr_grpo', baseline_shift=-0.1}",
        "algorithm.zero_variance=mask",
    ],
    "algorithm.curriculum skips rows of equal scores, though positive_nll (0.1) trains on their right answers": [
        "algorithm.advantage.kind=rloo",
        "algorithm.curriculum={}",
        "algorithm.positive_nll=0.1",
    ],
    'algorithm.kl.loss_beta (0.1) with correction "reject" and max_lag (8)': [
        "algorithm.correction={kind='reject', reject=[{kind='token', band=[0.5, 2.0]}]}",
        "algorithm.kl.loss_beta=0.1",
    ],
    'algorithm.kl.loss_beta (0.1) with correction "topr" and max_lag (8): the KL to the reference is then, where': [
        "algorithm.correction.kind=topr",
        "algorithm.kl.loss_beta=0.1",
    ],
    "algorithm.critic.lr (0.01) has no effect: advantage 'rloo' has no critic": [
        "algorithm.advantage.kind=rloo",
        "algorithm.critic.lr=0.01",
    ],
    "algorithm.target_kl (0.1) has no effect: an update is one step": ["algorithm.target_kl=0.1"],
    "algorithm.whiten.unbiased (True) has no effect: advantages are not whitened": [
        "algorithm.whiten={over='off', unbiased=true}",
    ],
    "algorithm.whiten.over (off) has no effect: advantage 'reinforce_plus_plus' whitens over the batch itself": [
        "algorithm.advantage.kind=reinforce_plus_plus",
        "algorithm.whiten.over=off",
    ],
    "algorithm.entropy_control.step (0.1) has no effect: entropy_control.target is 0": [
        "algorithm.entropy_control.step=0.1",
    ],
    "algorithm.kl.horizon (5) has no effect: kl.target is 0": ["algorithm.kl.horizon=5"],
    "algorithm.kl.loss_estimator (k2) has no effect: kl.loss_beta is 0": ["algorithm.kl.loss_estimator=k2"],
    "algorithm.kl.allow_both (True) has no effect: one of both weights is 0": [
        "algorithm.kl={reward_beta=0.1, allow_both=true}",
    ],
    "algorithm.kl.offload (True) has no effect: kl.reward_beta and kl.loss_beta are 0": ["algorithm.kl.offload=true"],
    "algorithm.advantage.lam (0.9) has no effect: adaptive_alpha computes it": [
        "algorithm.advantage={kind='gae', lam=0.9, adaptive_alpha=0.05}",
    ],
    "learner.final_lr_share (0.1) has no effect: learner.decay is 'constant'": [
        "learner.decay=constant",
        "learner.final_lr_share=0.1",
    ],
    "queue.segments.explained (0.2) has no effect: queue.segments.max_tokens is 0": ["queue.segments={explained=0.2}"],
    "learner.warmup_updates (9) is the whole run (9 updates)": ["updates=9", "learner.warmup_updates=9"],
    "algorithm.critic.warmup_updates (9) is the whole run": ["updates=9", "algorithm.critic.warmup_updates=9"],
    "rollout.in_flight (5) is below rollout.slots (512)": ["rollout.in_flight=5"],
    "learner ranks and rollout actors have 33 threads, but this machine": ["rollout.actors=32"],
    "evaluation.prompts (9999) is more than the 8": ["evaluation.prompts=9999"],
}


MEANT = [
    ["algorithm.proximal=behavior", "algorithm.correction.kind=off", "learner.minibatches=2"],
    ["algorithm.proximal=behavior", "algorithm.correction.kind=off", "algorithm.kl.loss_beta=0.1"],
    ["algorithm.proximal=behavior", "algorithm.correction.kind=off", "algorithm.policy_loss.kind=dppo_tv"],
    ["algorithm.policy_loss.kind=reinforce"],
    ["algorithm.critic.lr=0.01", "algorithm.whiten.shift_mean=false"],
    ["algorithm.target_kl=0.1", "learner.minibatches=2"],
    ["algorithm.kl={reward_beta=0.1, loss_beta=0.1, allow_both=true, target=6.0, horizon=1000}"],
    ["algorithm.correction.kind=off", "algorithm.kl.loss_beta=0.1", "queue.max_lag=0"],
]


@pytest.mark.parametrize("choices", MEANT, ids=" ".join)
def test_the_same_settings_where_they_mean_something_are_not_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], choices: list[str]
) -> None:
    monkeypatch.setattr(loop, "run", lambda *_, **__: 0)
    assert main(["run", str(MATH), *PLAIN, *choices]) == 0
    assert "note: algorithm" not in capsys.readouterr().out


@pytest.mark.sampled(4)
@pytest.mark.parametrize("note", NOTES)
def test_settings_that_are_probably_not_meant_are_noted_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], note: str
) -> None:
    monkeypatch.setattr(loop, "run", lambda *_, **__: 0)
    assert main(["run", str(MATH), *PLAIN, *NOTES[note]]) == 0
    assert capsys.readouterr().out.count(f"note: {note}") == 1
    assert main(["run", str(MATH)]) == 0
    assert "note: " not in capsys.readouterr().out.replace("this machine 1 cores", "")
