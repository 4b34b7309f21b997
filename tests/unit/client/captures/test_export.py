"""Do exported rows and the capture commands say what was captured, and name what was not, also if
ranks stored columns of the rows?
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from capture_kit import finished, values, write
from refusal_kit import refuses
from typer.testing import CliRunner

from midstream import CaptureReader, MidstreamError
from midstream.api.responses import packed
from midstream.broker.artifacts.headers import BlobPlace
from midstream.client.captures.export import export
from midstream.client.cli import main
from midstream.schemas.model.banks import RowShape
from midstream.schemas.model.routing import RoutingKind
from midstream.schemas.requests.specs import RankSpec, StoredCapture
from midstream.storage.store import open_store
from midstream.workers.runner.files.finished_rows import BankColumns, FinishedCapture

SITES = {"pre_attn": [0, 3], "post_block": [0, 1, 2]}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Two prompts of one job, one in a segment and one in a file."""
    captures = tmp_path / "captures"
    write(
        captures,
        finished(sites=SITES),
        finished(request=1, sites=SITES, positions=[4, 9], layout="packed"),
    )
    return captures


def run(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(
        main.app, [str(argument) for argument in arguments], env={"COLUMNS": "160"}
    )
    return done.exit_code, done.output + (
        str(done.exception) if isinstance(done.exception, MidstreamError) else ""
    )


def test_npz_holds_every_request_in_float32(root: Path, tmp_path: Path) -> None:
    names = export(CaptureReader(root, "job_x"), tmp_path / "rows.npz")
    with np.load(tmp_path / "rows.npz") as arrays:
        assert sorted(arrays) == sorted(names)
        assert len(names) == 2 * 7
        np.testing.assert_array_equal(arrays["1/pre_attn.3"], values("pre_attn", 3, [4, 9]))
        assert arrays["1/positions"].tolist() == [4, 9]
        assert arrays["1/token_ids"].tolist() == [104, 109]
        assert arrays["0/post_block.2"].dtype == np.float32


def test_one_requests_safetensors_is_a_capture_file_of_its_own(root: Path, tmp_path: Path) -> None:
    names = export(
        CaptureReader(root, "job_x"),
        tmp_path / "out" / "rows.safetensors",
        hooks=["resid_post"],
        layers="1-2",
        requests=[1],
    )
    assert names == ["post_block.1", "post_block.2", "positions", "token_ids"]
    reader = CaptureReader(tmp_path / "out" / "rows.safetensors")
    assert reader.requests() == [1]
    assert reader.hooks(1) == ["post_block"]
    assert reader.layers(1) == [1, 2]
    assert reader.dtype(1) == "bfloat16"
    np.testing.assert_array_equal(reader.array(2, request=1), values("post_block", 2, [4, 9]))


def test_exported_requests_open_with_the_safetensors_package_or_by_themselves(
    tmp_path: Path,
) -> None:
    write(tmp_path, *(finished(request=n, requests=2, dtype="float32") for n in range(2)))
    export(CaptureReader(tmp_path, "job_x"), tmp_path / "rows.safetensors")
    tensors = safetensors.numpy.load_file(tmp_path / "rows.safetensors")
    np.testing.assert_array_equal(tensors["1/post_block.3"], values("post_block", 3, [0, 1, 2]))
    assert not list(tmp_path.glob(".*part*"))
    one = tmp_path / "out" / "job_x" / "rows.safetensors"
    export(CaptureReader(tmp_path, "job_x"), one, requests=[1])
    assert CaptureReader(one.parent).requests() == [1], "it does not miss the other"


@pytest.mark.parametrize(
    ("chosen", "field", "allowed"),
    [
        ({"hooks": ["mlp_in"]}, "hooks", "pre_attn, post_block"),
        ({"layers": "7"}, "layers", "[0, 1, 2, 3]"),
        ({"hooks": ["pre_attn"], "layers": "0-1"}, "layers", "[0, 3]"),
        ({"layers": "x"}, "layers", "[0, 1, 2, 3]"),
        ({"requests": [5]}, "request", "[0, 1]"),
    ],
)
def test_exporting_uncaptured_sites_names_them(
    root: Path, tmp_path: Path, chosen: dict[str, object], field: str, allowed: str
) -> None:
    with refuses(field=field, allowed=allowed):
        export(CaptureReader(root, "job_x"), tmp_path / "rows.npz", **chosen)  # type: ignore[arg-type]
    assert not (tmp_path / "rows.npz").exists()
    with refuses("must end in .npz or .safetensors"):
        export(CaptureReader(root, "job_x"), tmp_path / "rows.csv")


def test_show_describes_a_folder_or_a_job_in_the_capture_root(root: Path, tmp_path: Path) -> None:
    for source in ([root / "tag" / "job_x"], [root, "--set=job=job_x"]):
        code, text = run("get", "capture", *source)
        assert code == 0, text
        assert "pre_attn" in text
        assert "[3, 3, 5]" in text  # three layers, three positions, hidden size
    code, text = run(
        "get", "capture", root, "--set=job=job_x", "--set=hook=pre_attn", "--set=layer=3"
    )
    assert "layer 3, request 0, float32 [3, 5]" in text
    write(tmp_path, finished())
    assert run("get", "capture", tmp_path / "tag" / "job_x")[0] == 0


def test_verify_names_a_stage_or_a_blob_that_is_wrong_and_fails(root: Path, tmp_path: Path) -> None:
    assert run("check", "capture", root, "--set=job=job_x")[0] == 0
    path = root / "tag" / "job_x" / "p0001.a1.pp0.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    code, text = run("check", "capture", root, "--set=job=job_x")
    assert code != 0
    assert "p0001.a1.pp0.safetensors" in text
    assert "1 of 2 checks failed" in text
    write(tmp_path, finished(sites={"post_block": [0]}, all_sites={"post_block": [0, 1]}, stages=2))
    code, text = run("check", "capture", tmp_path, "--set=job=job_x")
    assert code != 0
    assert "missing tensors (1): post_block.1; stages present: 0, of 2 in total" in text


def test_a_request_that_is_missing_is_refused_unless_what_is_there_is_wanted(
    tmp_path: Path,
) -> None:
    write(tmp_path, finished(request=0, requests=2, positions=[0, 2], dropped=(1,)))
    source = (tmp_path, "--set=job=job_x")
    said = "captured 2 requests, but files exist for only 1: 0"
    for command in (
        ("get", "capture", *source),
        ("export", "capture", *source, "-o", tmp_path / "rows.npz"),
        ("check", "capture", *source),
    ):
        code, text = run(*command)
        assert code != 0, text
        assert said in text, text
    assert "2 of 3 checks failed" in text
    code, text = run("get", "capture", *source, "--set=partial=true")
    assert code == 0
    assert said in text
    assert "positions dropped under overload: 1 (1 in total)" in text
    options = ("--set=partial=true", "-o", tmp_path / "rows.npz")
    assert run("export", "capture", *source, *options)[0] == 0


def test_export_from_a_terminal_says_what_it_wrote(root: Path, tmp_path: Path) -> None:
    target = tmp_path / "rows.npz"
    chosen = ("--set=job=job_x", "--set=hooks=pre_attn:3", "--set=requests=0")
    code, text = run("export", "capture", root, "-o", target, *chosen)
    assert code == 0
    assert "3 arrays" in text
    assert target.is_file()


# --- Rows of ranks ---


SHAPE = RowShape(heads=4, width=3)
ROWS = np.arange(24, dtype=np.float32).reshape(2, 12)
STREAM = np.arange(10, dtype=np.float32).reshape(2, 5)


def part(
    hook: str, rows: np.ndarray, columns: BankColumns | None, rank: int, heads: tuple[int, ...] = ()
) -> FinishedCapture:
    """What one rank stores at `hook` of layer 1; the capture also names the other of `z` and
    `post_block`.
    """
    beside = {"post_block": [1]} if hook == "z" else {"z": [1]}
    capture = StoredCapture(
        sites={hook: [1]},
        positions="all",
        tag="tag",
        layout="packed",
        row=columns and columns.row,
        beside=beside,
        heads=list(heads),  # type: ignore[dict-item]
    )
    return FinishedCapture(
        spec=RankSpec(
            version="v", job="job_x", request=0, attempt=1, prompt_tokens=2, requests={"tag": 1}
        ),
        capture=capture,
        sites={hook: [1]},
        hidden_size=rows.shape[1],
        dtype="float32",
        positions=[0, 1],
        token_ids=[7, 8],
        worker="w",
        rank=rank,
        pp=0,
        stages=1,
        rows=lambda *_: [memoryview(np.ascontiguousarray(rows)).cast("B")],
        columns=columns,
    )


def parts(heads: tuple[int, ...] = ()) -> list[FinishedCapture]:
    """Two ranks with two heads each; the first also stores the stream."""
    found = [part("post_block", STREAM, None, 0)]
    for rank in (0, 1):
        columns = BankColumns(SHAPE, 6 * rank, 6 * rank + 6)
        if chosen := columns.chosen(heads):
            rows = np.concatenate(
                [ROWS[:, columns.start : columns.stop][:, each] for each in chosen], axis=1
            )
            found.append(part("z", rows, columns, rank, heads))
    return found


def test_a_reader_puts_the_columns_of_ranks_side_by_side(tmp_path: Path) -> None:
    write(tmp_path, *parts())
    reader = CaptureReader(tmp_path / "tag", "job_x")
    assert reader.hooks() == ["z", "post_block"]
    assert len(reader.files) == 3
    assert np.array_equal(reader.array(1, "z"), ROWS)
    assert np.array_equal(reader.array(1, "post_block"), STREAM)
    assert np.array_equal(reader.heads(1, "z"), ROWS.reshape(2, 4, 3))
    assert all(check.ok for check in reader.verify())
    with pytest.raises(MidstreamError, match="post_block has no heads"):
        reader.heads(1, "post_block")
    write(tmp_path, *parts(heads=(1, 2)))
    assert np.array_equal(
        CaptureReader(tmp_path / "tag", "job_x").heads(1, "z"), ROWS.reshape(2, 4, 3)[:, 1:3]
    )


@pytest.mark.parametrize("missing", [1, 2])
def test_a_rank_that_is_missing_leaves_the_rows_incomplete(tmp_path: Path, missing: int) -> None:
    write(tmp_path, *(part for number, part in enumerate(parts()) if number != missing))
    with pytest.raises(MidstreamError, match=r"incomplete: missing tensors \(1\): z.1"):
        CaptureReader(tmp_path / "tag", "job_x").array(1, "z")


def test_the_joined_download_and_an_export_have_whole_rows(tmp_path: Path) -> None:
    files = write(tmp_path, *parts())
    store = open_store(tmp_path)
    places = [
        (BlobPlace(file.path, file.offset, file.bytes, "job_x", 0, "tag"), file.crc32)
        for file in files
    ]
    joined = packed.join(packed.open_blobs(store, "job_x", places), {"z": [1], "post_block": [1]})
    raw = b"".join(joined.chunks())
    assert len(raw) == joined.length
    export(CaptureReader(tmp_path / "tag", "job_x"), tmp_path / "rows.safetensors")
    for reader in (
        CaptureReader.from_bytes(raw),
        CaptureReader.from_bytes((tmp_path / "rows.safetensors").read_bytes()),
    ):
        assert np.array_equal(reader.array(1, "z"), ROWS)
        assert np.array_equal(reader.array(1, "post_block"), STREAM)
        assert not [check.detail for check in reader.verify() if "expected" in check.detail]


def test_experts_are_chosen_by_the_rule_that_the_capture_holds(tmp_path: Path) -> None:
    logits = np.log(np.array([[1, 2, 4, 1], [8, 2, 4, 2]], dtype=np.float32))
    router = part("router", logits, BankColumns(RowShape(heads=1, width=4), 0, 4), 0)
    router = replace(
        router,
        routing=(
            RoutingKind(layers=[1], experts=4, top=2),
            RoutingKind(layers=[2], experts=4, top=1),
        ),
    )
    write(tmp_path, router, part("post_block", STREAM, None, 0), *parts()[1:])
    chosen, weights = CaptureReader(tmp_path / "tag", "job_x", partial=True).experts(1)
    assert chosen.tolist() == [[2, 1], [0, 2]]
    assert np.allclose(weights, [[2 / 3, 1 / 3], [2 / 3, 1 / 3]])
