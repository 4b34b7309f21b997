"""Sources of harvests: every document is in one unit, by its number; what cannot be read is said by
file and place.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from midstream_fake_engine.model import make_bundle, make_tokenizer
from refusal_kit import refuses

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.roots import allowed_roots
from midstream.schemas.settings.settings import Settings
from midstream.storage.formats import csv_rows
from midstream.storage.store import open_store
from midstream_harvest.files.corpora import find, store_of
from midstream_harvest.records.harvests import (
    HarvestPlan,
    HarvestSource,
    PlannedUnit,
    StoredHarvest,
)
from midstream_harvest.run import source as source_files, tables
from midstream_harvest.run.cut import CutDocument
from midstream_harvest.run.source import SourceFiles as Reader

#: Tokens of the fake model.
VOCABULARY = make_tokenizer().get_vocab_size()
TEXTS = [f"document number {number} " + "x" * (number % 37) for number in range(400)]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_files, "LEAST_WEIGHT", 1)
    monkeypatch.setattr(source_files, "PIECE", 1000)


def reader(folder: Path, source: HarvestSource, **changes: Any) -> Reader:
    """With the format found, as a harvest that was accepted has it."""
    if source.path is not None:
        source = msgspec.structs.replace(source, format=find([str(folder)], source)[2])
    fields: dict[str, Any] = {
        "id": "hrv_1",
        "model": "m",
        "created": 0.0,
        "uri": "/none",
        "sites": {"post_block": [0]},
        "source": source,
        "root": str(folder),
        "max_length": 4096,
        "row_bytes": 640 << 10,
    }
    bundle = make_bundle(make_tokenizer())
    return Reader(
        StoredHarvest(**(fields | changes)),
        bundle,
        Settings(harvest_sources=str(folder)),
        VOCABULARY,
    )


def read(made: Reader, plan: HarvestPlan, unit: PlannedUnit) -> list[CutDocument]:
    return made.read(plan.files[unit.file] if plan.files else None, unit)


def texts_of(made: Reader, plan: HarvestPlan) -> list[tuple[int, str]]:
    return [
        (document.number, made.tokens.tokenizer.decode(document.token_ids.tolist()))
        for unit in plan.units
        for document in read(made, plan, unit)
    ]


def write_jsonl(path: Path, values: list[Any], end: str = "\n") -> None:
    path.write_text("\n".join(json.dumps(value) for value in values) + end)


def test_every_line_of_every_file_is_read_once_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number, name in enumerate(("part-1.jsonl", "part-2.jsonl", "part-10.jsonl")):
        values = [{"text": text, "id": 1} for text in TEXTS[number * 100 : number * 100 + 100]]
        write_jsonl(folder / name, values, "" if number == 1 else "\n")
    (folder / "readme.md").write_text("not a corpus")
    made = reader(tmp_path, HarvestSource(path="corpus"))
    plan = made.plan()
    assert len(plan.units) > 5
    assert texts_of(made, plan) == list(enumerate(TEXTS[:300]))


def test_a_byte_order_mark_is_no_part_of_a_document(tmp_path: Path) -> None:
    lines = [json.dumps({"text": text}) for text in TEXTS[:3]]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8-sig")
    made = reader(tmp_path, HarvestSource(path="a.jsonl"))
    assert texts_of(made, made.plan()) == list(enumerate(TEXTS[:3]))


def test_lines_of_the_request_are_documents(tmp_path: Path) -> None:
    made = reader(tmp_path, HarvestSource(lines=[*TEXTS[:50], [104, 105]]), root="")
    plan = made.plan()
    assert len(plan.units) > 1
    assert [number for number, _ in texts_of(made, plan)] == list(range(51))
    assert read(made, plan, plan.units[-1])[-1].token_ids.tolist() == [104, 105]


def write_texts(path: Path, values: list[Any], stream: bool = False, **options: Any) -> None:
    """In the format of the path's ending."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    table = pa.table({"text": values, "number": list(range(len(values)))})
    if path.suffix == ".jsonl":
        write_jsonl(path, values)
    elif path.suffix == ".csv":
        path.write_text("text,number\n" + "".join(f'"{text}",1\n' for text in values))
    elif path.suffix == ".parquet":
        parquet.write_table(table, path, row_group_size=90, **options)
    else:
        form = pa.ipc.new_stream if stream else pa.ipc.new_file
        with pa.OSFile(str(path), "wb") as sink, form(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=70)


