"""`streamppo data`: converts the original files of well-known data sets to one parquet file.

name           original files                                   columns written, besides data_source
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
    """Write one split of a data set to a parquet file, and print the number of rows. Returns the exit code 0.

    Raises `TaskError` if the files have another layout, or if `to` cannot be written.
    """
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
    for where, row in dataset_files.rows(str(_file(folder, f"{split}.jsonl")), split):
        answer = extract_marked(row["answer"])
        if answer is None:
            raise TaskError(f"{where}: no #### in the solution")
        yield {"prompt": row["question"], "answer": answer.replace(",", ""), "solution": row["answer"]}


def _math(folder: Path, split: str) -> Rows:
    r"""hendrycks/math, with one file for each problem. The answer is the solution's last \boxed{}."""
    files = sorted((folder / split).rglob("*.json"))
    if not files:
        raise TaskError(f"{folder / split}: no SUBJECT/*.json files of MATH")
    for path in files:
        row = dataset_files.parse(path.read_bytes(), str(path))
        answer = extract_boxed(row["solution"])
        if answer is None:
            raise TaskError(f"{path}: no \\boxed in the solution")
        yield {
            "prompt": row["problem"],
            "answer": answer,
            "solution": row["solution"],
            "level": row["level"],
            "subject": row["type"],
        }


def _hellaswag(folder: Path, split: str) -> Rows:
    """rowanz/hellaswag, whose endings become choices with letters."""
    name = {"train": "train", "test": "val", "validation": "val"}.get(split, split)
    for _, row in dataset_files.rows(str(_file(folder, f"hellaswag_{name}.jsonl")), split):
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


def _file(folder: Path, name: str) -> Path:
    """Return the file `name` in `folder` or a subfolder."""
    files = sorted(folder.rglob(name))
    if not files:
        raise TaskError(f"{folder}: there is no {name} in it")
    return files[0]


def _messages(transcript: str, where: str) -> list[dict[str, str]]:
    """Return the messages of a transcript that ends with "Assistant:"."""
    _, *pieces = TURN.split(transcript.rstrip())
    turns = list(zip(pieces[::2], pieces[1::2], strict=True))
    if len(turns) < 2 or turns[-1][0] != "Assistant" or turns[-1][1].strip():
        raise TaskError(f"{where}: the prompt does not end with 'Assistant:'")
    return [{"role": SPEAKERS[speaker], "content": text.strip()} for speaker, text in turns[:-1]]
