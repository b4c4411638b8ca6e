# ruff: noqa: RUF001  DeepSeek's control tokens have these characters.
"""Small tokenizers of the kinds of published models, with the control tokens of a chat template."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SIGN = "▁"
"""SentencePiece's character for a space."""
TEXT = (
    "What is 12+34? The answer is 46.",
    "What is 5+7? The answer is 12, and not 57.",
    "You are a helpful assistant. Please think step by step, then write the number.",
    "The quick brown fox jumps over the lazy dog; 1234567890 times, he said.",
    '{"name": "add", "arguments": {"first": 1, "second": 2}}',
    "def add(first, second):\n    return first + second\n",
    "Grüße aus Köln, à bientôt!",
)
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""The pattern with which Qwen2's tokenizer splits a text into words."""


@dataclass(frozen=True)
class Controls:
    """The control tokens of a chat template. `stops` end a completion, as in generation_config.json.

    `turn_end` is the token that the template writes after an assistant's turn.
    """

    eos: str
    turn_end: str
    stops: tuple[str, ...]
    bos: str | None = None
    pad: str | None = None
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()

    @property
    def specials(self) -> list[str]:
        """All special tokens, without duplicates."""
        named = [one for one in (self.pad, self.bos, self.eos, *self.stops, *self.special) if one]
        return list(dict.fromkeys(named))


