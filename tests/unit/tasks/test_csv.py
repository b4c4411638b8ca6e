"""Tables of text as pandas, Python and Excel write them are read as rows of data."""

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest
from config_case import one_source
from hypothesis import given
from hypothesis import strategies as st

from streamppo.errors import TaskError
from streamppo.tasks import dataset_files, task

LONG = "a long answer, " * 20_000


def read(path: Path) -> list[dict[str, Any]]:
    return [dict(row) for _, row in dataset_files.rows(str(path), "train")]


def test_a_table_of_pandas_with_its_index_and_gaps_is_read_without_the_index(tmp_path: Path) -> None:
    path = tmp_path / "train.csv"
    # Written by DataFrame({"prompt": ..., "answer": ..., "level": [1, None]}).to_csv(path).
    path.write_text(',prompt,answer,level\n0,"Say ""hi"", then\nstop",007,1.0\n1,"2+3=",5,\n')
    assert read(path) == [
        {"prompt": 'Say "hi", then\nstop', "answer": "007", "level": "1.0"},
        {"prompt": "2+3=", "answer": "5", "level": None},
    ]


def test_a_table_saved_by_excel_has_a_mark_and_other_line_ends(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("prompt,answer\r\nZoé?,你好\r\n\r\n".encode("utf-8-sig"))
    assert read(path) == [{"prompt": "Zoé?", "answer": "你好"}]


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz", "a.tsv", "a.tsv.gz"])
def test_every_ending_is_read_and_a_cell_may_be_long(tmp_path: Path, name: str) -> None:
    separator = "\t" if ".tsv" in name else ","
    content = separator.join(("prompt", "answer")) + "\n" + separator.join(("x", f'"{LONG}"')) + "\n"
    (tmp_path / name).write_bytes(gzip.compress(content.encode()) if name.endswith(".gz") else content.encode())
    built = task.build(one_source(data=str(tmp_path / name), held_out=0.0), 1)
    assert [prompt.columns["answer"] for prompt in built.training] == [LONG]


CELLS = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\r\0"), max_size=8)


@given(st.lists(st.tuples(CELLS, CELLS), max_size=5))
def test_what_python_writes_is_read_as_it_was(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerows([("prompt", "answer"), *rows])
    assert read(path) == [{"prompt": prompt or None, "answer": answer or None} for prompt, answer in rows]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer\nx\n", "line 2: 1 values for 2 columns"),
        (b"prompt,answer\nx,y,z\n", "line 2: 3 values for 2 columns"),
        (b"prompt,prompt\nx,y\n", "the first line must name the columns, and it has 'prompt' twice"),
        (b'prompt,answer\n"x,y\nz,1\n', "line 3: not CSV: unexpected end of data"),
        (b'prompt,answer\n"x"y,1\n', "line 2: not CSV: ',' expected after"),
        (b"prompt,answer\nx,1\n\xff,2\n", "line 3: not UTF-8: .*; save the file as UTF-8"),
        (b"prompt;answer\nx;1\n", "row 1: no column 'prompt'; columns are prompt;answer"),
        (b"prompt,answer\n", "no rows"),
        (b"", "no rows"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_with_the_line(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(TaskError, match=message):
        task.build(one_source(data=str(tmp_path / "a.csv")), 1)
