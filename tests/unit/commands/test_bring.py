"""A configuration for a model, data and a reward that people bring: complete, and of sizes that fit them."""

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import bring_case as case
import pytest
import torch
from safetensors.torch import save_file

from streamppo.cli import MISTAKE, main
from streamppo.commands.start import init
from streamppo.commands.start.project import policy, sizes
from streamppo.commands.start.project.policy import PolicyModel
from streamppo.commands.start.project.rows import DataRows
from streamppo.config import file as configfile
from streamppo.config.correction import Topr
from streamppo.config.reward import FunctionScorer
from streamppo.config.sections import Config
from streamppo.config.task import DataTask, Source
from streamppo.errors import ConfigError
from streamppo.tasks import data as data_sets

POINTER = f"version https://git-lfs.github.com/spec/v1\noid sha256:{'0' * 64}\nsize 1000\n"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begun(capsys: pytest.CaptureFixture[str], words: list[str]) -> tuple[Config, str]:
    assert main(words) == 0
    return configfile.load(Path("mine.toml")), capsys.readouterr().out


def source(config: Config) -> Source:
    assert isinstance(config.task, DataTask)
    return config.task.sources["data"]


def test_two_commands_are_enough_and_check_has_nothing_to_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, said = begun(capsys, case.bring(tmp_path))
    assert config.name == "mine"
    assert config.model.path == str(tmp_path / "model") and config.rollout.engine.kv == "keep"
    assert (source(config).prompt, source(config).answer, source(config).max_prompt_tokens) == ("prompt", "answer", 5)
    assert config.rollout.max_tokens == 6, "answers of three tokens, a quarter more, and the end"
    assert config.learner.lr == 1e-3
    assert "the prompt is 'prompt' (up to 5 tokens), the answer 'answer' (up to 3 tokens)" in said
    assert said.splitlines()[-2:] == ["  check    0 errors", "begin with: streamppo run mine.toml"]
    assert main(["check", "mine.toml"]) == 0
    table = capsys.readouterr().out
    assert "mine.toml: 0 errors" in table and not re.search(r"^\w+ +(note|error)", table, re.MULTILINE)


def test_every_line_of_the_file_has_its_reason(tmp_path: Path) -> None:
    assert main(case.bring(tmp_path)) == 0
    text = Path("mine.toml").read_text()
    tomllib.loads(text)
    lines = [line for line in text.splitlines() if line and not line.startswith(("[", "#"))]
    assert len(lines) > 30
    assert [line for line in lines if not re.search(r"\S +# \S", line)] == []


