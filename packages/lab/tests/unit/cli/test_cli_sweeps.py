"""Do `midstream sweep` and `attribute` ask for what was typed, show what came, and name the option
that is wrong?
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from attribution_kit import attribution
from cli_kit import Cli, Ended
from http_kit import reply, server
from job_kit import job_result, job_view
from sweep_kit import VIEW, over, result

from midstream import PatchStudy
from midstream.schemas.base.records import from_json
from midstream.schemas.jobs.results import JobResult
from midstream_lab.records.attributions import AttributionRequest, AttributionResult
from midstream_lab.records.sweeps import SweepRequest, SweepResult

PAIR = {
    "clean": "The Eiffel Tower is in",
    "corrupt": "The Colosseum is in",
    "answer": " Paris",
    "foil": " Rome",
}
PROMPTS = [word for name, text in PAIR.items() for word in (f"--{name}", text)]


def swept(cli: Cli, *options: object, found: SweepResult | None = None) -> tuple[Any, Ended]:
    """What the server was asked, as JSON, and how the command ended."""
    ended, seen = cli.served(
        "sweep",
        *options,
        "--model",
        "m",
        by=[reply(VIEW, 202), reply(VIEW), over(found or result())],
    )
    return from_json(seen.bodies[0], Any), ended


@pytest.mark.parametrize(
    ("typed", "fields"),
    [
        (
            "--hooks resid_pre,mlp_out --layers 0-9 --set positions.start=1 --set positions.stop=4 "
            "--set window.layers=3 --set window.positions=1 --set mask=0-63",
            {"hooks": ["resid_pre", "mlp_out"], "layers": "0-9", "mask": "0-63",
             "positions": {"start": 1, "stop": 4}, "window": {"layers": 3, "positions": 1}},
        ),
        (
            "--set metric=logit_diff --set direction=noise --set alignment=right --set alpha=0.5 "
            "--set noise=2",
            {"metric": "logit_diff", "direction": "noise", "alignment": "right", "alpha": 0.5,
             "noise": 2},
        ),
        (
            "--set priority=low --set expires_in=10m --set callback_url=https://a.example/hook "
            "--set callback_events=job.failed --set callback_events=job.succeeded",
            {"priority": "low", "expires_in": 600.0, "callback_url": "https://a.example/hook",
             "callback_events": ["job.failed", "job.succeeded"]},
        ),
        ("", {"priority": "normal", "expires_in": None, "callback_url": None}),
        (
            """--hooks z --set axis=head --set heads=0-3 --set path.frozen=attn
            --set path.receivers={"layer":23,"hook":"q","head":3}
            --set path.receivers={"layer":24,"hook":"mlp_out"}""",
            {"axis": "head", "heads": "0-3",
             "path": {"sender": None, "frozen": ["attn"],
                      "receivers": [{"layer": 23, "hook": "q", "head": 3},
                                    {"layer": 24, "hook": "mlp_out", "head": None}]}},
        ),
    ],
)  # fmt: skip
def test_sweep_options_become_the_request(cli: Cli, typed: str, fields: dict[str, Any]) -> None:
    asked, _ = swept(cli, *PROMPTS, *typed.split())
    assert asked["pairs"][0] | PAIR == asked["pairs"][0]
    assert asked | fields == asked


def test_pairs_come_from_a_file_and_spans_are_shared(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "pairs.json"
    file.write_text('[{"clean": "a", "corrupt": "b"}, {"clean": "c", "corrupt": "d"}]')
    subject = '{"name": "subject", "clean": {"text": "Eiffel"}, "corrupt": {"text": "Col"}}'
    end = '{"name": "end", "clean": [-1]}'
    asked, _ = swept(cli, "--file", file, "--set", f"spans={subject}", "--set", f"spans={end}")
    assert [each["clean"] for each in asked["pairs"]] == ["a", "c"]
    first, last = asked["pairs"][1]["spans"]
    assert first["corrupt"]["text"] == "Col"
    assert last["name"] == "end"
    assert last["clean"] == [-1]
    assert last["corrupt"] is None


def test_the_terminal_shows_heatmap_strongest_cells_notes_and_reasons(cli: Cli) -> None:
    _, ended = swept(cli, *PROMPTS, "--top", "2")
    for part in (
        "pre_attn (resid_pre)",
        "um 3",
        "█",
        "Strongest cells",
        "0.950",
        "note: position 3",
        "60 cells without a value",
    ):
        assert part in ended.out
    assert "0.317" not in ended.out


def test_figure_and_study_are_written(cli: Cli, tmp_path: Path) -> None:
    drawn = tmp_path / "out.png"
    kept = tmp_path / "out.json"
    asked, ended = swept(cli, *PROMPTS, "--figure", drawn, "--save", kept)
    assert drawn.read_bytes().startswith(b"\x89PNG")
    assert str(drawn) in ended.out
    study = PatchStudy.load(kept)
    assert study.job == "job_1"
    assert study.result == result()
    assert study.request == msgspec.convert(asked, SweepRequest)
    assert "job: job_1" in ended.out


def test_a_sweep_none_of_whose_cells_has_a_value_is_shown_and_fails(cli: Cli) -> None:
    found = result()
    empty = msgspec.structs.replace(found, summary=msgspec.structs.replace(found.summary, cells=0))
    _, ended = swept(cli, *PROMPTS, found=empty)
    assert ended.code == 1
    assert "note: position 3" in ended.out
    assert ended.err.startswith(
        "error: no cell has a value; 60 cells without a value: the first tokens are the same"
    )


def test_json_output_is_only_the_result(cli: Cli) -> None:
    _, ended = swept(cli, *PROMPTS, "--json")
    assert from_json(ended.out, SweepResult) == result()


def test_an_earlier_sweep_is_shown_exported_and_drawn(cli: Cli, tmp_path: Path) -> None:
    with server(reply(job_view(state="succeeded")), over(result())) as (url, seen):
        assert "Strongest cells" in cli("get", "job", "job_1", "--url", url).out
    drawn = tmp_path / "one.png"
    written = tmp_path / "one.json"
    for more in ((), ("-o", written), ("-o", drawn), ("-o", drawn, "--set", "pair=0")):
        ended, seen = cli.served("export", "job", "job_1", *more, by=[over(result())])
        assert ended.code == 0, ended
        assert seen == ["GET /v1/jobs/job_1/result"], ended
    assert from_json(written.read_bytes(), JobResult).sweep == result()
    assert drawn.read_bytes().startswith(b"\x89PNG")
    ended, _ = cli.served("export", "job", "job_1", by=[over(result())])
    assert from_json(ended.out.encode(), JobResult).sweep == result()


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ([], "--clean"),
        ([*PROMPTS, "--set", "window=three"], "window"),
        ([*PROMPTS, "--set", "spans=subject"], "pairs[0].spans"),
        ([*PROMPTS, "--set", "metric=best"], "metric"),
        ([*PROMPTS, "--hooks", "resid"], "hooks[0]"),
        ([*PROMPTS, "--file", "pairs.json"], "clean"),
        (["--file", "missing.json", "--set", "alpha=1"], "--file"),
        ([*PROMPTS, "--save", "nowhere/x.json"], "--save"),
        ([*PROMPTS, "--figure", "x.doc"], "--figure"),
        ([*PROMPTS, "--pair", "1"], "--pair"),
        ([*PROMPTS, "--set", "expires_in=soon"], "expires_in"),
        ([*PROMPTS, "--set", "priority=now"], "priority"),
        ([*PROMPTS, "--set", "path.sender=z.3"], "path.sender"),
        ([*PROMPTS, "--set", "neurons.top=a"], "neurons.top"),
        ([*PROMPTS, "--set", "alhpa=1"], "alhpa"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_option_or_field(
    cli: Cli, options: list[str], field: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pairs.json").write_text('[{"clean": "a", "corrupt": "b"}]')
    ended = cli("sweep", *options, "--model", "m", "--url", "http://127.0.0.1:1")
    assert ended.code == 1
    assert ended.err.startswith(f"error: {field}: ")
    assert ended.err.count("\n") == 1


# --- midstream attribute


def test_attribute_sends_the_method_and_what_to_verify_and_draws(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "both.png"
    answers = (reply(VIEW, 202), reply(VIEW), reply(job_result(attribution=attribution())))
    ended, seen = cli.served(
        "attribute",
        *PROMPTS,
        "--model",
        "m",
        *("--set", "method=integrated", "--set", "steps=4"),
        *("--set", "verify.top=4", "--set", "verify.tolerance=0.5"),
        *("--figure", path),
        by=answers,
    )
    assert ended.code == 0
    assert "off by more than the noise floor" in ended.out
    asked = from_json(seen.bodies[0], AttributionRequest)
    assert asked.method == "integrated"
    assert asked.steps == 4
    assert asked.pairs[0].foil == " Rome"
    assert asked.verify.top == 4
    assert asked.verify.tolerance == 0.5  # type: ignore[union-attr]
    assert path.stat().st_size > 10_000


def test_attribute_prints_json(cli: Cli) -> None:
    ended, _ = cli.served(
        *("attribute", *PROMPTS, "--model", "m", "--json"),
        by=[reply(VIEW, 202), reply(VIEW), reply(job_result(attribution=attribution()))],
    )
    assert from_json(ended.out.encode(), AttributionResult) == attribution()
