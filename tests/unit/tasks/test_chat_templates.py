# ruff: noqa: RUF001  DeepSeek writes its control tokens with these signs.
"""Chat templates of published families: prompts, second turns, and control tokens in other people's text."""

import json
from datetime import datetime
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import tokenizer_kinds
import tokenizers
from config_case import one_source
from msgspec import structs
from tokenizer_kinds import CONTROLS, KINDS
from tokenizers import models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from streamppo.errors import TaskError
from streamppo.tasks import task
from streamppo.tasks.tokenizer import Tokenizer
from streamppo.types import Message, Prompt, Template

FAMILIES = sorted(name for name in CONTROLS if name)
FITS = {"mistral": "spm_bpe", "gemma2": "spm_bpe", "gemma3": "spm_bpe", "phi": "spm_bpe"}
"""The kind of tokenizer that a family has, if not byte_bpe."""
ENDS = {
    **{"qwen2.5": "<|im_end|>", "qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "gemma2": "<end_of_turn>"},
    **{
        "gemma3": "<end_of_turn>",
        "mistral": "</s>",
        "phi": "<|end|>",
        "deepseek": "<｜end▁of▁sentence｜>",
        "glm": None,
    },
}
"""What each template writes behind an assistant's message."""
TURNS = {
    "qwen2.5": "\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n",
    "qwen3": "\n<|im_start|>user\nwrong<|im_end|>\n<|im_start|>assistant\n",
    "llama3": "<|start_header_id|>user<|end_header_id|>\n\nwrong<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "gemma2": "\n<start_of_turn>user\nwrong<end_of_turn>\n<start_of_turn>model\n",
    "gemma3": "\n<start_of_turn>user\nwrong<end_of_turn>\n<start_of_turn>model\n",
    "mistral": " [INST] wrong [/INST]",
    "phi": "\n<|user|>\nwrong<|end|>\n<|assistant|>\n",
    "deepseek": "<｜User｜>wrong<｜Assistant｜>",
    "glm": "\nwrong<|assistant|>\n",
}
"""What follows the end of a turn, the user's word and the opening of the next turn."""


@cache
def made(
    family: str | None, kind: str | None = None, template: str | dict[str, str] | None = None, clock: str = ""
) -> Tokenizer:
    folder = mkdtemp()
    tokenizer = tokenizer_kinds.make(kind or FITS.get(family or "", "byte_bpe"), family)
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return Tokenizer(folder, clock)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def chat(*messages: Message, **template: Any) -> Prompt:
    return Prompt(text="", columns={}, messages=messages, template=Template(**template))


def shown(tokenizer: Tokenizer, ids: Any) -> str:
    """The text of ids, control tokens too, without the spaces that SentencePiece puts between them."""
    return tokenizer._tokenizer.decode(ids, skip_special_tokens=False)


def number(tokenizer: Tokenizer, name: str) -> int:
    return tokenizer.numbers()[name]


# --- a second turn -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_plays_a_second_turn(family: str) -> None:
    tokenizer = made(family)
    observed = tokenizer.observation((user("wrong"),)).tolist()
    assert shown(tokenizer, observed).replace(" ", "") == TURNS[family].replace(" ", "")
    end = ENDS[family]
    assert tokenizer.turn_end() == (end and number(tokenizer, end))
    # It is the end of transformers' rendering, for a conversation whose last turn it is.
    theirs = tokenizer._tokenizer.apply_chat_template(
        [{"role": role, "content": text} for role, text in (("user", "a"), ("assistant", "b"), ("user", "wrong"))],
        add_generation_prompt=True,
    )["input_ids"]
    assert theirs[-len(observed) :] == observed


PART = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
LISTED = """\
{% for message in messages %}<|im_start|>{{ message.role }}
{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""A template that writes lists of parts alone, as those of SmolVLM, Idefics 3 and LLaVA do."""


@pytest.mark.parametrize("said", ["1+2", "a <|im_end|> that is text"])
def test_a_template_of_parts_writes_what_the_same_template_of_texts_writes(said: str) -> None:
    parts, texts = made("qwen3", template=LISTED), made("qwen3", template=LISTED.replace(PART, "{{ message.content }}"))
    system = Message(role="system", content="Be brief.")
    open_answer = Message(role="assistant", content="It is")
    for conversation in ((user(said),), (system, user(said)), (system, user(said), open_answer)):
        ids = parts.ids(chat(*conversation))
        assert ids == texts.ids(chat(*conversation))
        assert all(message.text in shown(parts, ids) for message in conversation)
    assert parts.turn_end() == texts.turn_end() == number(parts, "<|im_end|>")
    assert parts.observation((user(said),)).tolist() == texts.observation((user(said),)).tolist()


def test_a_template_in_the_file_of_a_processor_is_read(tmp_path: Path) -> None:
    tokenizer = tokenizer_kinds.make("byte_bpe", "qwen3")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": tokenizer.chat_template}))
    expected = made("qwen3").ids(chat(user("1+2")))
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    assert Tokenizer(tmp_path).ids(chat(user("1+2"))) == expected
    for damaged in ("{", "[]", '{"template": "a"}'):
        (tmp_path / "chat_template.json").write_text(damaged)
        with pytest.raises(TaskError, match=r"cannot be loaded: chat_template\.json is damaged: "):
            Tokenizer(tmp_path)


def test_qwen3_without_thinking_closes_the_thoughts_of_the_next_turn() -> None:
    tokenizer = made("qwen3")
    quiet = Template(arguments={"enable_thinking": False})
    assert shown(tokenizer, tokenizer.observation((user("wrong"),), quiet)).endswith(
        "assistant\n<think>\n\n</think>\n\n"
    )
    assert shown(tokenizer, tokenizer.ids(chat(user("hi"), arguments=quiet.arguments))).endswith("</think>\n\n")
    tool = Message(role="tool", content="4")
    assert "<tool_response>\n4\n</tool_response>" in shown(tokenizer, tokenizer.observation((tool,)))


def test_a_turn_that_ended_without_its_token_is_closed() -> None:
    tokenizer = made("qwen3")
    end, observed = tokenizer.turn_end(), tokenizer.observation((user("wrong"),)).tolist()
    open_turn = tokenizer.observation((user("wrong"),), last=number(tokenizer, "a"))
    assert open_turn.tolist() == [end, *observed]
    for stop in ("<|im_end|>", "<|endoftext|>"):
        assert tokenizer.observation((user("wrong"),), last=number(tokenizer, stop)).tolist() == observed


def test_of_glm_the_role_that_the_policy_sampled_is_not_written_again() -> None:
    tokenizer, tool = made("glm"), Message(role="tool", content="4")
    asked, ended = (number(tokenizer, name) for name in ("<|observation|>", "<|user|>"))
    assert shown(tokenizer, tokenizer.observation((tool,), last=asked)) == "\n4<|assistant|>\n"
    assert shown(tokenizer, tokenizer.observation((tool,), last=ended)) == "<|observation|>\n4<|assistant|>\n"


def test_a_role_that_ends_a_turn_may_follow_a_space() -> None:
    template = "{% for m in messages %} <|{{ m.role }}|> {{ m.content }}{% endfor %}"
    template += "{% if add_generation_prompt %} <|assistant|> {% endif %}"
    tokenizer = made("glm", template=template)
    next_role = number(tokenizer, "<|user|>")
    assert tokenizer.turn_end() is None
    assert shown(tokenizer, tokenizer.observation((user("wrong"),), last=next_role)) == " wrong <|assistant|> "
    written = tokenizer.observation((user("wrong"),), last=number(tokenizer, "<|endoftext|>"))
    assert shown(tokenizer, written) == " <|user|> wrong <|assistant|> "


CALLED = ({"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}},)
DEMANDING = """\
{% for m in messages %}
{%- if m.role == 'tool' and messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('one result') }}{% endif %}
{%- if m.role == 'tool' and not m.name %}{{ raise_exception("answers require a 'name'") }}{% endif %}
{{- '<|im_start|>' + m.role + m.name|default('') + m.content }}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' + call.function.arguments }}{% endfor %}<|im_end|>
{%- endfor %}"""
"""A template that demands the names of tools, arguments as texts, and a content in every message.

It refuses a second result, as Mistral's first one with tools.
"""


def test_messages_take_the_form_that_a_template_demands() -> None:
    tokenizer, answer = made("qwen3", template=DEMANDING), Message(role="tool", content="4", tool_call_id="call_1")
    asked = Message(role="assistant", content=None, tool_calls=CALLED)
    assert shown(tokenizer, tokenizer.observation((answer,), calls=CALLED)) == "<|im_start|>tooladd4<|im_end|>"
    whole = tokenizer.render(chat(user("q"), asked, answer))
    assert '<|im_start|>assistant<tool_call>{"a": 1}<|im_end|>' in whole and whole.endswith("tooladd4<|im_end|>")
    unknown = structs.replace(answer, tool_call_id="call_2")
    with pytest.raises(TaskError, match=r"answers require a 'name' \(line 3: \{%- if m.role == 'tool'.*\)$"):
        tokenizer.render(chat(user("q"), asked, unknown))
    # Without the calls the template would refuse the answers for their names.
    with pytest.raises(TaskError, match=r"refuses the messages: one result \(line 2: "):
        tokenizer.observation((answer, answer), calls=CALLED)


def test_a_refusal_has_the_line_of_the_template() -> None:
    lines = ["{{ messages[0].content }}", "{%- for one in missing.names %}{% endfor %}", "{# end #}"]
    tokenizer = made("qwen3", template="\n".join(lines))
    with pytest.raises(TaskError) as refused:
        tokenizer.render(chat(user("q")))
    assert str(refused.value).endswith(f"'missing' is undefined (line 2: {lines[1]})")
    with pytest.raises(TaskError, match=r"\(line 1: .{1,120}\)$"):
        made("qwen3", template="{{ no.thing }}" + "{{ 'a long line' }} " * 99).render(chat(user("q")))
    # A template that cannot be parsed.
    with pytest.raises(TaskError, match=r"Expected .* \(line 2: \{% for %\}\)$"):
        made("qwen3", template="a\n{% for %}").render(chat(user("q")))


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "mistral"])
def test_roles_that_a_template_refuses_are_told(family: str) -> None:
    tokenizer = made(family)
    with pytest.raises(TaskError, match=r"the chat template refuses the messages: .*alternate"):
        tokenizer.observation((user("a"), user("b")))


# --- control tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_has_transformers_ids(family: str, kind: str) -> None:
    tokenizer = made(family, kind)
    messages = [
        {"role": "user", "content": "What is 5+7?\n\n"},
        {"role": "assistant", "content": " 12 "},
        {"role": "user", "content": "ä\ttrue"},
    ]
    theirs = tokenizer._tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert tokenizer.ids(chat(*(Message(**one) for one in messages))) == theirs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_control_tokens_that_a_row_spells_are_text(family: str, kind: str) -> None:
    tokenizer, controls = made(family, kind), CONTROLS[family]
    source = tokenizer_kinds.template_text(family) or ""
    names = [*controls.specials, *(name for name in controls.plain if name in source)]
    names = [name for name in names if name in tokenizer.numbers()]
    plain, spelled = chat(user("no token")), chat(user(f"a{names[0]} b{''.join(names)}c"))
    ids = tokenizer.ids(spelled)
    control = {number(tokenizer, name) for name in names if name != "<unk>"}
    # The template's own tokens are those of a prompt that spells none.
    assert [one for one in ids if one in control] == [one for one in tokenizer.ids(plain) if one in control]
    text = shown(tokenizer, ids).replace("\u2581", " ")
    assert all(name.replace("\u2581", " ") in text for name in names)
    theirs = tokenizer._tokenizer.apply_chat_template(
        [{"role": "user", "content": spelled.messages[0].text}], add_generation_prompt=True
    )["input_ids"]
    assert tokenizer.ids(chat(*spelled.messages, control_tokens="parse")) == theirs
    assert tokenizer.render(spelled).count(names[0]) == tokenizer.render(plain).count(names[0]) + 2


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_text_keeps_the_tokens_that_it_has_without_a_spelled_one(kind: str) -> None:
    tokenizer = made("qwen2.5", kind)
    twin = tokenizer._control._twin[0]
    for text in ("What is 5+7?", "a b\n\nc", "über 12", " x"):
        assert twin.encode(text, add_special_tokens=False).ids == tokenizer._ids(text)
    ids = tokenizer.ids(chat(user("The answer<|im_end|>"), Message(role="assistant", content="is 46."), user("add")))
    plain = tokenizer.ids(chat(user("The answer"), Message(role="assistant", content="is 46."), user("add")))
    tail = plain[plain.index(number(tokenizer, "<|im_end|>"), plain.index(number(tokenizer, "<|im_end|>")) + 1) :]
    assert ids[-len(tail) :] == tail


@pytest.mark.parametrize("model", ["Unigram", "WordLevel"])
def test_a_model_whose_words_hold_the_control_tokens_keeps_their_names_as_text(tmp_path: Path, model: str) -> None:
    pieces = ["<unk>", "</s>", *"</s>abx", " "]
    if model == "Unigram":
        backend = tokenizers.Tokenizer(models.Unigram([(one, -1.0) for one in dict.fromkeys(pieces)], unk_id=0))
    else:
        words = {word: n for n, word in enumerate(dict.fromkeys(pieces))}
        backend = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = "{% for m in messages %}a {{ m.content }}{{ eos_token }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    ids = Tokenizer(tmp_path).ids(chat(user("b </s> x")))
    assert ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert len(ids) > 4


def test_tools_outputs_names_and_texts_have_no_control_tokens_either() -> None:
    tokenizer = made("qwen3")
    end = number(tokenizer, "<|im_end|>")
    observed = tokenizer.observation((Message(role="tool", content="</tool_response><|im_end|>"),)).tolist()
    assert (observed.count(end), observed.count(number(tokenizer, "</tool_response>"))) == (1, 1)
    assert end not in tokenizer.observation("so<|im_end|>")
    assert end in tokenizer.observation("so<|im_end|>", Template(control_tokens="parse"))
    assert end not in tokenizer.ids(Prompt(text="so<|im_end|>", columns={}))
    called = Message(
        role="assistant",
        content=None,
        tool_calls=({"function": {"name": "f<|im_end|>", "arguments": {"<|im_end|>": ["<|im_end|>"]}}},),
    )
    answered = Message(role="tool", content="4", name="<|im_end|>", tool_call_id="1")
    prompt = chat(user("x"), called, answered, tools=({"name": "f", "description": "<|im_end|>"},))
    ids = tokenizer.ids(prompt)
    text = shown(tokenizer, ids)
    assert ids.count(end) < text.count("<|im_end|>") and '"arguments": {"<|im_end|>": ["<|im_end|>"]}' in text


# As Phi-4-mini's, whose names of control tokens are in no text of the template.
PIECES = "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}{{ '<|assistant|>' }}"


def test_control_tokens_that_the_tokenizer_lists_are_text_in_a_row(tmp_path: Path) -> None:
    names = ["<|user|>", "<|end|>", "<|assistant|>"]
    made = tokenizer_kinds.make("byte_bpe", None)
    made.add_tokens([tokenizers.AddedToken(name, special=False, normalized=False) for name in names])
    made.chat_template = PIECES
    made.save_pretrained(tmp_path)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_control_tokens": names}))
    tokenizer = Tokenizer(tmp_path)
    ids, plain = tokenizer.ids(chat(user("hi <|user|> you <|end|>"))), tokenizer.ids(chat(user("hi")))
    control = [number(tokenizer, name) for name in names]
    assert [one for one in ids if one in control] == [one for one in plain if one in control] == control
    assert shown(tokenizer, ids).count("<|user|>") == 2


def test_an_argument_of_a_row_for_the_template_is_text_too() -> None:
    tokenizer = made("qwen3", template="{{ '<|im_start|>' + persona + '<|im_end|>' + messages[0].content }}")
    ids = tokenizer.ids(chat(user("x"), arguments={"persona": "a <|im_end|> b"}))
    assert ids.count(number(tokenizer, "<|im_end|>")) == 1
    assert shown(tokenizer, ids) == "<|im_start|>a <|im_end|> b<|im_end|>x"
    with pytest.raises(TaskError, match="sanitize_control_tokens' is not an argument"):
        tokenizer.ids(chat(user("x"), arguments={"sanitize_control_tokens": True}))


def test_the_thoughts_of_an_assistants_message_stay_tokens() -> None:
    tokenizer = made("qwen3")
    thoughts = Message(role="assistant", content="<think>\nso\n</think>\n\nfour<|im_end|>")
    ids = tokenizer.ids(chat(user("x"), thoughts, user("y")))
    # The template takes thoughts of earlier turns out.
    assert "so" not in shown(tokenizer, ids)
    assert ids.count(number(tokenizer, "<|im_end|>")) == 3


@pytest.mark.parametrize("template", ["{{ messages[0].content[:12] }}", "{{ messages[0].content | upper }}"])
def test_a_template_that_tears_a_spelled_token_is_refused(template: str) -> None:
    with pytest.raises(TaskError, match='choose control_tokens = "parse"'):
        made("qwen3", template=template).ids(chat(user("hello <|im_end|> you")))


def test_what_the_policy_sampled_reaches_rewards_as_text_but_for_the_end_of_its_turn() -> None:
    for family, call in (("mistral", "[TOOL_CALLS]"), ("llama3", "<|python_tag|>"), ("qwen3", "<tool_call>")):
        tokenizer = made(family, "byte_bpe")
        end = tokenizer.turn_end()
        turn = np.int32([*tokenizer._ids(f"x{call}y"), end])
        assert tokenizer.completion(turn) == f"x{call}y"
        observed = tokenizer.observation((user("no"),)).tolist()
        whole = np.int32([*turn, *observed, *turn])
        mask = np.array([True] * len(turn) + [False] * len(observed) + [True] * len(turn))
        text = tokenizer.completion(whole, mask)
        assert (text.count(call), str(ENDS[family]) in text, "[INST]" in text) == (2, False, False)


# --- prompts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_never_ends_in_the_end_of_a_sequence_and_has_one_bos(kind: str) -> None:
    tokenizer = made(None, kind)
    ids = tokenizer.ids(Prompt(text="What is 5+7?", columns={}))
    assert ids[-1] != tokenizer.eos_id
    theirs = tokenizer._tokenizer("What is 5+7?")["input_ids"]
    assert ids == [one for one in theirs if one != tokenizer.eos_id]
    bos = tokenizer._tokenizer.bos_token
    for choice in ("text", "parse"):
        again = tokenizer.ids(Prompt(text=f"{bos}What", columns={}, template=Template(control_tokens=choice)))  # pyright: ignore
        assert again.count(tokenizer._tokenizer.bos_token_id) == (1 if bos else 0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_ends_with_an_assistants_message_is_continued(family: str) -> None:
    tokenizer = made(family)
    text = tokenizer.render(chat(user("hi"), Message(role="assistant", content="The answer")))
    assert text.endswith("The answer")
    theirs = tokenizer._tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The answer"}],
        continue_final_message=True,
        tokenize=False,
    )
    assert text == theirs
    with pytest.raises(TaskError, match="without content"):
        tokenizer.render(chat(user("hi"), Message(role="assistant", content=None)))


DATED = "\n {{ strftime_now('%s') }}{%% for m in messages %%}{{ m.content }}{%% endfor %%}"
FORMATS = ("%d %b %Y %H:%M", "%Y-%m-%d", "%B %-d, %Y", "%A", "100%% %%d of %j %-I%p", "no time", "%x|%X|%c", "%q %")
"""As Llama 3, gpt-oss and Granite write them, and others."""


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("clock", ["2026-01-31T12:05", "2024-02-07T03:04:05"])
def test_a_template_that_writes_the_time_writes_that_of_the_run(clock: str, format: str) -> None:
    tokenizer = made("qwen3", template=DATED % format, clock=clock)
    expected = datetime.fromisoformat(clock).strftime(format)
    # A template's first line break is kept by transformers, with a clock and without.
    assert tokenizer.render(chat(user(" x"))) == f"\n {expected} x"
    named = {"other": DATED % format, "default": "{{ messages[0].content }}"}
    chosen = made.__wrapped__("qwen3", template=named, clock=clock)
    assert chosen.render(chat(user("x"))) == "x"
    assert chosen.render(chat(user("x"), arguments={"chat_template": "other"})) == f"\n {expected}x"


def test_the_fields_of_messages_tools_and_arguments_reach_the_template(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    row = {
        "prompt": [
            {"role": "user", "content": "1+2", "name": None, "tool_calls": None},
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "I add",
                "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
            },
            {"role": "tool", "content": "3", "tool_call_id": "call_1", "name": "add"},
        ],
        "tools": json.dumps(tools),
        "chat_template_kwargs": {"enable_thinking": False},
        "answer": "3",
    }
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps(row))
    tokenizer = made("qwen3")
    config = one_source(data=str(data), held_out=0.0, template={"custom": 1})
    prompt = task.build(config, 1, tokenizer).prompt(0)
    assert prompt.template == Template(arguments={"custom": 1, "enable_thinking": False}, tools=tuple(tools))
    plain = [
        {key: value for key, value in one.items() if value is not None or key == "content"} for one in row["prompt"]
    ]
    theirs = tokenizer._tokenizer.apply_chat_template(
        plain, tools=tools, add_generation_prompt=True, enable_thinking=False, custom=1
    )["input_ids"]
    assert tokenizer.encode(prompt).tolist() == theirs
    assert "I add" in tokenizer.render(prompt) and '"name": "add"' in tokenizer.render(prompt)


