"""Does a reader give back the rows that were published, and notice when it cannot?"""

from pathlib import Path

import numpy as np
import pytest

from midstream.client import CaptureReader
from midstream.schemas.errors import MidstreamError
from midstream.workers.storage import PendingFile, publish

HIDDEN = 5


def rows(layer: int, positions: list[int]) -> np.ndarray:
    """`[positions, HIDDEN]` float32, exact in bfloat16 (eight bits and an exponent), different everywhere."""
    made = np.array([[(layer * 16 + position + 1) * 2.0**column for column in range(HIDDEN)] for position in positions], dtype=np.float32)
    return made.reshape(len(positions), HIDDEN)


def bfloat16_bits(array: np.ndarray) -> bytes:
    return (array.view(np.uint32) >> 16).astype("<u2").tobytes()


def put(
    root: Path,
    layers: list[int],
    positions: list[int],
    request: int = 0,
    attempt: int = 1,
    stage: int = 0,
    dtype: str = "bfloat16",
    shift: float = 0,
) -> Path:
    """One file as a rank publishes it; its path."""
    data = [rows(layer, positions) + np.float32(shift) for layer in layers]
    packed = [bfloat16_bits(array) if dtype == "bfloat16" else array.tobytes() for array in data]
    integers = np.array(positions, dtype="<i8")
    tensors = [(f"post_block.{layer}", dtype, [len(positions), HIDDEN], [raw]) for layer, raw in zip(layers, packed, strict=True)]
    tensors += [
        ("positions", "int64", [len(positions)], [integers.tobytes()]),
        ("token_ids", "int64", [len(positions)], [(integers + 100).tobytes()]),
    ]
    name = f"tag/job/p{request:04d}.a{attempt}.pp{stage}.safetensors"
    publish(
        root, [PendingFile(name, tensors, {"job": "job", "request": request, "attempt": attempt, "stage": stage, "hook": "post_block"})]
    )
    return root / name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rows_come_back_as_float32_exactly(tmp_path: Path, dtype: str) -> None:
    put(tmp_path, [3, 7], [0, 2, 5], dtype=dtype)
    reader = CaptureReader(tmp_path / "tag" / "job")
    assert reader.layers() == [3, 7]
    assert reader.positions() == [0, 2, 5]
    assert reader.token_ids() == [100, 102, 105]
    found = reader.array(7)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, rows(7, [0, 2, 5]))
    np.testing.assert_array_equal(reader.row(3, position=2), rows(3, [2])[0])


def test_pipeline_stages_are_one_set_of_layers(tmp_path: Path) -> None:
    put(tmp_path, [2, 3], [0, 1], stage=1)
    put(tmp_path, [0, 1], [0, 1], stage=0)
    reader = CaptureReader(tmp_path / "tag" / "job")
    assert reader.layers() == [0, 1, 2, 3]
    np.testing.assert_array_equal(reader.stack(), np.stack([rows(layer, [0, 1]) for layer in range(4)]))


def test_stages_that_hold_different_positions_are_refused(tmp_path: Path) -> None:
    put(tmp_path, [0], [0, 1], stage=0)
    put(tmp_path, [1], [0, 2], stage=1)
    with pytest.raises(MidstreamError, match="different positions") as caught:
        CaptureReader(tmp_path / "tag" / "job").positions()
    assert caught.value.kind == "ranks_disagree"


def test_the_last_attempt_counts_with_all_its_stages(tmp_path: Path) -> None:
    for attempt, shift in ((1, 100.0), (2, 0.0)):
        for stage in (0, 1):
            put(tmp_path, [stage], [0], attempt=attempt, stage=stage, shift=shift)
    reader = CaptureReader(tmp_path / "tag" / "job")
    assert [path.name for path in reader.files] == ["p0000.a2.pp0.safetensors", "p0000.a2.pp1.safetensors"]
    np.testing.assert_array_equal(reader.array(1), rows(1, [0]))


def test_requests_are_kept_apart(tmp_path: Path) -> None:
    put(tmp_path, [0], [0, 1], request=0)
    put(tmp_path, [0], [4], request=12)
    reader = CaptureReader(tmp_path / "tag" / "job")
    assert reader.requests() == [0, 12]
    assert reader.positions(12) == [4]
    with pytest.raises(MidstreamError, match="request 3") as caught:
        reader.array(0, request=3)
    assert caught.value.allowed == "[0, 12]"


def test_a_layer_that_was_not_captured_is_named_with_those_that_were(tmp_path: Path) -> None:
    put(tmp_path, [3, 7], [0])
    with pytest.raises(MidstreamError, match="layer 4 was not captured at post_block") as caught:
        CaptureReader(tmp_path / "tag" / "job").array(4)
    assert caught.value.allowed == "[3, 7]"


def test_a_capture_of_no_position_has_no_rows_and_is_no_error(tmp_path: Path) -> None:
    put(tmp_path, [0], [])
    reader = CaptureReader(tmp_path / "tag" / "job")
    assert reader.array(0).shape == (0, HIDDEN)
    assert reader.positions() == []
    assert [check.ok for check in reader.verify()] == [True]


# field case 19
def test_one_flipped_bit_is_found_by_verify(tmp_path: Path) -> None:
    path = put(tmp_path, [0, 1], [0, 1])
    reader = CaptureReader(path)
    assert [check.ok for check in reader.verify()] == [True]
    raw = bytearray(path.read_bytes())
    raw[-60] ^= 1
    path.write_bytes(raw)
    (check,) = CaptureReader(path).verify()
    assert not check.ok
    assert "CRC32" in check.detail


def test_a_file_that_was_cut_short_is_refused_when_it_is_opened(tmp_path: Path) -> None:
    path = put(tmp_path, [0], [0, 1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(MidstreamError, match="cut short"):
        CaptureReader(path)
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(MidstreamError, match="cut short"):
        CaptureReader(path)


def test_a_folder_without_captures_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.safetensors").write_bytes(b"")
    with pytest.raises(MidstreamError, match="no capture files"):
        CaptureReader(tmp_path)


def test_a_missing_manifest_is_named_when_files_are_checked(tmp_path: Path) -> None:
    path = put(tmp_path, [0], [0])
    path.with_suffix(".json").unlink()
    reader = CaptureReader(path)
    np.testing.assert_array_equal(reader.array(0), rows(0, [0]))
    with pytest.raises(MidstreamError, match=r"p0000\.a1\.pp0\.json is missing"):
        reader.verify()


def test_rows_belong_to_the_caller_and_not_to_the_file(tmp_path: Path) -> None:
    path = put(tmp_path, [0], [0], dtype="float32")
    reader = CaptureReader(path)
    reader.array(0)[:] = 0
    np.testing.assert_array_equal(reader.array(0), rows(0, [0]))


def test_files_are_also_readable_by_the_safetensors_package(tmp_path: Path) -> None:
    from safetensors import safe_open

    path = put(tmp_path, [0, 1], [0, 1], dtype="float32")
    with safe_open(path, framework="numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("post_block.1"), CaptureReader(path).array(1))
