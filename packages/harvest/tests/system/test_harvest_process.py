"""The process that reads sources of harvests: hostile files end in a typed error, within its
memory, and a cancel ends it at once.
"""

import asyncio
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from harvest_kit import texts
from midstream_fake_engine.model import make_bundle, make_tokenizer
from refusal_kit import refuses
from wait_kit import warn_if_late

from midstream.broker.processes.helper_process import OUT_OF_MEMORY
from midstream_harvest.records.harvests import (
    HarvestCut,
    HarvestPlan,
    HarvestSource,
    StoredHarvest,
    SurveyTask,
)
from midstream_harvest.records.work import Survey
from midstream_harvest.run.cut import CutDocument
from midstream_harvest.run.process import SourceProcess, SourceReader

MIB = 1 << 20
#: Of the process in these tests: an idle one has some 150 MiB.
LIMIT_MIB = 448


@pytest.fixture(scope="module")
async def process() -> AsyncIterator[SourceProcess]:
    made = SourceProcess(LIMIT_MIB)
    yield made
    await made.helper.end()


def reader(process: SourceProcess, folder: Path, path: str, **changes: Any) -> SourceReader:
    source = HarvestSource(
        path=path, format=Path(path).suffix[1:], kind=changes.pop("kind", "text")
    )  # type: ignore[arg-type]
    fields: dict[str, Any] = {
        "id": f"hrv_{os.urandom(4).hex()}",
        "model": "m",
        "created": 0.0,
        "uri": "/none",
        "sites": {"post_block": [0]},
        "source": source,
        "root": str(folder),
        "max_length": 512,
        "row_bytes": 1024,
    }
    tokenizer = make_tokenizer()
    return SourceReader(
        process,
        StoredHarvest(**(fields | changes)),
        make_bundle(tokenizer),
        str(folder),
        tokenizer.get_vocab_size(),
    )


async def everything(made: SourceReader) -> tuple[HarvestPlan, list[CutDocument]]:
    plan = await made.plan()
    return plan, [document for unit in plan.units for document in await made.read(plan, unit)]


def lines(folder: Path, name: str, values: list[Any]) -> str:
    (folder / name).write_text("".join(json.dumps(value) + "\n" for value in values))
    return name


async def test_documents_come_from_another_process(tmp_path: Path, process: SourceProcess) -> None:
    documents = texts(200)
    made = reader(process, tmp_path, lines(tmp_path, "a.jsonl", documents))
    plan, found = await everything(made)
    assert [document.number for document in found] == list(range(200))
    assert found[7].token_ids.tolist() == make_tokenizer().encode(documents[7]).ids
    assert await made.special() == (
        make_tokenizer().token_to_id("<bos>"),
        make_tokenizer().token_to_id("<eos>"),
    )
    lines(tmp_path, "a.jsonl", documents[:100])
    with refuses(
        match=r"'a\.jsonl' was changed since the harvest was planned",
        kind="conflict",
        field="source.path",
    ):
        await made.read(plan, plan.units[0])


async def test_a_process_that_was_killed_is_started_again(
    tmp_path: Path, process: SourceProcess
) -> None:
    made = reader(process, tmp_path, lines(tmp_path, "a.jsonl", texts(20)))
    plan = await made.plan()
    process.helper.start().kill()
    assert len(await made.read(plan, plan.units[0])) == 20


def test_another_event_loop_asks_the_same_process(tmp_path: Path) -> None:
    """As where a worker hosts its engine again."""
    process = SourceProcess()
    made = reader(process, tmp_path, lines(tmp_path, "a.jsonl", texts(20)))

    async def planned() -> tuple[int, HarvestPlan]:
        async with asyncio.timeout(60):
            return process.helper.start().pid, await made.plan()

    try:
        assert asyncio.run(planned()) == asyncio.run(planned())
    finally:
        asyncio.run(process.helper.end())


async def test_an_idle_process_ends_and_the_next_request_has_another(tmp_path: Path) -> None:
    short = SourceProcess(LIMIT_MIB, idle_s=0.5)
    made = reader(short, tmp_path, lines(tmp_path, "a.jsonl", texts(20)))
    try:
        plan = await made.plan()
        first = short.helper.process
        assert await asyncio.to_thread(first.wait, 60) == -signal.SIGALRM
        assert len(await made.read(plan, plan.units[0])) == 20
        assert short.helper.process is not first
    finally:
        await short.helper.end()


async def test_a_process_that_cannot_start_is_no_fault_of_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    broken = SourceProcess()
    made = reader(broken, tmp_path, lines(tmp_path, "a.jsonl", texts(1)))
    with refuses(match="the process that reads sources ended with 1", kind="internal"):
        await made.plan()
    assert broken.helper.process.returncode == 1


@pytest.mark.parametrize(("against", "field"), [("", "sae"), ("hrv_y", "against")])
def test_a_survey_out_of_memory_names_a_field_of_surveys(
    process: SourceProcess, against: str, field: str
) -> None:
    survey = Survey(uris=["/none"], top=1, context=0, against=against)
    task = SurveyTask(job="j", survey=survey, sae_root="", sae_bytes=0, data_dir="")
    error = process._failure(OUT_OF_MEMORY, "the survey", task)
    assert error.field == field
    assert error.detail == f"the survey takes more than {LIMIT_MIB} MiB of memory"


