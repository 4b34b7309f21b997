"""Do the settings of the capture of every request become a spec, or say what is wrong with them?"""

import pytest

from midstream.schemas.prompts.selectors import Span
from midstream.schemas.requests.specs import CaptureSpec
from midstream.schemas.service.global_capture import from_settings, parse
from midstream.schemas.settings.settings import GlobalCapture, Settings, SettingsError


def test_positions_and_tag_are_read_and_nothing_is_captured_without_hooks() -> None:
    assert parse("") == parse("  ") == []
    assert parse("post_block", "all_generated", "ops")[0].positions == "all_generated"
    assert parse("post_block", "0, 5,-1", "ops")[0].positions == [0, 5, -1]
    assert parse("post_block", "0", "ops")[0].tag == "ops"
    assert parse("post_block", "5:")[0].positions == Span(start=5)
    assert parse("post_block", " 0, 5:-1 ")[0].positions == [0, Span(start=5, stop=-1)]


@pytest.mark.parametrize(
    ("text", "hooks"),
    [
        ("post_block:all;pre_attn:0-17", {"post_block": "all", "pre_attn": "0-17"}),
        (" resid_post : 3,7 ; mlp_out ", {"resid_post": "3,7", "mlp_out": "all"}),
        ("pre_attn:-1", {"pre_attn": "-1"}),
    ],
)
def test_hooks_are_named_with_their_layers(text: str, hooks: dict[str, str]) -> None:
    assert parse(text) == [CaptureSpec(hooks=hooks, positions="last_prompt", tag="global")]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("pre_mlp:0",),
            (
                "'pre_mlp' is not a hook: write hook:layers;hook:layers, with hooks pre_attn, "
                "attn_out"
            ),
        ),
        (("post_block:0;",), "'' is not a hook"),
        (("post_block:0;post_block:1",), "post_block is listed twice"),
        (("post_block", "first"), "'first' is not a position selector: use last_prompt"),
        (("post_block", "1-3"), "is not a position selector"),
        (("post_block", ""), "is not a position selector"),
        (("post_block", "5:x"), "is not a position selector"),
        (("post_block", "9:5"), "range from 9 up to 5 is empty"),
        (("post_block", "0", "../x"), "a tag is one folder name"),
    ],
)
def test_invalid_global_captures_are_refused_with_valid_values(
    arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        parse(*arguments)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("post_block:0-4", "layer 4 is out of range"),
        ("mlp_in", "unknown hook 'mlp_in'"),
        ("post_block;resid_post", "given twice"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused_as_settings(text: str, words: str) -> None:
    hooks = ["attn_out", "post_block"]
    fits = Settings(global_capture=GlobalCapture("post_block:0-3;attn_out:-1", tag="ops"))
    assert from_settings(fits, 4, hooks) == parse("post_block:0-3;attn_out:-1", tag="ops")
    with pytest.raises(SettingsError, match=f"^global_capture: .*{words}"):
        from_settings(Settings(global_capture=GlobalCapture(text)), 4, hooks)


def test_settings_are_checked_again_when_the_model_is_known() -> None:
    wide = Settings(global_capture=GlobalCapture("pre_attn;post_block"))
    assert from_settings(wide, 4, row_limit=8)
    with pytest.raises(
        SettingsError,
        match=(
            r"^global_capture: it has 8 sites, but one step has room for 7 rows "
            r".*capture_buffer_mib"
        ),
    ):
        from_settings(wide, 4, row_limit=7)
    assert from_settings(Settings()) == []
    assert from_settings(Settings(global_capture=GlobalCapture("post_block:99")))[0].hooks == {
        "post_block": "99"
    }
    with pytest.raises(SettingsError, match="'pre_mlp' is not a hook"):
        from_settings(Settings(global_capture=GlobalCapture("pre_mlp")))