_QWEN = Controls(
    eos="<|im_end|>",
    turn_end="<|im_end|>",
    stops=("<|im_end|>", "<|endoftext|>"),
    pad="<|endoftext|>",
    special=("<|im_start|>",),
    plain=("<tool_call>", "</tool_call>"),
)
_GEMMA = Controls(
    eos="<eos>",
    turn_end="<end_of_turn>",
    stops=("<eos>", "<end_of_turn>"),
    bos="<bos>",
    pad="<pad>",
    special=("<start_of_turn>", "<unk>"),
)
CONTROLS = {
    None: Controls(eos="</s>", turn_end="</s>", stops=("</s>",), bos="<s>", special=("<unk>",)),
    "qwen2.5": _QWEN,
    "qwen3": replace(_QWEN, plain=(*_QWEN.plain, "<tool_response>", "</tool_response>", "<think>", "</think>")),
    "llama3": Controls(
        eos="<|eot_id|>",
        turn_end="<|eot_id|>",
        stops=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        bos="<|begin_of_text|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
    ),
    "gemma2": _GEMMA,
    "gemma3": _GEMMA,
    "mistral": Controls(
        eos="</s>",
        turn_end="</s>",
        stops=("</s>",),
        bos="<s>",
        special=(
            *("<unk>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        ),
    ),
    "glm": Controls(
        eos="<|endoftext|>",
        turn_end="<|user|>",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        pad="<|endoftext|>",
        special=("[gMASK]", "<sop>", "<|system|>", "<|assistant|>"),
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "phi": Controls(
        eos="<|endoftext|>",
        turn_end="<|end|>",
        stops=("<|endoftext|>", "<|end|>"),
        bos="<s>",
        pad="<|endoftext|>",
        special=("<unk>", "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>"),
    ),
    "deepseek": Controls(
        eos="<｜end▁of▁sentence｜>",
        turn_end="<｜end▁of▁sentence｜>",
        stops=("<｜end▁of▁sentence｜>",),
        bos="<｜begin▁of▁sentence｜>",
        pad="<｜▁pad▁｜>",
        plain=(
            *("<｜User｜>", "<｜Assistant｜>", "<think>", "</think>"),
            *(f"<｜tool▁{one}｜>" for one in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")),
            *(f"<｜tool▁{one}｜>" for one in ("outputs▁begin", "outputs▁end", "output▁begin", "output▁end")),
        ),
    ),
}
"""The control tokens of each chat template, and (None) of a base model, which has no template."""


@dataclass(frozen=True)
class Kind:
    """A kind of tokenizer: its `model` (byte_bpe, spm_bpe or unigram), and its handling of control tokens.

    With `bos` and `eos` the post-processor adds these tokens to every text; `pad` is "own", "eos" or "none".
    """

    model: str
    bos: bool = False
    eos: bool = False
    pad: str = "own"
    has_bos: bool = True
    special: tuple[str, ...] = ()
    plain: tuple[str, ...] = ()


KINDS = {
    "byte_bpe": Kind("byte_bpe"),
    "spm_bpe": Kind("spm_bpe", bos=True),
    "unigram": Kind("unigram", bos=True),
    "added": Kind(
        "byte_bpe", special=("<|fim_middle|>", "<|vision_start|>"), plain=("<tool_call>", "<think>", "<|x|>")
    ),
    "pad_is_eos": Kind("byte_bpe", pad="eos"),
    "no_pad": Kind("byte_bpe", pad="none"),
    "no_bos": Kind("byte_bpe", has_bos=False),
    "double_bos": Kind("byte_bpe", bos=True),
    "adds_eos": Kind("byte_bpe", bos=True, eos=True),
}


def template_text(name: str | None) -> str | None:
    """The Jinja text of a chat template."""
    if name is None:
        return None
    return (Path(__file__).parent / "templates" / f"{name}.jinja").read_text(encoding="utf-8")


def make(kind: str, template: str | None) -> "PreTrainedTokenizerFast":
    """A tokenizer of `kind` with the chat template `template` and its control tokens.

    For the kind "double_bos" the template writes a bos too.
    """
    from transformers import PreTrainedTokenizerFast

    chosen, controls = KINDS[kind], CONTROLS[template]
    bos = (controls.bos or "<s>" if chosen.bos else controls.bos) if chosen.has_bos else None
    pad = {"own": controls.pad or "<pad>", "eos": controls.eos, "none": None}[chosen.pad]
    controls = replace(controls, bos=bos, pad=pad)
    backend = Tokenizer.from_str(_trained(chosen.model))
    specials = list(dict.fromkeys([*controls.specials, *chosen.special]))
    backend.add_special_tokens([AddedToken(one, normalized=False, special=True) for one in specials])
    plain = [one for one in dict.fromkeys([*controls.plain, *chosen.plain]) if one not in specials]
    backend.add_tokens([AddedToken(one, normalized=False, special=False) for one in plain])
    _post_process(backend, bos if chosen.bos else None, controls.eos if chosen.eos else None)
    text = template_text(template)
    if kind == "double_bos" and text and "bos_token" not in text:
        text = "{{- bos_token }}" + text
    named = {"bos_token": bos, "eos_token": controls.eos, "pad_token": pad}
    if "<unk>" in specials:
        named["unk_token"] = "<unk>"
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        clean_up_tokenization_spaces=False,
        **{name: token for name, token in named.items() if token},
    )
    made.chat_template = text
    return made


def _post_process(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    added = [one for one in (bos, eos) if one]
    if not added:
        return
    single = " ".join([*([bos] if bos else []), "$A", *([eos] if eos else [])])
    pair = " ".join([*([bos] if bos else []), "$A", "$B:1", *([eos] if eos else [])])
    ids = [(one, backend.token_to_id(one)) for one in added]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)


@cache
def _trained(model: str) -> str:
    return {"byte_bpe": _byte_bpe, "spm_bpe": _spm_bpe, "unigram": _unigram}[model]().to_str()


def _byte_bpe() -> Tokenizer:
    """GPT-2's and Qwen's kind: every byte is a token, and a space belongs to the next word."""
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(TEXT, trainer)
    return made


def _spm_bpe() -> Tokenizer:
    """Llama 2's, Mistral's and Gemma's kind: `SIGN` for a space and before the text; unknown characters as bytes."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SIGN, prepend_scheme="first", split=False)
    made.decoder = _sentencepiece_decoder()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=["<unk>", *_byte_names()], show_progress=False, max_token_length=12
    )
    made.train_from_iterator(TEXT, trainer)
    # The trainer makes control tokens of the bytes; in published tokenizers they are ordinary tokens.
    content = json.loads(made.to_str())
    content["added_tokens"] = content["added_tokens"][:1]
    return Tokenizer.from_str(json.dumps(content))


def _unigram() -> Tokenizer:
    """SentencePiece's unigram kind, with `SIGN` for a space and before the text."""
    pieces = {SIGN, *(one for text in TEXT for one in text.replace(" ", SIGN))}
    words = {SIGN + word for text in TEXT for word in text.split()}
    scored = [(one, -6.0) for one in sorted(pieces)] + [(one, -4.0) for one in sorted(words - pieces)]
    vocabulary = [("<unk>", 0.0), *((one, -9.0) for one in _byte_names()), *scored]
    made = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    made.pre_tokenizer = pre_tokenizers.Metaspace(replacement=SIGN, prepend_scheme="first")
    made.decoder = _sentencepiece_decoder()
    return made


def _sentencepiece_decoder() -> decoders.Decoder:
    steps = [decoders.Replace(SIGN, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return decoders.Sequence(steps)


def _byte_names() -> list[str]:
    return [f"<0x{number:02X}>" for number in range(256)]
