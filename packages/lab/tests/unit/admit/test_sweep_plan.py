"""What does a sweep come to, and which of its fields is named when it can come to nothing?"""

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest
from model_kit import HIDDEN
from plan_kit import CLEAN, ablated, model, pair, plan, refusal
from refusal_kit import refuses
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from midstream.api.resolve.prompts.tokenizer import Codec, CodecAnswer, CodecQuestion
from midstream.schemas.base.records import from_msgpack
from midstream.schemas.base.tensors import Tensor, to_numpy
from midstream.schemas.jobs.models import TokenizerBundle
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.specs import dims_name, dims_named
from midstream_lab.admit import prompts as sweep_prompts
from midstream_lab.admit.continuations import ReadPrompt, continue_prompts
from midstream_lab.admit.limits import room_of_cell
from midstream_lab.records.sweep_units import Units

# --- What it comes to
# --------------------------------------------------------------------------------------------------


def test_rows_of_the_clean_prompt_go_to_their_counterparts_in_the_corrupt_one() -> None:
    # field case 34
    sweep, blobs = plan()
    (stored,) = sweep.pairs
    assert stored.base_tokens == ["<bos>", "The", " Colosseum", " is", " in"]
    assert stored.source_tokens == ["<bos>", "The", " Eiffel", " Tower", " is", " in"]
    assert [(column.label, column.places) for column in stored.columns] == [
        ("<bos>", [(0, 0)]),
        ("The", [(1, 1)]),
        (" Colosseum", []),
        (" is", [(3, 4)]),
        (" in", [(4, 5)]),
    ]
    assert "' Eiffel Tower'" in stored.columns[2].reason
    assert any("' Colosseum'" in note for note in stored.notes)
    assert sweep.hooks == ["post_block"]
    assert sweep.layers == [0, 1, 2, 3]
    assert sweep.num_cells == 20
    assert blobs == {}


def test_ablations_and_noise_patch_the_clean_prompt() -> None:
    denoised = plan().sweep.pairs[0]
    noised = plan(direction="noise").sweep.pairs[0]
    assert noised.base == denoised.source
    assert noised.source == denoised.base
    turned = sorted((source, base) for column in denoised.columns for base, source in column.places)
    assert sorted(place for column in noised.columns for place in column.places) == turned
    assert [column.label for column in noised.columns if not column.places] == [" Eiffel", " Tower"]
    sweep, _ = plan(ablated(), ablation="zeros", metric="logit_diff")
    assert sweep.pairs[0].source == []
    assert [column.places for column in sweep.pairs[0].columns] == [
        [(place, -1)] for place in range(6)
    ]


def test_answers_are_tokenised_after_the_prompt() -> None:
    # field case 33
    stored = plan(pair(answer=" Paris of France", foil=[10, 11])).sweep.pairs[0]
    assert stored.answer == [9, 8, 11]
    assert stored.answer_text == " Paris of France"
    assert stored.foil == [10, 11]
    assert stored.foil_text == " Rome France"
    assert Units(plan(pair(answer=" Paris", foil=" Rome")).sweep).nodes[0][0].token_ids == (9, 10)


def test_prompts_of_token_ids_are_read_as_the_text_that_they_are() -> None:
    text = plan().sweep.pairs[0]
    ids = plan(pair(clean=[1, 2, 3, 4, 6, 7], corrupt=[1, 2, 5, 6, 7])).sweep.pairs[0]
    assert ids == text
    assert plan(
        pair(clean=[1, 2, 3, 4, 6, 7], corrupt=[0, 2, 5, 6, 7], positions=[-1])
    ).sweep.pairs[0].base_tokens[:3] == ["<unk>", "The", " Colosseum"]


def test_columns_are_the_positions_that_are_named_of_the_prompt_that_is_patched() -> None:
    stored = plan(pair(positions=[-1, {"text": "The"}, {"start": 3, "stop": 4}])).sweep.pairs[0]
    assert [(column.label, column.places) for column in stored.columns] == [
        ("The", [(1, 1)]),
        (" is", [(3, 4)]),
        (" in", [(4, 5)]),
    ]
    assert [column.label for column in plan(positions={"start": -2}).sweep.pairs[0].columns] == [
        " is",
        " in",
    ]
    assert [column.label for column in plan(positions="last_prompt").sweep.pairs[0].columns] == [
        " in"
    ]


