"""Does a reader give back the rows that were written, and notice when it cannot?"""

import json
import os
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from capture_kit import Sites, finished, values, write
from refusal_kit import refuses

from midstream import CaptureReader
from midstream.broker.artifacts import retention
from midstream.client.captures.blobs import at
from midstream.storage.file_store import FileStore
from midstream.storage.store import ArtifactStore, Referring
from midstream.workers.runner.files.finished_rows import FinishedCapture
from midstream.workers.runner.files.layouts import blob_of

LAYOUTS = ["packed", "per_file", "segment"]
STAGES: list[Sites] = [{"pre_attn": [0], "post_block": [0, 1]}, {"post_block": [2, 3]}]
WHOLE: Sites = {"pre_attn": [0], "post_block": [0, 1, 2, 3]}


def stage(pp: int, **changes: object) -> FinishedCapture:
    return finished(**({"sites": STAGES[pp], "all_sites": WHOLE, "pp": pp, "stages": 2} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_come_back_as_float32_exactly(tmp_path: Path, dtype: str) -> None:
    write(tmp_path, finished(sites={"post_block": [3, 7]}, positions=[0, 2, 5], dtype=dtype))
    reader = CaptureReader(tmp_path / "tag", "job_x")
    assert reader.job == "job_x"
    assert reader.tag == "tag"
    assert reader.layers() == [3, 7]
    assert reader.dtype() == dtype
    assert reader.positions() == [0, 2, 5]
    assert reader.token_ids() == [100, 102, 105]
    assert reader.array(7).dtype == np.float32
    np.testing.assert_array_equal(reader.array(7), values("post_block", 7, [0, 2, 5]))
    np.testing.assert_array_equal(reader.row(3, 5), values("post_block", 3, [5])[0])
    reader.array(7)[:] = 0  # it belongs to the caller
    np.testing.assert_array_equal(reader.array(7), values("post_block", 7, [0, 2, 5]))


def test_sites_are_read_and_named_as_transformer_lens_names_them(store: ArtifactStore) -> None:
    write(store, finished(sites={"mlp_in": [3], "post_block": [3, 7]}))
    reader = CaptureReader(store, "job_x")
    name = "blocks.7.hook_resid_post"
    for site in ((name,), (7, "resid_post"), (7, "hook_resid_post"), (7,)):
        np.testing.assert_array_equal(reader.array(*site), reader.array(7, "post_block"))
    assert reader.site(name) == ("post_block", 7)
    assert list(reader.arrays()) == ["mlp_in.3", "post_block.3", "post_block.7"]
    arrays = reader.arrays(names="transformer_lens")
    assert list(arrays) == ["mlp_in.3", "blocks.3.hook_resid_post", name]
    np.testing.assert_array_equal(arrays[name], reader.array(7, "post_block"))
    wrong: Any = "nnsight"
    with refuses("names: 'nnsight' is unknown"):
        reader.arrays(names=wrong)
    with refuses("layer 1 was not captured at mlp_out", allowed="hooks mlp_in, post_block"):
        reader.array(1, "mlp_out")
    for layer, hook in (("one", None), (name, "z")):
        with refuses("blocks.12.hook_resid_post", match=f"layer: '{layer}' is not a layer"):
            reader.array(layer, hook)


def test_stages_that_hold_different_positions_are_refused_or_dropped_rows_left_out(
    store: ArtifactStore,
) -> None:
    write(store, stage(0, positions=[0, 1]), stage(1, positions=[0, 2]))
    with refuses("different positions", kind="ranks_disagree"):
        CaptureReader(store, "job_x").positions()
    write(
        store,
        stage(0, job="job_y", positions=[0, 1, 3], dropped=(2,)),
        stage(1, job="job_y", positions=[0, 2, 3], dropped=(1,)),
    )
    reader = CaptureReader(store, "job_y")
    assert reader.positions() == [0, 3]
    assert reader.token_ids() == [100, 103]
    assert reader.dropped() == [1, 2]
    for layer in range(4):
        np.testing.assert_array_equal(reader.array(layer), values("post_block", layer, [0, 3]))
    np.testing.assert_array_equal(reader.row(2, 3), values("post_block", 2, [3])[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_raw_rows_are_views_of_the_file_that_cannot_be_written(
    store: ArtifactStore, layout: str
) -> None:
    write(store, finished(layout=layout), finished(request=1, layout=layout, dtype="float32"))
    reader = CaptureReader(store, "job_x")
    bits = reader.raw(2)
    floats = reader.raw(2, request=1)
    assert bits.dtype == np.uint16
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, values("post_block", 2, [0, 1, 2]))
    for view in (bits, floats):
        assert not view.flags.owndata
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True
    reader.close()
    assert reader.requests() == []
    np.testing.assert_array_equal(floats, values("post_block", 2, [0, 1, 2]))


# field case 18
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_stages_of_a_pipeline_are_merged_and_a_missing_one_is_an_error(
    store: ArtifactStore, layout: str
) -> None:
    write(store, stage(1, layout=layout), stage(0, layout=layout))
    reader = CaptureReader(store, "job_x")
    assert reader.hooks() == ["pre_attn", "post_block"]
    assert reader.layers() == [0, 1, 2, 3]
    assert reader.layers(hook="pre_attn") == [0]
    np.testing.assert_array_equal(
        reader.stack(), np.stack([values("post_block", layer, [0, 1, 2]) for layer in range(4)])
    )
    write(store, stage(0, job="job_y", layout=layout), owner="w.other.0")
    reader = CaptureReader(store, "job_y")
    for read in (reader.layers, reader.positions, lambda: reader.array(0), reader.stack):
        with refuses(
            "missing tensors (2): post_block.2, post_block.3; stages present: 0, of 2 in total"
        ):
            read()
    assert [check.ok for check in reader.verify()] == [True] * (
        3 if layout == "per_file" else 1
    ) + [False]
    assert CaptureReader(store, "job_y", partial=True).layers() == [0, 1]


def test_a_stage_that_holds_none_of_the_layers_is_not_missed(store: ArtifactStore) -> None:
    write(store, finished(sites={"post_block": [0]}, pp=0, stages=2))
    assert CaptureReader(store, "job_x").layers() == [0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_last_complete_attempt_is_read(store: ArtifactStore, layout: str) -> None:
    for attempt, shift, stages in ((1, 2.0, [0, 1]), (2, 0.0, [0, 1]), (3, 8.0, [0])):
        write(
            store,
            *(
                stage(pp, attempt=attempt, shift=shift, layout=layout, dtype="float32")
                for pp in stages
            ),
            owner=f"w.{attempt}",
        )
    reader = CaptureReader(store, "job_x")
    assert reader.manifest().attempt == 2
    np.testing.assert_array_equal(reader.array(3), values("post_block", 3, [0, 1, 2]))


def test_requests_are_kept_apart_and_files_of_other_jobs_left_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        finished(request=0),
        finished(request=12, positions=[4]),
        finished("job_y", request=5),
    )
    reader = CaptureReader(tmp_path / "tag", "job_x")
    assert reader.requests() == [0, 12]
    assert reader.positions(12) == [4]
    with refuses("request 3", allowed="[0, 12]"):
        reader.array(0, request=3)
    assert CaptureReader(tmp_path / "tag", "job_y").requests() == [5]


# --- Sources ---


def test_a_job_with_several_tags_needs_a_tag(tmp_path: Path) -> None:
    mine, other = write(
        tmp_path, finished(tag="mine", layout="packed"), finished(tag="all", layout="packed")
    )
    with refuses("several tags", allowed="all, mine"):
        CaptureReader(tmp_path, "job_x")
    assert CaptureReader(tmp_path, "job_x", tag="all").tag == "all"
    reader = CaptureReader([tmp_path / mine.path, tmp_path / other.path])
    assert reader.tag == "mine", "the first file's"
    assert reader.tags == ["mine", "all"]


@pytest.mark.parametrize("store", ["folder"], indirect=True)
def test_a_segment_among_files_stands_for_the_blobs_in_it_of_one_job(store: ArtifactStore) -> None:
    write(
        store,
        *(
            finished(f"job_{n}", request, shift=n, dtype="float32")
            for n in range(2)
            for request in range(3)
        ),
    )
    (segment,) = CaptureReader(store, "job_1").files
    for source in (segment, str(segment), [at(segment)], [segment, segment]):
        with refuses("several jobs", allowed="job_0, job_1"):
            CaptureReader(source)
        with CaptureReader(source, "job_1") as again:
            assert again.job == "job_1"
            assert again.requests() == [0, 1, 2]
            assert [check.ok for check in again.verify()] == [True] * 3
            np.testing.assert_array_equal(
                again.array(3, request=2), values("post_block", 3, [0, 1, 2]) + 1
            )
    retention.delete(store, ["job_1"])
    assert CaptureReader(segment).job == "job_0"
    with refuses("was deleted", kind="gone"):
        CaptureReader(segment, "job_1")
    segment.with_suffix(".jsonl").unlink()
    with refuses(".jsonl is missing", kind="capture_failed"):
        CaptureReader(segment)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_damaged_rows_are_found_by_verify_and_not_returned(tmp_path: Path, layout: str) -> None:
    """Field case 19: one flipped bit."""
    file, *_ = write(tmp_path, finished(layout=layout))
    path = tmp_path / file.path
    reader = CaptureReader(tmp_path, "job_x")
    assert all(check.ok for check in reader.verify())
    raw = bytearray(path.read_bytes())
    raw[file.offset + 8 + int.from_bytes(raw[file.offset : file.offset + 8], "little")] ^= 1
    path.write_bytes(raw)
    for read in (reader.array, reader.raw):
        with refuses("CRC32", kind="capture_damaged"):
            read(2)
    (failed,) = [check for check in CaptureReader(tmp_path, "job_x").verify() if not check.ok]
    assert "CRC32" in failed.detail


def test_a_file_that_is_cut_short_zeroed_or_without_its_manifest_is_named(tmp_path: Path) -> None:
    (file,) = write(tmp_path, finished(layout="packed"))
    path = tmp_path / file.path
    path.with_suffix(".json").rename(tmp_path / "kept")
    reader = CaptureReader(path)
    np.testing.assert_array_equal(reader.array(2), values("post_block", 2, [0, 1, 2]))
    (check,) = reader.verify()
    assert not check.ok
    assert "p0000.a1.pp0.json is missing" in check.detail
    for length in (file.bytes - 1, 20, 0):
        os.truncate(path, length)
        with refuses("truncated"):
            CaptureReader(path)
    (tmp_path / "kept").rename(path.with_suffix(".json"))
    path.write_bytes(bytes(file.bytes))
    with refuses("zeros", kind="capture_damaged"):  # and not deleted
        CaptureReader(tmp_path, "job_x")


def test_bytes_behind_a_blob_are_refused_and_not_left_unread(tmp_path: Path) -> None:
    first, second = (
        tmp_path / file.path
        for file in write(tmp_path, *(finished(request=n, layout="packed") for n in range(2)))
    )
    both = first.read_bytes() + second.read_bytes()
    first.write_bytes(both)
    for read in (lambda: CaptureReader(first), lambda: CaptureReader.from_bytes(both)):
        with refuses("not a complete blob", kind="capture_damaged"):
            read()


def test_a_part_of_a_file_is_read_where_a_manifest_says_that_it_is(tmp_path: Path) -> None:
    first, second = write(tmp_path, finished(request=0), finished(request=1))
    assert first.path == second.path
    whole = at(tmp_path / second.path)
    part = replace(whole, offset=second.offset, bytes=second.bytes, crc32=second.crc32)
    reader = CaptureReader([part])
    assert reader.requests() == [1]
    assert [check.ok for check in reader.verify()] == [True]


def test_files_that_are_no_captures_are_refused_by_name(tmp_path: Path) -> None:
    for source in (tmp_path, tmp_path / "nowhere"):
        with refuses("no capture files", kind="not_found"):
            CaptureReader(source)
    (tmp_path / "notes.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with refuses(match=r"notes\.safetensors.*not a Midstream file"):
        CaptureReader(tmp_path)


def test_rows_in_memory_are_read_like_files() -> None:
    blobs = [b"".join(blob_of(capture, capture.sites).buffers) for capture in (stage(1), stage(0))]
    reader = CaptureReader.from_bytes(blobs)
    np.testing.assert_array_equal(reader.array(2), values("post_block", 2, [0, 1, 2]))
    with refuses("post_block"):
        CaptureReader.from_bytes(blobs[0]).layers()
    with refuses("no blobs given"):
        CaptureReader.from_bytes([])


def test_files_are_also_readable_by_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors import safe_open

    (file,) = write(tmp_path, finished(layout="packed", dtype="float32"))
    with safe_open(tmp_path / file.path, framework="numpy") as opened:
        np.testing.assert_array_equal(
            opened.get_tensor("post_block.3"), values("post_block", 3, [0, 1, 2])
        )


# a server's connections are descriptors
@pytest.mark.parametrize("store", ["folder", "memory"], indirect=True)
def test_thousands_of_files_need_no_descriptors(store: ArtifactStore) -> None:
    write(
        store,
        *(
            finished(request=n, layout="per_file", sites={"post_block": list(range(10))})
            for n in range(30)
        ),
    )
    before = len(os.listdir("/proc/self/fd"))
    assert len(CaptureReader(store, "job_x").files) == 300
    assert len(os.listdir("/proc/self/fd")) == before


# --- What is missing ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_request_whose_files_are_missing_is_named_and_not_left_out(
    tmp_path: Path, layout: str
) -> None:
    for request in range(4):
        write(tmp_path, finished(request=request, layout=layout, requests=4), owner=f"w.{request}")
    folder = tmp_path / "tag" / "job_x"
    with CaptureReader(folder) as whole:
        assert whole.requests() == [0, 1, 2, 3]
        assert whole.gaps() == []
        assert all(check.ok for check in whole.verify())
    lost = (
        (tmp_path / "tag" / "segments").glob("w.2*.jsonl")
        if layout == "segment"
        else folder.glob("p0002*")
    )
    for path in lost:
        path.unlink()
    for source, job in ((folder, None), (tmp_path / "tag", "job_x"), (tmp_path, "job_x")):
        reader = CaptureReader(source, job)
        (gap,) = reader.gaps()
        assert "captured 4 requests, but files exist for only 3: 0-1, 3" in gap.detail
        assert [check for check in reader.verify() if not check.ok] == [gap]
        assert "requests=3 of 4" in repr(reader)
        with refuses("files exist for only 3", kind="capture_failed"):
            reader.requests()
        # it is whole itself
        np.testing.assert_array_equal(
            reader.array(3, request=1), values("post_block", 3, [0, 1, 2])
        )
    partial = CaptureReader(folder, partial=True)
    assert partial.requests() == [0, 1, 3]
    assert partial.gaps() == [gap]


def test_explicitly_named_files_need_not_be_complete(tmp_path: Path) -> None:
    files = write(tmp_path, *(finished(request=n, layout="packed", requests=3) for n in range(3)))
    for source in (tmp_path / files[1].path, [tmp_path / files[1].path]):
        reader = CaptureReader(source)
        assert reader.requests() == [1]
        assert all(check.ok for check in reader.verify())


def test_dropped_positions_are_a_check_that_fails(store: ArtifactStore) -> None:
    write(store, finished(request=0), finished(request=1, positions=[0, 3], dropped=(1, 2)))
    (failed,) = (check for check in CaptureReader(store, "job_x").verify() if not check.ok)
    assert failed.request == 1
    assert failed.detail == "request 1: positions dropped under overload: 1-2 (2 in total)"


# --- Views ---


def test_views_are_readable_at_interpreter_exit(tmp_path: Path) -> None:
    write(tmp_path, finished(positions=range(5000), dtype="float32", layout="packed"))
    program = f"""
import atexit
views = []
atexit.register(lambda: print(views[0].sum()))  # called after everything that is registered later
from midstream.client import CaptureReader
views.append(CaptureReader({str(tmp_path)!r}, "job_x").raw(2))
print(views[0].sum())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.returncode
    first, last = done.stdout.split()
    assert first == last


# --- Damage ---


def test_verify_finds_a_blob_that_is_not_what_it_says_though_its_checksum_is_right(
    tmp_path: Path,
) -> None:
    capture = finished(positions=[0, 1])
    right = b"".join(blob_of(capture, capture.sites).buffers)
    wrong = right.replace(b'\\"token_ids\\":[100,101]', b'\\"token_ids\\":[100,107]')
    assert wrong != right
    path = tmp_path / "tag.p0000.pp0.safetensors"
    for raw, said in ((right, ""), (wrong, "the tensor token_ids does not match the manifest")):
        path.write_bytes(raw)
        path.with_suffix(".json").write_text(
            json.dumps({"bytes": len(raw), "crc32": zlib.crc32(raw)})
        )
        assert [check.detail for check in CaptureReader(tmp_path).verify()] == [said]


# --- Deletion: `retention` and the reader keep one promise together ---


@pytest.mark.parametrize("layout", LAYOUTS)
def test_open_readers_survive_deletion_and_new_ones_are_refused(
    store: ArtifactStore, layout: str
) -> None:
    write(
        store,
        *(finished(request=n, layout=layout) for n in range(3)),
        finished("job_other", layout=layout),
    )
    reader = CaptureReader(store, "job_x")
    done = retention.delete(store, ["job_x"])
    # where blobs are erased in place
    assert done == ([] if layout == "segment" and isinstance(store, FileStore) else ["job_x"])
    for request in reader.requests():
        np.testing.assert_array_equal(
            reader.array(3, request=request), values("post_block", 3, [0, 1, 2])
        )
    assert all(check.ok for check in reader.verify() if layout == "segment")
    # which looks for the segments of the job alone
    kept = layout == "segment" and not isinstance(store, Referring)
    with refuses(kind="gone" if kept else "not_found"):
        CaptureReader(store, "job_x")
    del reader
    assert retention.delete(store, ["job_x"]) == ["job_x"]
    assert CaptureReader(store, "job_other").requests() == [0]


def test_a_job_under_deletion_is_gone_before_its_files(tmp_path: Path) -> None:
    write(tmp_path, finished(layout="packed"), finished(request=1))
    (tmp_path / ".deleted" / "job_x").mkdir(parents=True)
    for source in (tmp_path, tmp_path / "tag"):
        with refuses("job_x", kind="gone"):
            CaptureReader(source, "job_x")
    with refuses():
        CaptureReader(tmp_path / "tag" / "job_x")


def test_a_file_that_vanishes_while_it_is_opened_means_gone_and_not_fewer_requests(
    tmp_path: Path,
) -> None:
    files = write(tmp_path, *(finished(request=n, layout="packed") for n in range(3)))
    paths = [tmp_path / file.path for file in files]
    paths[1].unlink()
    with refuses(kind="gone"):
        CaptureReader(paths)


def test_negative_layers_count_from_the_models_last(store: ArtifactStore) -> None:
    write(store, finished(sites={"post_block": [3, 7]}, num_layers=8))
    write(store, finished(job="older", sites={"post_block": [3]}), owner="older")
    reader = CaptureReader(store, "job_x")
    np.testing.assert_array_equal(reader.array(-1), reader.array(7))
    np.testing.assert_array_equal(reader.stack([-5, -1]), reader.stack([3, 7]))
    for layer, words, allowed in (
        (-2, "layer 6 was not captured", "[3, 7]"),
        (-9, "below the first layer", "-8 to 7"),
    ):
        with refuses(words, allowed=allowed):
            reader.array(layer)
    with refuses("does not record the number of layers"):
        CaptureReader(store, "older").array(-1)


def test_tokens_need_the_client_that_opened_the_reader(store: ArtifactStore) -> None:
    write(store, finished(positions=[0, 2]))
    reader = CaptureReader(store, "job_x")
    with refuses("no tokenizer"):
        print(reader.tokens)
    reader.read_tokens = lambda ids: [f" {token}" for token in ids]
    assert reader.tokens == [" 100", " 102"]
