"""Is what is typed read as it was meant, and does a mistake name its option?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from refusal_kit import refuses
from safetensors.numpy import save_file

from midstream import SteeringSpec
from midstream.client.cli import options
from midstream.schemas.base.records import json_or_text
from midstream.schemas.base.tensors import from_numpy

JOY = np.arange(4, dtype=np.float32)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, which has files of vectors, good and bad ones."""
    monkeypatch.chdir(tmp_path)
    np.save("joy.npy", JOY)
    np.save("evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)  # field case 42
    np.savez("reft.npz", rotation=np.ones((2, 4)), weight=np.ones((2, 4)), bias=np.zeros(2))
    save_file({"post_block.3": JOY, "mlp_out.2": JOY}, "joy.safetensors")
    Path("empty.npz").write_bytes(b"")
    Path("torn.npz").write_bytes(b"PK\x03\x04torn")
    Path("torn.safetensors").write_bytes(b"torn")
    return tmp_path


def steering(text: str) -> Any:
    (entry,) = options.steering([text])
    return entry


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        *((options.layers, text, text) for text in ("all", "0-5", "1,4,-1", "nonsense", None)),
        (options.layers, "3", 3),
        (options.layers, "-1", -1),
        (options.positions, None, None),
        (options.positions, "all_prompt", "all_prompt"),
        (options.positions, "0,5,-1", [0, 5, -1]),
        (options.positions, "5:", {"start": 5}),
        (options.positions, "5:9", {"start": 5, "stop": 9}),
        (options.positions, "last:64", {"last": 64}),
        (options.positions, "-4:", {"start": -4}),
        (options.positions, ":9", {"stop": 9}),
        (options.positions, "0,5:9,-1", [0, {"start": 5, "stop": 9}, -1]),
        (options.positions, '{"role": "user", "turn": -1}', {"role": "user", "turn": -1}),
        (options.positions, ":", ":"),
        (options.positions, '{"turn": -1, "part": "content"}', {"turn": -1, "part": "content"}),
        (options.positions, "turn=-1", "turn=-1"),
        (options.positions, "5:x", "5:x"),
        (json_or_text, "3", 3),
        (json_or_text, "0-5", "0-5"),
        (json_or_text, "true", True),
        (json_or_text, '"3"', "3"),
        (json_or_text, "[0, -1]", [0, -1]),
        (json_or_text, "", ""),
    ],
)
def test_what_is_typed_becomes_fields(
    parse: Callable[[Any], Any], text: str | None, meant: Any
) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("@joy", {}),
        ("@joy:2.0", {"scale": 2.0}),
        ("@joy:scale=-1", {"scale": -1.0}),
        ("@joy:2:positions=all_generated", {"scale": 2.0, "positions": "all_generated"}),
        ("@joy:positions=5:9", {"positions": {"start": 5, "stop": 9}}),
        ('@joy:positions={"role":"user"}:scale=3', {"scale": 3.0, "positions": {"role": "user"}}),
        (
            '@joy:trigger={"text": "so", "after": "end"}:scale=2',
            {"scale": 2.0, "trigger": {"text": "so", "after": "end"}},
        ),
    ],
)
def test_a_module_is_typed_with_its_strength(text: str, fields: dict[str, Any]) -> None:
    assert steering(text) == msgspec.convert({"module": "joy", **fields}, SteeringSpec)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("joy.npy:3", {"layers": 3}),
        ("joy.npy:3-5:2.5", {"layers": "3-5", "scale": 2.5}),
        ("joy.npy:0,3:hook=resid_pre", {"layers": "0,3", "hook": "resid_pre"}),
        ("joy.npy:3:op=ablate", {"layers": 3, "op": "ablate"}),
        ("joy.npy:all:0.2:norm_match=true", {"layers": "all", "scale": 0.2, "norm_match": True}),
        (
            "joy.npy:3:2:hook=resid_pre:positions=0,-1",
            {"layers": 3, "scale": 2.0, "hook": "resid_pre", "positions": [0, -1]},
        ),
        (
            "joy.npy:0-2:op=clamp:low=-1:high=2.5:strength=0.5:positions=all_generated",
            {
                "layers": "0-2",
                "op": "clamp",
                "low": -1.0,
                "high": 2.5,
                "strength": 0.5,
                "positions": "all_generated",
            },
        ),
        ("joy.npy:3:positions=5::scale=2", {"layers": 3, "positions": {"start": 5}, "scale": 2.0}),
        (
            "joy.npy:3:positions=0,5:-1:op=ablate",
            {"layers": 3, "positions": [0, {"start": 5, "stop": -1}], "op": "ablate"},
        ),
        (
            "joy.npy:3:hook=mlp_out:op=replace:alpha=0.5",
            {"layers": 3, "op": "replace", "alpha": 0.5, "hook": "mlp_out"},
        ),
    ],
)
def test_a_vector_is_typed_with_its_file_and_op(
    folder: Path, text: str, fields: dict[str, Any]
) -> None:
    assert steering(text) == msgspec.convert(fields | {"vector": from_numpy(JOY)}, SteeringSpec)