def test_spans_are_columns_with_their_names() -> None:
    # field case 34
    spans = [
        {"name": "subject", "clean": {"text": "Eiffel Tower"}, "corrupt": {"text": "Colosseum"}},
        {"name": "rest", "clean": {"text": "is in"}},
        {"name": "name", "clean": {"text": "Eiffel"}},
    ]
    stored = plan(pair(spans=spans)).sweep.pairs[0]
    assert [(column.label, column.places) for column in stored.columns] == [
        ("subject", [(2, 3)]), ("rest", [(3, 4), (4, 5)]), ("name", []),
    ]  # fmt: skip
    assert "no counterpart" in stored.columns[2].reason
    assert any("span 'subject'" in note and "left out" in note for note in stored.notes)
    assert plan(pair(spans=spans[:1])).sweep.pairs[0].notes == [
        note for note in stored.notes if note.startswith("span 'subject'")
    ]
    noised = plan(pair(spans=spans), direction="noise").sweep.pairs[0]
    assert [column.places for column in noised.columns] == [[(3, 2)], [(4, 3), (5, 4)], []]
    assert plan(
        ablated(spans=[{"name": "s", "clean": {"text": "Eiffel Tower"}}]),
        ablation="mean",
        metric="logprob",
    ).sweep.pairs[0].columns[0].places == [(2, -1), (3, -1)]


def test_a_pairs_alignment_overrides_the_sweeps() -> None:
    pairs = plan(pair(alignment=[(3, 2), (-1, -1)]), pair(), alignment="right").sweep.pairs
    assert [column.places for column in pairs[0].columns] == [[], [], [(2, 3)], [], [(4, 5)]]
    assert [column.places for column in pairs[1].columns] == [
        [(place, place + 1)] for place in range(5)
    ]


def test_hooks_layers_mask_and_the_rest_are_resolved() -> None:
    sweep, blobs = plan(
        hooks=["resid_pre", "attn_out"],
        layers="1-2,-1",
        mask="0-1,-1",
        alpha=0.5,
        noise=2,
        metric="logprob",
    )
    assert sweep.hooks == ["pre_attn", "attn_out"]
    assert sweep.layers == [1, 2, 3]
    assert sweep.alpha == 0.5
    assert sweep.noise == 2
    assert sweep.metric == "logprob"
    (name,) = blobs
    assert sweep.mask == name
    assert to_numpy(from_msgpack(blobs[name], Tensor)).tolist() == [1, 1, 0, 0, 0, 0, 0, 1]
    assert plan(mask="all").sweep.mask == "", "a mask of everything is none"
    assert np.prod([len(sweep.hooks), len(sweep.layers), 5]) == sweep.num_cells


def test_notes_explain_easily_misread_settings() -> None:
    joined = plan(
        ablated(clean="The Eiffel ,", answer=" Paris of", foil=" Rome"),
        ablation="zeros",
        metric="kl",
    ).sweep.pairs[0]
    assert joined.notes == [
        (
            "kl covers the first token after the prompt; the answer's log-probability "
            "covers all of its 2 tokens"
        )
    ]


def test_windows_are_neighbours_among_the_sweeps_own_layers_and_columns() -> None:
    sweep, _ = plan(layers=[0, 2, 3], window={"layers": 2, "positions": 3})
    units = Units(sweep)
    cells = {(unit.layer, unit.column): unit for unit in units.cells(0)}
    assert units.patched(cells[0, 0]) == ([0, 2], [(0, 0), (1, 1)]), "cut off at the edge"
    assert units.patched(cells[1, 3]) == ([2, 3], [(3, 4), (4, 5)]), (
        "without the column that is skipped"
    )
    assert units.patched(cells[2, 1]) == ([3], [(0, 0), (1, 1)])
    assert units.patched(cells[1, 2]) == ([2, 3], []), "skipped itself"


# --- What is refused
# --------------------------------------------------------------------------------------------------

SPAN = {"name": "s", "clean": [1]}


