"""Rows in .json files: a list of objects, or an object in each line, as data sets on the hub have them."""

import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from config_case import one_source
from hypothesis import given
from hypothesis import strategies as st

from streamppo.errors import TaskError
from streamppo.tasks import dataset_files, task

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
ROWS = st.lists(st.dictionaries(st.text(max_size=6), VALUES, max_size=4), min_size=1, max_size=5)
FORMS: dict[str, Callable[[Sequence[Any]], str]] = {
    "list": json.dumps,
    "indented": lambda rows: json.dumps(rows, indent=2, ensure_ascii=False),
    "list of lines": lambda rows: "\n [\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n",
    "lines": lambda rows: "".join(json.dumps(row) + "\n" for row in rows),
    "lines with gaps": lambda rows: "\n" + "\n\n".join(map(json.dumps, rows)),
}


def read(file: Path) -> list[dict[str, Any]]:
    return [dict(row) for _, row in dataset_files.rows(str(file), "train")]


def write(file: Path, content: str, encoding: str = "utf-8") -> Path:
    text = content.encode(encoding, "surrogatepass")
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" else text)
    return file


@pytest.mark.parametrize("form", FORMS)
@given(rows=ROWS, name=st.sampled_from(["a.json", "a.json.gz"]), mark=st.booleans())
def test_each_form_of_a_json_file_has_its_rows(
    tmp_path_factory: pytest.TempPathFactory, form: str, rows: list[Any], name: str, *, mark: bool
) -> None:
    file = tmp_path_factory.mktemp("json") / name
    assert read(write(file, FORMS[form](rows), "utf-8-sig" if mark else "utf-8")) == rows


@pytest.mark.parametrize("form", ["list", "indented", "lines"])
def test_a_json_file_has_the_rows_that_datasets_reads(tmp_path: Path, form: str) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra `data` is not installed")
    rows = [{"query": f"{n}+1=", "answers": json.dumps([{"name": "add", "arguments": {"a": n}}])} for n in range(5)]
    file = write(tmp_path / "train.json", FORMS[form](rows))
    loaded = datasets.load_dataset("json", data_files=str(file), split="train", cache_dir=str(tmp_path / "cache"))
    assert read(file) == list(loaded) == rows


def test_a_folder_has_json_files_of_its_splits_and_descriptions_are_not_rows(tmp_path: Path) -> None:
    for split, number in (("train", 3), ("test", 2)):
        (tmp_path / split).mkdir()
        rows = [{"prompt": f"{split} {n}", "answer": "1"} for n in range(number)]
        write(tmp_path / split / "rows.json", json.dumps(rows))
        write(tmp_path / split / "dataset_info.json", "{}")
    write(tmp_path / "dataset_infos.json", "{}")
    built = task.build(one_source(data=str(tmp_path), evaluation_split="test"), 1)
    assert (len(built.training), len(built.held_out(None))) == (3, 2)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('[{"a": 1}, [1]]', "a.json, row 2: a row must be an object, this is a list"),
        ('[{"a": 1},', "a.json: not JSON: "),
        ('{\n  "data": [{"a": 1}]\n}', "a.json must be a list of objects, or one object in each line, in UTF-8"),
        ('{"a": 1}\n[1]', "a.json, line 2: a row must be an object, this is a list; a.json must be a list of objects"),
        ("[" * 100_000, "a.json: not JSON: "),
    ],
)
def test_a_json_file_without_rows_is_refused_with_the_form_of_rows(tmp_path: Path, content: str, why: str) -> None:
    with pytest.raises(TaskError, match=why):
        read(write(tmp_path / "a.json", content))
