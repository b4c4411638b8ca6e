"""A user's files: a tiny model in a folder, rows in a file, an async reward in another."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

REWARD = """
import asyncio


async def score(trajectory, answer):
    await asyncio.sleep(0)
    return float(trajectory.completion == answer)
"""
ROWS = [{"prompt": f"{number}+1=", "answer": str(number + 1)} for number in range(100)]
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def rows(path: Path, content: Sequence[Mapping[str, object]] = ROWS) -> Path:
    """Write rows as jsonl."""
    path.write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


def model(folder: Path, *, template: str | None = None, context: int = 256, width: int = 16) -> Path:
    """Save a Qwen2 model of one layer with a tokenizer of ASCII characters."""
    import string

    from transformers import Qwen2Config, Qwen2ForCausalLM

    from streamppo.tasks.tokenizer import character_tokenizer

    tokenizer = character_tokenizer(string.printable)
    tokenizer.chat_template = template
    settings = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(settings).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def bring(folder: Path, **options: str) -> list[str]:
    """Write all files to `folder`; return the arguments of `streamppo init` with them, with `options` replaced."""
    if "model" not in options:
        model(folder / "model")
    if "data" not in options:
        rows(folder / "rows.jsonl")
    (folder / "reward.py").write_text(REWARD)
    given = {"model": "model", "data": "rows.jsonl", "reward": "reward.py:score", **options}
    return ["init", "mine", *(word for name, value in given.items() for word in (f"--{name}", value))]
