"""Vectors in other tools' files: read as what the tools mean, written as the tools read them, and
refused where anything is wrong.
"""

import base64
import contextlib
import io
import json
import struct
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given, strategies as st

from midstream import MidstreamError, SteeringSpec
from midstream.client import vectors
from midstream.client.cli import options
from midstream.schemas.base.limits import MAX_FILE_TENSORS
from midstream.schemas.base.tensors import Tensor, from_numpy, to_numpy
from midstream.storage.formats import module_files
from midstream_bridges.formats import array_files, table
from midstream_bridges.formats.gguf import write as write_gguf

FORMAT_NAMES = ["safetensors", *(row.name for row in table.FORMATS if row.write)]
JOY = np.linspace(-1, 1, 8, dtype=np.float32)
CALM = np.float32(1) / np.arange(1, 9, dtype=np.float32)


def saved(value: Any, **given: Any) -> bytes:
    """As torch writes it."""
    out = io.BytesIO()
    torch.save(value, out, **given)
    return out.getvalue()


def zipped(members: dict[str, bytes], how: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", how) as archive:
        for name, raw in members.items():
            archive.writestr(name, raw)
    return out.getvalue()


def control_vector(path: Path, directions: dict[int, np.ndarray], **keys: Any) -> Path:
    """As repeng and EasySteer write it, with the library."""
    writer = gguf.GGUFWriter(path, "controlvector")
    writer.add_string("controlvector.model_hint", "llama")
    writer.add_uint32("controlvector.layer_count", len(directions))
    writer.add_array("general.tags", ["joy", "calm"])
    for name, value in keys.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"controlvector.{name}", value)
    for layer, vector in directions.items():
        writer.add_tensor(f"direction.{layer}", vector)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def sites(specs: list[SteeringSpec]) -> dict[Any, Any]:
    """Layer → vector as numbers."""
    return {
        spec.layers: to_numpy(spec.vector).tolist() for spec in specs if spec.vector is not None
    }


# --- GGUF ---


def test_directions_of_a_gguf_file_are_at_the_layers_of_their_names(tmp_path: Path) -> None:
    path = control_vector(
        tmp_path / "joy.gguf",
        {14: JOY, 3: CALM, 0: -JOY},
        method="pca",
        **{"explained_variance.3": 0.5},
    )
    specs = vectors.read(path)
    assert [(spec.layers, spec.hook, spec.op, spec.scale) for spec in specs] == [
        (n, None, None, None) for n in (0, 3, 14)
    ]
    assert sites(specs) == {0: (-JOY).tolist(), 3: CALM.tolist(), 14: JOY.tolist()}
    (spec,) = vectors.read(control_vector(tmp_path / "joy.gguf", {3: JOY.astype(np.float16)}))
    assert spec.vector == from_numpy(JOY.astype(np.float16))


@pytest.mark.parametrize(
    "key", [{"operation": "project"}, {"mode": "ablate"}, {"default_scale": 2}]
)
def test_a_gguf_key_that_may_change_the_arithmetic_is_refused(
    tmp_path: Path, key: dict[str, Any]
) -> None:
    with pytest.raises(
        ValueError, match=f"its key 'controlvector.{next(iter(key))}' .* valid keys"
    ):
        vectors.read(control_vector(tmp_path / "joy.gguf", {3: JOY}, **key))


def test_the_gguf_library_reads_what_is_written(tmp_path: Path) -> None:
    specs = [
        SteeringSpec(layers=7, vector=from_numpy(JOY)),
        SteeringSpec(layers=2, vector=from_numpy(CALM)),
    ]
    vectors.write(tmp_path / "both.gguf", specs, model="tiny")
    reader = gguf.GGUFReader(tmp_path / "both.gguf")
    assert {tensor.name: tensor.data.tobytes() for tensor in reader.tensors} == {
        "direction.7": JOY.tobytes(),
        "direction.2": CALM.tobytes(),
    }
    assert {tensor.tensor_type for tensor in reader.tensors} == {gguf.GGMLQuantizationType.F32}
    fields = {
        name: reader.fields[name].contents()
        for name in reader.fields
        if "." in name and not name.startswith("GGUF")
    }
    assert fields == {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "tiny",
        "controlvector.layer_count": 2,
    }


