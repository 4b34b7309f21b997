"""Is what is typed read as it was meant, and does a mistake name its option?"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from refusal_kit import refuses
from safetensors.numpy import save_file

from midstream import PatchSource, PatchSpec, SteeringSpec
from midstream.client.cli import options, sweeps
from midstream.client.sdk import wire
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.jobs.sweeps import SweepRequest

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
    (entry,) = options.parse_steering([text])
    return entry


@pytest.mark.parametrize(
    ("parse", "text", "meant"),
    [
        *((options.parse_layers, text, text) for text in ("all", "0-5", "1,4,-1", "nonsense")),
        (options.parse_layers, "3", 3),
        (options.parse_layers, "-1", -1),
        (options.parse_positions, "all_prompt", "all_prompt"),
        (options.parse_positions, "0,5,-1", [0, 5, -1]),
        (options.parse_positions, "5:", {"start": 5}),
        (options.parse_positions, "5:9", {"start": 5, "stop": 9}),
        (options.parse_positions, "last:64", {"last": 64}),
        (options.parse_positions, "-4:", {"start": -4}),
        (options.parse_positions, ":9", {"stop": 9}),
        (options.parse_positions, "0,5:9,-1", [0, {"start": 5, "stop": 9}, -1]),
        (options.parse_positions, ":", ":"),
        (options.parse_positions, "5:x", "5:x"),
        (options.parse_span, "Eiffel Tower", {"text": "Eiffel Tower"}),
        (options.parse_span, "Eiffel#1", {"text": "Eiffel", "occurrence": 1}),
        (options.parse_span, "the#-1", {"text": "the", "occurrence": -1}),
        (options.parse_span, "the#all", {"text": "the", "occurrence": None}),
        (options.parse_span, "C#", {"text": "C#"}),
        (options.parse_span, "C#1#0", {"text": "C#1", "occurrence": 0}),
        (options.parse_span, "#1", {"text": "#1"}),
        (options.parse_span, "a#b", {"text": "a#b"}),
        (options.parse_lens, "0-5,-1", {"layers": "0-5,-1"}),
        (options.parse_lens, "12:3", {"layers": 12, "top_k": 3}),
        (options.parse_features, "words:7", {"sae": "words", "top_k": 7}),
        (sweeps.parse_window, "3", {"layers": 3}),
        (sweeps.parse_window, "3x2", {"layers": 3, "positions": 2}),
        (sweeps.parse_neurons, "top:1,4", {"top": [1, 4]}),
        (sweeps.parse_neurons, "each:8", {"each": 8}),
        (sweeps.parse_neurons, "0-3/7", {"sets": ["0-3", "7"]}),
        (sweeps.parse_verify, "defaults", {}),
        (sweeps.parse_verify, "top=3,tolerance=0.1", {"top": 3, "tolerance": 0.1}),
        (steering, "@joy", {"module": "joy"}),
        (steering, "@joy:2.0", {"module": "joy", "scale": 2.0}),
        (steering, "@joy:scale=-1", {"module": "joy", "scale": -1.0}),
        (
            steering,
            "@joy:2:positions=all_generated",
            {"module": "joy", "scale": 2.0, "positions": "all_generated"},
        ),
        (
            steering,
            "@joy:positions=5:9",
            {"module": "joy", "positions": {"start": 5, "stop": 9}},
        ),
        (steering, "%tiny:123:4.5", {"sae": "tiny", "feature": 123, "value": 4.5}),
        (
            steering,
            "%tiny:123:op=ablate:positions=all_generated",
            {"sae": "tiny", "feature": 123, "op": "ablate", "positions": "all_generated"},
        ),
        (
            steering,
            "%tiny:7:2:op=clamp",
            {"sae": "tiny", "feature": 7, "op": "clamp", "value": 2.0},
        ),
    ],
)
def test_what_is_typed_becomes_fields(parse: Callable[[str], Any], text: str, meant: Any) -> None:
    assert parse(text) == meant


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("joy.npy:3", {"layers": 3}),
        ("joy.npy:3-5:2.5", {"layers": "3-5", "scale": 2.5}),
        ("joy.npy:resid_pre:0,3", {"layers": "0,3", "hook": "resid_pre"}),
        ("joy.npy:3:op=ablate", {"layers": 3, "op": "ablate"}),
        ("joy.npy:all:0.2:norm_match=true", {"layers": "all", "scale": 0.2, "norm_match": True}),
        (
            "joy.npy:resid_pre:3:2:positions=0,-1",
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
            "joy.npy:mlp_out:3:op=replace:alpha=0.5",
            {"layers": 3, "op": "replace", "alpha": 0.5, "hook": "mlp_out"},
        ),
    ],
)
def test_a_vector_is_typed_with_its_file_and_op(
    folder: Path, text: str, fields: dict[str, Any]
) -> None:
    assert steering(text) == msgspec.convert(fields | {"vector": from_numpy(JOY)}, SteeringSpec)


def test_files_of_several_vectors_combine_with_other_entries(folder: Path) -> None:
    (spec,) = options.parse_steering(["reft.npz:3:op=lowrank:strength=0.5"])
    ones = from_numpy(np.ones((2, 4)))
    assert spec == SteeringSpec(
        layers=3,
        op="lowrank",
        strength=0.5,
        rotation=ones,
        weight=ones,
        bias=from_numpy(np.zeros(2)),
    )
    first, second, third, fourth = options.parse_steering(
        ["joy.safetensors", "joy.npy:1:0.5", "@old"]
    )
    assert [entry.layers for entry in (first, second, third)] == [2, 3, 1]
    assert fourth == {"module": "old"}


@pytest.mark.parametrize(
    "text",
    [
        *("joy.npy", "joy.npy:", "joy.npy:op=add", "joy.npy:op=add:3", "joy.npy:3:much"),
        *("joy.npy:3:strength=much", "joy.npy:3:norm_match=maybe", "joy.npy:3:sclae=2"),
        *("joy.npy:3:1:post_block:4", "missing.npy:3", "empty.npz:3", "torn.npz:3", "evil.npy:3"),
        *("missing.safetensors", "torn.safetensors"),
        *("@", "@:2", "@joy:much", "@joy:2:3", "@joy:op=ablate", "@joy:scale=2:3", "@joy:layers=3"),
        *("%", "%tiny:x", "%tiny:1:2:3", "%tiny:1:scale=2"),
    ],
)
def test_a_bad_steering_option_names_itself(folder: Path, text: str) -> None:
    with refuses(f"FILE: '{text}': ", field="FILE"):
        options.parse_steering([text], "FILE")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({}, None),
        ({"layers": "all", "positions": None, "spans": []}, {"layers": "all"}),
        (
            {"layers": "3", "positions": "0,-1", "tag": "mine", "run": "clean"},
            {"layers": 3, "positions": [0, -1], "tag": "mine", "run": "clean"},
        ),
        (
            {"layers": "3", "positions": "5:", "spans": ["Tower", "the#all"]},
            {
                "layers": 3,
                "positions": [{"start": 5}, {"text": "Tower"}, {"text": "the", "occurrence": None}],
            },
        ),
        ({"hooks": "resid_pre"}, {"hooks": {"resid_pre": "all"}}),
        (
            {"hooks": "resid_pre, mlp_out:1", "layers": "3"},
            {"hooks": {"resid_pre": 3, "mlp_out": 1}},
        ),
        (
            {"hooks": "post_block:all;pre_attn:0-3", "every_n": 4, "consumers": ["memory"]},
            {
                "hooks": {"post_block": "all", "pre_attn": "0-3"},
                "every_n": 4,
                "consumers": ["memory"],
            },
        ),
    ],
)
def test_capture_options_send_only_what_was_typed(given: dict[str, Any], meant: Any) -> None:
    assert options.parse_capture(**given) == meant


@pytest.mark.parametrize(
    ("parse", "words", "field"),
    [
        (lambda: options.parse_lens(":3"), "--lens", "--lens"),
        (lambda: options.parse_lens("3:"), "--lens", "--lens"),
        (lambda: options.parse_lens("3:x"), "--lens", "--lens"),
        (lambda: options.parse_lens("3:1:2"), "--lens", "--lens"),
        (lambda: options.parse_capture(positions="all"), "", "--positions"),
        (lambda: options.parse_capture(tag="mine"), "", "--tag"),
        (lambda: options.parse_capture(consumers=["memory"]), "", "--consumer"),
        (lambda: options.parse_capture(run="clean"), "requires --layers", "--run"),
        (lambda: options.parse_capture(hooks="pre_mlp:0"), "'pre_mlp' is not a hook", "--hooks"),
        (
            lambda: options.parse_capture(layers="0", positions="all", spans=["Tower"]),
            "cannot be added to --positions all",
            "--span",
        ),
        (lambda: sweeps.parse_verify("20"), "tolerance", "--verify"),
        (lambda: sweeps.parse_verify("top=x"), "tolerance", "--verify"),
        (lambda: sweeps.parse_verify("top=1,"), "tolerance", "--verify"),
        (lambda: options.parse_patch("12=clean:5"), "is not valid", "--patch"),
        (lambda: options.parse_patch("12@5"), "is not valid", "--patch"),
        (lambda: options.parse_patch("12@5="), "is not valid", "--patch"),
        (lambda: options.parse_patch("12@5=clean:five"), "invalid position 'five'", "--patch"),
        (
            lambda: options.parse_patch("12@5=clean:5:6"),
            "unknown part '6': use alpha, mask, prompt, positions",
            "--patch",
        ),
        (
            lambda: options.parse_patch("12@5=clean:5:alpha=much"),
            "invalid alpha 'much'",
            "--patch",
        ),
        (
            lambda: options.parse_patch("12@5=zeros:prompt=1"),
            "unknown part 'prompt=1': use alpha, mask",
            "--patch",
        ),
        (lambda: options.parse_patch("12@5=gone.npy"), "No such file", "--patch"),
    ],
)
def test_what_cannot_be_read_names_its_option(
    parse: Callable[[], Any], words: str, field: str
) -> None:
    with refuses(words, field=field):
        parse()


@pytest.mark.parametrize(
    ("text", "where", "source"),
    [
        ("12@5=clean:5", {"layers": 12, "positions": [5]}, {"run": "clean", "position": 5}),
        (
            "post_block:12@5=clean:5",
            {"layers": 12, "positions": [5], "hook": "post_block"},
            {"run": "clean", "position": 5},
        ),
        (
            "0-3,7@0,-1=clean:4,-1",
            {"layers": "0-3,7", "positions": [0, -1]},
            {"run": "clean", "position": [4, -1]},
        ),
        (
            "resid_pre:all@5:9=job_1",
            {"layers": "all", "positions": {"start": 5, "stop": 9}, "hook": "resid_pre"},
            {"run": "job_1"},
        ),
        (
            "3@all_generated=clean:-1:alpha=0.5",
            {"layers": 3, "positions": "all_generated", "alpha": 0.5},
            {"run": "clean", "position": -1},
        ),
        (
            "3@-1=clean:mean:positions=0:4:prompt=2",
            {"layers": 3, "positions": [-1]},
            {"run": "clean", "mean": True, "positions": {"start": 0, "stop": 4}, "prompt": 2},
        ),
        (
            'mlp_out:8@"Eiffel Tower"=zeros',
            {"layers": 8, "positions": {"text": "Eiffel Tower"}, "hook": "mlp_out"},
            {"zeros": True},
        ),
        (
            '8@"a = b: c"#-1=zeros',
            {"layers": 8, "positions": {"text": "a = b: c", "occurrence": -1}},
            {"zeros": True},
        ),
        (
            '8@"of"#all=@sea:mask=0-3',
            {"layers": 8, "positions": {"text": "of", "occurrence": None}, "mask": "0-3"},
            {"module": "sea"},
        ),
    ],
)
def test_a_patch_is_written_short(text: str, where: dict[str, Any], source: dict[str, Any]) -> None:
    assert options.parse_patch(text) == {**where, "source": source}


def test_a_patch_may_bring_its_vector(folder: Path) -> None:
    (spec,) = wire.pack_patch(options.parse_patches(["3@last_prompt=joy.npy:alpha=0.5"]))
    assert spec == PatchSpec(
        layers=3, positions="last_prompt", alpha=0.5, source=PatchSource(vector=from_numpy(JOY))
    )


def test_prompts_come_from_lines_or_a_json_list(folder: Path) -> None:
    Path("lines.txt").write_text("one\n\ntwo\n")
    Path("list.json").write_text('["one\\nwith a break", "two"]')
    assert (options.read_prompts(Path("lines.txt")), options.read_prompts(Path("list.json"))) == (
        ["one", "two"],
        ["one\nwith a break", "two"],
    )


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ('{"prompts": ["x"]}', "--body takes a whole request"),
        ('[{"role": "user"}]', "--body takes a whole request"),
        ("[1]", "--body takes a whole request"),
        ('["a", ]', "give one prompt per line, or a JSON list of texts"),
    ],
)
def test_a_file_of_other_things_than_prompts_is_refused(folder: Path, text: str, hint: str) -> None:
    Path("job.json").write_text(text)
    with refuses(field="--file", hint=hint):
        options.read_prompts(Path("job.json"))


def test_a_file_that_does_not_fit_is_named_with_the_place(folder: Path) -> None:
    Path("body.json").write_text('{"model": "m", "pairs": [{"clean": 1}]}')
    with refuses("body.json: pairs[0].clean", field="--body"):
        options.read_json(Path("body.json"), SweepRequest, "--body")
