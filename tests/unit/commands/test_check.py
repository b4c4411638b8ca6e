"""`streamppo check`: every shipped configuration is in order; each mistake of another has a sentence."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import hollow_weights
import model_folders
import pytest
import torch
import transformers
from conftest import COUNTERS, MATH, REPOSITORY
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3Config,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
)

from streamppo.cli import main
from streamppo.commands.checks import machine, memory_estimate
from streamppo.commands.checks import memory as memory_checks
from streamppo.commands.checks import model as check_model
from streamppo.config import file as configfile
from streamppo.learner import memory
from streamppo.learner.attention import layers
from streamppo.learner.model import policy as learner_model
from streamppo.queue.rules.records import ArchivedBatch, Changes, PublishedVersion
from streamppo.queue.store.journal import Journal
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.terminal import counted

CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))
PUBLISHED: dict[str, Any] = {
    "gsm8k-qwen2.5-0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "vocab_size": 151936}
    | {"num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True},
    "math-qwen2.5-7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "vocab_size": 152064}
    | {"num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False},
    "math-qwen3-32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "vocab_size": 151936}
    | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": False},
    "math-qwen3-30b-a3b": {"hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48, "head_dim": 128}
    | {"num_attention_heads": 32, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
    | {"vocab_size": 151936, "tie_word_embeddings": False},
}
KINDS: dict[str, Any] = {"math-qwen3-32b": Qwen3Config, "math-qwen3-30b-a3b": Qwen3MoeConfig}
"""What stands in the config.json of the models that the configurations name."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_folder(folder: Path, *, template: str | None = TEMPLATE, kind: Any = Qwen2Config, **settings: Any) -> Path:
    """A folder with config.json, a tokenizer and weights of zeros, which take no disk."""
    folder.mkdir(exist_ok=True)
    hollow_weights.write(folder, kind(**({"vocab_size": 200, "num_key_value_heads": 2} | settings)))
    tokenizer = character_tokenizer("".join(map(chr, range(10, 127))))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Run `check` where the data of the shipped configurations has been prepared; (exit code, output).

    The columns of the table are one space apart.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "")
    for split in ("train", "test"):
        Path("gsm8k").mkdir(exist_ok=True)
        row = {"question": "What is 1+1?", "answer": "It is two.\n#### 2"}
        Path("gsm8k", f"{split}.jsonl").write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
        Path("MATH", split, "algebra").mkdir(parents=True)
        row = {"problem": "1+1?", "solution": r"\boxed{2}", "level": "Level 1", "type": "Algebra"}
        Path("MATH", split, "algebra", "1.json").write_text(json.dumps(row))

    def run(config: Path | str, *options: str) -> tuple[int, str]:
        code = main(["check", str(config), *options])
        output = capsys.readouterr()
        return code, re.sub(" {2,}", " ", output.out + output.err)

    yield run


def prepare(config: Path) -> None:
    """Run the `streamppo data` commands that the configuration's own comment names."""
    for line in re.findall(r"^#     (streamppo data .*)$", config.read_text(), flags=re.MULTILINE):
        assert main(line.replace("grade-school-math", "gsm8k").split()[1:]) == 0


@pytest.mark.sampled(4)
@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_every_shipped_configuration_is_in_order(checked: Callable[..., tuple[int, str]], config: Path) -> None:
    code, output = checked(config)
    assert code == 0, output
    prepare(config)
    code, output = checked(config)
    assert code == 0 and " error " not in output
    assert "task ok the first prompt is" in output