# --- torch ---


@pytest.mark.parametrize(
    ("value", "layers", "expected"),
    [
        (torch.from_numpy(JOY), 15, {15: JOY}),
        (torch.from_numpy(JOY)[None], "10-11", {"10-11": JOY}),
        (torch.nn.Parameter(torch.from_numpy(JOY)), 15, {15: JOY}),
        (torch.from_numpy(np.stack([JOY, CALM])), "4,9", {4: JOY, 9: CALM}),
        ({3: torch.from_numpy(JOY), 1: torch.from_numpy(CALM)}, None, {1: CALM, 3: JOY}),
        ({"layer_3": torch.from_numpy(JOY), "layer_1": torch.from_numpy(CALM)}, 3, {3: JOY}),
        (
            {"direction.3": torch.from_numpy(JOY), "direction.20": torch.from_numpy(CALM)},
            "0-9",
            {3: JOY},
        ),
        ({"resid_post.3": torch.from_numpy(JOY)}, None, {3: JOY}),
        # a view with strides and an offset
        (torch.from_numpy(np.stack([JOY, CALM])).T[:, 1], 2, {2: CALM}),
        (torch.from_numpy(JOY.astype(np.float64)), 2, {2: JOY}),
    ],
)
def test_torch_files_are_read_without_torch(
    value: Any, layers: Any, expected: dict[Any, np.ndarray]
) -> None:
    for protocol in (2, 4):
        specs = vectors.from_bytes(saved(value, pickle_protocol=protocol), layers)
        assert sites(specs) == {layer: vector.tolist() for layer, vector in expected.items()}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_torch_tensors_keep_their_bits(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(JOY).to(dtype)
    (spec,) = vectors.from_bytes(saved(tensor), 3)
    assert spec.vector == Tensor(
        dtype=str(dtype)[6:], shape=[8], data=tensor.view(torch.int16).numpy().tobytes()
    )  # type: ignore[arg-type]


def test_a_state_dict_of_pyreft_is_a_low_rank_entry() -> None:
    rotation = torch.randn(8, 2)
    weight = torch.randn(2, 8)
    bias = torch.randn(2)
    (spec,) = vectors.from_bytes(
        saved({"weight": weight, "bias": bias, "rotate_layer": rotation}), 3
    )
    assert spec.layers == 3
    assert spec.rotation == from_numpy(rotation.numpy().T)
    assert spec.weight == from_numpy(weight.numpy())
    assert spec.bias == from_numpy(bias.numpy())


def test_torch_loads_what_is_written_with_weights_only() -> None:
    specs = [
        SteeringSpec(layers=[2, 7], hook="mlp_out", vector=from_numpy(JOY)),
        SteeringSpec(layers=3, vector=from_numpy(CALM), scale=2.0),
    ]
    found = torch.load(io.BytesIO(vectors.to_bytes(specs, "pt")), weights_only=True)
    assert {name: value.numpy().tolist() for name, value in found.items()} == {
        "mlp_out.2": JOY.tolist(),
        "mlp_out.7": JOY.tolist(),
        "post_block.3": (CALM * np.float32(2)).tolist(),
    }


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (Evil(), "it holds a __builtin__.print"),
        ({"a": Evil()}, "it holds a __builtin__.print"),
        (JOY, "a numpy array: save torch.from_numpy"),
        ("joy", "it holds no tensors by name"),
        ({}, "it holds no tensors by name"),
        ([torch.zeros(4)], "it holds no tensors by name"),
        ({3: torch.zeros(4), "note": "joy"}, "'note' is not a tensor"),
        ({3: torch.zeros(4), "3": torch.zeros(4)}, "it names 3 twice"),
        ({(3,): torch.zeros(4)}, "keys other than texts and numbers"),
        (torch.zeros(4, dtype=torch.int8), "CharStorage"),
        (torch.zeros(1).expand(1 << 20), "contiguous"),
        (torch.full((4,), torch.nan), "not finite"),
        (torch.zeros(2, 2, 2), "shape"),
        (
            {"weight": torch.zeros(2, 4), "rotate_layer": torch.zeros(4, 2)},
            "its LoReFT has rotate_layer, weight; valid",
        ),
    ],
)
def test_torch_files_of_other_things_are_refused(
    value: Any, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match=says):
        vectors.from_bytes(saved(value), 1)
    assert capsys.readouterr().out == ""