def numbered(row: dict[str, Any], column: str, number: int) -> dict[str, Any]:
    """The row with a prompt that no other number has."""
    prompt = row[column]
    if isinstance(prompt, str):
        return {**row, column: f"{prompt}{number}"}
    return {**row, column: [*prompt[:-1], {**prompt[-1], "content": f"{prompt[-1]['content']}{number}"}]}


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"question": "1+1=", "answer": "2"}, "question", "answer"),
        ({"problem": "1+1=", "solution": "2", "level": 3}, "problem", "solution"),
        ({"instruction": "1+1=", "output": "2"}, "instruction", "output"),
        ({"prompt": [{"role": "user", "content": "1"}], "reward_model": {"ground_truth": "2"}}, "prompt",
         "reward_model.ground_truth"),
        ({"messages": [{"role": "user", "content": "1"}], "answer": "2"}, "messages", "answer"),
        ({"task_text": "1+1=", "answer": "2", "n": 1}, "task_text", "answer"),
        ({"ID": "2024-I-1", "Problem": "1+1=", "Answer": "2"}, "Problem", "Answer"),
    ],
)  # fmt: skip
def test_columns_are_found_by_the_names_that_data_sets_have(
    row: dict[str, Any], prompt: str, answer: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.model(tmp_path / "chat", template=case.TEMPLATE)
    data = case.rows(tmp_path / "its.jsonl", [numbered(row, prompt, n) for n in range(40)])
    config, said = begun(capsys, case.bring(tmp_path, data=str(data), model="chat"))
    assert (source(config).prompt, source(config).answer) == (prompt, answer)
    assert f"the prompt is {prompt!r}" in said and f"the answer {answer!r}" in said
    assert source(config).chat == isinstance(row[prompt], str), "a text becomes a user's message; messages are some"


def test_the_last_message_of_a_conversation_is_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.model(tmp_path / "chat", template=case.TEMPLATE)

    def turns(number: int) -> list[dict[str, str]]:
        return [{"role": "user", "content": f"1+{number}"}, {"role": "assistant", "content": f"#### {1 + number}"}]

    data = case.rows(tmp_path / "its.jsonl", [{"messages": turns(number)} for number in range(40)])
    config, said = begun(capsys, case.bring(tmp_path, data=str(data), model="chat", reward="gsm8k"))
    assert (source(config).prompt, source(config).answer) == ("messages", "messages")
    assert "8 rows with their own answer as the completion score 1" in said or "0 errors" in said
    assert re.search(r'answer = "messages" +# its last message', Path("mine.toml").read_text())


@pytest.mark.parametrize("named", [{}, {"answer": "ground_truth"}], ids=["found", "named"])
def test_an_answer_beside_a_finished_conversation_replaces_its_last_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], named: dict[str, str]
) -> None:
    """Rows with a worked solution as the last message, and its result in a column (allenai's RLVR, open-r1)."""
    case.model(tmp_path / "chat", template=case.TEMPLATE)
    rows = [
        {
            "messages": [
                {"role": "user", "content": f"1+{number}"},
                {"role": "assistant", "content": f"One and {number} make {1 + number}."},
            ],
            "ground_truth": str(1 + number),
        }
        for number in range(40)
    ]
    data = case.rows(tmp_path / "its.jsonl", rows)
    config, said = begun(capsys, case.bring(tmp_path, data=str(data), model="chat", **named))
    task = source(config)
    assert (task.prompt, task.answer, task.columns) == ("messages", "messages", {"answer": "ground_truth"})
    assert "the answer 'ground_truth' (up to 2 tokens)" in said
    prompt = data_sets.prompt(rows[4], "row 5", "data", task)
    assert [message.content for message in prompt.messages] == ["1+4"]
    assert prompt.columns["answer"] == "5"


