"""What becomes of captures when the disk refuses, a consumer breaks or their time is over, with
everything but the model real?
"""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from extension_kit import install_example, install_unruly
from midstream_fake_engine.model import residual_rows
from stack import Stack

from midstream.broker.ledger.jobs.captures import Captures
from midstream.client import CaptureReader
from midstream.schemas.jobs.jobs import State
from midstream.schemas.readings.installed import OptionValue, StoredReader
from midstream.schemas.readings.stored import READER
from midstream.schemas.requests.specs import StoredCapture

PLUGIN = """
from midstream.workers.runner.files.finished_rows import Outcome

class Picky:
    def consume(self, captures):
        if any(len(capture.positions) > 3 for capture in captures):
            raise ValueError("more than three rows")
        return [Outcome() for _ in captures]

def broken():
    raise OSError("no connection")
"""


def capture(tag: str, **changes: object) -> StoredCapture:
    facts = {"sites": {"post_block": [0, 1, 2, 3]}, "positions": "all_prompt", "tag": tag}
    return StoredCapture(**(facts | changes))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two pipeline stages; a package with consumers is installed beside; captures live for a
    while.
    """
    site = tmp_path_factory.mktemp("site")
    info = site / "picky-1.0.dist-info"
    info.mkdir()
    (site / "picky_consumer_of_the_tests.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: picky\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[midstream.capture_consumers]\npicky = "
        "picky_consumer_of_the_tests:Picky\nbroken = "
        "picky_consumer_of_the_tests:broken\n"
    )
    install_unruly(install_example(site))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(site))
        with Stack(
            tmp_path_factory.mktemp("stack"),
            pipeline_parallel_size=2,
            lease_s=15,
            extensions="row-geometry,unruly",
        ) as running:
            yield running


def rows_of(reader: CaptureReader, layer: int, request: int = 0) -> np.ndarray:
    return residual_rows(
        layer, np.array(reader.positions(request)), np.array(reader.token_ids(request))
    )


@pytest.mark.parametrize("layout", ["packed", "per_file", "segment"])
def test_each_layout_is_read_over_both_stages(stack: Stack, layout: str) -> None:
    job_id = stack.submit(
        ["one", "three"], capture=capture(layout.replace("_", "-"), layout=layout)
    )
    assert stack.wait(job_id).state is State.SUCCEEDED
    reader = CaptureReader(stack.settings.capture_root, job_id)
    assert (reader.requests(), reader.layers()) == ([0, 1], [0, 1, 2, 3])
    for request in (0, 1):
        for layer in range(4):
            np.testing.assert_array_equal(
                reader.array(layer, request=request), rows_of(reader, layer, request)
            )
    assert all(check.ok for check in reader.verify())


def test_rows_in_memory_come_back_with_the_result_and_nothing_is_written(stack: Stack) -> None:
    job_id = stack.submit(["one"], capture=capture("memory", consumers=["memory"]))
    assert stack.wait(job_id).capture_status == "ok"
    results = stack.result(job_id).capture_results
    assert results.files == []
    reader = CaptureReader.from_bytes([told.rows for told in results.consumers])
    np.testing.assert_array_equal(reader.array(3), rows_of(reader, 3))
    assert not (stack.settings.capture_root / "memory").exists()


# field case 19
def test_an_unwritable_capture_folder_fails_only_its_jobs(stack: Stack) -> None:
    (stack.settings.capture_root / "blocked").write_text("not a folder")
    jobs = [
        stack.submit(["one"], capture=capture(tag, layout=layout))
        for layout in ("packed", "segment")
        for tag in ("blocked", "free")
    ]
    views = [stack.wait(job_id) for job_id in jobs]
    assert [view.state for view in views] == [State.FAILED, State.SUCCEEDED] * 2
    for view in views[::2]:
        assert view.error is not None
        assert view.error.type == "urn:midstream:capture_failed"
        assert "write failed" in view.error.detail
        assert view.capture_status == "error"


# field case 19
def test_a_full_disk_fails_the_capture_with_its_reason_and_the_worker_goes_on(stack: Stack) -> None:
    disk = stack.settings.capture_root / "small"
    disk.mkdir(parents=True, exist_ok=True)
    if (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], capture_output=True
        ).returncode
        != 0
    ):
        pytest.skip("file systems cannot be mounted here")
    try:
        for layout in ("packed", "segment"):
            large = stack.wait(stack.submit(["x" * 2000], capture=capture("small", layout=layout)))
            assert (large.state, large.error and large.error.type) == (
                State.FAILED,
                "urn:midstream:capture_failed",
            )
            assert large.error is not None
            assert "No space left on device" in large.error.detail
            deadline = time.monotonic() + 60
            while shutil.disk_usage(disk).free < 32 << 10:  # the other stage may still be at it
                assert time.monotonic() < deadline, "what could not be written is removed"
                time.sleep(0.02)
            small = stack.submit(["x"], capture=capture("small", layout=layout))
            assert stack.wait(small).state is State.SUCCEEDED
            assert CaptureReader(stack.settings.capture_root, small).positions() == [0]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_consumer_plugin_gets_rows_and_a_failing_one_makes_the_result_partial(
    stack: Stack,
) -> None:
    (info,) = stack.do(lambda ledger: ledger.models())
    assert info.consumers == ["filesystem", "memory", "logging", "picky"]
    wanted = capture("picky", consumers=["filesystem", "picky"])
    fine, short = (
        stack.submit(["abc"], capture=wanted),
        stack.submit(["abc", "abcdef"], capture=wanted),
    )
    assert stack.wait(fine).capture_status == "ok"
    view = stack.wait(short)
    assert (view.state, view.capture_status) == (State.SUCCEEDED, "partial")
    results = stack.result(short).capture_results
    assert "picky failed: more than three rows" in results.detail
    assert {(told.request, told.name, told.ok) for told in results.consumers} == {
        (0, "filesystem", True), (0, "picky", True), (1, "filesystem", True), (1, "picky", False),
    }  # fmt: skip
    assert CaptureReader(stack.settings.capture_root, short).requests() == [0, 1]


def test_the_callbacks_worker_deletes_expired_captures(tmp_path: Path) -> None:
    with Stack(tmp_path, lease_s=15, capture_ttl_s=1) as short:
        jobs = [
            short.submit(["one"], capture=capture("passing", layout=layout))
            for layout in ("packed", "segment")
        ]
        assert [short.wait(job_id).state for job_id in jobs] == [State.SUCCEEDED] * 2

        def left() -> list[Path]:
            """Rows on disk; a segment's blobs become holes while its writer may still append to
            it.
            """
            while True:
                with contextlib.suppress(FileNotFoundError):  # deleted while we looked: once more
                    return [
                        path
                        for path in short.settings.capture_root.rglob("*.s*")
                        if path.is_file() and path.stat().st_blocks
                    ]

        short.wait(
            jobs[0], until=lambda _: not short.do(lambda ledger: Captures(ledger).list()).captures
        )
        short.wait(jobs[0], until=lambda _: not left())
        assert [short.view(job_id).state for job_id in jobs] == [State.SUCCEEDED] * 2


def test_an_installed_reader_answers_from_both_stages(stack: Stack) -> None:
    (info,) = [
        model
        for model in stack.do(lambda ledger: ledger.models())
        if model.name == stack.settings.served_model
    ]
    codes = {each.name: each.digest for each in info.extensions}
    assert set(codes) == {"row-geometry", "unruly"}

    def wish(name: str, options: dict[str, OptionValue], **changes: Any) -> StoredCapture:
        reading = StoredReader(
            name=name, digest=codes[name], row_bytes=64, fixed_bytes=64, options=options
        )
        return capture("", consumers=[READER], reading=msgspec.structs.replace(reading, **changes))

    jobs = [
        stack.submit(["one", "three"], capture=wish("row-geometry", {"k": 2})),
        stack.submit(["one"], capture=wish("unruly", {"mood": "raise"})),
        stack.submit(["one"], capture=wish("row-geometry", {"k": 2}, digest="0" * 64)),
    ]
    assert [stack.wait(job_id).state for job_id in jobs] == [
        State.SUCCEEDED,
        State.FAILED,
        State.FAILED,
    ]
    found = stack.result(jobs[0]).readers
    assert found is not None
    for request, reading in enumerate(found):
        assert (reading.request, reading.digest, reading.options) == (
            request,
            codes["row-geometry"],
            {"k": 2},
        )
        assert [part.sites for part in reading.parts] == [
            {"post_block": [0, 1]},
            {"post_block": [2, 3]},
        ]
        for part in reading.parts:
            rows = [
                residual_rows(layer, np.array(part.positions), np.array(part.token_ids))
                for layer in part.sites["post_block"]
            ]
            np.testing.assert_allclose(
                part.arrays["norm"].numpy(), np.linalg.norm(np.stack(rows), axis=-1), rtol=1e-6
            )
    for job_id, words in (
        (jobs[1], "unruly: ValueError: no such luck"),
        (jobs[2], "the job was accepted for the code 000000000000"),
    ):
        error = stack.wait(job_id).error
        assert error is not None
        assert error.type == "urn:midstream:reading_failed"
        assert words in error.detail
