"""Headers of files that come from elsewhere are read, or refused with a ValueError that names the
tensor; nothing else comes out.
"""

import io
import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from refusal_kit import refuses
from safetensors.numpy import save
from typer.testing import CliRunner

from midstream.client.cli.main import app
from midstream.schemas.artifacts.loras import LoraSupport
from midstream.schemas.base.errors import MidstreamError, Problem, invalid
from midstream.schemas.base.records import from_json, to_json
from midstream.storage.formats import lens_files, lora_files, module_files, sae_files
from midstream.storage.formats.capture_blobs import DamagedBlob, read_header
from midstream.storage.formats.tensor_files import npy_header, whole_header

SAES = Path(__file__).parents[2] / "data" / "saes"
MODEL: dict[str, Any] = {"hooks": ["post_block"], "num_layers": 4, "hidden_size": 8}


def file_of(header: str, size: int = 16) -> bytes:
    raw = header.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(size)


def tensor(
    name: str = "x", shape: Any = "[4]", offsets: str = "[0, 16]", dtype: str = '"F32"'
) -> str:
    return f'"{name}": {{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}'


#: Header, and words of the refusal.
WRONG = [
    ("{" + tensor(shape="[1e400]") + "}", "x has no valid entry in the header"),
    ("{" + tensor(shape="[1.5]") + "}", "x has no valid entry in the header"),
    ("{" + tensor(shape="[-4]") + "}", "x has no valid entry in the header"),
    (
        "{" + tensor(shape="[4611686018427387904, 4611686018427387904]") + "}",
        "x has no valid entry in the header",
    ),
    ("{" + tensor(shape="[" + "9," * 1000 + "9]") + "}", "x has no valid entry in the header"),
    ("{" + tensor(name="\\ud800") + "}", "no valid safetensors header"),
    ("{" + tensor(offsets="[0, 16, 16]") + "}", "x has no valid entry in the header"),
    ("{" + tensor(offsets='["0", "16"]') + "}", "x has no valid entry in the header"),
    ("{" + tensor(offsets="[16, 0]") + "}", "x has -16 bytes; its shape [4] of F32 needs 16"),
    ("{" + tensor(offsets="[0, 8]") + "}", "x has 8 bytes; its shape [4] of F32 needs 16"),
    ("{" + tensor(offsets="[8, 24]") + "}", "x begins at byte 8, valid: 0"),
    (
        "{" + tensor(shape="[2]", offsets="[0, 8]") + "," + tensor("y", "[3]", "[4, 16]") + "}",
        "y begins at byte 4, valid: 8",
    ),
    ("{" + tensor(shape="[40]", offsets="[0, 160]") + "}", "are not all there"),
    ("{" + tensor(shape="[2]", offsets="[0, 8]") + "}", "8 bytes after its tensors"),
    ("{" + tensor(dtype='"I64"', shape="[2]") + "}", "x is I64; valid: F32, F16, BF16"),
    ("{" + '"x": ' + "[" * 50_000 + "}", "no valid safetensors header"),
    ("[]", "no valid safetensors header"),
]


@pytest.mark.parametrize(("header", "says"), WRONG, ids=map(str, range(len(WRONG))))
def test_wrong_headers_are_refused_alike_in_every_kind_of_file(
    tmp_path: Path, header: str, says: str
) -> None:
    """Of an adapter, an autoencoder and a tuned lens: a 400 that names the field, the file and the
    tensor.
    """
    raw = file_of(header)
    lora = tmp_path / "lora"
    sae = tmp_path / "sae"
    lens = tmp_path / "lens"
    lora.mkdir()
    lens.mkdir()
    (lora / lora_files.CONFIG).write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4})
    )
    (lora / lora_files.WEIGHTS).write_bytes(raw)
    shutil.copytree(SAES / "standard", sae)
    (sae / sae_files.WEIGHTS).write_bytes(raw)
    (lens / lens_files.FILE).write_bytes(raw)
    for name, check in {
        lora_files.WEIGHTS: lambda: lora_files.check_on(lora, LoraSupport(max_rank=8, modules={})),
        sae_files.WEIGHTS: lambda: sae_files.check_on(sae, None, None, **MODEL),
        lens_files.FILE: lambda: lens_files.check_on(lens, 4, 8),
    }.items():
        with refuses(name, says, status=400, field="path"):
            check()