TESTS = "streamppo.tasks.scorers.code:CodeTests"
DONE = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
CALLS = [DONE[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]


@pytest.mark.parametrize(
    ("row", "options", "said"),
    [
        ({"a": "x", "b": "y", "answer": "z"}, {}, "name the prompt's column with --prompt"),
        (
            {"prompt": [{"role": "user", "content": "x"}], "answer": "z"},
            {},
            "row 1: the model's tokenizer has no chat template, which",
        ),
        ({"prompt": 3, "answer": "z"}, {}, "no column is the prompt by its name"),
        ({"prompt": 3, "answer": "z"}, {}, "'prompt' of row 1 is 3, neither a text nor messages"),
        ({"question": None, "problem": "", "answer": "z"}, {}, "'problem' of row 1 is empty: leave such rows out"),
        ({"messages": DONE[1:]}, {}, "'messages' of row 1 ends with an assistant's message: the last message of each"),
        (
            {"messages": CALLS},
            {"prompt": "messages"},
            "one there; 'messages' of row 1 ends with an assistant's message",
        ),
        (
            {"chosen": DONE, "rejected": DONE},
            {},
            "columns are chosen, rejected: name the prompt's column with --prompt",
        ),
        ({"conversations": [{"from": "human", "value": "x"}]}, {}, 'has turns of "from" and "value": write "role"'),
        ({"system": "s", "conversations": [{"from": "user", "value": "x"}]}, {}, 'has turns of "from" and "value"'),
        (
            {"a": "x", "b": "y", "n": 1},
            {},
            "messages, instruction, query, input, conversation, conversations, text); columns",
        ),
        ({"prompt": "x", "gold_text": "z"}, {}, "asks for the column 'answer', and row 1 of "),
        ({"prompt": "x", "gold_text": "z"}, {}, "name the column of the answer with --answer"),
        ({"prompt": "x", "gold_text": "z"}, {"reward": f"{TESTS}"}, "'tests', and row 1 of "),
        (
            {"prompt": "x", "gold_text": "z"},
            {"reward": f"{TESTS}"},
            "has prompt, gold_text; name it with --column tests=",
        ),
        (
            {"prompt": "x", "answer": "z"},
            {"column": "tests:answer"},
            "--column is NAME=COLUMN with different names, not",
        ),
        ({"prompt": "x", "answer": "z"}, {"column": "tests=a.b"}, "row 1: no column 'a.b'; columns are prompt, answer"),
        ({"prompt": "x", "answer": "z"}, {"prompt": "promt"}, "--prompt promt: a prompt is a text or a list"),
        ({"prompt": "x", "answer": "z"}, {"answer": "anser"}, "--answer anser: not every row of "),
        ({"prompt": "x", "answer": "z"}, {"model": "./nowhere"}, "--model: './nowhere' is not a folder here"),
        ({"prompt": "x", "answer": "z"}, {"reward": "reward.py:scoer"}, "reward.py has no 'scoer'"),
        ({"prompt": "x", "answer": "z"}, {"data": "none.jsonl"}, "none.jsonl: no such file or folder"),
        ({"prompt": "x" * 300, "answer": "z"}, {}, "the shortest prompt has 300 tokens, and model reads 256 at once"),
    ],
)
def test_what_cannot_be_told_or_used_is_refused_with_the_remedy(
    row: dict[str, Any], options: dict[str, str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = case.rows(tmp_path / "its.jsonl", [row] * 3)
    assert main(case.bring(tmp_path, **{"data": str(data), **options})) == MISTAKE
    assert said in capsys.readouterr().err
    assert not Path("mine.toml").exists()


@pytest.mark.parametrize("column", ["input_output", "meta.tests"])
def test_a_column_is_given_the_name_that_the_reward_uses(
    column: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]})
    content = [{"question": f"{n}?", "input_output": tests, "meta": {"tests": tests}} for n in range(40)]
    data = case.rows(tmp_path / "its.jsonl", content)
    config, _ = begun(capsys, case.bring(tmp_path, data=str(data), reward=TESTS, column=f"tests={column}"))
    assert source(config).columns == {"tests": column}
    assert main(["check", "mine.toml", "--no-score"]) == 0


def test_several_rewards_are_summed_and_each_needs_its_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "more.py").write_text(
        "def score(completions, solution, **kwargs):\n    return [1.0] * len(solution)\n\n\n"
        "def größe(trajectory):\n    return 0.5\n"
    )
    words = [*case.bring(tmp_path), "--reward", "more.py:score", "--reward", "more.py:größe"]
    assert main(words) == MISTAKE
    assert "more.py:score asks for the column 'solution', and row 1 of" in capsys.readouterr().err
    config, _ = begun(capsys, [*words, "--column", "solution=answer"])
    functions = {name: getattr(scorer, "function", "") for name, scorer in config.reward.scorers.items()}
    expected = {"score": "reward.py:score", "score_1": "more.py:score", "größe": "more.py:größe"}
    assert functions == {name: str(tmp_path / function) for name, function in expected.items()}
    assert main(["check", "mine.toml"]) == 0
    assert re.search(r"reward score_1 +ok +8 rows .* score 1$", capsys.readouterr().out, re.MULTILINE)


def test_a_verl_reward_without_a_column_of_the_answer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "verls.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(solution_str == ground_truth)\n"
    )
    data = case.rows(tmp_path / "its.jsonl", [{"question": f"{n}+1=", "gt": f"{n + 1}"} for n in range(40)])
    words = case.bring(tmp_path, data=str(data), reward="verls.py:compute_score")
    assert main(words) == MISTAKE
    assert "name the column of the answer with --answer" in capsys.readouterr().err
    config, _ = begun(capsys, [*words, "--answer", "gt"])
    assert source(config).answer == "gt"


