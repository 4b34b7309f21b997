"""Patterns of a capture: read, scored, drawn on a terminal and as a picture, and shown by the
command.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cli_kit import Cli
from http_kit import reply
from refusal_kit import refuses
from rich.console import Console

from midstream.client import CaptureReader
from midstream.client.captures import patterns
from midstream.client.captures.attention import pattern
from midstream.client.captures.patterns import BEHAVIOURS, Attention, attention_of
from midstream.client.notebook import rendered
from midstream.client.render import attention as show, figures
from midstream.client.sdk.attention import (
    attention_patches,
    by_layer,
    capture_fields,
    values_fields,
)
from midstream.client.sdk.captures import Captures
from midstream.client.sdk.client import AsyncClient, Client
from midstream.client.sdk.jobs import Jobs
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.tensors import to_numpy
from midstream.schemas.jobs.captures import FORMAT, Manifest
from midstream.schemas.model.attention import AttentionKind
from midstream.schemas.prompts.images import ImageSpan
from midstream.storage.blobs import make_blob

LAYERS = 2
HEADS = 4
KEY_HEADS = 2
HEAD = 8
#: Two equal halves behind a first token: what follows a token is known in the second.
TOKENS = [9, *[3, 1, 4, 15, 92, 6], *[3, 1, 4, 15, 92, 6]]
KIND = AttentionKind(layers=list(range(LAYERS)), heads=HEADS, head_dim=HEAD, scale=HEAD**-0.5)


def rows(layer: int, heads: int, count: int = len(TOKENS)) -> np.ndarray:
    """float32 `[count, heads * HEAD]`, random."""
    return (
        np.random.default_rng(100 * layer + heads)
        .normal(size=(count, heads * HEAD))
        .astype(np.float32)
    )


def blob(
    kinds: Sequence[AttentionKind] = (KIND,),
    hooks: Sequence[str] = ("q", "k"),
    positions: Sequence[int] | None = None,
    **more: Any,
) -> bytes:
    """A capture file of all layers, with `rows` in it."""
    chosen = range(len(TOKENS)) if positions is None else positions
    sites = {hook: list(range(LAYERS)) for hook in hooks}
    facts: dict[str, Any] = {
        "format": FORMAT,
        "version": "1",
        "job": "job_a",
        "request": 0,
        "attempt": 1,
        "worker": "w",
        "rank": 0,
        "pp": 0,
        "stages": 1,
        "sites": sites,
        "stage_sites": sites,
        "all_sites": sites,
        "at": "after",
        "dtype": "float32",
        "hidden_size": HEADS * HEAD,
        "prompt_tokens": len(TOKENS),
        "positions": list(chosen),
        "token_ids": [TOKENS[place] for place in chosen],
        "num_layers": LAYERS,
        "attention": list(kinds),
    }
    tensors: list[Any] = []
    for hook in hooks:
        for layer in range(LAYERS):
            values = np.ascontiguousarray(
                rows(layer, HEADS if hook == "q" else KEY_HEADS)[list(chosen)]
            )
            tensors.append((f"{hook}.{layer}", "float32", values.shape, [values]))
    for name, values in (("positions", list(chosen)), ("token_ids", facts["token_ids"])):
        tensors.append((name, "int64", [len(values)], [np.array(values, dtype=np.int64)]))
    made = make_blob(Manifest(**(facts | more)), tensors)
    return b"".join(bytes(each) for each in made.buffers)


def reader(*args: Any, **more: Any) -> CaptureReader:
    return CaptureReader.from_bytes(blob(*args, **more))


def printed(
    found: Attention,
    panels: Sequence[tuple[int, int]] | None = None,
    width: int = 100,
) -> str:
    console = Console(width=width, height=80, color_system=None, force_terminal=True)
    with console.capture() as captured:
        console.print(show.report(found, panels))
    return captured.get()


def test_a_reader_gives_the_patterns_of_its_queries_and_keys() -> None:
    opened = reader()
    found = opened.attention(1)
    np.testing.assert_array_equal(
        found, pattern(rows(1, HEADS), rows(1, KEY_HEADS), KIND, range(len(TOKENS)))
    )
    np.testing.assert_array_equal(opened.attention(-1, "1-2"), found[1:3])
    np.testing.assert_array_equal(opened.attention(1, queries=[-1]), found[:, -1:])
    np.testing.assert_array_equal(opened.attention(1, 3, queries=[0, 5]), found[[3]][:, [0, 5]])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hooks": ("q",)}, "layer 0 was not captured at k"),
        ({"hooks": ("k",)}, "layer 0 was not captured at q"),
        ({"kinds": ()}, "does not record how layer 0 attends"),
        (
            {"kinds": [msgspec.structs.replace(KIND, refused="it is MLA")]},
            "layer 0 has no attention pattern: it is MLA",
        ),
        (
            {"positions": [3, 4]},
            "the query of position 3 sees keys 0-3, of which 0-2 were not captured",
        ),
        (
            {
                "kinds": [msgspec.structs.replace(KIND, text_only=True)],
                "images": [ImageSpan(start=1, stop=3, digest="d")],
            },
            "tokens of an image",
        ),
    ],
)
def test_a_reader_without_what_a_pattern_takes_says_so(given: dict[str, Any], words: str) -> None:
    with refuses(words):
        reader(**given).attention(0)


def test_all_layers_leave_out_those_without_a_pattern_and_name_them() -> None:
    kinds = [
        msgspec.structs.replace(KIND, layers=[0]),
        AttentionKind(layers=[1], refused="it keeps a state"),
    ]
    found = attention_of(reader(kinds))
    assert found.layers == [0]
    assert found.absent == {1: "it keeps a state"}
    assert len(found.panels) == HEADS
    assert "layer 1 has no pattern: it keeps a state" in printed(found)
    for ask, words in (
        (lambda: found[1], "layer 1 has no pattern here: it keeps a state"),
        (lambda: attention_of(reader(kinds), [0, 1]), "layer 1 has no attention pattern"),
        (
            lambda: attention_of(
                reader([AttentionKind(layers=[0, 1], refused="it keeps a state")])
            ),
            "there is no attention pattern: layer 0: it keeps a state; layer 1",
        ),
        (lambda: attention_of(reader(), 2), "layer 2 is out of range"),
    ):
        with refuses(words):
            ask()


def test_patterns_beyond_the_limit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "MAX_BYTES", 4 * HEADS * len(TOKENS) ** 2)
    assert attention_of(reader(), 0).layers == [0]
    with refuses("the patterns of 2 layers exceed"):
        attention_of(reader())


def _ideal(target: int) -> Attention:
    """Two heads: one attends to the key `target` back where there is one, else to the first; the
    other evenly to all that it sees.
    """
    count = len(TOKENS)
    sharp = np.zeros((count, count), dtype=np.float32)
    sharp[range(count), [max(query - target, 0) for query in range(count)]] = 1
    even = np.tril(np.ones((count, count), dtype=np.float32))
    even /= even.sum(axis=1, keepdims=True)
    return Attention(
        "job_a",
        list(range(count)),
        TOKENS,
        [f"t{token}" for token in TOKENS],
        {3: np.stack([sharp, even])},
        {3: [0, 5]},
    )


@pytest.mark.parametrize(
    ("behaviour", "back"),
    [("previous", 1), ("current", 0), ("first", 99), ("duplicate", 6), ("induction", 5)],
)
def test_a_score_is_the_share_of_attention_on_the_keys_of_its_behaviour(
    behaviour: Any, back: int
) -> None:
    best, other = _ideal(back).scores(behaviour)
    assert best.layer == 3
    assert best.head == 0
    assert best.score == 1.0
    queries = {"previous": range(1, 13), "current": range(13), "first": range(1, 13)}.get(
        behaviour, range(7, 13)
    )
    assert other.score == pytest.approx(np.mean([1 / (query + 1) for query in queries]), abs=1e-6)
    assert other.layer == 3
    assert other.head == 5


def test_a_behaviour_without_keys_in_the_prompt_is_refused() -> None:
    found = attention_of(reader(positions=range(6)), 0)
    assert found.behaviours() == ["previous", "current", "first"]
    with refuses("no query has a key for 'induction'", allowed="previous, current, first"):
        found.scores("induction")
    with refuses("'sideways' is not known"):
        found.scores("sideways")  # type: ignore[arg-type]


def test_the_maps_show_each_head_with_rows_of_queries_and_columns_of_keys() -> None:
    lines = printed(_ideal(1), [(3, 0)], width=60).splitlines()
    assert lines[0].split() == ["layer", "3", "head", "0"]
    cells = [line[4:] for line in lines[1 : 1 + len(TOKENS)]]
    assert [line[:4].strip() for line in lines[1 : 1 + len(TOKENS)]] == [
        f"t{token}" for token in TOKENS
    ]
    assert cells[0].rstrip() == "██"
    for query in range(1, len(TOKENS)):
        assert cells[query].rstrip() == "··" * (query - 1) + "██" + "··"
    assert "0 ····░░░░▒▒▒▒▓▓▓▓████ 1 share of the query's attention" in "\n".join(lines)


def test_the_maps_fit_the_terminal_and_merge_tokens_where_they_must() -> None:
    found = attention_of(reader())
    for width in (30, 60, 200):
        assert max(map(len, printed(found, width=width).splitlines())) <= width
    assert printed(found, width=200).splitlines()[0].count("layer") > printed(
        found, width=60
    ).splitlines()[0].count("layer")
    narrow = printed(found, width=12)
    assert narrow.split()[0] == "0.0"
    assert "a cell is 2" in narrow
    merged = show.coarse(_ideal(1).of(3, 0), 4)
    assert merged.shape == (4, 4)
    np.testing.assert_array_equal(np.isnan(merged), np.triu(np.ones((4, 4), dtype=bool), 1))
    assert np.diagonal(merged)[:3].tolist() == [1, 1, 1]


def test_of_many_heads_the_strongest_are_drawn() -> None:
    found = attention_of(reader())
    assert show.panels_of(found, 8) == found.panels
    few = show.panels_of(found, 3)
    assert len(few) == 3
    assert few == sorted(few)
    strongest = [found.scores(name)[0] for name in BEHAVIOURS[:3]]
    assert {(each.layer, each.head) for each in strongest} <= set(few)
    best = [(each.layer, each.head) for each in found.scores("induction")]
    assert show.panels_of(found, 3, "induction") == best[:3]
    assert "3 of 8 heads" in printed(found, best[:3])


def test_the_picture_has_a_panel_per_head_with_the_values_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = attention_of(reader())
    drawn = found.plot(tmp_path / "out.png", panels=[(0, 1), (1, 3)])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    panels = drawn.axes[:2]
    assert [axis.get_title() for axis in panels] == ["layer 0, head 1", "layer 1, head 3"]
    values = np.ma.filled(panels[1].images[0].get_array(), np.nan)
    seen = np.tril(np.ones(values.shape, dtype=bool))
    np.testing.assert_array_equal(values[seen], found.of(1, 3)[seen])
    assert np.isnan(values[~seen]).all()
    assert len({axis.images[0].get_clim() for axis in panels}) == 1, "one scale"
    for given, words in (
        ({"panels": [(0, 9)]}, "head 9 of layer 0 is not here"),
        ({"panels": []}, "0 panels"),
        ({"path": tmp_path / "out.xyz"}, "not a figure format"),
    ):
        with refuses(words):
            figures.plot(found, **given)  # type: ignore[arg-type]
    assert "data:image/png;base64," in found._repr_html_()
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "What heads attend to" in rendered("attention_html", found), "the terminal's maps"


def test_the_command_draws_a_capture_and_gives_its_scores(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "tag" / "job_a"
    folder.mkdir(parents=True)
    (folder / "tag.p0.pp0.safetensors").write_bytes(blob(requests=1))
    drawn = tmp_path / "out.png"
    ended = cli("attention", folder, "--show", "1.2", "--figure", drawn)
    assert ended.code == 0
    assert drawn.exists()
    assert "layer 1 head 2" in ended.out
    assert "1 of 8 heads" in ended.out
    facts = json.loads(cli("attention", folder, "--json", "--layers", "0", "--heads", "1-2").out)
    assert sorted(facts["scores"]) == sorted(BEHAVIOURS)
    assert {(each["layer"], each["head"]) for each in facts["scores"]["induction"]} == {
        (0, 1),
        (0, 2),
    }


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "give either a prompt or a capture"),
        (["job_x", "--prompt", "a"], "give either a prompt or a capture"),
        (["job_x", "--behaviour", "sideways"], "'sideways' is not known"),
        (["job_x", "--figure", "out.xyz"], "not a figure format"),
    ],
)
def test_the_command_refuses_options_by_name(cli: Cli, options: list[str], words: str) -> None:
    ended = cli("attention", *options)
    assert ended.code == 1
    assert words in ended.err


@pytest.mark.parametrize("words", [("two words",), ("--prompt", "two words")])
def test_the_command_takes_a_prompt_with_and_without_its_option(
    cli: Cli, words: tuple[str, ...]
) -> None:
    refusal = MidstreamError("invalid_request", "refused here").problem()
    _, seen = cli.served("attention", *words, "--set", "model=m", by=[reply(refusal, 400)])
    assert json.loads(seen.bodies[0])["prompts"] == ["two words"]


def test_the_call_captures_queries_and_keys_as_attention_uses_them() -> None:
    fields = capture_fields((1, 2, 3), "0-2", {"model": "m"})
    assert fields == {
        "model": "m", "prompts": [[1, 2, 3]], "sampling": {"max_tokens": 0},
        "capture": {"hooks": {"q": "0-2", "k": "0-2"}, "positions": "all_prompt", "at": "after"},
    }  # fmt: skip
    assert len(attention_of(reader()).layers) == LAYERS


def test_a_patch_is_what_the_pattern_makes_of_the_values_in_the_heads_columns() -> None:
    opened = reader(hooks=("q", "v"))
    count = len(TOKENS)
    patterns = {
        (1, head): np.tril(np.random.default_rng(head).uniform(size=(count, count)))
        for head in (0, 3)
    }
    patches = attention_patches(opened, patterns)
    assert [patch.positions for patch in patches] == [[place] for place in range(count)]
    assert {(patch.layers, patch.hook, patch.mask, patch.alpha) for patch in patches} == {
        (1, "z", f"0-{HEAD - 1},{3 * HEAD}-{4 * HEAD - 1}", 1.0)
    }
    written = np.stack(
        [to_numpy(patch.source.vector) for patch in patches if patch.source.vector is not None]
    )
    values = rows(1, KEY_HEADS)
    for head, shared in ((0, 0), (3, 1)):
        expected = patterns[1, head] @ values[:, shared * HEAD : (shared + 1) * HEAD]
        np.testing.assert_allclose(
            written[:, head * HEAD : (head + 1) * HEAD], expected, rtol=1e-5, atol=1e-6
        )
    assert not written[:, HEAD : 3 * HEAD].any()


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (np.eye(3), "head 0 has shape [3, 3]"),
        (np.full((13, 13), np.nan), "not finite"),
        (np.eye(13, k=2), "the query at 0 attends to the later key at 2"),
    ],
)
def test_a_pattern_that_no_request_could_have_is_refused(pattern: np.ndarray, words: str) -> None:
    with refuses(words, field="patterns"):
        attention_patches(reader(hooks=("q", "v")), {(0, 0): pattern})


def test_patched_patterns_are_of_heads_there_are_and_of_values_that_stay() -> None:
    ideal = np.eye(13)
    with refuses("head 4 is out of range"):
        attention_patches(reader(hooks=("q", "v")), {(0, 4): ideal})
    for given in ({}, {(-1, 0): ideal}):
        with refuses("patterns: names layers"):
            by_layer(given, {})
    with refuses("probes: a probe that steers by its scores"):
        by_layer({(1, 0): ideal}, {"probes": ["p", {"probe": "q", "action": "steer"}]})
    assert list(by_layer({(2, 0): ideal, (0, 1): ideal, (2, 3): ideal}, {"probes": "p"})) == [0, 2]
    fields = values_fields(
        "a", 1, [], {"model": "m", "lens": {"layers": -1}, "sampling": {"max_tokens": 9}}
    )
    assert fields == {
        "model": "m", "prompts": ["a"], "sampling": {"max_tokens": 0},
        "capture": {"hooks": {"q": [1], "v": [1]}, "positions": "all_prompt", "at": "after"},
    }  # fmt: skip


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The jobs that clients without a server are given."""
    given: list[dict[str, Any]] = []

    async def run(_: Any, **fields: Any) -> Any:
        given.append(fields)
        return f"job_{len(given)}"

    async def opened(_: Any, job_id: Any) -> Any:
        return reader(hooks=tuple(given[-1]["capture"]["hooks"]))

    monkeypatch.setattr(Jobs, "run", run)
    monkeypatch.setattr(Captures, "open", opened)
    return given


