"""Are the bytes that processes of different versions exchange still the same, and are former ones
still read?
"""

import ast
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from tree import ROOT, product, sources
from wire_samples import CHOSEN, FILE, JSON, MSGPACK, encoders, full, small, written

from midstream.broker.receipts import frames
from midstream.schemas.base.records import (
    Published,
    Record,
    from_json,
    from_msgpack,
    to_json,
    to_msgpack,
)
from midstream.schemas.jobs.jobs import Job
from midstream.schemas.jobs.models import ModelInfo, WorkerInfo

KEPT: dict[str, dict[str, Any]] = json.loads(FILE.read_text())
NAMES = sorted(encoders())
HOW = (
    "they have changed: if that is meant, run `python tools/data/wire_samples.py`, "
    "and see that older peers can live with it"
)


@pytest.mark.parametrize("name", [*NAMES, "Frame"])
def test_encoded_samples_equal_the_golden_bytes(name: str) -> None:
    assert written()[name] == KEPT[name]["now"], HOW


def read(name: str, raw: bytes) -> Any:
    kind, _ = encoders()[name]
    return from_msgpack(raw, kind) if kind in MSGPACK else from_json(raw, kind)


@pytest.mark.parametrize("name", NAMES)
def test_golden_bytes_decode_to_the_samples(name: str) -> None:
    kind, _ = encoders()[name]
    assert read(name, bytes.fromhex(KEPT[name]["now"]["small"])) == small(kind)
    assert read(name, bytes.fromhex(KEPT[name]["now"]["full"])) == full(kind)


#: (struct, field) of former versions that readers may drop.
REMOVED = {
    ("ModelInfo", "quantisation"),
    ("ModelInfo", "digest"),
    ("RankSpec", "steering"),  # a rank refuses the requests of another version
}


@pytest.mark.parametrize("name", [name for name in NAMES if KEPT[name]["former"]])
def test_bytes_of_former_versions_decode_to_their_values(name: str) -> None:
    kind, _ = encoders()[name]
    plain = msgspec.msgpack.decode if kind in MSGPACK else msgspec.json.decode
    for raw in map(bytes.fromhex, KEPT[name]["former"]):
        assert lost(read(name, raw), plain(raw)) == []


def lost(value: Any, raw: Any, at: str = "$") -> list[str]:
    """Return where `value` differs from `raw`, which it was decoded from; `REMOVED` aside."""
    if isinstance(value, msgspec.Raw):
        value = msgspec.msgpack.decode(value)
    if isinstance(value, msgspec.Struct):
        fields = {field.encode_name: field.name for field in msgspec.structs.fields(value)}
        tag = value.__struct_config__.tag_field
        tags = tag is not None  # the first item of an array
        named = raw if isinstance(raw, dict) else dict(zip(fields, raw[tags:], strict=False))
        inner = [
            (getattr(value, fields[key]) if key in fields else None, named[key], key)
            for key in named
            if key != tag and (type(value).__name__, key) not in REMOVED
        ]
    elif isinstance(value, dict):
        inner = [(value.get(key), raw[key], key) for key in raw]
    elif isinstance(value, list | tuple) and len(value) == len(raw):
        inner = [(one, raw[number], str(number)) for number, one in enumerate(value)]
    else:
        return [] if msgspec.to_builtins(value, builtin_types=(bytes,)) == raw else [at]
    return [place for one, was, key in inner for place in lost(one, was, f"{at}.{key}")]


@pytest.mark.parametrize("kind", list(frames.FrameKind), ids=lambda kind: kind.name)
def test_golden_frames_decode(kind: frames.FrameKind) -> None:
    frame = frames.unpack(bytes.fromhex(KEPT["Frame"]["now"][kind.name]))
    assert frame == frames.Frame(kind, "0123456789abcdef" * 2, 7, b"payload")


#: Name of a union → its members.
UNIONS = {"FitOutcome": {"FitResult", "LensFitResult"}}
#: Read from what this very process or a child of it wrote, or from a file of this machine.
OF_THIS_MACHINE = {
    *("PlaneConfig", "JobRequest", "ReadRequest", "HelperReply"),
    *("DeskCommand", "DeskMessage", "DeskAnswer", "PoolRequest", "PoolAnswer"),
}


def decoded_types() -> Iterator[tuple[str, str]]:
    """(where, name of a struct) of every place in broker, workers and the package of harvests that
    reads bytes into one.
    """
    for path in [*sources("broker", "workers"), *product("harvest")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            told = [
                keyword.value
                for keyword in node.keywords
                if keyword.arg == "type" and called == "decode"
            ]
            if called in ("from_msgpack", "from_json") and len(node.args) == 2:
                told.append(node.args[1])
            elif called == "Decoder" and node.args:
                told.append(node.args[0])
            for wanted in told:
                names = {
                    one.id
                    for one in ast.walk(wanted)
                    if isinstance(one, ast.Name) and one.id[0].isupper()
                }
                yield from (
                    (f"{path.relative_to(ROOT)}:{node.lineno}", member)
                    for name in names - {"Any"}
                    for member in UNIONS.get(name, {name})
                )


def test_every_struct_that_is_read_from_a_wire_or_from_redis_is_among_the_samples() -> None:
    found = list(decoded_types())
    assert len(found) > 15, "the scan has gone blind"
    assert [(where, name) for where, name in found if name not in {*NAMES, *OF_THIS_MACHINE}] == []


def test_the_samples_fill_every_field() -> None:
    for kind in (*MSGPACK, *JSON):
        value = full(kind)
        for field in msgspec.structs.fields(kind):
            if field.default is not msgspec.NODEFAULT and (kind.__name__, field.name) not in CHOSEN:
                assert getattr(value, field.name) != field.default, f"{kind.__name__}.{field.name}"


def test_jobs_without_new_fields_keep_their_old_bytes() -> None:
    # So an older worker, which refuses fields that it does not know, can still run it.
    assert set(msgspec.msgpack.decode(to_msgpack(small(Job)))) == {
        "id",
        "kind",
        "model",
        "prompts",
        "sampling",
        "created",
    }


@pytest.mark.parametrize("kind", [ModelInfo, WorkerInfo])
def test_unknown_fields_from_newer_workers_are_ignored(kind: type[Record]) -> None:
    assert issubclass(kind, Published)
    told = msgspec.json.decode(to_json(full(kind))) | {"invented_later": 1}
    assert from_json(msgspec.json.encode(told), kind) == full(kind)


def test_unknown_fields_in_jobs_are_refused() -> None:
    told = msgspec.msgpack.decode(to_msgpack(small(Job))) | {"invented_later": 1}
    with pytest.raises(msgspec.ValidationError, match="invented_later"):
        from_msgpack(msgspec.msgpack.encode(told), Job)