#: What happens to the file between planning and reading.
CHANGES: dict[str, Callable[[list[str]], list[str]]] = {
    "rewritten": lambda texts: ["y" + text[1:] for text in texts],
    "reordered": lambda texts: texts[::-1],
    "prepended": lambda texts: ["one more", *texts],
    "shrunk": lambda texts: texts[: len(texts) // 3],
    "touched": list,
}


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow", "csv"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_file_that_was_changed_since_the_plan_is_not_read(
    tmp_path: Path, ending: str, change: str
) -> None:
    path = tmp_path / f"texts.{ending}"
    write_texts(path, TEXTS)
    made = reader(tmp_path, HarvestSource(path=path.name))
    plan = made.plan()
    write_texts(path, CHANGES[change](TEXTS))
    for unit in plan.units:
        with refuses(
            f"'{path.name}' was changed since the harvest was planned",
            kind="conflict",
            field="source.path",
        ):
            read(made, plan, unit)


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow", "csv"])
@pytest.mark.parametrize("change", ["rewritten", "reordered"])
@pytest.mark.parametrize("limited", [False, True])
def test_a_change_that_keeps_size_and_time_is_seen_by_the_checksum(
    tmp_path: Path, ending: str, change: str, limited: bool
) -> None:
    texts = [f"{number:03d} has as many characters as every other" for number in range(200)]
    path = tmp_path / f"texts.{ending}"
    write_texts(path, texts)
    made = reader(tmp_path, HarvestSource(path=path.name), max_tokens=3 if limited else None)
    plan = made.plan()
    time = path.stat().st_mtime_ns
    size = path.stat().st_size
    write_texts(path, CHANGES[change](texts))
    if path.stat().st_size != size:
        path.write_bytes(path.read_bytes().ljust(size)[:size])
    os.utime(path, ns=(time, time))
    for unit in plan.units:
        with pytest.raises(MidstreamError, match="texts"):
            read(made, plan, unit)


@pytest.mark.parametrize(
    ("ending", "stream"),
    [("jsonl", False), ("parquet", False), ("arrow", False), ("arrow", True), ("csv", False)],
)
def test_units_are_read_in_any_order(tmp_path: Path, ending: str, stream: bool) -> None:
    write_texts(tmp_path / f"texts.{ending}", TEXTS, stream)
    made = reader(tmp_path, HarvestSource(path=f"texts.{ending}"))
    plan = made.plan()
    assert len(plan.units) > 5
    assert sum(unit.documents for unit in plan.units) == len(TEXTS)
    found = texts_of(made, msgspec.structs.replace(plan, units=plan.units[::-1]))
    assert sorted(found) == list(enumerate(TEXTS))


def test_texts_of_a_dictionary_are_planned_by_what_they_hold(tmp_path: Path) -> None:
    """In the file they are a few kB."""
    write_texts(tmp_path / "texts.parquet", ["x" * 50_000, "y" * 50_000] * 500, use_dictionary=True)
    plan = reader(tmp_path, HarvestSource(path="texts.parquet"), row_bytes=1).plan()
    assert [unit.documents for unit in plan.units] == [336, 336, 328]
    assert max(unit.weight for unit in plan.units) < 17 << 20


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "arrow", "csv"])
def test_a_document_that_is_too_large_is_named(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (source_files, tables, csv_rows):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 1 << 20)
    write_texts(tmp_path / f"texts.{ending}", [*TEXTS[:100], "z" * (2 << 20), "after"])
    with refuses(
        f"texts.{ending}",
        match=r"line 101 is longer|row 100 has 2,097,152 bytes",
    ):
        reader(tmp_path, HarvestSource(path=f"texts.{ending}")).plan()


@pytest.mark.parametrize("alone", [True, False])
def test_a_fifo_or_a_device_is_no_source(tmp_path: Path, alone: bool) -> None:
    (tmp_path / "corpus").mkdir()
    os.mkfifo(tmp_path / "corpus/a.jsonl")
    with refuses("not a regular file", field="source.path"):
        reader(tmp_path, HarvestSource(path="corpus/a.jsonl" if alone else "corpus")).plan()
    (tmp_path / "link").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        open_store(str(tmp_path)).open("link")


def test_token_ids_of_a_table_are_taken_as_they_are(tmp_path: Path) -> None:
    write_texts(tmp_path / "ids.parquet", [[1, 2, 3], [], [4]])
    made = reader(tmp_path, HarvestSource(path="ids.parquet", kind="tokens"))
    plan = made.plan()
    assert [
        document.token_ids.tolist() for unit in plan.units for document in read(made, plan, unit)
    ] == [[1, 2, 3], [], [4]]


