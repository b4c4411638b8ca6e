"""The words of transformers alone about a model folder: its log-probs, its template, its tokens. None of our code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizer_kinds
import torch
import transformers
from numpy.typing import NDArray

ANSWER = "QXZQ"
"""An assistant's answer that occurs nowhere else."""
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Loaded(NamedTuple):
    """A model folder as transformers loads it, in float32, and its tokenizer."""

    lm: Any
    tokenizer: Any
    missing: list[str]


def load(folder: Path) -> Loaded:
    """Load a folder, and what of it is missing, unexpected or mis-shaped."""
    lm, report = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    wrong = [f"{kind} {name}" for kind, names in report.items() for name in names]
    return Loaded(lm.eval(), transformers.AutoTokenizer.from_pretrained(folder), wrong)


@torch.no_grad()
def logprobs(loaded: Loaded, prompt: Sequence[int], tokens: Sequence[int], *, words: int | None = None) -> NDArray[Any]:
    """Log-probs [T] of `tokens` behind `prompt`, among the first `words` of the vocabulary."""
    row = torch.tensor([[*prompt, *tokens]])
    logits_TV = loaded.lm(row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    if words is not None:
        logits_TV[:, words:] = -torch.inf
    return logits_TV.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0].numpy()


def prompt_ids(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """The ids of a prompt as TRL and transformers make them; a text neither ends in eos nor has its bos twice."""
    if isinstance(prompt, str):
        ids: list[int] = list(tokenizer(prompt)["input_ids"])
        while ids and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
        return ids
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))


def observation_ids(
    tokenizer: Any, prompt: list[dict[str, Any]], said: list[dict[str, Any]], turn_end: str
) -> list[int]:
    """The ids of the whole conversation that stand behind the end of the assistant's turn.

    The token at the end of the turn is the policy's own, also where the template gives it to the next turn (GLM).
    """
    turns = [*prompt, {"role": "assistant", "content": ANSWER}, *said]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    behind = text.index(turn_end, text.index(ANSWER)) + len(turn_end)
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(read["input_ids"], read["offset_mapping"], strict=True)
    return [number for number, (begin, end) in pairs if begin >= behind and end > begin]


def stops(folder: Path, tokenizer: Any, template: str | None) -> set[int]:
    """Every token that ends a turn: of generation config, model config and tokenizer, and the template's own."""
    found: set[int] = set()
    config = transformers.AutoConfig.from_pretrained(folder)
    sources = [config.eos_token_id, tokenizer.eos_token_id]
    if (folder / "generation_config.json").is_file():
        sources.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    # GLM's template writes nothing behind a turn: the next one begins.
    if template not in (None, "glm"):
        sources.append(tokenizer.convert_tokens_to_ids(tokenizer_kinds.CONTROLS[template].turn_end))
    for one in sources:
        found |= set() if one is None else {one} if isinstance(one, int) else set(one)
    return found


def text_of(tokenizer: Any, tokens: Sequence[int], stops: set[int]) -> str:
    """The text of a turn without the token that ends it, and without special tokens that every tokenizer may have.

    Others are text: `<|python_tag|>` is what a parser of tool calls looks for.
    """
    kept = list(tokens[:-1] if len(tokens) and int(tokens[-1]) in stops else tokens)
    named = {getattr(tokenizer, f"{name}_token_id") for name in NAMED}
    return tokenizer.decode([one for one in kept if one not in named], skip_special_tokens=False)


def furthest(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest distance of two arrays."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).max()) if len(one) else 0.0


def specials(tokenizer: Any) -> set[int]:
    """The ids of all special tokens, also of those without a name."""
    return {*tokenizer.all_special_ids, *(n for n, one in tokenizer.added_tokens_decoder.items() if one.special)}