@pytest.mark.sampled(2)
@pytest.mark.parametrize("example", sorted((REPOSITORY / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_is_in_order_but_for_an_extra_that_is_not_installed(
    checked: Callable[..., tuple[int, str]], example: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    _, output = checked(example)
    wrong = [line for line in output.splitlines() if " error " in line and "pip install 'streamppo[" not in line]
    assert wrong == []
    assert "task ok the first prompt is" in output or "pip install 'streamppo[" in output


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PUBLISHED)
def test_the_memory_that_a_comment_names_is_the_memory_that_check_computes(
    checked: Callable[..., tuple[int, str]], tmp_path: Path, name: str
) -> None:
    config = REPOSITORY / "configs" / f"{name}.toml"
    prepare(config)
    kind = KINDS.get(name, Qwen2Config)
    folder = model_folder(tmp_path / "model", kind=kind, **PUBLISHED[name], max_position_embeddings=32768)
    code, output = checked(config, f"model.path={folder}", "--gpu-gib", "80")
    assert code == 0, output
    comment = "".join(line for line in config.read_text().splitlines(keepends=True) if line.startswith("#"))
    lines = [line for line in output.splitlines() if line.startswith(("rank ", "engine memory "))]
    found = re.findall(r"[\d.]+ [GM]iB", "".join(lines))
    assert len(found) == 9
    # What a layer keeps differs a little between versions of transformers; the comments are of constraints.txt.
    is_pinned = f"transformers=={transformers.__version__}" in (REPOSITORY / "constraints.txt").read_text().split()
    for size in found:
        value, unit = size.split()
        sizes = [float(number) for number in re.findall(rf"([\d.]+) {unit}", comment)]
        assert min(abs(number / float(value) - 1) for number in sizes) <= (0 if is_pinned else 0.06), (size, found)
    (parameters,) = re.findall(r"parameters ok ([\d,]+) in", output)
    assert parameters in comment
    host = next(line for line in output.splitlines() if line.startswith("host memory ok"))
    (held,) = re.findall(r"holds? ([\d.]+ GiB)", host)
    assert held in comment or name.startswith("gsm8k")


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ([], None),
        (["rollout.top_k=8"], "candidates ok at most 36 bytes a token besides 13 others, 36.0 MiB a batch"),
        (["rollout.top_p=0.9"], "candidates ok at most 644 bytes a token .*; top_k would bound it"),
    ],
)
def test_the_bytes_that_candidates_take_at_most_are_said(
    checked: Callable[..., tuple[int, str]], tmp_path: Path, sampling: list[str], said: str | None
) -> None:
    folder = model_folder(tmp_path / "model", vocab_size=160, max_position_embeddings=4096)
    sizes = ("queue.batch_size=1024", "rollout.max_tokens=1024")
    _, output = checked(MATH, f"model.path={folder}", *sizes, *sampling)
    assert "candidates ok" not in output if said is None else re.search(said, output), output


def test_a_teacher_at_a_url_is_asked_later_and_its_key_is_missed_here(checked: Callable[..., tuple[int, str]]) -> None:
    _, output = checked(MATH, "algorithm.teacher.url=http://a:1")
    assert "teacher later http://a:1 is contacted when the run starts" in output and "environment has no" not in output
    _, output = checked(MATH, "algorithm.teacher={url='http://a:1', key_env='NO_SUCH_KEY'}")
    assert "http://a:1 is contacted when the run starts; the environment has no NO_SUCH_KEY here" in output


def test_neither_ray_nor_a_gpu_is_touched_and_no_row_is_wrapped_in_a_pipe() -> None:
    code = (
        "import sys, torch; from streamppo.cli import main; code = main(['check', *sys.argv[1:]]);"
        "sys.exit(code or 'ray' in sys.modules or torch.cuda.is_initialized())"
    )
    words = [sys.executable, "-c", code, str(MATH), "updates=123456"]
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm-256color"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout
    assert re.search(r"^Ray is asked +ok +GPU 0, CPU 2: for learner ranks .* actors \(1\) *$", done.stdout, re.M)


# --- what is wrong, in a sentence ----------------------------------------------------------------------------

REWARDS = """
async def score(trajectory, difficulty):
    return 1.0

def late(trajectory):
    return 1.0

class World:
    async def reset(self, prompt): ...

LENGTH = 8
"""
DATA = "task={kind='data', data='rows.jsonl'"
WRONG = {
    "importing nowhere failed": ["reward.function=nowhere:score"],
    "has no 'missing'": ["reward.function=mine.py:missing"],
    "asks for the column 'difficulty'": ["reward.function=mine.py:score"],
    "is sync: it would block the actor": ["reward.function=mine.py:late", "reward.where=actor"],
    "mine.py:late' has no argument 'wieght' (it has none)": [
        "reward.function=mine.py:late",
        "reward.arguments.wieght=1",
    ],
    "has no `async def step`": ["environment.name=mine.py:World"],
    "mine.py:LENGTH' is not a function": ["rollout.limit=mine.py:LENGTH"],
    "no scorer of [reward.scorers] is for the data source": [
        "reward={scorers={a={kind='function', function='mine.py:late', sources=['x']}}}"
    ],
    "line 2: not JSON": ["task={kind='data', data='broken.jsonl'}"],
    "latin.jsonl, line 1: not JSON: 'utf-8'": ["task={kind='data', data='latin.jsonl'}"],
    "learns only from answers that are texts or numbers: the answer of the prompt '1+1=' is [2]": [
        "task={kind='data', data='numbers.jsonl', held_out=0}"
    ],
    "model/journal.sqlite: missing": ["algorithm.critic.pretrain=model"],
    "has no archived batch": ["algorithm.critic.pretrain=young"],
    "no column 'question'": [f"{DATA}, prompt='question'}}"],
    "tokenizer has no chat template": [f"{DATA}, chat=true}}", "model.path=plain"],
    "there is no tokenizer": ["model.path=mute"],
    "the tokenizer has 120 tokens, but the model only 50": ["model.path=small"],
    "broken-late.jsonl, line 101: not JSON": ["task={kind='data', data='broken-late.jsonl'}", "model.path=model"],
    "bloom is a bloom, which transformers computes only with eager attention": [
        "model.path=bloom",
        "model.attention=sdpa",
        "rollout.engine.kind=sglang",
    ],
    "gemma2 caps its attention scores (attn_logit_softcapping), and SDPA does not": [
        "model.path=gemma2",
        "model.attention=sdpa",
        "rollout.engine.kind=sglang",
    ],
    "bin: a push of this model has model.embed_tokens.weight": [
        "model.path=bin",
        "rollout.engine.kind=sglang",
    ],
    "does not run model_type 'bloom', whose attention transformers does not let others replace": ["model.path=bloom"],
    "light: no weights": ["model.path=light"],
    "parts: model-2.safetensors of the 2 parts are missing": ["model.path=parts"],
    "young: no config.json": ["model.path=young"],
    "must divide the 2 heads of keys and values": ["learner.ranks=4", "learner.mesh.context=4", "model.path=model"],
    "tensor = 4 must divide the 2 heads": ["learner.ranks=4", "learner.mesh={tensor=2, context=2}", "model.path=model"],
    "transformers has no plan that splits the experts": [
        "learner.ranks=2",
        "learner.mesh.expert=2",
        "model.path=model",
    ],
    "are too much for one GPU: the GPU has 0 GiB": ["learner.gpus=1", "model.path=model", "--gpu-gib", "0.01"],
    "the cache does not hold one completion of 261 tokens": [
        "rollout.engine.kind=sglang",
        "rollout.gpus=1",
        "model.path=model",
        "--gpu-gib",
        "0.0001",
    ],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sentence", WRONG)
def test_an_error_is_a_sentence_and_the_exit_code(
    checked: Callable[..., tuple[int, str]], tmp_path: Path, sentence: str
) -> None:
    (tmp_path / "mine.py").write_text(REWARDS)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "hello", "answer": "a"}\n{"prompt": "there", "answer": "b"}\n')
    (tmp_path / "broken.jsonl").write_text('{"prompt": "hello", "answer": "a"}\n{"prompt": \n')
    (tmp_path / "latin.jsonl").write_text('{"prompt": "é", "answer": "a"}\n', encoding="latin-1")
    (tmp_path / "numbers.jsonl").write_text('{"prompt": "1+1=", "answer": [2]}\n' * 2)
    (tmp_path / "young").mkdir()
    Journal(tmp_path / "young" / "journal.sqlite").close()
    row = '{"prompt": "hello", "answer": "a"}\n'
    (tmp_path / "broken-late.jsonl").write_text(row * 100 + "{\n" + row)
    bloom = BloomConfig(hidden_size=32, n_layer=2, n_head=4)
    for other in (bloom, Gemma2Config(**SMALL, vocab_size=200)):
        model_folder(tmp_path / other.model_type, **SMALL)
        hollow_weights.write(tmp_path / other.model_type, other)
    (model_folder(tmp_path / "light", **SMALL) / "model.safetensors").unlink()
    parts = model_folder(tmp_path / "parts", **SMALL)
    (parts / "model.safetensors").rename(parts / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (parts / "model.safetensors.index.json").write_text(json.dumps(index))
    model_folder(tmp_path / "model", **SMALL)
    model_folder(tmp_path / "plain", template=None, **SMALL)
    model_folder(tmp_path / "small", **SMALL, vocab_size=50)
    whole = model_folder(tmp_path / "bin", **SMALL) / "model.safetensors"
    torch.save(load_file(whole), tmp_path / "bin" / "pytorch_model.bin")
    whole.unlink()
    (tmp_path / "mute").mkdir()
    hollow_weights.write(tmp_path / "mute", Qwen2Config(**SMALL, num_key_value_heads=2))
    code, output = checked(MATH, *WRONG[sentence])
    assert code == 1
    assert sentence in output, output


def test_a_model_that_transformers_modules_compute_is_named(
    checked: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    for other in (MixtralConfig(**SMALL, vocab_size=200), Qwen2Config(**SMALL, vocab_size=200, hidden_act="gelu")):
        folder = model_folder(tmp_path / other.model_type, **SMALL)
        hollow_weights.write(folder, other)
        code, output = checked(MATH, f"model.path={folder}")
        assert code == 0, output
        assert f"transformers' modules compute this {other.model_type}: a tiny one decodes at half the speed" in output


ELSEWHERE = "rollout.engine={kind='sglang', urls=['http://h:1'], transport='group'}"
ABSENT = {
    "object store not here cluster.object_store_mib (1000000000) is more than": ["cluster.object_store_mib=1000000000"],
    "critic later 'polcy' is not a folder here": ["algorithm.critic.model=polcy"],
    "pretrain: 'runs/nope' is not a folder": ["algorithm.critic.pretrain=runs/nope"],
    "unknown for a MambaConfig": ["model.path=mamba", ELSEWHERE],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sentence", ABSENT)
def test_what_cannot_be_looked_at_is_a_sentence_and_no_error(
    checked: Callable[..., tuple[int, str]], tmp_path: Path, sentence: str
) -> None:
    folder = tmp_path / ABSENT[sentence][0].partition("=")[2]
    settings = {"mamba": MambaConfig(hidden_size=8, num_hidden_layers=2, state_size=4, vocab_size=200)}
    if folder.name in settings:
        model_folder(folder, **SMALL)
        hollow_weights.write(folder, settings[folder.name])
    code, output = checked(MATH, *ABSENT[sentence])
    assert code == 0 and sentence in output, output
    assert f"0 errors, {counted(len(ABSENT[sentence]), 'subject')} that cannot be checked here" in output
    assert ("engine later http://h:1 is contacted when the run starts" in output) == (ELSEWHERE in ABSENT[sentence])


def test_memory_is_estimated_later_if_the_model_is_elsewhere(checked: Callable[..., tuple[int, str]]) -> None:
    _, output = checked(MATH, "model.path=someone/model")
    assert "memory later it is estimated once the model can be read" in output


def test_a_critic_learns_from_the_batches_of_a_run_that_has_some(
    checked: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    journal = Journal(tmp_path / "run" / "journal.sqlite")
    journal.write(
        Changes(COUNTERS),
        [PublishedVersion(version=1, digest="", archived=ArchivedBatch(files=("0",), first_prompt=0, last_prompt=0))],
    )
    journal.close()
    code, output = checked(MATH, f"algorithm.critic.pretrain={tmp_path / 'run'}")
    assert code == 0 and f"critic ok learns from the 1 batches of {tmp_path / 'run'}" in output


def test_the_context_of_a_task_without_a_bound_on_prompts_is_not_noted(
    checked: Callable[..., tuple[int, str]],
) -> None:
    code, output = checked(MATH)
    assert code == 0 and "context note" not in output and "0 errors" in output


def test_completions_that_the_model_cuts_short_are_noted_and_are_no_error(
    checked: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    rows = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    model_folder(tmp_path / "short", **SMALL, max_position_embeddings=64)
    code, output = checked(MATH, f"{DATA}}}", "rollout.max_tokens=100", "model.path=short")
    assert code == 0
    assert "context note prompt and completion may have 1124 tokens; the model takes 64" in output
    code, output = checked(MATH, f"{DATA}}}", "rollout.engine.kind=sglang", "rollout.engine.max_total_tokens=64")
    assert "does not hold one completion of 256 tokens" in output


@pytest.mark.parametrize(("segments", "noted"), [("{max_tokens=2}", True), ("{max_tokens=64}", False), ("{}", False)])
def test_a_number_of_tokens_that_cuts_completions_which_end_in_time_is_noted(
    checked: Callable[..., tuple[int, str]], segments: str, noted: bool
) -> None:
    code, output = checked(MATH, f"queue.segments={segments}", "queue.too_old=mask")
    assert code == 0
    assert ("queue.segments.max_tokens (2) cuts every longer completion" in output) == noted


def test_a_field_that_is_not_there_is_answered_with_the_nearest(checked: Callable[..., tuple[int, str]]) -> None:
    code, output = checked(MATH, "learner.rangs=2")
    assert code == 2 and "did you mean 'ranks'?" in output


def test_an_sglang_that_is_too_old_is_an_error_and_none_at_all_is_not(
    checked: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    there: list[str] = []

    def version(name: str) -> str:
        if not there:
            raise metadata.PackageNotFoundError(name)
        return there[0]

    monkeypatch.setattr(metadata, "version", version)
    code, output = checked(MATH, "rollout.engine.kind=sglang")
    assert code == 0 and "engine not here SGLang is not installed" in output
    there.append("0.5.12")
    code, output = checked(MATH, "rollout.engine.kind=sglang")
    assert code == 1 and "the installed SGLang is 0.5.12: 0.5.21 or newer is needed" in output
    there[0] = "0.5.21"
    code, output = checked(MATH, "rollout.engine.kind=sglang")
    assert code == 0 and "engine ok SGLang 0.5.21" in output


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("here", "code"), [(0, 0), (1, 1), (2, 0)])
def test_too_few_gpus_are_an_error_and_none_are_another_machine(
    checked: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, here: int, code: int
) -> None:
    monkeypatch.setattr(machine, "gpus_here", lambda: here)
    got, output = checked(MATH, "learner.gpus=1", "rollout.gpus=1")
    assert got == code and (f"the run requests 2; this machine has {here}" in output) == (here < 2)
    assert checked(MATH, "learner.gpus=1", "rollout.gpus=1", "cluster.address=auto")[0] == 0


def test_weights_that_the_object_store_cannot_hold_are_noted(
    checked: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    folder = model_folder(tmp_path / "model", **SMALL, vocab_size=1_000_000, tie_word_embeddings=True)
    code, output = checked(MATH, f"model.path={folder}", "learner.micro_batch_tokens=64")
    assert code == 0 and "object store note weights spill to disk: cluster.object_store_mib = 367" in output


# --- the arithmetic ------------------------------------------------------------------------------------------


def small() -> Qwen2Config:
    return Qwen2Config(**SMALL, vocab_size=97, num_key_value_heads=2, max_position_embeddings=64)


def test_sizes_are_those_of_the_model_itself() -> None:
    config = configfile.load(MATH)
    lm = Qwen2ForCausalLM(small())
    found = memory.sizes(small(), config.model)
    assert found.parameters == sum(parameter.numel() for parameter in lm.parameters())
    assert found.layer == sum(parameter.numel() for parameter in lm.model.layers[1].parameters())
    assert found.rest == found.parameters - 2 * found.layer
    assert found.head == lm.lm_head.weight.numel()
    # Two layers, keys and values, two heads of 8 numbers of 4 bytes.
    assert found.cache_per_token == 2 * 2 * 2 * 8 * 4


def test_activations_are_what_a_layer_keeps() -> None:
    layer = Qwen2ForCausalLM(small()).model.layers[0]
    own = {parameter.data_ptr() for parameter in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}
    hidden = torch.randn(64, 1, 32, requires_grad=True)
    rotation = torch.ones(1, 1, 8), torch.zeros(1, 1, 8)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.untyped_storage().data_ptr(), x), id):
        layer(hidden, position_embeddings=rotation, attention_mask=torch.ones(64, 1, 1, 1, dtype=torch.bool))
    size = sum(tensor.untyped_storage().nbytes() for address, tensor in kept.items() if address not in own) / 64
    assert memory.sizes(small(), configfile.load(MATH).model).activations_per_layer == pytest.approx(size, rel=0.1)


def test_what_is_sharded_is_divided_by_the_ranks_and_a_critic_of_its_own_doubles() -> None:
    config = configfile.load(MATH, ["learner.ranks=4", "learner.micro_batch_tokens=8"])
    model = memory.sizes(small(), config.model)
    rank = memory.rank(config, model, longest=10)
    assert rank.state == model.parameters * 16 // 4
    assert rank.activations == 10 * 2 * model.activations_per_layer
    assert rank.head == 10 * 97 * 4 * 3 + 97 * 32 * 4 * 2
    on_gpu = memory.rank(configfile.change(config, ["learner.gpus=1", "model.dtype=bfloat16"]), model, longest=10)
    assert on_gpu.head == 10 * 97 * 8 + 97 * 32 * model.element + 10 * 32 * 16, "a piece of all tokens"
    assert rank.reference == 0
    two = configfile.change(config, ["algorithm.critic.model=policy", "algorithm.kl.loss_beta=0.1"])
    twice = memory.rank(two, model, longest=10)
    assert twice.state == (2 * model.parameters - model.head) * 16 // 4
    assert twice.activations == rank.activations, "the critic's passes come after the policy's"
    assert twice.reference == model.parameters
    taught, asked = ([f"algorithm.teacher.{place}"] for place in ("model=x", "url=http://a:1"))
    references = [
        memory.rank(configfile.change(config, place), model, longest=10).reference for place in (taught, asked)
    ]
    assert references == [model.parameters, 0]
    half = configfile.change(two, ["model.dtype=bfloat16"])
    moving = configfile.change(half, ["algorithm.kl.follow_every=10"])
    kept = [memory.rank(one, memory.sizes(small(), one.model), longest=10).reference for one in (half, moving)]
    assert kept == [model.parameters // 2, model.parameters], "in the type that it computes in, unless it moves"
    cut = memory.rank(configfile.change(config, ["learner.mesh.context=2"]), model, longest=10)
    assert cut.activations * 2 == rank.activations and cut.state == rank.state, "a rank has half of a row's tokens"
    light = memory.rank(configfile.change(config, ["model.gradient_checkpointing=full"]), model, longest=10)
    assert light.activations == 10 * 2 * 32 * 4
    assert model.widest == 4 * 48
    assert light.layer == 10 * (model.activations_per_layer + 2 * model.widest)
    whole = memory.rank(configfile.change(config, ["learner.ranks=1"]), model, longest=10)
    assert whole.layer == 4 * model.rest, "the embedding's gradient waits for that of its use as the head"
    assert light.total == sum(light) - min(light.head, light.layer), "the head's logits are gone by then"
    away = memory.rank(configfile.change(config, ["model.gradient_checkpointing=offloaded"]), model, longest=10)
    assert away.activations == 0 and away.layer == light.layer
    waits = configfile.change(two, ["learner.offload=true"])
    assert memory.rank(waits, model, longest=10) == twice._replace(state=0)
    assert memory.state(waits, model) == twice.state, "it is in the memory of the machine"


def mixture(experts: int = 128) -> Qwen3MoeConfig:
    """Qwen3-30B-A3B with a smaller vocabulary, or with other experts."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4}
    return Qwen3MoeConfig(
        **sizes, head_dim=128, vocab_size=97, moe_intermediate_size=768, num_experts=experts, num_experts_per_tok=8
    )


ROUTED = ("rollout.engine={kind='sglang', routes=true}", "rollout.gpus=1", "learner.gpus=1", "model.dtype=bfloat16")


def test_a_rank_has_the_routes_of_a_pass_on_its_gpu_and_those_of_its_rows_in_the_machines_memory() -> None:
    small, large = (
        configfile.load(MATH, [*ROUTED, "learner.ranks=32", f"queue.batch_size={rows}"]) for rows in (1024, 32768)
    )
    model = memory.sizes(mixture(), small.model)
    assert model.routes == 48 * 8 and memory.sizes(mixture(257), small.model).routes == 2 * 48 * 8
    one, other = (memory.rank(config, model, longest=1000) for config in (small, large))
    assert other.batch - one.batch == (32768 - 1024) * 1000 * memory.BATCH
    assert one.batch - 1024 * 1000 * memory.BATCH == small.learner.micro_batch_tokens * 384
    assert [memory.routes(config, model, 1000) for config in (small, large)] == [32 * 1000 * 384, 1024 * 1000 * 384]
    said = [one.text for one in memory_checks.memory(large, mixture(), memory_checks.Gpu(80, True))]
    assert any(re.search(r"; every rank [\d.]+ [GM]iB of its rows' experts", text) for text in said)


def test_what_the_queue_bears_is_said_beside_what_ranks_take_with_the_shards_for_it() -> None:
    def found(*overrides: str) -> tuple[str, str]:
        config = configfile.load(MATH, [*ROUTED, "learner.ranks=32", *overrides])
        (one,) = [
            one
            for one in memory_checks.memory(config, mixture(), memory_checks.Gpu(80, True))
            if one.subject == "queue"
        ]
        return one.state, one.text

    state, text = found()
    assert state == "note" and text.startswith("397 bytes a token of a completion; one queue bears 60 MB/s, 151,134 ")
    (shards,) = re.findall(r"queue.shards = (\d+) would suffice", text)
    assert found(f"queue.shards={shards}")[0] == "ok" and found(f"queue.shards={int(shards) - 1}")[0] == "note"
    state, text = found("rollout.engine.routes=false")
    assert state == "ok" and text.startswith("13 bytes a token")
    model = memory.sizes(mixture(), configfile.load(MATH, [*ROUTED]).model)
    assert model.active == model.parameters - 48 * (128 - 8) * 3 * 2048 * 768


def test_layers_are_gathered_one_after_another_where_the_learner_shards_them_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone, offloaded, config = (
        configfile.load(MATH, choices) for choices in ([], ["learner.offload=true"], ["learner.ranks=2"])
    )
    model = memory.sizes(small(), config.model)
    assert memory.rank(config, model, 10).gathered == model.parameters * (4 + 4 + 4)
    assert memory.rank(offloaded, model, 10).gathered == model.parameters * (4 + 4 + 4)
    assert memory.rank(alone, model, 10).gathered == 0
    half = configfile.change(alone, ["model.dtype=bfloat16"])
    copied = memory.sizes(small(), half.model)
    assert memory.rank(half, copied, 10).gathered == 2 * copied.trained, "a working copy"
    monkeypatch.setattr(memory, "SHARD_LAYERS_ABOVE", 100)
    expected = (model.rest + 2 * model.layer) * 8 + 4 * max(model.rest, model.layer)
    assert memory.rank(config, model, 10).gathered == expected
    assert memory.HEAD_CHUNK == learner_model.HEAD_CHUNK


@pytest.mark.parametrize("family", ["qwen3", "qwen3_vl"])
def test_a_note_says_that_a_model_of_pictures_too_has_its_text_model_trained(tmp_path: Path, family: str) -> None:
    usual = model_folders.usual(family)
    folder = model_folders.make(tmp_path / "m", family=family, tokenizer=usual.tokenizer, template=usual.template)
    files, found = check_model.load(configfile.load(MATH, [f"model.path={folder}"]), None)
    assert files.tokenizer is not None
    notes = [one.text for one in found if one.state == "note"]
    assert any("its text model is trained" in text for text in notes) == (family == "qwen3_vl"), notes


def test_models_of_pictures_too_and_opt_have_their_layers_counted() -> None:
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 300}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    vision = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    gemma = memory.sizes(Gemma3Config(text_config={**text, **heads}, vision_config=vision), configfile.load(MATH).model)
    assert gemma.layers == 2 and gemma.parameters > 2 * gemma.layer > 2 * 32 * 48
    assert (gemma.encoders > 0) and gemma.head == 0, "a tied head, and a tower that SGLang alone holds"
    engines = [configfile.load(MATH, [f"rollout.engine.kind={kind}"]) for kind in ("embedded", "sglang")]
    embedded, sglang = (memory_estimate._engine_weights(config, gemma) for config in engines)
    assert sglang - embedded == 4 * gemma.encoders
    opt = OPTConfig(hidden_size=32, word_embed_proj_dim=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4)
    with torch.device("meta"):
        assert len(list(layers.layers_of(AutoModelForCausalLM.from_config(opt).base_model))) == 3


def test_an_engine_keeps_its_share_of_what_is_free_for_weights_and_cache() -> None:
    options = ["rollout.engine={kind='sglang', mem_fraction_static=0.5}", "rollout.gpus=2"]
    config = configfile.load(MATH, options)
    model = memory.sizes(small(), config.model)
    engine = memory_estimate.engine(config, model, 64, free=2e6)
    assert engine is not None
    assert engine.weights == model.parameters * 4 // 2
    assert engine.total == pytest.approx(1e6, abs=model.cache_per_token)
    assert engine.tokens == pytest.approx((1e6 - engine.weights) * 2 / model.cache_per_token, abs=1)
    bounded = configfile.change(config, ["rollout.engine.max_total_tokens=100"])
    assert memory_estimate.engine(bounded, model, 64, free=2e6) == (
        engine.weights,
        100 * model.cache_per_token // 2,
        100,
        0,
    )
    turns = configfile.load(MATH, ["environment.agent=a:b", "reward={}"])
    parked = memory_estimate.engine(turns, model, 64, free=0.0)
    assert parked is not None and parked.copied * model.layers == parked.cache, "the rows of a layer at a time"
    starved = memory_estimate.engine(config, model, 64, free=1.0)
    assert starved is not None and starved.tokens == 0
    elsewhere = ["rollout.engine={kind='sglang', urls=['http://h:1'], transport='group'}"]
    assert memory_estimate.engine(configfile.load(MATH, elsewhere), model, 64, 1.0) is None
    slots = memory_estimate.engine(configfile.load(MATH), model, 64, free=1.0)
    assert slots is not None and slots.tokens == config.rollout.slots * 64