#: The value below in a pair with itself, which the pickle names by its number.
TWICE = [b"h%c\x86q%c" % (level, level + 1) for level in range(40)]


@pytest.mark.parametrize(
    ("pickle", "says"),
    [
        (b"]q\0" + b"".join(TWICE), f"it holds more than {array_files.MAX_ITEMS} items"),
        (b"]q\0h\0a", "it is nested too deeply"),
        (b"]" * 3000 + b"a" * 2999, "it is nested too deeply"),
    ],
)
def test_nested_lists_of_torch_files_are_bounded(pickle: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        vectors.from_bytes(zipped({"a/data.pkl": b"\x80\x02" + pickle + b"."}), 1)


@given(st.binary(max_size=200))
def test_any_pickle_is_read_or_refused(pickle: bytes) -> None:
    raw = zipped({"a/data.pkl": b"\x80\x02" + pickle + b"."})
    with pytest.raises(ValueError):  # noqa: PT011  # whichever it is
        vectors.from_bytes(raw, 1)


@given(st.data())
def test_damaged_torch_files_are_read_or_refused(data: st.DataObject) -> None:
    raw = bytearray(saved({3: torch.from_numpy(JOY), 1: torch.from_numpy(CALM)}))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        vectors.from_bytes(bytes(raw))


# --- numpy ---


def npz(**arrays: np.ndarray) -> bytes:
    out = io.BytesIO()
    np.savez_compressed(out, **arrays)  # type: ignore[arg-type]
    return out.getvalue()


def test_npz_files_name_layers_sites_or_fields() -> None:
    assert sites(vectors.from_bytes(npz(**{"3": JOY, "12": CALM}))) == {
        3: JOY.tolist(),
        12: CALM.tolist(),
    }
    assert [
        spec.hook for spec in vectors.from_bytes(npz(**{"mlp_out.3": JOY, "resid_pre.3": CALM}))
    ] == ["pre_attn", "mlp_out"]
    (spec,) = vectors.from_bytes(
        npz(rotation=np.ones((2, 8)), weight=np.ones((2, 8)), bias=np.zeros(2)), 3, op="lowrank"
    )
    assert spec.layers == 3
    assert spec.op == "lowrank"
    assert spec.rotation == from_numpy(np.ones((2, 8), np.float32))


def declaring(shape: tuple[int, ...], values: bytes = b"") -> bytes:
    """A `.npy` file whose header declares `shape`, float32, with these bytes."""
    out = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        out, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )  # type: ignore[no-untyped-call]
    return out.getvalue() + values


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (4,), }\n"


def headed(header: str) -> bytes:
    """A `.npy` file with this header and four numbers."""
    raw = header.encode("latin1")
    return array_files.NPY_MAGIC + b"\x01\x00" + len(raw).to_bytes(2, "little") + raw + bytes(16)


@pytest.mark.parametrize(
    "header",
    ["((((", "(" * 9000, "[]", HEADER.replace("4,)", "-4,)"), HEADER.replace("<f4", "|O")],
    ids=["open", "deep", "list", "negative", "objects"],
)
def test_a_wrong_numpy_header_is_refused_by_the_name_of_its_member(header: str) -> None:
    with pytest.raises(ValueError, match=r"W_enc\.npy"):
        array_files.read_npz(zipped({"W_enc.npy": headed(header)}))


