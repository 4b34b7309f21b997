"""What do captures come to on a model, and which of them does it refuse, by which field?"""

import logging
from typing import Any

import model_kit
import msgspec
import pytest
from refusal_kit import refuses

from midstream.api.resolve.positions import captures as rules
from midstream.api.resolve.positions.captures import Bounds, resolve_captures
from midstream.broker.artifacts import global_capture as everyone
from midstream.broker.telemetry.metrics import GLOBAL_CAPTURE_SKIPPED
from midstream.schemas.base.limits import MAX_SEARCHED
from midstream.schemas.jobs.jobs import Job, Sampling, StoredPrompt
from midstream.schemas.prompts.selectors import PositionWindow, Span
from midstream.schemas.prompts.windows import Around, When
from midstream.schemas.requests.specs import CaptureSpec, StoredCapture
from midstream.schemas.service.global_capture import captures_of, parse


def bounds(*lengths: int, max_tokens: int = 4, **changes: Any) -> Bounds:
    facts: dict[str, Any] = {
        "dtype": "bfloat16",
        "hooks": ["pre_attn", "attn_out", "mlp_out", "post_block"],
        "consumers": ["filesystem", "memory"],
        "memory_limit_kib": 1,
    }
    return model_kit.bounds(*lengths, max_tokens=max_tokens, probes=["p"], **(facts | changes))


def captured(capture: dict[str, Any], *lengths: int, **changes: Any) -> list[list[StoredCapture]]:
    return resolve_captures(CaptureSpec(**capture), bounds(*lengths, **changes))


def test_the_default_capture_is_post_block_of_all_layers_at_the_last_prompt_token() -> None:
    assert captured({}) == [
        [StoredCapture(sites={"post_block": [0, 1, 2, 3]}, positions="last_prompt", tag="default")]
    ]


def test_each_hook_has_its_own_layers_and_every_option_is_kept() -> None:
    wish = {
        "hooks": {"resid_post": "all", "pre_attn": "0-1"},
        "positions": [-1, 0],
        "every_n": 3,
        "at": "after",
        "dtype": "float32",
        "layout": "segment",
        "consumers": ["memory"],
        "tag": "t",
    }
    sites = {"pre_attn": [0, 1], "post_block": [0, 1, 2, 3]}
    kept: Any = {
        "every_n": 3,
        "at": "after",
        "dtype": "float32",
        "layout": "segment",
        "consumers": ["memory"],
        "tag": "t",
    }
    assert captured(wish, 2, 3, memory_limit_kib=4) == [
        [StoredCapture(sites=sites, positions=[0, 1], **kept)],
        [StoredCapture(sites=sites, positions=[0, 2], **kept)],
    ]


@pytest.mark.parametrize(
    "window",
    [
        {"last": 3},
        {"head_and_tail": {"head": 2, "tail": 0}},
        {"around": {"token_ids": [[5, 6]], "before": 1, "after": 2}},
        {"when": {"probe": "p", "at_least": -1.5, "after": 4}},
    ],
)
def test_windows_record_all_positions_and_choose_at_the_end(window: dict[str, Any]) -> None:
    span = msgspec.convert(window, Span)
    ((capture,),) = captured({"positions": span})
    assert capture.positions == "all"
    assert capture.window == span


def test_the_tokens_that_a_window_searches_are_bounded_over_all_prompts() -> None:
    window = {"positions": Span(around=Around(token_ids=[[1]] * 16))}
    share = MAX_SEARCHED // 32 - 4  # of which 4 are generated
    assert len(captured(window, share, share)) == 2
    with refuses(match="at most 67108864", status=400, field="capture.positions.around"):
        captured(window, share, share + 1)


MEMORY = {"consumers": ["memory"]}
ALL_ROWS: dict[str, Any] = {**MEMORY, "positions": "all"}


BOTH = {"hooks": {"pre_attn": "all", "post_block": "all"}}


STEP = {"step_tokens": 8, "capture_row_limit": 8}


OF_PROBE = {"positions": Span(when=When(probe="p", at_least=0.5))}


