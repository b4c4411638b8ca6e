"""`streamppo data`: converts well-known data sets, original files or a copy from the hub, to one parquet file.

name           original files                                   columns written, and data_source
gsm8k          train.jsonl, test.jsonl                          prompt, answer, solution
math           train/SUBJECT/*.json, test/SUBJECT/*.json        prompt, answer, solution, level, subject
hellaswag      hellaswag_train.jsonl, hellaswag_val.jsonl       prompt, answer (a letter), endings
full_hh_rlhf   train-*.parquet, test-*.parquet, or jsonl        prompt (messages), chosen, rejected
"""

import re
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Literal

from streamppo import durable
from streamppo.commands.console import echo
from streamppo.errors import TaskError
from streamppo.tasks import dataset_files
from streamppo.tasks.scorers.answers import extract_boxed, extract_marked

LETTERS = "ABCDEFGH"
SPEAKERS = {"Human": "user", "Assistant": "assistant"}
TURN = re.compile(r"(?:^|\n\n)(Human|Assistant):")
Name = Literal["gsm8k", "math", "hellaswag", "full_hh_rlhf"]
Rows = Iterator[dict[str, object]]


def data(name: Name, folder: Path, to: Path, split: str) -> int:
    """Write one split of a data set to the parquet file `to`. Raises `TaskError` for another layout."""
    import pyarrow
    import pyarrow.parquet

    if not folder.is_dir():
        raise TaskError(f"{folder}: no such folder")
    with durable.naming(to, TaskError):
        to.parent.mkdir(parents=True, exist_ok=True)
    durable.refuse_output(to, TaskError)
    try:
        rows = [{"data_source": name, **row} for row in LAYOUTS[name](folder, split)]
    except KeyError as error:
        raise TaskError(f"{folder}: rows lack the column {error} of {name}") from error
    content = BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), content)
    durable.write_output(to, content.getvalue(), TaskError)
    echo(f"{to}: {len(rows)} rows", result=to)
    return 0


def _gsm8k(folder: Path, split: str) -> Rows:
    """openai/grade-school-math, whose answers follow ####."""
    for where, row in _rows(folder, f"{split}.jsonl", split):
        answer = extract_marked(row["answer"])
        if answer is None:
            raise TaskError(f"{where}: no #### in the solution")
        yield {"prompt": row["question"], "answer": answer.replace(",", ""), "solution": row["answer"]}


def _math(folder: Path, split: str) -> Rows:
    r"""hendrycks/math, with one file for each problem. The answer is the solution's last \boxed{}."""
    files = sorted((folder / split).glob("*/*.json"))
    originals = ((str(path), dataset_files.parse(path.read_bytes(), str(path))) for path in files)
    for where, row in originals if files else _rows(folder, "SUBJECT/*.json", split):
        answer = extract_boxed(row["solution"])
        if answer is None:
            raise TaskError(f"{where}: no \\boxed in the solution")
        yield {
            "prompt": row["problem"],
            "answer": answer,
            "solution": row["solution"],
            "level": row["level"],
            "subject": row["type"],
        }


def _hellaswag(folder: Path, split: str) -> Rows:
    """rowanz/hellaswag, whose endings become choices with letters."""
    split = {"test": "validation"}.get(split, split)
    for _, row in _rows(folder, f"hellaswag_{split.removesuffix('idation')}.jsonl", split):
        choices = "\n".join(f"{letter}. {ending}" for letter, ending in zip(LETTERS, row["endings"], strict=False))
        yield {
            "prompt": f"{row['activity_label']}: {row['ctx']}\n\n{choices}\n\nWhich ending fits? Give its letter.",
            "answer": LETTERS[int(row["label"])],
            "endings": row["endings"],
        }


def _full_hh_rlhf(folder: Path, split: str) -> Rows:
    """Dahoas/full-hh-rlhf. The prompt is the dialogue before the last answer, and each row has two last answers."""
    for where, row in dataset_files.rows(str(folder), split):
        yield {
            "prompt": _messages(row["prompt"], where),
            "chosen": row["chosen"].strip(),
            "rejected": row["rejected"].strip(),
        }


LAYOUTS: dict[Name, Callable[[Path, str], Rows]] = {
    "gsm8k": _gsm8k,
    "math": _math,
    "hellaswag": _hellaswag,
    "full_hh_rlhf": _full_hh_rlhf,
}


def _rows(folder: Path, original: str, split: str) -> Iterator[tuple[str, dataset_files.Row]]:
    """Yield the rows of the file `original` in `folder` or a subfolder, or else of a copy from the hub (its `main`)."""
    if files := sorted(folder.rglob(original)):
        yield from dataset_files.rows(str(files[0]), split)
        return
    try:
        yield from dataset_files.rows(str(folder / "main" if (folder / "main").is_dir() else folder), split)
    except TaskError as error:
        raise TaskError(f"{folder}: neither the original {original} nor a copy from the hub: {error}") from error


def _messages(transcript: str, where: str) -> list[dict[str, str]]:
    _, *pieces = TURN.split(transcript.rstrip())
    turns = list(zip(pieces[::2], pieces[1::2], strict=True))
    if len(turns) < 2 or turns[-1][0] != "Assistant" or turns[-1][1].strip():
        raise TaskError(f"{where}: the prompt does not end with 'Assistant:'")
    return [{"role": SPEAKERS[speaker], "content": text.strip()} for speaker, text in turns[:-1]]
