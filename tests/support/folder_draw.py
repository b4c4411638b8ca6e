"""A draw of the campaign benchmarks/faults/folders.py: a user's input, and the outcome that it must have."""

import random
from dataclasses import dataclass
from typing import Literal

import folder_faults
import folder_rows
import model_folders
import tokenizer_kinds

Expected = Literal["passes", "refused", "either"]
FUSED = ("llama3", "qwen2", "qwen3")
"""Families with a forward pass of their own in the embedded engine; transformers' modules compute the others."""
FAULTY = 0.3
"""Fraction of draws with a fault."""
FAULTY_RUNS = 0.1
"""Fraction of whole runs with a fault: a refused run tests little."""
REMEDIES = {
    "missing_tensor": r"missing|lacks|no tensor|not in",
    "missing_head": r"lm_head",
    "wrapped_compile": r"_orig_mod",
    "wrapped_parallel": r"module\.",
    "wrapped_peft": r"base_model",
    "unexpected_tensor": r"extra",
    "wrong_shape": r"shape|\[\d|\d x \d",
    "not_a_number": r"nan|finite|number",
    "fewer_layers": r"layer",
    "more_layers": r"layer",
    "missing_shard": r"00002-of-00002",
    "index_beyond_shard": r"index|lists|lacks|missing",
    "lfs_pointer": r"lfs",
    "cut_file": r"safetensors|cut|complete|whole",
    "no_weights": r"weights",
    "lora_adapter": r"adapter|lora|peft",
    "gguf": r"gguf",
    "fp8": r"fp8|quanti",
    "awq": r"awq|quanti",
    "auto_map": r"auto_map|own code|custom code|trust|model_type|own_model",
    "unknown_type": r"qwen9",
    "no_tokenizer": r"tokenizer",
    "small_embeddings": r"token",
    "no_config": r"config\.json|own format",
    "broken_config": r"config\.json",
    "in_a_subfolder": r"config\.json|snapshots",
}
"""Patterns of the message that refuses each fault of a model folder."""


@dataclass(frozen=True)
class Draw:
    """A model folder, rows, and their use. `fault` is a fault of the model folder, `row_fault` one of the rows."""

    number: int
    family: str
    tokenizer: str
    template: str | None
    tied: bool
    dtype: str
    layout: str
    generation: str
    spare: int
    rows: str
    reward: str
    turns: int
    words: str = ""
    fault: str = ""
    row_fault: str = ""
    engine: str = "embedded"
    compute: str = "float32"
    whole: bool = False

    @property
    def expected(self) -> Expected:
        """The outcome that the draw must have."""
        if self.fault in folder_faults.FAULTS or self.row_fault or self.refusals:
            return "refused"
        return "either" if self.allowed else "passes"

    @property
    def allowed(self) -> str:
        """A pattern of messages that may refuse a healthy draw: they name a feature that some templates lack."""
        found = {
            r"\.gz": self.rows == "gzip",
            r"tool|calls|alternate|roles": self.rows == "tools",
            r"system": self.rows == "system",
            r"names in files": self.engine == "sglang" and self.layout in ("bin", "bare_names"),
        }
        return "|".join(pattern for pattern, holds in found.items() if holds)

    @property
    def refusals(self) -> list[str]:
        """Reasons why a healthy folder and healthy rows do not fit together."""
        found = list[str]()
        if self.template is None and (self.turns > 1 or self.rows not in folder_rows.TEXTS):
            found.append("template")
        return found

    @property
    def remedy(self) -> str:
        """A pattern of the message that refuses it."""
        if self.fault in REMEDIES:
            return REMEDIES[self.fault]
        if self.row_fault:
            return folder_rows.FAULTS[self.row_fault][1]
        return "|".join([*self.refusals, *([self.allowed] if self.allowed else [])])

    def __str__(self) -> str:
        """One line with all fields that differ from their usual values."""
        usual = {"dtype": "float32", "layout": "single", "generation": "published", "spare": 0, "engine": "embedded"}
        usual |= {"compute": "float32", "words": "", "fault": "", "row_fault": "", "whole": False}
        shown = {name: value for name, value in vars(self).items() if usual.get(name, "?") != value}
        return " ".join(f"{name}={value}" for name, value in shown.items())


def draw(seed: int, number: int, *, whole: bool = False) -> Draw:
    """Make draw number `number` of a campaign."""
    chance = random.Random(f"{seed}/{number}")
    family = chance.choice(model_folders.FAMILIES)
    usual = model_folders.usual(family)
    foreign = chance.random() < 0.5
    tokenizer = chance.choice(model_folders.TOKENIZERS) if foreign else usual.tokenizer
    template = chance.choice(model_folders.TEMPLATES) if foreign else usual.template
    layout = chance.choice(model_folders.LAYOUTS)
    if not model_folders.fits(family, tokenizer):
        tokenizer = usual.tokenizer
    if not model_folders.fits(family, tokenizer, layout):
        layout = "single"
    texts = template is None and chance.random() < 0.9
    rows = chance.choice(folder_rows.TEXTS[:1] * 3 + folder_rows.TEXTS if texts else tuple(folder_rows.FORMATS))
    tied = chance.random() < 0.5
    made = Draw(
        number=number,
        family=family,
        tokenizer=tokenizer,
        template=template,
        tied=tied or layout == "head_in_file",
        dtype=chance.choice(model_folders.DTYPES),
        layout=layout,
        generation=chance.choice(model_folders.GENERATION),
        spare=chance.choice((0, 0, 0, 7)),
        rows=rows,
        reward=chance.choice(("trajectory", "trl", "verl")) if rows == "verl" else chance.choice(("trajectory", "trl")),
        turns=1 if texts else chance.choice((1, 2, 2)),
        words=" " + chance.choice(folder_rows.CONTROL) if chance.random() < 0.1 else "",
        engine="embedded" if family in FUSED or whole or chance.random() < 0.6 else "sglang",
        compute="bfloat16" if chance.random() < 0.1 else "float32",
        whole=whole,
    )
    return _with_fault(made, chance) if chance.random() < (FAULTY_RUNS if whole else FAULTY) else made


def _with_fault(made: Draw, chance: random.Random) -> Draw:
    """Return the draw with a fault of its folder or of its rows, in the layout that the fault needs."""
    # Everything else is healthy.
    changes: dict[str, object] = {"layout": "single" if made.layout != "extras" else "extras", "spare": 0}
    changes |= {"rows": "text" if made.template is None else "messages", "words": "", "reward": "trajectory"}
    changes |= {"turns": 1 if made.template is None else made.turns}
    kind = chance.random()
    if made.family in model_folders.MULTIMODAL:
        # The faults change settings of text models.
        changes |= {"family": "qwen3"}
    if kind < 0.7:
        changes["fault"] = chance.choice(sorted(folder_faults.FAULTS))
        changes["tied"] = made.tied and changes["fault"] != "missing_head"
        if changes["fault"] in ("fp8", "awq", "more_layers", "fewer_layers") and made.family not in FUSED:
            changes |= {"family": "qwen3", "engine": "embedded"}
    elif kind < 0.8:
        changes |= {"fault": "different_head", "tied": True}
    else:
        changes |= {"row_fault": chance.choice(sorted(folder_rows.FAULTS)), "rows": "text"}
    return Draw(**{**vars(made), **changes})


def turn_end(made: Draw) -> str:
    """The token that ends an assistant's turn."""
    return tokenizer_kinds.CONTROLS[made.template].turn_end
