"""`check` plays a turn of the environment with each source's first prompt, and names control tokens in rows."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizer_kinds
from config_case import one_source
from conftest import MATH

from streamppo.commands.checks import turns
from streamppo.config import file as configfile
from streamppo.tasks import task
from streamppo.tasks.tokenizer import Tokenizer

WORLD = """
from streamppo.tasks.environments import Done
from streamppo.types import Message


class World:
    async def reset(self, prompt):
        return list(prompt.messages)

    async def step(self, text):
        ANSWER
"""
REFUSING = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)


def findings(
    folder: Path, answer: str, *, family: str = "qwen3", template: str = "", source: Any = None, **row: Any
) -> Any:
    (folder / "world.py").write_text(WORLD.replace("ANSWER", answer))
    row = {"prompt": [{"role": "user", "content": "1+2"}], "answer": "3", **row}
    (folder / "rows.jsonl").write_text(json.dumps(row))
    made = tokenizer_kinds.make("byte_bpe", family)
    made.chat_template = template or made.chat_template
    made.save_pretrained(folder / "model")
    world = f"{{name='{folder}/world.py:World', max_tokens=256}}"
    config = configfile.load(MATH, ["task={kind='data', data='rows.jsonl'}", f"environment={world}"])
    tokenizer = Tokenizer(folder / "model")
    built = task.build(one_source(data=str(folder / "rows.jsonl"), held_out=0.0, **source or {}), 1, tokenizer)
    return list(turns.findings(config, built, tokenizer))


@pytest.mark.parametrize("family", sorted(name for name in tokenizer_kinds.CONTROLS if name))
def test_a_turn_and_its_answer_are_played_with_every_familys_template(tmp_path: Path, family: str) -> None:
    (found,) = findings(tmp_path, "return [Message(role='user', content='no')]", family=family)
    assert (found.subject, found.state) == ("environment", "ok")
    assert "with the row's answer as a turn it answered 'user: no'" in found.text


@pytest.mark.parametrize(
    ("answer", "template", "state", "reason"),
    [
        ("return [Message(role='tool', content='no')]", REFUSING, "error", "the chat template refuses the messages"),
        (
            "return [Message(role='user', content='no')]",
            "{{ messages[-1].content }}",
            "error",
            "rewrites earlier turns",
        ),
        ("return Done(1.0)", "{{ messages[-1].content }}", "error", "rewrites earlier turns"),
        ("return Done(1.0)", "", "ok", "it ended the conversation"),
        ("raise ValueError(text)", "", "note", "it fails on the row's answer as a turn: step: "),
    ],
)
def test_a_turn_that_cannot_be_played_is_an_error_before_the_run(
    tmp_path: Path, answer: str, template: str, state: str, reason: str
) -> None:
    (found,) = findings(tmp_path, answer, template=template)
    assert (found.state, reason in found.text) == (state, True), found


def test_rows_that_spell_control_tokens_are_noted(tmp_path: Path) -> None:
    note, _ = findings(tmp_path, "return Done(1.0)", prompt=[{"role": "user", "content": "<|im_end|>"}])
    assert (note.state, note.text.split(",")[0]) == (
        "note",
        "1 of the first 1 prompts spell control tokens (<|im_end|>)",
    )


SPELLED = "<|im_start|>user\n1+2<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("prompt", "control_tokens", "says"),
    [
        (
            SPELLED,
            "text",
            'which stay text; if rows are written in a chat template already, choose control_tokens = "parse"',
        ),
        (SPELLED, "parse", None),
        ([{"role": "user", "content": SPELLED}], "text", 'control_tokens = "parse", and neither chat nor system'),
        (
            [{"role": "user", "content": SPELLED}],
            "parse",
            "to which the chat template adds its own; if rows are written in a chat template already",
        ),
        ("1+2", "text", None),
    ],
)
def test_a_template_that_would_be_written_twice_is_noted(
    tmp_path: Path, prompt: object, control_tokens: str, says: str | None
) -> None:
    notes = [
        found.text
        for found in findings(tmp_path, "return Done(1.0)", source={"control_tokens": control_tokens}, prompt=prompt)
        if found.subject == "task"
    ]
    assert [says in text for text in notes] == [True] if says else notes == []


CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENING = "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "row", "is_noted"),
    [
        (CHATML, {}, True),
        (CHATML, {"prompt": "1+2"}, False),
        (CHATML + "{% if add_generation_prompt %}" + OPENING + "{% endif %}", {}, False),
        (CHATML + OPENING, {}, False),
        ("[INST]{{ messages[0].content }}[/INST]{% if messages[1:] %} {{ messages[1].content }}{% endif %}", {}, False),
    ],
)
def test_a_template_that_leaves_the_opening_of_a_turn_to_the_policy_is_noted(
    tmp_path: Path, template: str, row: dict[str, Any], is_noted: bool
) -> None:
    texts = [one.text for one in findings(tmp_path, "return Done(1.0)", family="qwen2.5", template=template, **row)]
    assert any(f"a completion begins with {OPENING!r}" in text for text in texts) == is_noted
    assert any("does not open" in text for text in texts) == is_noted


TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]
BEGUN = [{"role": "user", "content": "1+2"}, {"role": "assistant", "content": "It is"}]


@pytest.mark.parametrize(
    ("family", "row", "note"),
    [
        ("gemma3", {"tools": TOOLS}, "1 of the first 1 prompts have tools, which the chat template leaves out"),
        ("gemma3", {"tools": []}, ""),
        ("qwen3", {"tools": TOOLS}, ""),
        ("qwen3", {"prompt": BEGUN}, "1 of the first 1 prompts end with an assistant's message"),
        ("qwen3", {"prompt": BEGUN[:1]}, ""),
    ],
)
def test_prompts_that_a_model_sees_otherwise_than_rows_seem_to_say_are_noted(
    tmp_path: Path, family: str, row: dict[str, Any], note: str
) -> None:
    notes = [
        found.text for found in findings(tmp_path, "return Done(1.0)", family=family, **row) if found.state == "note"
    ]
    assert [text[: len(note)] for text in notes] == ([note] if note else [])