def test_files_of_several_vectors_combine_with_other_entries(folder: Path) -> None:
    (spec,) = options.steering(["reft.npz:3:op=lowrank:strength=0.5"])
    ones = from_numpy(np.ones((2, 4)))
    assert spec == SteeringSpec(
        layers=3,
        op="lowrank",
        strength=0.5,
        rotation=ones,
        weight=ones,
        bias=from_numpy(np.zeros(2)),
    )
    first, second, third, fourth = options.steering(["joy.safetensors", "joy.npy:1:0.5", "@old"])
    assert [entry.layers for entry in (first, second, third)] == [2, 3, 1]
    assert fourth == SteeringSpec(module="old")


@pytest.mark.parametrize(
    "text",
    [
        *("joy.npy", "joy.npy:", "joy.npy:op=add", "joy.npy:op=add:3", "joy.npy:3:much"),
        *("joy.npy:3:strength=much", "joy.npy:3:norm_match=maybe", "joy.npy:3:sclae=2"),
        *("joy.npy:3:1:post_block:4", "missing.npy:3", "empty.npz:3", "torn.npz:3", "evil.npy:3"),
        *("missing.safetensors", "torn.safetensors"),
        *("@", "@:2", "@joy:much", "@joy:2:3", "@joy:sclae=2", "@joy:scale=2:3"),
    ],
)
def test_a_bad_steering_option_names_itself(folder: Path, text: str) -> None:
    with refuses(f"FILE: '{text}': ", field="FILE"):
        options.steering([text], "FILE")


@pytest.mark.parametrize(
    ("hooks", "layers", "meant"),
    [
        (None, None, {}),
        (None, "all", {"layers": "all"}),
        (None, "3", {"layers": 3}),
        ("resid_pre", None, {"hooks": {"resid_pre": "all"}}),
        ("resid_pre, mlp_out:1", "3", {"hooks": {"resid_pre": 3, "mlp_out": 1}}),
        (
            "post_block:all;pre_attn:0-3",
            None,
            {"hooks": {"post_block": "all", "pre_attn": "0-3"}},
        ),
    ],
)
def test_hooks_have_layers_of_their_own_or_the_same(
    hooks: str | None, layers: str | None, meant: Any
) -> None:
    assert options.sites(hooks, layers) == meant