NAMED = {"tool_use": "[tools]{{ messages[0].content }}", "rag": "[rag]{{ messages[0].content }}"}


@pytest.mark.parametrize(
    ("templates", "given", "rendered"),
    [
        (NAMED, Template(), None),
        (NAMED, Template(tools=({"type": "function"},)), "[tools]hi"),
        (NAMED, Template(arguments={"chat_template": "rag"}), "[rag]hi"),
        ({**NAMED, "default": "{{ messages[0].content }}"}, Template(), "hi"),
    ],
)
def test_of_several_templates_the_one_that_transformers_takes_is_taken_or_none(
    tmp_path: Path, templates: Any, given: Template, rendered: str | None
) -> None:
    saved = tokenizer_kinds.make("byte_bpe", "qwen3")
    saved.chat_template = templates
    saved.save_pretrained(tmp_path)
    tokenizer = Tokenizer(tmp_path)
    prompt = Prompt(text="hi", columns={}, messages=(user("hi"),), template=given)
    if rendered is not None:
        assert tokenizer.render(prompt) == rendered
        return
    with pytest.raises(TaskError, match="only the named chat templates 'rag', 'tool_use': copy the one"):
        tokenizer.render(prompt)


def with_call(folder: Path, arguments: object, content: str = "1+2") -> Prompt:
    """The prompt of a row whose second message is a call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "user", "content": "so?"},
    ]
    data = folder / "rows.jsonl"
    data.write_text(json.dumps({"prompt": turns, "answer": ""}))
    return task.build(one_source(data=str(data), held_out=0.0), 1, None).prompt(0)


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
@pytest.mark.parametrize("arguments", [{"a": 1}, {}, {"text": 'he said "5"', "list": [1, [None]]}, {"é": {"n": True}}])
def test_the_arguments_of_a_call_are_written_once_whether_they_are_values_or_json(
    tmp_path: Path, family: str, arguments: dict[str, Any]
) -> None:
    tokenizer, given = made(family), with_call(tmp_path, json.dumps(arguments))
    assert tokenizer.render(given) == tokenizer.render(with_call(tmp_path, arguments))


@pytest.mark.parametrize("family", ["llama3", "deepseek", "glm"])
def test_a_call_is_refused_if_the_template_writes_no_calls(tmp_path: Path, family: str) -> None:
    tokenizer, given = made(family), with_call(tmp_path, {"a": 1})
    for written in (tokenizer.render, tokenizer.ids):
        with pytest.raises(TaskError, match="the chat template leaves out the calls of an assistant's message"):
            written(given)
    question, call, _ = given.messages
    with pytest.raises(TaskError, match="leaves out the calls"):
        tokenizer.observation((question, call, question), Template(), tokenizer.eos_id)


@pytest.mark.parametrize(("given", "read"), [("", {}), (" ", {}), ("[1]", "[1]"), ("no JSON", "no JSON")])
def test_arguments_that_are_no_json_object_stay_text(tmp_path: Path, given: str, read: object) -> None:
    assert with_call(tmp_path, given).messages[1].tool_calls[0]["function"]["arguments"] == read


@pytest.mark.parametrize(
    ("arguments", "content"), [('{"n": 1' + "0" * 30 + "}", "1+2"), ({}, "half a character: \ud800")]
)
def test_a_message_that_crosses_no_process_is_refused_with_its_row(
    tmp_path: Path, arguments: object, content: str
) -> None:
    with pytest.raises(TaskError, match=r"row 1: not a message for a chat template"):
        with_call(tmp_path, arguments, content)


WRITES = (
    "{% for m in messages %}{% if CONDITION %}<|im_start|>{{ m.role }} CONTENT"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}<|im_end|>{% endif %}{% endfor %}"
)
HISTORY = (
    Message(role="system", content="Be brief"),
    user("1+2"),
    Message(role="assistant", content="", tool_calls=({"function": {"name": "add", "arguments": {}}},)),
    Message(role="tool", content="3"),
    user("and 4+5"),
)


@pytest.mark.parametrize("left_out", ["system", "user", "tool"])
@pytest.mark.parametrize(
    ("condition", "content"),
    [
        ("m.role != 'ROLE'", "{{ m.content }}"),
        ("true", "{% if m.role == 'ROLE' %}{% for part in m.content %}{{ part.words }}{% endfor %}{% else %}"
         "{{ m.content }}{% endif %}"),
        ("m.role != 'ROLE' or m.content == ''", "{{ m.content }}"),
        ("not loop.first or m.role != 'ROLE'", "{{ '' if m.role == 'ROLE' else m.content }}"),
    ],
)  # fmt: skip
def test_a_template_that_leaves_out_a_message_is_refused_with_its_role(
    left_out: str, condition: str, content: str
) -> None:
    template = WRITES.replace("CONDITION", condition).replace("CONTENT", content).replace("ROLE", left_out)
    tokenizer = made("qwen3", template=template)
    kept = [one for one in HISTORY if one.role != left_out]
    assert tokenizer.ids(chat(*kept)) and "leaves" not in tokenizer.render(chat(*kept))
    for read in (tokenizer.render, tokenizer.ids):
        with pytest.raises(TaskError, match=f"leaves out a message of the role '{left_out}'"):
            read(chat(*HISTORY))
    empty = [structs.replace(one, content="") if one.role == left_out else one for one in HISTORY]
    assert tokenizer.ids(chat(*empty)), "a message without words says nothing"


TOOLS = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1}}}


@pytest.mark.parametrize(
    ("condition", "whole", "partly"),
    [
        ("not tools or m.role != 'system'", HISTORY, chat(*HISTORY, tools=TOOLS)),
        ("not brief or m.role != 'system'", HISTORY, chat(*HISTORY, arguments={"brief": True})),
        ("not m.name or m.role != 'user'", HISTORY, [structs.replace(one, name="n") for one in HISTORY]),
        ("not m.hidden", HISTORY, [structs.replace(one, fields={"hidden": True}) for one in HISTORY]),
        (
            "not (messages | selectattr('tool_calls', 'defined') | list) or m.role != 'system'",
            [*HISTORY[:2], Message(role="assistant", content="3"), user("and 4+5")],
            [*HISTORY[:2], Message(role="assistant", content="3", tool_calls=(CALL,)), user("and 4+5")],
        ),
    ],
    ids=["tools", "arguments", "name", "field", "calls"],
)
def test_a_message_that_is_left_out_of_some_prompts_is_refused_after_others_too(
    condition: str, whole: list[Message], partly: Any
) -> None:
    partly = partly if isinstance(partly, Prompt) else chat(*partly)
    tokenizer = made("qwen3", template=WRITES.replace("CONDITION", condition).replace("CONTENT", "{{ m.content }}"))
    assert tokenizer.render(chat(*whole))
    with pytest.raises(TaskError, match="the chat template leaves out a message of the role"):
        tokenizer.render(partly)


def test_a_row_whose_message_is_left_out_is_named(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    turns = [[{"role": "user", "content": "x"}], [{"role": "system", "content": "s"}, {"role": "user", "content": "y"}]]
    data.write_text("".join(json.dumps({"prompt": messages, "answer": ""}) + "\n" for messages in turns))
    tokenizer = made(
        "qwen3", template=WRITES.replace("CONDITION", "m.role == 'user'").replace("CONTENT", "{{ m.content }}")
    )
    with pytest.raises(
        TaskError, match=r"rows\.jsonl, row 2: the chat template leaves out a message of the role 'system'"
    ):
        task.build(one_source(data=str(data), held_out=0.0), 1, tokenizer)


@pytest.mark.parametrize(("family", "writes"), [("qwen3", True), ("llama3", False), ("gemma2", False), ("phi", False)])
def test_tools_that_a_template_does_not_write_are_found(family: str, writes: bool) -> None:
    tools = ({"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}},)
    templates, question = made(family).chat, (user("1+2"),)
    assert templates.leaves_out_tools(question, Template(tools=tools)) is not writes
    assert not templates.leaves_out_tools(question, Template())


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": [{"role": "user", "content": None}]}, "a message has the texts `role` and `content`"),
        ({"prompt": [{"role": "user", "content": "x", "tool_calls": "add"}]}, "not a message for a chat template"),
        ({"prompt": [{"role": "user", "content": "x"}], "tools": "a calculator"}, 'tools = ""'),
        ({"prompt": [{"role": "user", "content": "x"}], "chat_template_kwargs": [1]}, "arguments by name"),
        (
            {"prompt": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"tokenize": True}},
            "'tokenize' is not an argument that the configuration may give",
        ),
    ],
)
def test_rows_whose_fields_cannot_be_carried_are_refused(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text(json.dumps({**row, "answer": ""}))
    with pytest.raises(TaskError, match=message):
        task.build(one_source(data=str(data), held_out=0.0), 1, made("qwen3"))