@pytest.mark.parametrize(
    ("resolve", "field", "words"),
    [
        # what the model or the worker lacks; field case 27
        *(
            (lambda wish=wish: captured(wish), field, words)
            for wish, field, words in (
                (
                    {"hook": "resid_mid"},
                    "capture.hook",
                    "unknown hook 'resid_mid': the model has pre_attn, attn_out, mlp_out, "
                    "post_block",
                ),
                ({"hook": "mlp_in", "layers": 99}, "capture.hook", "unknown hook 'mlp_in'"),
                ({"layers": "0-9"}, "capture.layers", "layer 9"),
                ({"hooks": {"mlp_in": 0}}, "capture.hooks.mlp_in", "unknown hook 'mlp_in'"),
                ({"hooks": {"pre_attn": "4"}}, "capture.hooks.pre_attn", "layer 4"),
                (
                    {"hooks": {"pre_attn": 0, "resid_pre": 1}},
                    "capture.hooks.resid_pre",
                    "given twice",
                ),
                (
                    {"positions": [0, 9]},
                    "capture.positions[1]",
                    "position 9 is out of range: the prompt has",
                ),
                (
                    {"positions": [0, Span(start=3, stop=9)]},
                    "capture.positions[1].stop",
                    "the range stops at 9, but the prompt has length 6",
                ),
                ({"positions": [Span(start=3)]}, "capture.positions[0]", "needs a `stop`"),
                (
                    {"positions": Span(start=-7)},
                    "capture.positions.start",
                    "position -7 is out of range: the prompt has",
                ),
                (
                    {"positions": Span(start=10)},
                    "capture.positions.start",
                    "position 10 is out of range: the prompt and the generated tokens have at "
                    "most 10 positions",
                ),
                (
                    {"consumers": ["filesystem", "kafka"]},
                    "capture.consumers[1]",
                    "unknown consumer 'kafka': the worker has filesystem, memory",
                ),
                ({"consumers": ["memory", "memory"]}, "capture.consumers[1]", "listed twice"),
                ({"positions": [0, Span(last=2)]}, "capture.positions[1]", "stand alone"),
                (
                    {"positions": Span(when=When(probe="q", at_least=0.5))},
                    "capture.positions.when.probe",
                    "'q' does not score this request: it has p",
                ),
                (
                    {"positions": Span(around=Around(token_ids=[[1], [2, 9]]))},
                    "capture.positions.around.token_ids[1][1]",
                    "token id 9 is outside the vocabulary",
                ),
                (
                    {"positions": Span(last=2), "run": "r"},
                    "capture.run",
                    "positions that are known",
                ),
            )
        ),
        (lambda: captured(OF_PROBE, pp=2), "capture.positions.when", "pipeline stages"),
        # a bfloat16 position of 4 sites: 4 × 8 × 2 bytes of rows and 16 of its number and token id
        (
            lambda: captured({**MEMORY, "positions": "all"}, 6, 7, max_tokens=7),
            "capture.consumers",
            "prompt 1 may produce 1040 bytes",
        ),
        (
            lambda: captured({**MEMORY, "positions": "all", "dtype": "float32"}, 6, max_tokens=7),
            "capture.consumers",
            "at most 1 KiB per prompt",
        ),
        (
            lambda: captured({**MEMORY, "positions": "all", "layers": 0}, 60),
            "capture.consumers",
            "may produce",
        ),
        (
            lambda: captured({**MEMORY, "positions": Span(start=3)}, 6, max_tokens=11),
            "capture.consumers",
            "1040 bytes of rows",
        ),
        (
            lambda: captured(
                {**BOTH, "positions": "all_prompt"}, 60, **STEP | {"capture_row_limit": 7}
            ),
            "capture",
            "prompt 0 produces 8 rows in one engine step, for one token: ",
        ),
        (
            lambda: captured({**BOTH, "positions": "all"}, 60, speculative_tokens=3, **STEP),
            "capture",
            "prompt 0 produces 32 rows in one engine step, for one token and 3 drafts",
        ),
        (
            lambda: captured({"tag": "global"}, global_captures=[CaptureSpec(tag="global")]),
            "capture.tag",
            "choose another",
        ),
    ],
)
def test_captures_that_cannot_be_or_do_not_fit_are_refused_by_field(
    resolve: Any, field: str, words: str
) -> None:
    with refuses(words, field=field, status=400):
        resolve()


@pytest.mark.parametrize(
    ("capture", "lengths", "facts"),
    [
        (ALL_ROWS, [6], {"max_tokens": 7}),
        # five generated tokens fewer
        ({**ALL_ROWS, "every_n": 2}, [6, 7], {"max_tokens": 7}),
        ({"positions": "all"}, [60], {}),  # what goes to files is not bounded by this
        ({**MEMORY, "positions": Span(last=2), "layers": 0}, [60], {}),
        # two of the prompt, ten of the generated that are fed back
        ({**MEMORY, "positions": Span(start=4)}, [6], {"max_tokens": 11}),
        ({**BOTH, "positions": "all_prompt"}, [60], STEP),  # 2 hooks × 4 layers
        # one position, so one row per site
        (BOTH, [60], {"speculative_tokens": 3, **STEP}),
        # each stage has half of them
        ({**BOTH, "positions": "all"}, [60], {"pp": 2, **STEP, "capture_row_limit": 4}),
    ],
)
def test_captures_that_just_fit_are_taken(
    capture: dict[str, Any], lengths: list[int], facts: dict[str, Any]
) -> None:
    assert captured(capture, *lengths, **facts)