def test_conversations_go_through_the_chat_template(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": [{"role": "user", "content": "hi"}]}])
    made = reader(tmp_path, HarvestSource(path="chats.jsonl", kind="chat", field="messages"))
    assert texts_of(made, made.plan()) == [(0, "<bos>user: hi\n")] or texts_of(made, made.plan())[
        0
    ][1].endswith("user: hi\n")


def test_a_limit_of_tokens_ends_the_plan_exactly_there(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    made = reader(tmp_path, HarvestSource(path="texts.jsonl"), max_tokens=1234)
    plan = made.plan()
    documents = [document for unit in plan.units for document in read(made, plan, unit)]
    assert sum(len(document.token_ids) for document in documents) == 1234
    assert [document.number for document in documents] == list(range(len(documents)))


def test_files_behind_the_limit_of_tokens_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write_texts(tmp_path / "corpus/a.parquet", TEXTS)
    (tmp_path / "corpus/b.parquet").write_text("damaged")
    plan = reader(tmp_path, HarvestSource(path="corpus"), max_tokens=500).plan()
    assert [file.key for file in plan.files] == ["corpus/a.parquet"]


def test_parts_cover_the_units(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "texts.jsonl", TEXTS)
    plan = reader(tmp_path, HarvestSource(path="texts.jsonl")).plan()
    assert 1 < plan.parts <= len(plan.units)


@pytest.mark.parametrize(
    ("lines", "source", "said"),
    [
        (['{"text": "a"}', "{"], {}, "document 1 is not JSON"),
        (['{"other": "a"}'], {}, "document 0 has no member 'text'"),
        (["17"], {}, "document 0 (in bad.jsonl) is not a text"),
        (
            ['{"text": [1, -4]}'],
            {"kind": "tokens"},
            "document 0 (in bad.jsonl) is not a list of the model's token ids",
        ),
        (['{"text": [1, 9999]}'], {"kind": "tokens"}, "is not a list of the model's token ids"),
    ],
)
def test_a_document_that_cannot_be_read_is_named(
    tmp_path: Path, lines: list[str], source: dict[str, Any], said: str
) -> None:
    (tmp_path / "bad.jsonl").write_text("\n".join(lines))
    made = reader(tmp_path, HarvestSource(path="bad.jsonl", **source))
    plan = made.plan()
    with refuses(said, kind="invalid_request"):
        [read(made, plan, unit) for unit in plan.units]


@pytest.mark.parametrize(
    ("path", "changes", "field"),
    [
        ("missing.jsonl", {}, "source.path"),
        ("../etc", {}, "source.path"),
        ("/etc/passwd", {}, "source.path"),
        ("link.jsonl", {}, "source.path"),
        ("both", {}, "source.format"),
        ("readme.md", {}, "source.format"),
        ("both", {"format": "arrow"}, "source.format"),
    ],
)
def test_a_path_that_is_not_a_corpus_is_refused_by_its_field(
    tmp_path: Path, path: str, changes: dict[str, Any], field: str
) -> None:
    root = tmp_path / "root"
    (root / "both").mkdir(parents=True)
    for name in ("both/a.jsonl", "both/b.parquet", "readme.md"):
        (root / name).write_text("x")
    (tmp_path / "outside.jsonl").write_text("{}")
    (root / "link.jsonl").symlink_to(tmp_path / "outside.jsonl")
    with refuses(kind="invalid_request", field=field) as raised:
        find(allowed_roots(str(root)), HarvestSource(path=path, **changes))
    assert raised.value.allowed


def test_a_store_must_be_one_that_the_operator_allows(tmp_path: Path) -> None:
    settings = Settings(data_dir=str(tmp_path), harvest_stores=f"{tmp_path}/a, s3://bucket/rows")
    assert store_of(settings, None) == f"{tmp_path}/a"
    assert store_of(settings, "s3://bucket/rows/") == "s3://bucket/rows"
    with refuses(field="store"):
        store_of(settings, "s3://other")
    assert store_of(Settings(data_dir=str(tmp_path)), None) == f"{tmp_path}/harvests"


@pytest.mark.parametrize(
    ("own", "found"),
    [
        (None, ["/data", "s3://corpora/en?region=eu"]),
        ([], []),
        (["/data/"], ["/data"]),
        (["/data/vision", "/database", "/", "/data/../etc"], ["/data/vision"]),
        (["s3://corpora/en/wiki?region=eu"], ["s3://corpora/en/wiki?region=eu"]),
        (["s3://corpora/en", "s3://corpora/english?region=eu"], []),
    ],
)
def test_a_tenant_may_read_what_is_its_own_and_open(
    own: list[str] | None, found: list[str]
) -> None:
    assert allowed_roots("/data, s3://corpora/en?region=eu", own) == found