@pytest.mark.parametrize(
    ("pairs", "fields", "field", "words"),
    [
        # what needs or excludes something else
        ([pair(corrupt=None)], {}, "pairs[0].corrupt", "is required"),
        ([pair()], {"ablation": "zeros", "metric": "logprob"}, "pairs[0].corrupt", "one prompt"),
        (
            [ablated(alignment="left")],
            {"ablation": "zeros", "metric": "logprob"},
            "pairs[0].alignment",
            "one prompt",
        ),
        (
            [ablated()],
            {"ablation": "zeros", "metric": "logprob", "alignment": "left"},
            "alignment",
            "one prompt",
        ),
        (
            [ablated()],
            {"ablation": "mean", "metric": "logprob", "direction": "noise"},
            "direction",
            "one prompt",
        ),
        ([ablated()], {"ablation": "zeros"}, "metric", "two prompts"),
        ([pair(), pair(answer=None)], {}, "pairs[1].answer", "is required"),
        ([pair(foil=None)], {"metric": "logit_diff"}, "pairs[0].foil", "is required"),
        (
            [pair(spans=[SPAN], positions=[0])],
            {},
            "pairs[0].positions",
            "is not valid together with spans",
        ),
        (
            [pair(spans=[SPAN])],
            {"window": {"positions": 2}},
            "window.positions",
            "a window applies to columns",
        ),
        ([pair(spans=[])], {}, "pairs[0].spans", "is empty"),
        ([pair(spans=[SPAN, SPAN])], {}, "pairs[0].spans[1].name", "twice"),
        ([pair(spans=[{"name": "", "clean": [1]}])], {}, "pairs[0].spans[0].name", "is empty"),
        (
            [pair(spans=[SPAN]), pair(spans=[{"name": "t", "clean": [1]}])],
            {},
            "pairs[1].spans",
            "columns t",
        ),
        ([pair(positions=[1]), pair(spans=[SPAN])], {}, "pairs[1].spans", "and others do not"),
        ([pair(spans=[SPAN]), pair(positions=[1])], {}, "pairs[1].spans", "and others do not"),
        (
            [ablated(spans=[SPAN | {"corrupt": [1]}])],
            {"ablation": "zeros", "metric": "kl"},
            "pairs[0].spans[0].corrupt",
            "one prompt",
        ),
        # the model
        ([pair()], {"hooks": ["post_attn"]}, "hooks[0]", "unknown hook"),
        ([pair()], {"hooks": ["pre_attn", "resid_pre"]}, "hooks[1]", "already listed"),
        ([pair()], {"layers": "0-4"}, "layers", "out of range"),
        ([pair()], {"mask": "0-8"}, "mask", "dimension 8 is out of range"),
        ([pair()], {"info": model(grades=False)}, "model", "log-probabilities"),
        # prompts and answers
        ([pair(clean="")], {}, "pairs[0].clean", "is empty"),
        ([pair(corrupt=[2, 99])], {}, "pairs[0].corrupt[1]", "outside the vocabulary"),
        ([pair(), pair(corrupt=CLEAN)], {}, "pairs[1].corrupt", "same tokens as clean"),
        ([pair(answer="")], {}, "pairs[0].answer", "is empty"),
        ([pair(answer=[])], {}, "pairs[0].answer", "is empty"),
        ([pair(answer=[99])], {}, "pairs[0].answer[0]", "outside the vocabulary"),
        ([pair(answer=" Paris" * 33)], {}, "pairs[0].answer", "33 tokens"),
        ([pair(foil=[9])], {}, "pairs[0].foil", "same tokens as the answer"),
        ([pair(foil=" Paris France")], {}, "pairs[0].foil", "is a prefix of"),
        (
            [pair(clean="The of", answer="Paris")],
            {},
            "pairs[0].answer",
            "ends in 'The' ' of', and with it in 'The' ' ofParis'",
        ),
        # columns
        ([pair(positions=[0, 5])], {}, "pairs[0].positions[1]", "out of range: the prompt has"),
        ([pair()], {"positions": [-6]}, "positions[0]", "pairs[0]: position -6 is out of range"),
        ([pair()], {"positions": {"start": 5}}, "positions.start", "out of range: the prompt has"),
        (
            [pair()],
            {"positions": {"start": 1, "stop": 6}},
            "positions.stop",
            "position 5 is out of range",
        ),
        ([pair()], {"positions": []}, "positions", "no position given"),
        (
            [pair(positions=[{"text": "Eiffel"}])],
            {},
            "pairs[0].positions[0].text",
            "does not occur in the prompt",
        ),
        ([pair(positions=[2])], {}, "pairs[0].positions", "nothing that can be patched"),
        (
            [pair(spans=[SPAN | {"corrupt": [9]}])],
            {},
            "pairs[0].spans[0].corrupt[0]",
            "out of range: the prompt has",
        ),
        (
            [pair(spans=[{"name": "s", "clean": [{"text": "Eiffel"}]}])],
            {},
            "pairs[0].spans",
            "no counterpart",
        ),
        (
            [pair(alignment=[(0, 0), (1, 9)])],
            {},
            "pairs[0].alignment[1][1]",
            "out of range: the corrupt prompt",
        ),
        ([pair(), pair(corrupt="The Colosseum is")], {}, "pairs", "pairs[0] 5, pairs[1] 4"),
        # limits
        ([pair()], {"window": {"layers": 5}}, "window.layers", "exceeds the number of layers"),
        (
            [pair()],
            {"window": {"positions": 6}},
            "window.positions",
            "exceeds the number of positions",
        ),
        (
            [pair()],
            {"limits": {"sweep_cells": 19}},
            "pairs",
            "20 cells (1 pair × 1 hook × 4 layers × 5 columns)",
        ),
        (
            [pair()],
            {"info": model(max_model_len=6)},
            "pairs[0].clean",
            "has 6 tokens, followed by 1 more",
        ),
        (
            [pair(answer=[9, 9, 9])],
            {"info": model(max_model_len=7), "direction": "noise"},
            "pairs[0].clean",
            "followed by 3 more",
        ),
        ([pair()], {"info": model(capture_row_limit=7)}, "layers", "8 rows in one engine step"),
        (
            [pair()],
            {"info": model(steering_rows=2), "window": {"positions": 5}},
            "window",
            "needs 4 rows",
        ),
        (
            [pair()],
            {"info": model(steering_entries=3), "window": {"layers": 4}, "mask": [0]},
            "window",
            "needs 8 entries",
        ),
        # what to do, and before anything costly is compared
        ([pair()], {"limits": {"sweep_cells": 1}}, "pairs", "fewer layers"),
        ([pair()], {"limits": {"sweep_cells": 1}}, "pairs", "(allowed: at most 1 "),
        (
            [pair(spans=[{"name": str(n), "clean": "all_prompt"} for n in range(20)])],
            {"limits": {"sweep_cells": 19}},
            "pairs[0].spans",
            "",
        ),
        ([pair(positions=[{"text": "The"}] * 65_000)], {}, "pairs[0].positions", ""),
        (
            [ablated()],
            {"ablation": "zeros", "metric": "logprob", "axis": "neuron", "neurons": {"each": 1}},
            "neurons.each",
            "only one",
        ),
        # a field that the axis does not take
        *(
            ([pair()], fields, field, words)
            for fields, field, words in (
                ({"axis": "neuron"}, "neurons", "is required"),
                ({"neurons": {"each": 1}}, "neurons", "not valid with axis 'position'"),
                ({"heads": 0}, "heads", "not valid with axis 'position'"),
                (
                    {"axis": "neuron", "neurons": {"sets": [[HIDDEN]]}},
                    "neurons.sets[0]",
                    "out of range",
                ),
                (
                    {"axis": "neuron", "neurons": {"sets": [[]]}},
                    "neurons.sets[0]",
                    "no neuron given",
                ),
                (
                    {"axis": "neuron", "neurons": {"top": [1, HIDDEN + 1]}},
                    "neurons.top[1]",
                    "exceeds the dimensions",
                ),
                (
                    {"axis": "neuron", "neurons": {"each": HIDDEN + 1}},
                    "neurons.each",
                    "exceeds the dimensions",
                ),
                (
                    {"axis": "neuron", "neurons": {"each": 1}, "mask": "0-1"},
                    "mask",
                    "not valid with axis",
                ),
                (
                    {"axis": "neuron", "neurons": {"each": 1}, "window": {"layers": 2}},
                    "window.layers",
                    "not valid with axis",
                ),
                (
                    {"axis": "together", "window": {"positions": 2}},
                    "window.positions",
                    "not valid with axis",
                ),
                ({"axis": "head"}, "hooks[0]", "has no heads"),
            )
        ),
    ],
)
def test_invalid_sweeps_are_refused_by_field(
    pairs: list[dict[str, Any]], fields: dict[str, Any], field: str, words: str
) -> None:
    # field case 34, 36
    with refuses(words, field=field, status=400):
        plan(*pairs, **fields)