def test_the_operator_captures_the_end_of_every_request() -> None:
    model = bounds().model
    (spec,) = parse("post_block:1", "last:3")
    (capture,) = captures_of(spec, model, [1])
    assert capture.positions == "all"
    assert capture.window == Span(last=3)


def test_rows_for_the_response_are_bounded_over_all_prompts_of_a_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 + 16 bytes a prompt."""
    monkeypatch.setattr(rules, "MEMORY_JOB_BYTES", 2000)
    assert captured(MEMORY, *[6] * 25)
    assert captured({}, *[6] * 26), "what goes to files is not bounded by this"
    assert captured({**MEMORY, "positions": "all"}, 60, memory_limit_kib=8), (
        "one prompt may give its own limit"
    )
    with refuses(
        "26 prompts may produce 2080 bytes of rows: ",
        "per job; send fewer prompts",
        status=400,
        field="capture.consumers",
    ):
        captured(MEMORY, *[6] * 26)


def test_an_open_range_is_stored_per_prompt() -> None:
    assert [
        [capture.positions for capture in captures]
        for captures in captured({"positions": Span(start=-2)}, 6, 3)
    ] == [
        [PositionWindow(start=4)],
        [PositionWindow(start=1)],
    ]


def test_an_unfitting_global_capture_is_not_a_user_error() -> None:
    with refuses(kind="internal"):
        resolve_captures(None, bounds(6, global_captures=[CaptureSpec(hook="mlp_in")]))


@pytest.mark.parametrize(
    ("positions", "stored"),
    [
        ([0, 5, -1], [[[0, 5]], [[0, 2]], [[0]]]),
        ([Span(start=2, stop=5)], [[[2, 3, 4]], [[2]], []]),
        ([5], [[[5]], [], []]),
    ],
)
def test_a_global_capture_goes_as_far_as_each_prompt(positions: Any, stored: Any) -> None:
    specs = [CaptureSpec(positions=positions, tag="global")]
    found = resolve_captures(None, bounds(6, 3, 1, global_captures=specs))
    assert [[capture.positions for capture in captures] for captures in found] == stored


def test_a_global_capture_is_added_to_every_prompt() -> None:
    specs = [CaptureSpec(hooks={"pre_attn": "0-1"}, positions=[5], tag="global")]
    both = captured({"tag": "mine"}, 6, 7, global_captures=specs)
    assert [[capture.tag for capture in captures] for captures in both] == [["mine", "global"]] * 2
    assert both[0][1].sites == {"pre_attn": [0, 1]}
    assert resolve_captures(None, bounds(3, global_captures=specs)) == [], "it is too short"


def test_global_capture_that_exceeds_a_steps_room_is_skipped_without_refusals(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A long prompt that asks for nothing must not be answered 400 about a capture; the user's own
    capture comes first.
    """
    everyone._complaints._made.clear()
    limits: dict[str, Any] = {
        "capture_row_limit": 4,
        "global_captures": [CaptureSpec(layers="0-2", positions=[0, 5], tag="global")],
    }
    before = GLOBAL_CAPTURE_SKIPPED.labels("buffer")._value.get()
    assert [len(captures) for captures in resolve_captures(None, bounds(5, 60, **limits))] == [1, 1]
    narrow, wide = (
        captured({"layers": layers, "tag": "mine"}, 60, **limits)[0] for layers in (0, "0-1")
    )
    assert [[capture.tag for capture in captures] for captures in (narrow, wide)] == [
        ["mine", "global"],
        ["mine"],
    ]
    assert GLOBAL_CAPTURE_SKIPPED.labels("buffer")._value.get() == before + 1
    (line,) = [
        record.getMessage() for record in caplog.records if record.levelno == logging.WARNING
    ]
    assert "skipped for prompts of a job (count: 1)" in line
    assert "capture_buffer_mib" in line


def test_removing_global_captures_keeps_the_captures_that_the_user_requested() -> None:
    limits = bounds(6, 3, global_captures=[CaptureSpec(tag="global")])
    prompts = [StoredPrompt(token_ids=[1] * prompt.tokens) for prompt in limits.prompts]

    def job(spec: CaptureSpec | None) -> Job:
        captures = resolve_captures(spec, limits)
        return Job(
            id="j",
            kind="generate",
            model="m",
            prompts=prompts,
            sampling=Sampling(),
            created=0.0,
            captures=captures,
        )

    before = GLOBAL_CAPTURE_SKIPPED.labels("quota")._value.get()
    left = everyone.without(job(CaptureSpec(tag="mine")), limits.model, "quota", "full")
    assert [[capture.tag for capture in captures] for captures in left.captures] == [
        ["mine"],
        ["mine"],
    ]
    assert everyone.without(job(None), limits.model, "quota", "full").captures == []
    assert GLOBAL_CAPTURE_SKIPPED.labels("quota")._value.get() == before + 4