async def test_both_clients_submit_the_same_jobs_and_give_the_same_patterns(
    submitted: list[dict[str, Any]],
) -> None:
    blocking = Client("http://127.0.0.1:1").readings
    awaiting = AsyncClient("http://127.0.0.1:1").readings
    wanted = {(1, 2): np.eye(len(TOKENS)), (0, 2): np.eye(len(TOKENS))}
    own = {"layers": 0, "positions": "all_prompt", "hook": "attn_out", "source": {"zeros": True}}
    patching: dict[str, Any] = {"model": "m", "patch": own, "lens": {"layers": -1}}

    found = blocking.attention("a", layers=1, heads="0-1", model="m")
    job = blocking.patch_attention("a", wanted, **patching)
    jobs = submitted.copy()
    submitted.clear()
    found_too = await awaiting.attention("a", layers=1, heads="0-1", model="m")
    assert await awaiting.patch_attention("a", wanted, **patching) == job
    np.testing.assert_array_equal(found[1], found_too[1])
    assert found.heads == {1: [0, 1]}
    assert jobs == submitted
    _, values, above, patched = jobs
    assert "lens" not in values
    assert values["patch"] == own
    assert above["capture"]["hooks"] == {"q": [1], "v": [1]}
    assert above["patch"] == patched["patch"][: 1 + len(TOKENS)]
    assert patched["patch"][0] == own
    assert [each.layers for each in patched["patch"][1:]] == [0] * len(TOKENS) + [1] * len(TOKENS)
    assert patched["lens"] == {"layers": -1}