def test_text_that_has_other_tokens_behind_the_other_prompt_is_refused() -> None:
    """Here "bc" is one token, but only behind an "a"."""
    tokenizer = Tokenizer(
        models.WordLevel({"a": 0, "b": 1, "c": 2, "bc": 3, "x": 4}, unk_token="x")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(?<=a)bc|."), "isolated")
    split = Codec(
        TokenizerBundle(
            tokenizer_json=tokenizer.to_str(),
            chat_template=None,
            special_tokens={},
            eos_token_ids=[],
        )
    )
    prompts = [
        ReadPrompt([token], [word], split.map_ids([token])) for token, word in ((0, "a"), (4, "x"))
    ]
    (glued,) = asyncio.run(continue_prompts([("pairs[0].foil", "bc", prompts[:1])], model(), split))
    assert glued.ids == [3]
    assert glued.note == (
        "foil 'bc' continues the prompt's last word: begin it with a space if it is a separate word"
    )
    assert asyncio.run(continue_prompts([("f", "bc", prompts[1:])], model(), split))[0].ids == [
        1,
        2,
    ]
    with refuses("'bc' and 'b' 'c'", field="pairs[0].foil"):
        asyncio.run(continue_prompts([("pairs[0].foil", "bc", prompts)], model(), split))


# --- Long texts
# --------------------------------------------------------------------------------------------------


def test_each_distinct_text_of_a_sweep_is_tokenised_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, bool]] = []
    encode_here = Codec.encode_here

    def noting(self: Codec, texts: list[str], special_tokens: bool, offsets: bool = False) -> Any:
        seen.extend((text, special_tokens) for text in texts)
        return encode_here(self, texts, special_tokens, offsets)

    monkeypatch.setattr(Codec, "encode_here", noting)
    monkeypatch.setattr(Codec, "map_text", None)  # which would tokenise in this process
    pairs = plan(*[pair(positions=[-1])] * 5).sweep.pairs
    assert len(seen) == len(set(seen)) == 8, (
        "two prompts, with and without special tokens, and with each answer"
    )
    assert all(one == pairs[0] for one in pairs)