@pytest.mark.parametrize("gap", [{}, {"answer": None}])
@pytest.mark.parametrize("named", [{}, {"answer": "answer"}])
def test_the_row_without_an_answer_is_named(
    gap: dict[str, Any], named: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = [{"prompt": f"{n}", **({"answer": "z"} if n != 20 else gap)} for n in range(40)]
    data = case.rows(tmp_path / "its.jsonl", content)
    assert main(case.bring(tmp_path, data=str(data), **named)) == MISTAKE
    said = capsys.readouterr().err
    assert ("row 21 has none; columns are prompt" if named else "row 21 of ") in said


def test_templates_of_which_none_is_the_default_are_no_plain_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = case.model(tmp_path / "model") / "additional_chat_templates"
    folder.mkdir()
    (folder / "rag.jinja").write_text(case.TEMPLATE)
    words = case.bring(tmp_path, model="model")
    assert main(words) == MISTAKE
    said = " ".join(capsys.readouterr().err.split())
    assert "row 1: the tokenizer has only the named chat templates 'rag': copy the one for these prompts to" in said
    (folder / "rag.jinja").rename(tmp_path / "model" / "chat_template.jinja")
    config, _ = begun(capsys, words)
    assert source(config).chat


def test_answers_that_are_numbers_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(100)])
    config, said = begun(capsys, case.bring(tmp_path, data=str(data)))
    assert config.rollout.max_tokens == 6 and "(up to 3 tokens)" in said


