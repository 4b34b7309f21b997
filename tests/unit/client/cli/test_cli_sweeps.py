"""Does `midstream sweep` ask for what was typed, show what came, and name the option that is
wrong?
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from attribution_kit import attribution, job_result
from http_kit import reply, server
from sweep_kit import VIEW, over, result

from midstream.client import PatchStudy
from midstream.client.cli import main, options, sweeps
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import from_json, to_json
from midstream.schemas.jobs.attributions import AttributionRequest, AttributionResult
from midstream.schemas.jobs.sweeps import SweepRequest, SweepResult
from midstream.schemas.requests.attributions import Verify
from midstream.schemas.requests.sweep_paths import PathEnd, SweepPath

PROMPTS = (
    "--clean",
    "The Eiffel Tower is in",
    "--corrupt",
    "The Colosseum is in",
    "--answer",
    " Paris",
    "--foil",
    " Rome",
)


def swept(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[SweepRequest, str]:
    """What the server was asked and what was printed."""
    with server(reply(VIEW, 202), reply(VIEW), over(result())) as (url, seen):
        with pytest.raises(SystemExit) as caught:
            main.main(["sweep", *options, "--url", url])
        assert not caught.value.code
        return from_json(seen.bodies[0], SweepRequest), capsys.readouterr().out


def test_sweep_options_become_the_request(capsys: pytest.CaptureFixture[str]) -> None:
    asked, _ = swept(
        capsys,
        *PROMPTS,
        "--model",
        "m",
        "--hooks",
        "resid_pre,mlp_out",
        "--layers",
        "0-9",
        "--positions",
        "1:4",
        "--window",
        "3x1",
        "--metric",
        "logit_diff",
        "--direction",
        "noise",
        "--alignment",
        "right",
        "--alpha",
        "0.5",
        "--mask",
        "0-63",
        "--noise",
        "2",
    )
    assert json.loads(to_json(asked)) | {
        "mask": "0-63",
        "metadata": {},
        "ablation": None,
    } == json.loads(to_json(asked))
    assert (asked.pairs[0].clean, asked.pairs[0].answer, asked.pairs[0].foil) == (
        "The Eiffel Tower is in",
        " Paris",
        " Rome",
    )
    assert (asked.hooks, asked.layers, asked.window.layers, asked.window.positions) == (
        ["resid_pre", "mlp_out"],
        "0-9",
        3,
        1,
    )
    assert (asked.metric, asked.direction, asked.alignment, asked.alpha, asked.noise) == (
        "logit_diff",
        "noise",
        "right",
        0.5,
        2,
    )
    assert json.loads(to_json(asked.positions)) == {"start": 1, "stop": 4}


def test_how_a_sweep_is_handled_is_typed_as_for_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    told = (
        "--callback",
        "https://a.example/hook",
        "--callback-event",
        "job.failed",
        "--callback-event",
        "job.succeeded",
    )
    asked, _ = swept(
        capsys, *PROMPTS, "--model", "m", "--priority", "low", "--expires-in", "10m", *told
    )
    assert (asked.priority, asked.expires_in) == ("low", 600.0)
    assert (asked.callback_url, asked.callback_events) == (
        "https://a.example/hook",
        ["job.failed", "job.succeeded"],
    )
    plain, _ = swept(capsys, *PROMPTS, "--model", "m")
    assert (plain.priority, plain.expires_in, plain.callback_url) == ("normal", None, None)


def test_the_terminal_shows_heatmap_strongest_cells_notes_and_reasons(
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, shown = swept(capsys, *PROMPTS, "--model", "m", "--top", "2")
    for part in (
        "pre_attn (resid_pre)",
        "um 3",
        "█",
        "Strongest cells",
        "0.950",
        "note: position 3",
        "60 cells without a value",
    ):
        assert part in shown
    assert "0.317" not in shown


def test_figure_and_study_are_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawn, kept = tmp_path / "out.png", tmp_path / "out.json"
    asked, shown = swept(
        capsys, *PROMPTS, "--model", "m", "--heatmap", str(drawn), "--save", str(kept)
    )
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert str(drawn) in shown
    study = PatchStudy.load(kept)
    assert (study.job, study.request, study.result) == ("job_1", asked, result())
    assert "job: job_1" in shown


def test_a_sweep_none_of_whose_cells_has_a_value_is_shown_and_fails(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = result()
    empty = msgspec.structs.replace(found, summary=msgspec.structs.replace(found.summary, cells=0))
    with (
        server(reply(VIEW, 202), reply(VIEW), over(empty)) as (url, _),
        pytest.raises(SystemExit) as caught,
    ):
        main.main(["sweep", *PROMPTS, "--model", "m", "--url", url])
    assert caught.value.code == 1
    printed = capsys.readouterr()
    assert "note: position 3" in printed.out
    assert printed.err.startswith(
        "error: no cell has a value; 60 cells without a value: the first tokens are the same"
    )


def test_json_output_is_only_the_result(capsys: pytest.CaptureFixture[str]) -> None:
    _, shown = swept(capsys, *PROMPTS, "--model", "m", "--json")
    assert from_json(shown, SweepResult) == result()


def test_an_earlier_sweep_is_shown_by_job_id(capsys: pytest.CaptureFixture[str]) -> None:
    with server(reply(VIEW), over(result())) as (url, seen), pytest.raises(SystemExit):
        main.main(["sweep", "--job", "job_1", "--url", url])
    assert not any(line.startswith("POST") for line in seen)
    assert "Strongest cells" in capsys.readouterr().out


def test_pairs_come_from_a_file_and_spans_are_shared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "pairs.json").write_text(
        '[{"clean": "a", "corrupt": "b"}, {"clean": "c", "corrupt": "d"}]'
    )
    asked, _ = swept(
        capsys,
        "--pairs",
        str(tmp_path / "pairs.json"),
        "--model",
        "m",
        "--span",
        "subject=Eiffel|Col",
        "--span",
        "end=-1",
    )
    assert [each.clean for each in asked.pairs] == ["a", "c"]
    subject, end = asked.pairs[1].spans or []
    assert json.loads(to_json(subject.corrupt))["text"] == "Col"
    assert (end.name, end.clean, end.corrupt) == ("end", [-1], None)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ((), "--clean"),
        ((*PROMPTS, "--window", "three"), "--window"),
        ((*PROMPTS, "--span", "subject"), "--span"),
        ((*PROMPTS, "--metric", "best"), "metric"),
        ((*PROMPTS, "--hooks", "resid"), "--hooks"),
        ((*PROMPTS, "--hooks", "resid_pre:0;mlp_out:1"), "--hooks"),
        ((*PROMPTS, "--pairs", "pairs.json"), "--clean"),
        (("--body", "missing.json", "--alpha", "1"), "--body"),
        (("--job", "job_1", "--save", "x.json"), "--save"),
        ((*PROMPTS, "--save", "nowhere/x.json"), "--save"),
        ((*PROMPTS, "--heatmap", "x.doc"), "heatmap"),
        ((*PROMPTS, "--pair", "1"), "--pair"),
        ((*PROMPTS, "--expires-in", "soon"), "--expires-in"),
        ((*PROMPTS, "--priority", "now"), "priority"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option_or_field(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], field: str
) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["sweep", *options, "--model", "m", "--url", "http://127.0.0.1:1"])
    assert caught.value.code == 1
    error = capsys.readouterr().err
    assert error.startswith(f"error: {field}: ")
    assert error.count("\n") == 1


def test_axes_and_paths_are_typed_in_one_word_each(capsys: pytest.CaptureFixture[str]) -> None:
    asked, _ = swept(
        capsys,
        *PROMPTS,
        "--model",
        "m",
        "--hooks",
        "z",
        "--axis",
        "head",
        "--heads",
        "0-3",
        "--receivers",
        "23.q.3,24.mlp_out",
        "--frozen",
        "attn",
    )
    assert (asked.axis, asked.heads) == ("head", "0-3")
    assert asked.path == SweepPath(
        receivers=[PathEnd(23, "q", 3), PathEnd(24, "mlp_out")], frozen=["attn"]
    )
    assert sweeps.parse_path("20.z.0", None, None) == {
        "sender": {"layer": 20, "hook": "z", "head": 0}
    }
    assert sweeps.parse_path(None, "logits", None) == {"receivers": "logits"}
    assert [sweeps.parse_neurons(text) for text in ("top:1,4", "each:8", "0-3/7")] == [
        {"top": [1, 4]},
        {"each": 8},
        {"sets": ["0-3", "7"]},
    ]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--frozen", "attn"), "--frozen"),
        (("--sender", "z.3"), "--sender"),
        (("--receivers", "3.z.x"), "--receivers"),
        (("--neurons", "top:a"), "--neurons"),
    ],
)
def test_a_mistyped_axis_or_path_names_its_option(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], field: str
) -> None:
    test_a_mistake_is_one_line_that_names_the_option_or_field(capsys, (*PROMPTS, *options), field)


@pytest.mark.parametrize(
    ("text", "window"), [("3", {"layers": 3}), ("3x2", {"layers": 3, "positions": 2})]
)
def test_a_window_is_layers_or_layers_by_positions(text: str, window: dict[str, Any]) -> None:
    assert sweeps.parse_window(text) == window


def test_a_file_that_does_not_fit_is_named_with_the_place(tmp_path: Path) -> None:
    (tmp_path / "body.json").write_text('{"model": "m", "pairs": [{"clean": 1}]}')
    with pytest.raises(MidstreamError, match=r"body.json: pairs\[0\].clean") as caught:
        options.read_json(tmp_path / "body.json", SweepRequest, "--body")
    assert caught.value.field == "--body"


# --- midstream attribute


def test_attribute_sends_the_method_and_what_to_verify_and_draws(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "both.png"
    answers = (reply(VIEW, 202), reply(VIEW), reply(job_result(attribution())))
    asking = ["--model", "m", "--method", "integrated", "--steps", "4"]
    with server(*answers) as (url, seen), pytest.raises(SystemExit) as caught:
        main.main(
            [
                "attribute",
                *PROMPTS,
                *asking,
                "--verify",
                "top=4,tolerance=0.5",
                "--png",
                str(path),
                "--url",
                url,
            ]
        )
    assert not caught.value.code
    asked = from_json(seen.bodies[0], AttributionRequest)
    assert (asked.method, asked.steps, asked.pairs[0].foil) == ("integrated", 4, " Rome")
    assert asked.verify == Verify(top=4, tolerance=0.5)
    assert "off by more than the noise floor" in capsys.readouterr().out
    assert path.stat().st_size > 10_000


def test_attribute_prints_json_of_an_earlier_job(capsys: pytest.CaptureFixture[str]) -> None:
    answers = (reply(VIEW), reply(job_result(attribution())))
    with server(*answers) as (url, _), pytest.raises(SystemExit) as caught:
        main.main(["attribute", "--job", "job_1", "--json", "--url", url])
    assert not caught.value.code
    assert from_json(capsys.readouterr().out.encode(), AttributionResult) == attribution()


@pytest.mark.parametrize(
    ("text", "fields"), [("defaults", {}), ("top=3,tolerance=0.1", {"top": 3, "tolerance": 0.1})]
)
def test_verify_is_parsed(text: str, fields: dict[str, float]) -> None:
    assert sweeps.parse_verify(text) == fields


@pytest.mark.parametrize("text", ["20", "top=x", "top=1,"])
def test_an_invalid_verify_names_its_fields(text: str) -> None:
    with pytest.raises(MidstreamError, match=r"--verify.*tolerance"):
        sweeps.parse_verify(text)