@pytest.mark.parametrize(
    ("pairs", "field"),
    [
        ([pair(), pair(corrupt="The " * 20)], "pairs[1].corrupt"),
        ([pair(), pair(answer=" Paris" * 10)], "pairs[1].answer"),
        ([pair(), pair(), pair(clean=[1] * 30)], "pairs[2].clean"),
        ([pair(clean=[11] * 20)], "pairs[0].clean"),  # its text
    ],
)
def test_a_sweep_of_too_much_text_is_refused(
    monkeypatch: pytest.MonkeyPatch, pairs: list[dict[str, Any]], field: str
) -> None:
    monkeypatch.setattr(sweep_prompts, "MAX_SWEEP_TEXT", 130)
    monkeypatch.setattr(Codec, "encodings", None)  # nothing is tokenised before
    error = refusal(*pairs)
    assert error.field == field
    assert "130 characters" in error.detail


def test_text_longer_than_the_model_is_refused_by_its_field(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answer = Codec.answer

    def strict(self: Codec, question: CodecQuestion) -> CodecAnswer:
        return answer(self, msgspec.structs.replace(question, limit=8))

    monkeypatch.setattr(Codec, "answer", strict)
    assert refusal(pair(), pair(corrupt="The" + " old" * 8)).field == "pairs[1].corrupt"
    assert refusal(pair(), pair(foil=" Rome" * 8)).field == "pairs[1].foil"
    assert refusal(pair(clean=[2] * 33)).field == "pairs[0].clean"


def test_columns_beyond_the_cell_limit_are_not_built() -> None:
    error = refusal(*[pair()] * 9, limits={"sweep_cells": 20})
    assert error.field == "pairs"
    assert error.detail == "the sweep has more than 20 cells"


# --- Room
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "fields", "room"),
    [
        # <bos> The | Colosseum is skipped
        (pair(), {"window": {"layers": 2, "positions": 3}}, (2, 4)),
        (pair(), {"window": {"layers": 2, "positions": 5}, "mask": [0]}, (4, 16)),
        (
            ablated(spans=[{"name": "s", "clean": "all_prompt"}]),
            {"ablation": "zeros", "metric": "logprob", "mask": [0]},
            (6, 12),  # of its patches that change nothing
        ),
    ],
)
def test_a_cells_room_is_that_of_its_widest_window(
    asked: Any, fields: dict[str, Any], room: tuple[int, int]
) -> None:
    assert room_of_cell(plan(asked, **fields).sweep, 0) == room