def test_the_row_without_a_prompt_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = case.rows(
        tmp_path / "its.jsonl", [{"prompt": f"{n}" if n != 20 else None, "answer": "z"} for n in range(40)]
    )
    assert main(case.bring(tmp_path, data=str(data))) == MISTAKE
    assert "'prompt' of row 21 is empty: leave such rows out" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "chat", "control_tokens"),
    [("<|user|>{}+1=<eos><|assistant|>", False, "parse"), ("{}+1=", True, "text"), ("{}+1=<eo", True, "text")],
)
def test_a_text_that_is_templated_already_gets_no_second_template(
    text: str, chat: bool, control_tokens: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.model(tmp_path / "chat", template=case.TEMPLATE)
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": text.format(n), "answer": "2"} for n in range(40)])
    config, _ = begun(capsys, case.bring(tmp_path, data=str(data), model="chat"))
    assert (source(config).chat, source(config).control_tokens) == (chat, control_tokens)
    assert main(["check", "mine.toml"]) == 0
    assert "spell control tokens" not in capsys.readouterr().out


def test_texts_of_which_a_late_one_is_not_templated_get_the_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.model(tmp_path / "chat", template=case.TEMPLATE)
    texts = [*(f"<|user|>{n}+1=<eos><|assistant|>" for n in range(100)), "100+1="]
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": text, "answer": "2"} for text in texts])
    config, _ = begun(capsys, case.bring(tmp_path, data=str(data), model="chat"))
    assert (source(config).chat, source(config).control_tokens) == (True, "text")
    assert main(["check", "mine.toml"]) == 0
    assert "spell control tokens" in capsys.readouterr().out


def test_a_reward_that_reads_texts_where_trl_gives_messages_is_told_their_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.model(tmp_path / "chat", template=case.TEMPLATE)
    (tmp_path / "trl.py").write_text(
        "import re\ndef score(completions, **more):\n    return [float(re.search('2', one)) for one in completions]\n"
    )
    begun(capsys, case.bring(tmp_path, model="chat", reward="trl.py:score"))
    assert main(["check", "mine.toml"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "and a text is completions[0][0]['content']" in said


def test_answers_that_are_no_text_are_not_said_to_score(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": f"{n}+1=", "answer": ["1", "2"]} for n in range(40)])
    (tmp_path / "one_of.py").write_text("def score(trajectory, answer):\n    return trajectory.completion in answer\n")
    begun(capsys, case.bring(tmp_path, data=str(data), reward="one_of.py:score"))
    assert main(["check", "mine.toml"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "reward ok 8 rows without a text or number as answer score 0 with an empty completion" in said


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("pre_tokenizer", {"type": "OfAnotherRelease"}),
        ("normalizer", {"type": "OfAnotherRelease"}),
        ("model", {"type": "OfAnotherRelease"}),
        ("model", {"type": "BPE", "vocab": {"a": 0}, "merges": ["a zzz"]}),
    ],
)
def test_a_tokenizer_of_another_release_is_refused_in_a_sentence(
    part: str, value: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.model(tmp_path / "model")
    words = case.bring(tmp_path, model="model")
    begun(capsys, words)
    file = tmp_path / "model" / "tokenizer.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), part: value}))
    assert main(["check", "mine.toml"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "cannot be loaded: Exception: " in said
    Path("mine.toml").unlink()
    assert main(words) == MISTAKE
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("named", "template", "works"),
    [
        ({"pad_token": "[PAD]"}, case.TEMPLATE, True),
        ({"additional_special_tokens": ["[A]", "[B]"]}, case.TEMPLATE, True),
        ({"eos_token": "[END]"}, case.TEMPLATE, False),
        ({"additional_special_tokens": ["[A]"]}, case.TEMPLATE + "[A]", False),
    ],
)
def test_a_special_token_beyond_the_models_embedding_is_an_error_only_if_it_can_occur(
    named: dict[str, Any], template: str, works: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    folder = case.model(tmp_path / "model", template=case.TEMPLATE)
    words = case.bring(tmp_path, model="model")
    begun(capsys, words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(named)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    assert main(["check", "mine.toml"]) == (0 if works else 1)
    said = " ".join(capsys.readouterr().out.split())
    assert ("a prompt with one of these fails" in said) == works
    assert (", but the model only " in said) != works


@pytest.mark.slow
def test_a_damaged_generation_config_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.model(tmp_path / "model")
    begun(capsys, case.bring(tmp_path, model="model"))
    for text in ("{nope", "[1]", "\xff"):
        (tmp_path / "model" / "generation_config.json").write_bytes(text.encode("latin-1"))
        assert main(["check", "mine.toml"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "generation_config.json cannot be read, so its ends of completions are ignored: " in said


def test_a_template_that_no_tokenizer_reads_makes_no_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case.model(tmp_path / "model")
    (tmp_path / "model" / "chat_template.json").write_text('{"chat_template": "{{ messages }}"}')
    config, _ = begun(capsys, case.bring(tmp_path, model="model"))
    assert not source(config).chat


def test_columns_that_are_named_are_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = case.rows(tmp_path / "its.jsonl", [{"a": f"x{n}", "b": f"y{n}", "meta": {"gold": "z"}} for n in range(40)])
    options = {"data": str(data), "prompt": "b", "answer": "meta.gold"}
    config, _ = begun(capsys, case.bring(tmp_path, **options))
    assert (source(config).prompt, source(config).answer) == ("b", "meta.gold")


def test_the_three_go_together_and_a_file_that_is_there_stays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = case.bring(tmp_path)
    assert main(words[:4]) == MISTAKE
    assert "--data and --reward are missing" in capsys.readouterr().err
    assert main(["init", "mine", "--gpu", "1"]) == MISTAKE
    Path("mine.toml").write_text("mine")
    assert main(words) == MISTAKE
    assert "mine.toml: already exists" in capsys.readouterr().err
    assert Path("mine.toml").read_text() == "mine"


def test_builtin_tiny_takes_rows_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, _ = begun(capsys, case.bring(tmp_path, model="builtin:tiny"))
    assert config.model.path == "builtin:tiny" and config.rollout.max_tokens == 6


# --- sizes ---------------------------------------------------------------------------------------------------


def model(parameters: int = 494_032_768, context: int = 32_768, **changed: Any) -> PolicyModel:
    return PolicyModel("m", "m", parameters, context, 24_576, chat=True)._replace(**changed)


def rows(prompts: int = 200, answers: int = 3, total: int = 7473) -> DataRows:
    return DataRows(
        "rows", total, "question", "answer", False, [prompts] * 10, [answers] * 10, [b"%d" % n for n in range(10)]
    )


def test_a_model_that_writes_before_it_answers_has_room_for_it() -> None:
    assert sizes.completion(model(), rows(answers=3), 1).max_tokens == 1024
    assert sizes.completion(model(), rows(answers=900), 1).max_tokens == 1800
    assert sizes.completion(model(), rows(answers=9000), 1).max_tokens == sizes.MOST_TOKENS
    assert sizes.completion(model(84_000), rows(answers=8), 0).max_tokens == 12
    # One answer of a hundred may be unusually long. A small model needs room for all of them.
    unusual = rows(answers=300)._replace(answers=[300] * 99 + [2000])
    assert sizes.completion(model(), unusual, 0).max_tokens == 600
    assert sizes.completion(model(84_000, context=8192), unusual, 0).max_tokens == 2502
    assert sizes.completion(model(), unusual._replace(answers=[300] * 97 + [2000] * 3), 0).max_tokens == 4000


def test_repeated_prompts_are_evaluated_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": f"{n % 200}+1=", "answer": "2"} for n in range(1000)])
    config, said = begun(capsys, case.bring(tmp_path, data=str(data)))
    assert config.evaluation.prompts == round(0.05 * 200)
    assert "1000 rows repeat the prompt" in said and "evaluation.prompts" not in said


def test_prompts_that_are_too_long_are_not_evaluated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"{n}+1=" + "0" * (400 * (n % 2)) for n in range(1000)]
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": text, "answer": "2"} for text in texts])
    config, said = begun(capsys, case.bring(tmp_path, data=str(data), model="builtin:tiny"))
    assert "500 prompts are longer than" in said
    assert config.evaluation.prompts == round(0.05 * 500) and "evaluation.prompts" not in said


def test_builtin_tiny_learns_answers_that_are_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(100)])
    _, said = begun(capsys, case.bring(tmp_path, data=str(data), model="builtin:tiny", reward="numeric"))
    assert "check    0 errors" in said


@pytest.mark.parametrize("name", ["its.jsonl", "its.json", "its.csv", "its.parquet", "its.jsonl.gz", "its.arrow"])
def test_a_data_file_that_is_a_git_lfs_pointer_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_text(POINTER)
    assert main(case.bring(tmp_path, data=str(tmp_path / name))) == MISTAKE
    assert f"{name}: a git-LFS pointer and not the file: `git lfs pull`" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_tokenizers_file_that_is_a_git_lfs_pointer_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case.model(tmp_path / "model")
    (tmp_path / "model" / name).write_text(POINTER)
    assert main(case.bring(tmp_path, model="model")) == MISTAKE
    assert f"{name}: a git-LFS pointer and not the file: `git lfs pull`" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "function"), init.OURS.items())
def test_a_reward_of_ours_has_a_short_name(
    name: str, function: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = json.dumps({"inputs": ["1\n"], "outputs": ["1\n"]})
    data = case.rows(tmp_path / "its.jsonl", [{"prompt": f"{n}+1=", "answer": "2", "tests": tests} for n in range(40)])
    config, _ = begun(capsys, case.bring(tmp_path, data=str(data), reward=name))
    (scorer,) = config.reward.scorers.values()
    assert isinstance(scorer, FunctionScorer) and scorer.function == function


@pytest.mark.parametrize(("parameters", "gpus", "tokens"), [(10**9, 0, 2048), (10**9, 1, None), (84_000, 0, None)])
def test_a_large_model_on_a_cpu_has_small_passes(parameters: int, gpus: int, tokens: int | None) -> None:
    assert sizes.choose(model(parameters), rows(), gpus, 16_384).micro_batch_tokens == tokens


@pytest.mark.parametrize("context", [64, 256, 1024, 40_960])
@pytest.mark.parametrize("prompts", [1, 40, 63, 600])
@pytest.mark.parametrize("answers", [0, 3, 100, 5000])
@pytest.mark.parametrize("parameters", [84_000, 7_000_000_000])
def test_prompt_and_completion_always_fit_the_context(
    context: int, prompts: int, answers: int, parameters: int
) -> None:
    try:
        length = sizes.completion(model(parameters, context), rows(prompts, answers), 1)
    except ConfigError:
        assert prompts > context // 2, "only where no prompt leaves room for an answer"
        return
    assert length.max_prompt_tokens + length.max_tokens <= context
    assert length.max_prompt_tokens == prompts and not length.left_out


def test_rates_fall_with_the_size_and_the_cache_fits_the_memory() -> None:
    rates = [sizes.choose(model(10**power), rows(), 1, 1000).lr for power in range(4, 12)]
    assert rates == sorted(rates, reverse=True) and (rates[0], rates[-1]) == (1e-3, 1e-6)
    slots = [sizes.choose(model(), rows(), 0, mib).slots for mib in (16, 1024, 16_384, 100_000)]
    assert slots == sorted(slots) and slots[0] >= 1 and slots[-1] == 64
    asked = slots[1] * 24_576 * (200 + 256)
    assert asked <= 1024 * 2**20 // 4


@pytest.mark.parametrize("bound", [0, sizes.SMALL])
def test_models_of_any_size_get_the_rule_for_old_data(
    bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sizes, "SMALL", bound)
    config, _ = begun(capsys, case.bring(tmp_path))
    assert isinstance(config.algorithm.correction, Topr) and config.algorithm.negative_weight == 0.25
    assert (config.learner.minibatches, config.learner.betas) == (4, (0.9, 0.999))


@pytest.mark.parametrize(("gpus", "places"), [(1, (1, 1, 0.5)), (2, (1, 1, 1)), (3, (1, 2, 1)), (8, (4, 4, 1))])
def test_gpus_are_divided_between_ranks_and_engines(
    gpus: int, places: tuple[int, int, float], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, _ = begun(capsys, case.bring(tmp_path, gpu=str(gpus)))
    assert (config.learner.ranks, config.rollout.actors, config.learner.gpus) == places
    assert config.rollout.gpus == config.learner.gpus and config.model.dtype == "bfloat16"
    assert type(config.rollout.engine).__name__ == "SGLangEngine"


@pytest.mark.parametrize(
    ("name", "parameters", "chat"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", 500_000_000, True),
        ("meta-llama/Llama-3.1-8B", 8_000_000_000, False),
        ("google/gemma-3-270m-it", 270_000_000, True),
        ("openai/gpt", policy.UNKNOWN_PARAMETERS, False),
    ],
)
def test_a_model_that_is_not_here_is_sized_by_its_name(name: str, parameters: int, chat: bool) -> None:
    found = policy.read(name)
    assert (found.parameters, found.chat, found.is_known) == (parameters, chat, False)
    assert found.size == f"about {parameters:,} parameters"


def test_only_a_model_that_is_here_is_sized_exactly() -> None:
    assert policy.read("builtin:tiny").size == "about 90,000 parameters"
    assert model(84_544).size == "84,544 parameters"


def test_a_second_copy_of_the_weights_under_another_name_is_not_counted(tmp_path: Path) -> None:
    """Mistral publishes consolidated.safetensors beside the files that transformers reads."""
    save_file({"a": torch.zeros(3, 5), "b": torch.zeros(2)}, tmp_path / "model.safetensors")
    shutil.copyfile(tmp_path / "model.safetensors", tmp_path / "consolidated.safetensors")
    assert policy._parameters(tmp_path) == 17
    (tmp_path / "model.safetensors").unlink()
    assert policy._parameters(tmp_path) == policy.UNKNOWN_PARAMETERS