@pytest.mark.parametrize(
    ("call", "words", "field"),
    [
        (lambda: options.hooks("pre_mlp:0", None), "'pre_mlp' is not a hook", "--hooks"),
        (lambda: options.hooks("mlp_out:1", 3), "has no effect", "--layers"),
        (lambda: options.fields(None, ["x"]), "is not FIELD=VALUE", "--set"),
        (lambda: options.fields(None, ["=1"]), "is not FIELD=VALUE", "--set"),
        (lambda: options.fields(None, ["a=1", "a.b=2"]), "'a' has a value", "--set"),
        (lambda: options.fields(Path("lines.txt"), []), "lines.txt has no fields", "--file"),
        (lambda: options.fields(Path("torn.json"), []), "torn.json: ", "--file"),
        (lambda: options.fields(Path("torn.toml"), []), "torn.toml: ", "--file"),
    ],
)
def test_what_cannot_be_read_names_its_option(
    folder: Path, call: Callable[[], Any], words: str, field: str
) -> None:
    Path("lines.txt").write_text("one\n")
    Path("torn.json").write_text("{")
    Path("torn.toml").write_text("a =")
    with refuses(words, field=field):
        call()


@pytest.mark.parametrize(
    ("pairs", "meant"),
    [
        (["a=1", "b.c=x", "b.d=[1]"], {"a": 1, "b": {"c": "x", "d": [1]}}),
        (["a=1", "a=2", "a=[3]"], {"a": [1, 2, 3]}),
        (["a.b=1", "a.b=x"], {"a": {"b": [1, "x"]}}),
        (["a=b=c"], {"a": "b=c"}),
        (["typed=2"], {"typed": [1, 2]}),
    ],
)
def test_fields_are_set_by_path_and_collect(pairs: list[str], meant: dict[str, Any]) -> None:
    assert options.fields(None, pairs, {"typed": 1, "left": None}) == {"typed": 1, **meant}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.json", '{"a": {"b": 1, "c": 2}, "d": 3}'),
        ("a.toml", "d = 3\n[a]\nb = 1\nc = 2\n"),
        ("stdin", ' {"a": {"b": 1, "c": 2}, "d": 3}'),
    ],
)
def test_options_take_the_place_of_a_files_fields(folder: Path, name: str, content: str) -> None:
    Path(name).write_text(content)
    assert options.fields(Path(name), ["a.b=4"], {"d": 5}) == {"a": {"b": 4, "c": 2}, "d": 5}


@pytest.mark.parametrize(
    ("name", "content", "meant"),
    [
        ("lines.csv", 'id,text\n1,"a, b"\n', ["a, b"]),
        ("lines.jsonl", '{"prompt": "a"}\n"b"\n[1, 2]\n', ["a", "b", [1, 2]]),
        ("lines.txt", "one\n\ntwo\n", ["one", "two"]),
        ("lines", "[1] is a citation\n", ["[1] is a citation"]),
        ("list.json", '["one\\nwith a break", "two"]', ["one\nwith a break", "two"]),
        ("list.txt", '["one", "two"]', ["one", "two"]),
    ],
)
def test_a_file_without_fields_is_more_of_a_list(
    folder: Path, name: str, content: str, meant: list[Any]
) -> None:
    Path(name).write_text(content)
    assert options.fields(Path(name), [], {"of": ["typed"]}, "of") == {"of": ["typed", *meant]}


def test_a_file_of_conversations_is_refused_with_where_to_send_them(folder: Path) -> None:
    Path("chats.jsonl").write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    with refuses("chats.jsonl:messages has conversations", "send conversations as messages"):
        options.fields(Path("chats.jsonl:messages"), [], {}, "prompts")


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.csv", "other.csv:clean=right,answer=to"])
def test_rows_of_several_columns_are_objects(folder: Path, name: str) -> None:
    Path("pairs.jsonl").write_text('{"clean": "a", "answer": " b"}\n\n{"clean": "c"}\n')
    Path("pairs.csv").write_text("clean;answer\na; b\n\nc;\n")
    Path("other.csv").write_text("id,to,right\n1, b,a\n")
    rows = options.fields(Path(name), [], {}, "pairs", ("clean", "answer"))["pairs"]
    assert rows == [{"clean": "a", "answer": " b"}, {"clean": "c"}][: len(rows)]
