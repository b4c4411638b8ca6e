"""Text to token ids and back, by the model's own tokenizer; and the character tokenizer of builtin:tiny."""

from pathlib import Path
from typing import Any

import numpy as np

from streamppo.errors import TaskError
from streamppo.types import Ints


class Tokenizer:
    """A thin face on the Hugging Face tokenizer of a model folder or hub name."""

    def __init__(self, path: str | Path) -> None:
        from transformers import AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(str(path))
        self.eos_id: int | None = self._tokenizer.eos_token_id

    def encode(self, text: str) -> Ints:
        """Token ids [P] of a prompt. Raises `TaskError` if there are none."""
        ids = self._tokenizer(text)["input_ids"]
        if not ids:
            raise TaskError(f"the prompt {text!r} has no tokens")
        return np.asarray(ids, dtype=np.int32)

    def decode(self, tokens: Ints) -> str:
        """The text of `tokens` [T], special tokens left out."""
        return self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True)


def character_tokenizer(alphabet: str) -> Any:
    """A Hugging Face tokenizer with one token for each character; 0 is padding, 1 end-of-sequence, 2 unknown."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: number for number, token in enumerate([*specials, *alphabet])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