def npy(header: str) -> bytes:
    raw = header.encode("latin1")
    return b"\x93NUMPY\x01\x00" + len(raw).to_bytes(2, "little") + raw


NPY = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }\n"


@pytest.mark.parametrize(
    "header",
    [
        "((((",
        "(" * 9000,
        "{",
        "[]",
        "{'descr': '<f4'}",
        NPY.replace("4,)", "-4,)"),
        NPY.replace("<f4", "|O"),
    ],
    ids=["open", "deep", "brace", "list", "short", "negative", "objects"],
)
def test_wrong_npy_headers_are_refused_by_member_and_also_by_the_client(
    tmp_path: Path, header: str
) -> None:
    with zipfile.ZipFile(tmp_path / "params.npz", "w") as archive:
        archive.writestr("W_enc.npy", npy(header) + bytes(16))
    with refuses(match=r"params\.npz.*W_enc", status=400, field="path"):
        sae_files.check_on(tmp_path, "post_block", 1, **MODEL)
    with zipfile.ZipFile(tmp_path / "probe.npz", "w") as archive:
        archive.writestr("weight.npy", npy(header) + bytes(16))
    refused_file = CliRunner().invoke(
        app, ["put", "probe", "p", str(tmp_path / "probe.npz"), "--set", "layer=0"]
    )
    assert isinstance(refused_file.exception, MidstreamError)
    assert refused_file.exception.field == "FILE"


#: What a header may hold anywhere, valid or not.
ANY = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 70), 1 << 70)
    | st.floats()
    | st.sampled_from(["F32", "BF16", "I64", "x", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["dtype", "shape", "data_offsets", "y"]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries({"dtype": ANY, "shape": ANY, "data_offsets": ANY}) | ANY
HEADERS = (
    st.dictionaries(
        st.sampled_from(["x", "y", "post_block.0", "__metadata__", "\ud800"]), ENTRIES, max_size=4
    )
    .map(json.dumps)
    .map(file_of)
)
VALID = save({"x": np.ones((2, 2), np.float32), "y": np.ones(3, np.float32)})


def changed(raw: bytes) -> st.SearchStrategy[bytes]:
    """A file in which some bytes are others, or which ends early."""
    at = st.tuples(st.integers(0, len(raw) - 1), st.integers(0, 255))
    return st.tuples(st.lists(at, max_size=6), st.integers(0, len(raw))).map(
        lambda change: bytes(
            {**dict(enumerate(raw)), **dict(change[0])}[place] for place in range(len(raw))
        )[: change[1] or None]
    )


def read_or_refused(*parsers: Callable[[], object]) -> None:
    for parse in parsers:
        try:
            parse()
        except ValueError as error:
            to_json(invalid("path", str(error)).problem())


@settings(max_examples=100, deadline=None)
@given(HEADERS | changed(VALID) | st.binary(max_size=200))
def test_whatever_a_safetensors_file_holds_it_is_read_or_refused(raw: bytes) -> None:
    def read(start: int, count: int) -> bytes:
        return raw[start : start + count]

    read_or_refused(
        lambda: whole_header(read, len(raw)),
        lambda: read_header(read, len(raw)),
        lambda: lora_files.parse(b"{}", raw),
        lambda: module_files.specs_of(raw),
    )


@settings(max_examples=60, deadline=None)
@given(changed(npy(NPY) + bytes(16)) | st.text(max_size=60).map(lambda text: npy(ascii(text))))
def test_whatever_a_numpy_file_holds_it_is_read_or_refused(raw: bytes) -> None:
    read_or_refused(lambda: npy_header(io.BytesIO(raw)))


def test_a_whole_safetensors_file_is_read() -> None:
    _, places = whole_header(lambda start, count: VALID[start : start + count], len(VALID))
    assert {name: place.shape for name, place in places.items()} == {"x": [2, 2], "y": [3]}
    with pytest.raises(DamagedBlob, match="not all there"):
        whole_header(lambda start, count: VALID[start : start + count], len(VALID) - 1)


def test_a_problem_can_be_encoded_whatever_it_quotes() -> None:
    error = MidstreamError("invalid_request", "no \ud800 here", field="a\udcff", allowed="\udc80")
    problem = from_json(to_json(error.problem("/v1/\ud801")), Problem)
    assert problem.detail == "no \\ud800 here"
    assert problem.field == "a\\udcff"
    assert problem.allowed == "\\udc80"