@pytest.mark.parametrize(
    ("fields", "limits", "rows"),
    [
        ({"hooks": ["attn_out"]}, {}, 2 * 4),
        ({"hooks": ["attn_out"]}, {"tuning.sweep_entry": False}, 4),
        ({"hooks": ["attn_out", "pre_attn", "post_block"], "layers": [0, 1]}, {}, 3 * 2),
        ({"ablation": "mean", "metric": "kl", "hooks": ["attn_out", "post_block"]}, {}, 3 * 4),
        (
            {"ablation": "zeros", "metric": "kl", "hooks": ["attn_out", "post_block"]},
            {"tuning.sweep_entry": False},
            4,
        ),
    ],
)
def test_rows_that_the_prompts_give_fit_the_capture_buffer(
    fields: dict[str, Any], limits: dict[str, Any], rows: int
) -> None:
    asked = ablated() if "ablation" in fields else pair()
    assert plan(asked, info=model(capture_row_limit=rows), limits=limits, **fields)
    assert (
        f" {rows} rows"
        in refusal(asked, info=model(capture_row_limit=rows - 1), limits=limits, **fields).detail
    )


# --- Sweep columns ---


def columns(**fields: Any) -> list[tuple[str, int, str, tuple[int, int] | None]]:
    (stored,) = plan(**fields).sweep.pairs
    return [
        (column.label, len(column.places), column.dims, column.ranks) for column in stored.columns
    ]


def test_positions_together_are_one_column_without_those_that_have_no_counterpart() -> None:
    assert columns(axis="together", positions=[-1, -2]) == [("all positions", 2, "", None)]
    (stored,) = plan(axis="together").sweep.pairs
    assert stored.notes
    alone = len(stored.base) - len(stored.columns[0].places)
    assert any(
        f"stay as they are in the corrupt prompt (count: {alone})" in note for note in stored.notes
    )
    assert not any("stay as they are" in note for note in plan().sweep.pairs[0].notes)


@pytest.mark.parametrize(
    ("neurons", "found"),
    [
        (
            {"sets": ["0-1,5", 7]},
            [("neurons 0-1, 5", "0-1, 5", None), ("neuron 7", "7", None)],
        ),
        ({"top": [1, 4]}, [("top 1", "", (0, 1)), ("top 4", "", (0, 4))]),
        ({"each": 2}, [("neuron #1", "", (0, 1)), ("neuron #2", "", (1, 2))]),
    ],
)
def test_neurons_are_columns_by_set_by_rank_or_by_the_first_ranks(
    neurons: dict[str, Any], found: list[tuple[str, str, tuple[int, int] | None]]
) -> None:
    everywhere = len(plan(axis="together").sweep.pairs[0].columns[0].places)
    assert columns(axis="neuron", neurons=neurons) == [
        (label, everywhere, dims, ranks) for label, dims, ranks in found
    ]


#: Of four elements each, over one key head.
WITH_HEADS = model(
    hooks=["pre_attn", "q", "k", "z"],
    inside={
        **dict.fromkeys(("q", "z"), RowShape(heads=3, width=4)),
        "k": RowShape(heads=1, width=4),
    },
)


def test_heads_are_columns_with_their_dimensions_and_at_each_token() -> None:
    everywhere = len(plan(axis="together").sweep.pairs[0].columns[0].places)
    asked: dict[str, Any] = {"info": WITH_HEADS, "hooks": ["hook_z", "q"]}
    assert columns(axis="head", **asked) == [
        ("head 0", everywhere, "0-3", None),
        ("head 1", everywhere, "4-7", None),
        ("head 2", everywhere, "8-11", None),
    ]
    (stored,) = plan(axis="head_position", heads="0,-1", positions=[1, -1], **asked).sweep.pairs
    found = [
        (column.head, column.dims, [to for to, _ in column.places]) for column in stored.columns
    ]
    last = len(stored.base) - 1
    assert found == [(0, "0-3", [1]), (0, "0-3", [last]), (2, "8-11", [1]), (2, "8-11", [last])]
    assert [column.label.rpartition(" ")[2] for column in stored.columns] == ["1", str(last)] * 2
    refused = refusal(pair(), info=WITH_HEADS, hooks=["z", "k"], axis="head")
    assert refused.field == "hooks[1]"
    assert "k has 1 heads of 4, but z has 3 of 4" in refused.detail


def test_the_name_of_a_mask_lists_its_dimensions() -> None:
    assert dims_named(dims_name("0-2, 5")) == [range(3), range(5, 6)]