async def test_a_cancel_ends_what_the_process_reads(tmp_path: Path, process: SourceProcess) -> None:
    made = reader(process, tmp_path, lines(tmp_path, "a.jsonl", texts(20)))
    slow = reader(
        process,
        tmp_path,
        lines(tmp_path, "b.jsonl", ["x" * (8 * MIB)] * 3),
        max_length=1,
        cut=HarvestCut(fit="split"),
    )

    await made.plan()
    plan = await asyncio.create_task(slow.plan())
    reading = [asyncio.create_task(slow.read(plan, unit)) for unit in plan.units]
    await asyncio.sleep(0.2)
    began = time.monotonic()
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert len((await everything(made))[1]) == 20
    warn_if_late(time.monotonic() - began, 10, "the process goes on with what was cancelled")


def parquet(folder: Path, name: str, values: list[Any], **options: Any) -> str:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    parquet.write_table(pa.table({"text": values}), folder / name, compression="zstd", **options)
    return name


def arrow(folder: Path, name: str, values: list[Any]) -> str:
    import pyarrow as pa

    table = pa.table({"text": values})
    with (
        pa.OSFile(str(folder / name), "wb") as sink,
        pa.ipc.new_stream(
            sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
        ) as writer,
    ):
        writer.write_table(table)
    return name


#: Name → (the file, written by; what is said of it; None: it is read).
HOSTILE: dict[str, tuple[Callable[[Path], str], str | None]] = {
    "a line of 60 MB": (
        lambda folder: lines(folder, "a.jsonl", ["a", "x" * 60_000_000]),
        "line 2 is longer than 16 MiB",
    ),
    "a value of 200 MB": (
        lambda folder: parquet(folder, "a.parquet", ["x" * 200_000_000]),
        "row group 0 .* 200,000,",
    ),
    "a value of 60 MB among others": (
        lambda folder: parquet(
            folder, "a.parquet", ["x"] * 100 + ["x" * 60_000_000], use_dictionary=False
        ),
        "row 100 has 60,000,000",
    ),
    "a page of 500 MB": (
        lambda folder: parquet(
            folder,
            "a.parquet",
            ["x" * 10_000_000] * 50,
            use_dictionary=False,
            data_page_size=1 << 30,
            write_batch_size=1000,
        ),
        "memory",
    ),
    "a batch of 500 MB": (
        lambda folder: arrow(folder, "a.arrow", ["x" * 10_000_000] * 50),
        "memory",
    ),
    "nested JSON": (
        lambda folder: (folder / "a.jsonl").write_text('{"text":' + "[" * 10**6) and "a.jsonl",
        "not JSON|document 0",
    ),
    "objects beside the text": (
        lambda folder: (
            (folder / "a.jsonl").write_text('{"x":[' + "{}," * 5_000_000 + '{}],"text":"a"}')
            and "a.jsonl"
        ),
        None,
    ),
    "a list for a text": (
        lambda folder: (
            (folder / "a.jsonl").write_text('{"text":[' + "[]," * 5_000_000 + "[]]}") and "a.jsonl"
        ),
        ".",
    ),
    "a text of 15 MB": (lambda folder: lines(folder, "a.jsonl", ["many words " * 1_400_000]), None),
    "a word of 15 MB": (lambda folder: lines(folder, "a.jsonl", ["a" * 15_000_000]), None),
    "a dictionary of 1 MB, 200 times": (
        lambda folder: parquet(folder, "a.parquet", ["y" * 1_000_000] * 200),
        None,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.matrix if "15 MB" in name else ()) for name in HOSTILE],
)
async def test_a_hostile_source_stays_within_the_memory(
    tmp_path: Path, process: SourceProcess, name: str
) -> None:
    """The limit is one that the kernel enforces; what the worker itself takes is measured."""
    write, said = HOSTILE[name]
    path = _in_a_fork(lambda: write(tmp_path), tmp_path)
    made = reader(process, tmp_path, path, cut=HarvestCut(fit="split"), max_tokens=2_000_000)
    before = _resident()
    if said is None:
        plan, _ = await everything(made)
        assert plan.units
    else:
        with refuses(path, match=said, kind="invalid_request"):
            await everything(made)
    assert _resident() - before < 300 * MIB
    after = reader(process, tmp_path, lines(tmp_path, "after.jsonl", texts(9)))
    assert len((await everything(after))[1]) == 9


def _in_a_fork(write: Callable[[], str], folder: Path) -> str:
    """What `write` returns; its memory is not this process'."""
    child = os.fork()
    if child == 0:
        try:
            (folder / "path").write_text(write())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    return (folder / "path").read_text()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def test_an_ended_worker_leaves_no_process(tmp_path: Path) -> None:
    made = SourceProcess(LIMIT_MIB)
    await reader(made, tmp_path, lines(tmp_path, "a.jsonl", texts(5))).plan()
    running = made.helper.start()
    running.stdin.close()  # as the kernel does for a worker that was killed
    assert await asyncio.to_thread(running.wait, 10) == 0
