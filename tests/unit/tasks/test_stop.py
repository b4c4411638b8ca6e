"""All that ends a completion: found in every place that names it, in every form; rewards see the text without it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Gemma3Config, Qwen2Config

from streamppo.errors import ModelError, TaskError
from streamppo.tasks import stop
from streamppo.tasks.stop import Stop
from streamppo.tasks.tokenizer import character_tokenizer
from streamppo.types import Identity, Prompt

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NAMES = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|user|>", "</s>", "<end_of_turn>", "<|eot_id|>")
SMALL: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def tokenizer_of(template: str | None = None, eos: str | None = "<|endoftext|>", plain: Sequence[str] = ()) -> Any:
    """A character tokenizer with tokens that are special, and some, `plain`, that are not."""
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz?!:<>|_/\n ")
    made.add_tokens([one for one in NAMES if one not in plain], special_tokens=True)
    made.add_tokens(list(plain))
    made.eos_token, made.chat_template = eos, template
    return made


def model(folder: Path, generation: object = None, **settings: Any) -> Qwen2Config:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return Qwen2Config(vocab_size=100, **SMALL, **settings)


def test_ends_are_the_union_of_all_places_and_each_is_named_with_them(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(CHATML)
    end, eot, text = (tokenizer.convert_tokens_to_ids(one) for one in ("<|im_end|>", "<|eot_id|>", "<|endoftext|>"))
    found = stop.read(tmp_path, model(tmp_path, [text, 5], eos_token_id=eot), tokenizer, ("</s>", "\n\nq:"))
    assert found.origins == {
        text: ["generation config", "tokenizer"],
        5: ["generation config"],
        eot: ["model config"],
        end: ["chat template"],
        tokenizer.convert_tokens_to_ids("</s>"): ["rollout.stop"],
    }
    assert found.strings == ("\n\nq:",)
    described = found.describe(tokenizer.convert_ids_to_tokens)
    assert f"<|im_end|> ({end}: chat template)" in described and "the string '\\n\\nq:'" in described


REFUSED = [
    {"do_sample": False, "num_return_sequences": 4},
    {"do_sample": False, "num_beams": 1, "num_beam_groups": 2},
    {"cache_implementation": "of_another_release"},
    {"max_new_tokens": 0},
    {"watermarking_config": {"of_another_release": 1}},
    {"compile_config": {"of_another_release": 1}},
]


@pytest.mark.parametrize("refused", REFUSED, ids=str)
def test_settings_that_transformers_refuses_leave_the_ends_of_the_others(
    tmp_path: Path, refused: dict[str, object]
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({**refused, "eos_token_id": [7, 9]}))
    assert stop.read(tmp_path, model(tmp_path), tokenizer_of(CHATML)).ids >= {7, 9}


@pytest.mark.parametrize("generation", [None, 7])
def test_a_chat_model_ends_its_turn_whatever_its_generation_config_has(tmp_path: Path, generation: int | None) -> None:
    tokenizer = tokenizer_of(CHATML, eos="<|im_end|>")
    found = stop.read(tmp_path, model(tmp_path, generation), tokenizer)
    assert found.ids == {tokenizer.eos_token_id} | ({7} if generation else set())
    assert not stop.read(tmp_path / "none", Qwen2Config(**SMALL), None).ids, "a model without any has none"


@pytest.mark.parametrize(
    "writes", ["{{ m.role }}", "{% for part in m.content %}{{ part.words }}{% endfor %}", "{{ m.content | upper }}"]
)
def test_a_template_that_does_not_write_the_assistants_words_tells_no_end_of_its_turn(writes: str) -> None:
    tokenizer = tokenizer_of(CHATML.replace("{{ m.content }}", writes))
    assert stop.end_of_turn(tokenizer) is None, "the first token of the conversation begins a turn"


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}ENDS{% endfor %}"
ASSISTANT = "{% if m.role == 'assistant' %}"


@pytest.mark.parametrize(
    ("ends", "eos", "end"),
    [
        pytest.param("<|eot_id|><|im_end|>", "<|im_end|>", "<|im_end|>", id="Command A: of several, eos_token"),
        pytest.param(
            "<|user|>a<|user|>b<|im_end|>", "</s>", "<|im_end|>", id="Kimi K3: of several, the one that is once"
        ),
        pytest.param("<|im_end|><|eot_id|>", "</s>", "<|im_end|>", id="the first"),
        pytest.param(
            "<|im_end|>{% if loop.last %}<|endoftext|>{% endif %}", "<|endoftext|>", "<|im_end|>", id="Phi 4 mini"
        ),
        pytest.param(
            f"{ASSISTANT}{{{{ '<|eot_id|>' if loop.last else '<|im_end|>' }}}}{{% endif %}}",
            "</s>",
            "<|eot_id|>",
            id="GPT-OSS: at the end of a conversation",
        ),
        pytest.param(
            f"{ASSISTANT}{{{{ '' if loop.last else '<|im_end|>' }}}}{{% endif %}}",
            "</s>",
            "<|im_end|>",
            id="Apertus: only before another message",
        ),
        pytest.param("", "</s>", None, id="GLM: the next role"),
    ],
)
def test_of_the_tokens_after_a_turn_the_one_that_ends_it_is_found(ends: str, eos: str, end: str | None) -> None:
    tokenizer = tokenizer_of(TURN.replace("ENDS", ends), eos)
    expected = None if end is None else tokenizer.convert_tokens_to_ids(end)
    assert stop.end_of_turn(tokenizer) == expected


def test_what_a_template_writes_before_the_end_of_a_turn_is_not_in_the_text_for_rewards(tmp_path: Path) -> None:
    ends = "{{ '<|user|>b<|user|><|im_end|>' if m.role == 'assistant' else '<|eot_id|>' }}"
    tokenizer = tokenizer_of(TURN.replace("ENDS", ends))
    found = stop.read(tmp_path, model(tmp_path), tokenizer)
    written = ("ab<|user|>b<|user|><|im_end|>", "ab<|im_end|>", "a<|user|>b<|user|>b<|im_end|>", "ab<|user|>b<|user|>")
    texts = [found.text(np.asarray(tokenizer.encode(text)), "stop", tokenizer.decode) for text in written]
    assert texts == ["ab", "ab", "a<|user|>b<|user|>b", "ab<|user|>b<|user|>"]
    # White space may be a part of the words.
    spaced = stop.read(tmp_path, model(tmp_path), tokenizer_of(TURN.replace("ENDS", " <|im_end|>")))
    assert spaced.closing == ""


def test_a_text_config_inside_of_the_model_config_is_read_too(tmp_path: Path) -> None:
    config = Gemma3Config(text_config={"eos_token_id": [1, 9]}, eos_token_id=3)
    assert stop.read(tmp_path, config, None).origins == {3: ["model config"], 1: ["text config"], 9: ["text config"]}


@pytest.mark.parametrize(
    ("value", "ids"),
    [
        (5, {5}),
        ([5, 6], {5, 6}),
        ([], set()),
        ([None], set()),
        (-1, set()),
        ([-1, 4], {4}),
        ("5", {5}),
        ("<|im_end|>", {"<|im_end|>"}),
        (["<|im_end|>", 5], {"<|im_end|>", 5}),
        ([[5], [6, [7]]], {5, 6, 7}),
        ("nobody", "'nobody'"),
        (True, "True"),
        (2.5, "2.5"),
        ({"a": 1}, "{'a': 1}"),
        ([1, "nobody"], "'nobody'"),
    ],
)
def test_every_form_of_an_end_is_read_or_refused_by_its_value(tmp_path: Path, value: object, ids: Any) -> None:
    tokenizer = tokenizer_of(eos=None)
    if isinstance(ids, str):
        with pytest.raises(ModelError, match=f"generation config's eos_token_id has {ids}"):
            stop.read(tmp_path, model(tmp_path, value), tokenizer)
        return
    wanted = {tokenizer.convert_tokens_to_ids(one) if isinstance(one, str) else one for one in ids}
    assert stop.read(tmp_path, model(tmp_path, value), tokenizer).ids == wanted


TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama 3": (
        "{% for m in messages %}<|im_start|>{{ m.content | trim }}<|eot_id|>{% endfor %}",
        "<|eot_id|>",
    ),
    "gemma": ("{% for m in messages %}{{ m.content }}<end_of_turn>\n{% endfor %}", "<end_of_turn>"),
    "mistral": ("{% for m in messages %}{{ ' ' + m.content + eos_token }}{% endfor %}", "<|endoftext|>"),
    "no end, as GLM": ("{% for m in messages %}<|user|>\n{{ m.content }}{% endfor %}", None),
    "lines alone": ("{% for m in messages %}{{ m.content }}\n\n{% endfor %}", None),
    "thinking cut off": (CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}"), "<|im_end|>"),
    "refuses": ("{{ raise_exception('never') }}", None),
    "wants more": ("{{ messages[7].content }}{{ messages[0].missing.more }}", None),
    "none": (None, None),
}


@pytest.mark.parametrize(("template", "end"), TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("special", [True, False])
def test_the_token_behind_an_assistants_message_ends_a_turn(
    template: str | None, end: str | None, special: bool
) -> None:
    plain = ["\n\n", "<|im_end|>", "<end_of_turn>", "<|im"] if not special else ["\n\n"]
    tokenizer = tokenizer_of(template, plain=plain)
    found = stop.end_of_turn(tokenizer)
    assert (None if found is None else tokenizer.convert_ids_to_tokens(found)) == end


def test_rewards_see_a_text_without_its_end_and_the_tokens_keep_it() -> None:
    tokenizer = tokenizer_of(CHATML, plain=["<|im_end|>"])

    def text(said: str, finish: str, ends: Stop) -> str:
        tokens = np.array(tokenizer.encode(said, add_special_tokens=False), np.int32)
        return ends.text(tokens, finish, lambda some: tokenizer.decode(some, skip_special_tokens=True))

    ends = Stop({tokenizer.convert_tokens_to_ids("<|im_end|>"): ["chat template"]}, ("\n\n", "q:"))
    assert text("ab<|im_end|>", "stop", ends) == "ab"
    assert text("<|im_end|>", "stop", ends) == ""
    assert text("ab\n\n", "stop", ends) == text("abq: c\n\n", "stop", ends) == "ab"
    assert text("ab\n", "length", ends) == "ab\n"
    assert text("ab<|im_end|>", "stop", Stop()) == "ab<|im_end|>", "by nothing it was an end"


@pytest.mark.parametrize("string", ["ab", "a", "\n\nq:", "\N{LATIN SMALL LETTER E WITH ACUTE}x", "</answer>"])
def test_a_string_is_found_at_the_token_that_completes_it_however_it_is_spelt(string: str) -> None:
    tokenizer = character_tokenizer("abqx</answer>:\n" + string)
    completes = Stop(strings=(string, "never")).make_check(tokenizer.decode)
    assert completes is not None and Stop().make_check(tokenizer.decode) is None
    tokens = np.array(tokenizer.encode("x" * 80 + string + "x"), np.int32)
    found = [length for length in range(1, len(tokens) + 1) if completes(tokens[:length])]
    assert found[0] == len(tokens) - 1


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("half", r"own_limit:half': TypeError: 'float' object cannot be interpreted as an integer$"),
        ("none_at_all", r"gave 0, and a completion has at least 1 token$"),
    ],
)
def test_a_length_limit_that_is_no_number_of_tokens_is_refused(name: str, message: str) -> None:
    limit = stop.load_limit(f"own_limit:{name}", 8)
    with pytest.raises(TaskError, match=message):
        limit(Prompt(text="1+1=", columns={}), None)


def test_without_a_function_every_completion_has_the_limit_of_all() -> None:
    prompt = Prompt(text="1+1=", columns={})
    assert stop.load_limit("", 8)(prompt, Identity(task="t", prompt=1, sample=0)) == 8