@given(st.data(), st.text(max_size=60))
def test_whatever_a_numpy_file_holds_it_is_read_or_refused(data: st.DataObject, text: str) -> None:
    raw = bytearray(headed(HEADER))
    for _ in range(data.draw(st.integers(0, 6))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    for content in (bytes(raw), headed(ascii(text))):
        with contextlib.suppress(ValueError):
            array_files.read_npy(content)


ZEROS = 72 << 20  # more than a file may have

BOMBS: dict[str, Callable[[], bytes]] = {
    "npy that declares 256 MiB": lambda: declaring((1 << 26,)),
    "npz that declares 256 MiB": lambda: zipped(
        {"3.npy": declaring((1 << 26,))}, zipfile.ZIP_DEFLATED
    ),
    "npz of zeros": lambda: zipped(
        {"3.npy": declaring((ZEROS // 4,), bytes(ZEROS))}, zipfile.ZIP_DEFLATED
    ),
    "torch file of zeros": lambda: zipped(
        {"a/data.pkl": b"\x80\x02}.", "a/data/0": bytes(ZEROS)}, zipfile.ZIP_DEFLATED
    ),
    "pickle with a memo of 2^31": lambda: zipped({"a/data.pkl": b"\x80\x02}r\xff\xff\xff\x7f."}),
    "pickle of a text of 4 GiB": lambda: zipped({"a/data.pkl": b"\x80\x02X\xff\xff\xff\xff."}),
    "gguf text of 2^60": lambda: (
        b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + struct.pack("<Q", 1 << 60)
    ),
    "gguf array of 2^60": lambda: (
        b"GGUF" + struct.pack("<IQQQ", 3, 1, 1, 1) + b"a" + struct.pack("<IIQ", 9, 4, 1 << 60)
    ),
    "zstd of zeros": lambda: json.dumps(
        lens(JOY[None], [3], data=base64.b64encode(zstandard.compress(bytes(ZEROS))).decode())
    ).encode(),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_that_declares_much_takes_no_memory(name: str) -> None:
    raw = BOMBS[name]()
    assert len(raw) < 1 << 20
    tracemalloc.start()
    try:
        with pytest.raises(ValueError):  # noqa: PT011  # whichever it is
            vectors.from_bytes(raw, 3)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 16 << 20


def test_a_file_beyond_its_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "joy.npy", JOY)
    monkeypatch.setattr(vectors, "MAX_VECTOR_FILE", 100)
    with pytest.raises(ValueError, match="more than 100 bytes"):
        vectors.read(tmp_path / "joy.npy", 3)


# --- vllm-lens ---


def lens(
    activations: np.ndarray, layers: list[int], data: str | None = None, **given: Any
) -> dict[str, Any]:
    """A SteeringVector as its `model_dump` gives it."""
    tensor = {
        "data": data or base64.b64encode(zstandard.compress(activations.tobytes(), 1)).decode(),
        "dtype": str(activations.dtype),
        "original_dtype": f"torch.{activations.dtype}",
        "shape": list(activations.shape),
        "compression": "zstd",
    }
    return {
        "activations": tensor,
        "layer_indices": layers,
        "scale": 2.0,
        "norm_match": False,
        "position_indices": None,
        **given,
    }


def test_steering_vectors_of_vllm_lens_are_one_entry_per_layer() -> None:
    specs = vectors.from_bytes(
        json.dumps(lens(np.stack([JOY, CALM]), [15, 20], norm_match=True)).encode()
    )
    assert [(spec.layers, spec.scale, spec.norm_match, spec.positions) for spec in specs] == [
        (15, 2.0, True, None),
        (20, 2.0, True, None),
    ]
    assert sites(specs) == {15: JOY.tolist(), 20: CALM.tolist()}


@pytest.mark.parametrize(("positions", "expected"), [(None, [[0], [1]]), ([5, 9], [[5], [9]])])
def test_vectors_by_position_are_one_entry_per_position(positions: Any, expected: Any) -> None:
    specs = vectors.from_bytes(
        json.dumps([lens(np.stack([JOY, CALM])[None], [15], position_indices=positions)]).encode()
    )
    assert [(spec.layers, spec.positions) for spec in specs] == [
        (15, expected[0]),
        (15, expected[1]),
    ]
    assert [to_numpy(spec.vector).tolist() for spec in specs if spec.vector] == [
        JOY.tolist(),
        CALM.tolist(),
    ]


def test_a_steering_vector_saved_with_torch_is_read() -> None:
    value = {
        "activations": torch.from_numpy(JOY)[None],
        "layer_indices": [4],
        "scale": 3.0,
        "norm_match": False,
        "position_indices": None,
    }
    (spec,) = vectors.from_bytes(saved(value))
    assert spec.layers == 4
    assert spec.scale == 3.0
    assert spec.vector == from_numpy(JOY)


# --- Round trips ---

_VECTORS = st.lists(
    st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=4, max_size=4
).map(lambda values: np.array(values, np.float32))


@given(
    st.dictionaries(st.integers(1, 200), _VECTORS, min_size=1, max_size=6),
    st.sampled_from(FORMAT_NAMES),
)
def test_vectors_round_trip_through_every_format_bit_for_bit(
    directions: dict[int, np.ndarray], form: str
) -> None:
    specs = [
        SteeringSpec(layers=layer, vector=from_numpy(vector))
        for layer, vector in directions.items()
    ]
    found = vectors.from_bytes(vectors.to_bytes(specs, form))
    assert {spec.layers: spec.vector for spec in found} == {
        spec.layers: spec.vector for spec in specs
    }
    assert {
        (spec.hook or "post_block", spec.scale or 1.0, spec.op or "add", spec.positions or "all")
        for spec in found
    } == {("post_block", 1.0, "add", "all")}


@pytest.mark.parametrize(
    ("spec", "form", "says"),
    [
        ({"op": "ablate"}, "gguf", "op ablate, which gguf cannot hold"),
        ({"positions": "all_generated"}, "pt", "positions, which pt cannot hold"),
        ({"norm_match": True}, "npz", "norm_match, which npz cannot hold"),
        ({"hook": "mlp_out"}, "gguf", "cannot hold mlp_out"),
        ({"hook": "mlp_out"}, "vllm-lens", "hook mlp_out, which vllm-lens cannot hold"),
        ({"layers": 0}, "gguf", "layer 0 cannot be in a GGUF control vector"),
        ({"layers": "0-3"}, "gguf", "layers '0-3': give numbers"),
        ({}, "onnx", "no format 'onnx'; valid: safetensors, gguf"),
        ({"layers": [3, 3]}, "npz", "two entries are at post_block of layer 3"),
    ],
)
def test_what_a_format_cannot_hold_is_refused(spec: dict[str, Any], form: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        vectors.to_bytes([SteeringSpec(**{"layers": 3, "vector": from_numpy(JOY), **spec})], form)


def test_a_scale_and_norm_match_are_kept_where_the_format_has_them() -> None:
    spec = SteeringSpec(layers=[3, 5], vector=from_numpy(JOY), scale=0.1, norm_match=True)
    assert vectors.from_bytes(vectors.to_bytes([spec], "vllm-lens")) == [
        SteeringSpec(layers=layer, vector=from_numpy(JOY), scale=0.1, norm_match=True)
        for layer in (3, 5)
    ]


# --- What is wrong ---


def gguf_with(old: bytes, new: bytes) -> bytes:
    raw = write_gguf({3: JOY, 4: CALM}, "m")
    assert old in raw
    return raw.replace(old, new)


def gguf_at(place: int, form: str, value: int) -> bytes:
    raw = write_gguf({3: JOY}, "m")
    number = struct.pack(form, value)
    return raw[:place] + number + raw[place + len(number) :]


SHAPE = struct.pack("<IQI", 1, 8, 0)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: write_gguf({3: JOY}, "m")[:30], "it ends early"),
        (lambda: write_gguf({3: JOY}, "m")[:-1], "it ends early"),
        (
            lambda: gguf_with(b"controlvector", b"llamallamalla"),
            "general.architecture is 'llamallamalla'; valid: 'controlvector'",
        ),
        (
            lambda: gguf_with(b"direction.3", b"direction.x"),
            "'direction.x' is not a direction",
        ),
        (lambda: gguf_with(b"direction.4", b"direction.3"), "two directions for layer 3"),
        (lambda: gguf_at(4, ">I", 3), "version"),
        (lambda: gguf_at(8, "<Q", 1 << 40), "1099511627776 tensors"),
        (lambda: gguf_at(16, "<Q", 1 << 40), "1099511627776 keys"),
        (
            lambda: gguf_with(SHAPE, struct.pack("<IQI", 1, 1 << 30, 0)),
            "1073741824 elements",
        ),
        (lambda: gguf_with(SHAPE, struct.pack("<IQI", 1, 8, 2)), "ggml type 2; valid: F32"),
        (lambda: gguf_with(SHAPE, struct.pack("<IQI", 2, 8, 0)), "2 dimensions"),
        (
            lambda: saved(torch.zeros(4), _use_new_zipfile_serialization=False),
            "torch before",
        ),
        (
            lambda: zipped({"3.npy": declaring((8,), JOY.tobytes()), "x.npy": b""}).replace(
                b"x.npy", b"3.npy"
            ),
            "has a member twice",
        ),
        (
            lambda: zipped({f"{number}.npy": b"" for number in range(MAX_FILE_TENSORS + 100)}),
            f"more than {MAX_FILE_TENSORS} members",
        ),
        (
            lambda: zipped({"a/data.pkl": b"\x80\x02}."}, zipfile.ZIP_DEFLATED),
            "torch.save does not compress",
        ),
        (lambda: zipped({"3.npy": declaring((8,), JOY.tobytes()[:-4])}), "its|it is"),
        (lambda: zipped({"3.npy": declaring((8,), JOY.tobytes())})[:-30], "its archive is damaged"),
        *(
            (lambda raw=raw: raw, r"it is|its |has")
            for raw in (
                *(b"", b"joy", b"\x00" * 64, b"PK\x03\x04", b"[]", b"{}", b"[1]"),
                array_files.NPY_MAGIC,
            )
        ),
        *(
            (lambda change=change: json.dumps(lens(JOY[None], [15], **change)).encode(), says)
            for change, says in (
                ({"layer_indices": [1, 2]}, "activations: has shape"),
                ({"position_indices": [3]}, "position_indices: is for activations of shape"),
                ({"layer_indices": []}, "for 0 layers"),
                ({"layer": [3]}, "unknown field `layer`"),
                ({"scale": "much"}, "scale"),
            )
        ),
    ],
)
def test_a_file_in_which_anything_is_wrong_is_refused(make: Callable[[], bytes], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        vectors.from_bytes(make())


# --- On the command line ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("joy.gguf", [(3, None), (14, None)]),
        ("joy.gguf:10-20", [(14, None)]),
        ("joy.gguf:14:0.5", [(14, 0.5)]),
        ("joy.gguf:scale=2", [(3, 2.0), (14, 2.0)]),
        ("joy.gguf:3:hook=mlp_out", [(3, None)]),
        ("one.pt:15:4", [(15, 4.0)]),
    ],
)
def test_files_are_named_with_layers_and_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    control_vector(Path("joy.gguf"), {3: JOY, 14: CALM})
    Path("one.pt").write_bytes(saved(torch.from_numpy(JOY)))
    entries = options.steering([text])
    assert [
        (entry.layers, entry.scale) for entry in entries if isinstance(entry, SteeringSpec)
    ] == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("one.pt", "names no layer: write FILE:LAYERS"),
        ("joy.gguf:5", r"it has no layer 5; it has 3, 14"),
        ("joy.gguf:-1", "counted from 0"),
        ("joy.gguf:4-9", "none of the layers 4-9; it has 3, 14"),
        ("joy.safetensors:3:hook=mlp_out", "names its hook points"),
        ("rows.pt:3", "2 rows for 1 layers"),
        ("rows.pt:all", "2 rows: name as many layers"),
    ],
)
def test_layers_that_do_not_fit_a_file_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    control_vector(Path("joy.gguf"), {3: JOY, 14: CALM})
    Path("one.pt").write_bytes(saved(torch.from_numpy(JOY)))
    Path("rows.pt").write_bytes(saved(torch.zeros(2, 8)))
    Path("joy.safetensors").write_bytes(
        module_files.to_bytes([SteeringSpec(layers=3, hook="post_block", vector=from_numpy(JOY))])
    )
    with pytest.raises(MidstreamError, match=says):
        options.steering([text])
