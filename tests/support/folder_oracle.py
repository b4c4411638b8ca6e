"""Reference results of transformers for a model folder: log-probs, template, tokens; without our code."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizer_kinds
import torch
import transformers
from numpy.typing import NDArray

ANSWER = "QXZQ"
"""An assistant's answer that does not occur elsewhere."""
NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


class Loaded(NamedTuple):
    """A model loaded by transformers in float32, its tokenizer, and its load report (`missing`)."""

    lm: Any
    tokenizer: Any
    missing: list[str]


def load(folder: Path) -> Loaded:
    """Load a folder; `missing` lists tensors that are missing, unexpected or of the wrong shape."""
    (name,) = transformers.AutoConfig.from_pretrained(folder).architectures or ()
    lm, report = getattr(transformers, name).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True, attn_implementation="eager"
    )
    wrong = [f"{kind} {name}" for kind, names in report.items() for name in names]
    return Loaded(lm.eval(), transformers.AutoTokenizer.from_pretrained(folder), wrong)


@torch.no_grad()
def logprobs(loaded: Loaded, prompt: Sequence[int], tokens: Sequence[int], *, words: int | None = None) -> NDArray[Any]:
    """Log-probs [T] of `tokens` after `prompt`, over the first `words` tokens of the vocabulary."""
    row = torch.tensor([[*prompt, *tokens]])
    logits_TV = loaded.lm(row, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
    if words is not None:
        logits_TV[:, words:] = -torch.inf
    return logits_TV.log_softmax(-1).gather(1, row[0, len(prompt) :, None])[:, 0].numpy()


def prompt_ids(tokenizer: Any, prompt: str | list[dict[str, Any]]) -> list[int]:
    """The token ids of a prompt, as in TRL and transformers; a text has one bos at most, and no eos at its end."""
    if isinstance(prompt, str):
        ids: list[int] = list(tokenizer(prompt)["input_ids"])
        while ids and ids[-1] == tokenizer.eos_token_id:
            ids.pop()
        return ids
    return list(tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False))


def observation_ids(
    tokenizer: Any, prompt: list[dict[str, Any]], said: list[dict[str, Any]], turn_end: str, stops: set[int]
) -> list[int]:
    """The token ids of the whole conversation after the end of the assistant's turn.

    The token that ends the turn is the policy's, even if the template begins the next turn with it (GLM). A policy for
    which it is not one of the `stops` has ended the turn with another token, which the template does not write.
    """
    turns = [*prompt, {"role": "assistant", "content": ANSWER}, *said]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    behind = text.index(ANSWER) + len(ANSWER)
    if tokenizer.convert_tokens_to_ids(turn_end) in stops:
        behind = text.index(turn_end, behind) + len(turn_end)
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    pairs = zip(read["input_ids"], read["offset_mapping"], strict=True)
    return [number for number, (begin, end) in pairs if begin >= behind and end > begin]


def stops(folder: Path, tokenizer: Any, template: str | None) -> set[int]:
    """All tokens that end a turn: of generation config, model config, tokenizer and template."""
    found: set[int] = set()
    config = transformers.AutoConfig.from_pretrained(folder)
    sources = [getattr(one, "eos_token_id", None) for one in (config, config.get_text_config())]
    sources.append(tokenizer.eos_token_id)
    if (folder / "generation_config.json").is_file():
        sources.append(transformers.GenerationConfig.from_pretrained(folder).eos_token_id)
    # GLM's template writes no end of a turn: the next turn begins.
    if template not in (None, "glm"):
        sources.append(tokenizer.convert_tokens_to_ids(tokenizer_kinds.CONTROLS[template].turn_end))
    for one in sources:
        found |= set() if one is None else {one} if isinstance(one, int) else set(one)
    return found


def text_of(tokenizer: Any, tokens: Sequence[int], stops: set[int]) -> str:
    """The text of a turn without its end token and without named special tokens (`NAMED`).

    Other special tokens are text: parsers of tool calls look for `<|python_tag|>`, for example.
    """
    kept = list(tokens[:-1] if len(tokens) and int(tokens[-1]) in stops else tokens)
    named = {getattr(tokenizer, f"{name}_token_id") for name in NAMED}
    return tokenizer.decode([one for one in kept if one not in named], skip_special_tokens=False)


def furthest(one: NDArray[Any], other: NDArray[Any]) -> float:
    """The largest absolute difference of two arrays; 0 if they are empty."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).max()) if len(one) else 0.0


def specials(tokenizer: Any) -> set[int]:
    """The ids of all special tokens, named or not."""
    return {*tokenizer.all_special_ids, *(n for n, one in tokenizer.added_tokens_decoder.items() if one.special)}
