"""Tests how examples are read from files, and what is said of a file that cannot be."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from refusal_kit import refuses

from midstream import read_rows, read_texts
from midstream.client import texts

MOOD = [{"text": "Hello, you", "label": "good"}, {"text": "no", "label": "bad"}]
FILES = {
    "mood.csv": 'text,label\n"Hello, you",good\n\nno,bad\n',
    "excel.csv": '\ufeffVerse;Mood\n"Hello, you";good\nno;bad\n',
    "mood.tsv": "label\ttext\ngood\tHello, you\nbad\tno\n",
    "mood.jsonl": '{"text": "Hello, you", "label": "good"}\n\n{"text": "no", "label": "bad"}\n',
    "swapped.csv": 'label,text\n"Hello, you",good\nno,bad\n',
    "mood.json": '[{"prompt": "Hello, you", "label": "good"}, {"prompt": "no", "label": "bad"}]',
    "json.csv": '{"text": "a"}\n',
    "csv.jsonl": "text,label\na,b\n",
    "unquoted.csv": "text,label\nHello, you,good\n",
    "torn.csv": 'text\n"a\n',
    "lines.txt": "Hello, you\n\nno\n",
    "bad.parquet": "torn",
    "quoted.csv": '"a;b;c;d",text,label\n1,"Hello, you",good\n,no,bad\n',
    "twice.csv": "text,label,text\na,b,c\n",
    "separated.txt": "\ufeffone\u2028still\u2029one\x85\x0b\x0c\x1c.\r\ntwo\rthree\n",
    "null.jsonl": '"a"\nnull\n',
    "number.jsonl": '"a"\n5\n',
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with files in every format."""
    monkeypatch.chdir(tmp_path)
    for name, content in FILES.items():
        Path(name).write_text(content, newline="")
    for name in ("mood.json", "mood.jsonl"):
        Path(f"marked-{name}").write_text(FILES[name], encoding="utf-8-sig")
    Path("latin.csv").write_bytes(b"text\n\xff\n")
    parquet.write_table(pa.Table.from_pylist(MOOD), "mood.parquet")


@pytest.mark.parametrize(
    "source",
    ["mood.csv", "excel.csv:Verse,Mood", "mood.tsv", "mood.jsonl", "mood.json", "mood.parquet",
     "marked-mood.jsonl", "marked-mood.json", "quoted.csv",
     "swapped.csv:text=label,label=text", "mood.parquet:text,label"],
)  # fmt: skip
def test_every_format_gives_the_same_rows(source: str) -> None:
    rows = read_rows(source, ["text", "label"])
    assert [{name: row[name] for name in MOOD[0]} for row in rows] == MOOD


def test_other_files_have_a_text_on_each_line_and_no_columns() -> None:
    assert [*read_texts("lines.txt")] == ["Hello, you", "no"]
    with refuses("line 1 has no columns"):
        [*read_rows("lines.txt", ["text", "label"])]


def test_lines_end_with_a_newline_a_carriage_return_or_both() -> None:
    one = "one\u2028still\u2029one\x85\x0b\x0c\x1c."
    assert [*read_texts("separated.txt")] == [one, "two", "three"]


def test_a_file_is_read_no_further_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("long.jsonl").write_text(f'"a"\n"{"b" * 99}"\n')
    monkeypatch.setattr(texts, "MAX_DOCUMENT_BYTES", 50)
    read = read_texts("long.jsonl")
    assert next(read) == "a"
    with refuses("line 2 is longer than"):
        next(read)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("json.csv", "line 1 is JSON: files of JSON lines are named .jsonl"),
        (
            "csv.jsonl",
            "after line 0: JSON is malformed: invalid character (byte 4) (allowed: UTF-8; CSV",
        ),
        ("unquoted.csv", "line 2 has 3 cells, the first line 2: texts with separators are written"),
        ("twice.csv", "line 1 names 'text' twice: a column has a name of its own"),
        ("null.jsonl", "line 2 has no columns"),
        ("number.jsonl", "line 2 has no columns"),
        ("torn.csv", "torn.csv cannot be read after line 0: unexpected end of data"),
        ("latin.csv", "latin.csv cannot be read after line 0: 'utf-8' codec"),
        ("bad.parquet", "bad.parquet cannot be read after line 0: "),
        (
            "excel.csv",
            "line 2 has no 'text': it has Verse, Mood; name columns as in excel.csv:text=COLUMN",
        ),
        ("mood.csv:verse", "mood.csv, line 2 has no 'verse': it has text, label"),
        ("mood.csv:text,label", "'text,label' names other columns than are read"),
        ("mood.csv:other=text", "COLUMN or NAME=COLUMN of text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(source: str, words: str) -> None:
    with refuses(words):
        [*read_texts(source)]
