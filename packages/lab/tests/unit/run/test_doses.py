"""A dose's figures: what the worker computes of outputs, and what receipts add."""

import math

import msgspec
import pytest
from refusal_kit import refuses

from midstream.schemas.artifacts.probes import ProbeScore
from midstream.schemas.base.edit_sizes import EditSizes
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_msgpack
from midstream.schemas.jobs.jobs import Job, Output, Prompted, Sampling, StoredPrompt, TokenLogprob
from midstream.schemas.jobs.receipts import Receipt
from midstream_lab.admit.doses import expanded
from midstream_lab.records.doses import DoseEffect, DoseRequest, StoredDose
from midstream_lab.results.dose_result import dose_result
from midstream_lab.run.dose_measures import measure, repetition
from midstream_lab.show.doses import drawn


def output(
    text: str = "",
    token_ids: list[int] | None = None,
    logprobs: list[float] = (),  # type: ignore[assignment]
    ended: str = "length",
) -> Output:
    tokens = [None, *(TokenLogprob(token_id=1, token="", logprob=value) for value in logprobs)]
    return Output(
        index=0,
        text=text,
        token_ids=token_ids or [],
        finish_reason=ended,
        prompt_tokens=1,
        prompt=Prompted(text="", token_ids=[], logprobs=tokens) if logprobs else msgspec.UNSET,
    )


def dose(effect: DoseEffect, targets: list[int] | None = None) -> StoredDose:
    return StoredDose(
        cells=[(None, 0.0), *((3, scale) for scale in ((-0.5, 0.5, 1.0, 2.0)))],
        effect=effect,
        prompts=2,
        requests=3 + len(targets or []),
        target_tokens=targets or [],
        max_loss=0.3,
        max_repetition=0.2,
    )


def receipt(request: int, **fields: object) -> Receipt:
    own = {"job": "j", "request": request, "attempt": 1, "rank": 0, "world": 1, "tp": 0, "pp": 0}
    rest = {"version": "", "worker": "w", "boot": "b", "step": 1, "actions": 0, "checksum": "0"}
    return Receipt(**own, **rest, status="ok", **fields)  # type: ignore[arg-type]


def test_words_loss_and_repetition_of_each_cell_and_the_largest_safe_scales() -> None:
    losses = (2.0, 2.1, 2.2, 2.9, 2.0)
    outputs = [
        part
        for number, loss in enumerate(losses)
        for part in (
            output("How GREAT!" if number else "no", list(range(8))),
            output("bad", [1] * 12 if number == 1 else list(range(12))),
            output(logprobs=[-loss, -loss]),
        )
    ]
    result = measure(dose(DoseEffect(words=["great"])), outputs)
    assert result.unsteered.effect == 0.0
    assert result.unsteered.loss == 2.0
    assert [cell.effect for cell in result.cells] == [0.5] * 4
    assert [round(cell.loss, 6) for cell in result.cells] == [0.1, 0.2, 0.9, 0.0]
    assert result.cells[0].repetition == pytest.approx((1 - 1 / 9) / 2)
    assert [cell.safe for cell in result.cells] == [False, True, False, True]
    sizes = [
        [EditSizes(request=n, hook="post_block", layer=3, rows=4, median=0.1 * n, largest=0.2 * n)]
        for n in range(3)
    ]
    found = dose_result(to_msgpack(result), [receipt(6 + n, sizes=sizes[n]) for n in range(3)])
    assert [(cell.median, cell.largest) for cell in found.cells[:2]] == [(0.0, 0.0), (0.1, 0.4)]
    # 2.0 is an island behind a cell that is not safe; −0.5 repeats itself
    assert [(cell.layer, cell.scale) for cell in found.safe] == [(3, 0.5)]


@pytest.mark.parametrize(
    ("cut", "safe"),
    [*enumerate([[], [2.0], [-0.5], [-0.5, 0.5], [-0.5, 1.0]])],
)
def test_a_cell_whose_text_a_policy_ended_is_not_safe(cut: int, safe: list[float]) -> None:
    """Nor is any, if the unsteered text was ended: a part of a text repeats itself less."""
    outputs = [
        part
        for number in range(5)
        for part in (
            output("a", [1, 2]),
            output("a", [1], ended="policy:guard" if number == cut else "stop"),
            output(logprobs=[-2.0]),
        )
    ]
    result = dose_result(to_msgpack(measure(dose(DoseEffect(words=["a"])), outputs)), [])
    cells = [result.unsteered, *result.cells]
    assert [cell.stopped for cell in cells] == [int(number == cut) for number in range(5)]
    assert [cell.safe for cell in cells] == [0 < cut != n for n in range(5)]
    assert [cell.scale for cell in result.safe] == safe
    assert "of 1 of 5 cells, which cannot be compared" in "".join(map(str, drawn(result)))


def test_a_targets_log_probability_is_that_of_its_own_tokens() -> None:
    cell = [
        *(output("a", [1, 2]) for _ in range(2)),
        output(logprobs=[-9.0, -1.0]),
        output(logprobs=[-9.0, -2.0, -3.0]),
        output(logprobs=[-4.0]),
    ]
    result = measure(dose(DoseEffect(target=" x"), [1, 2]), cell * 5)
    assert result.unsteered.effect == result.cells[0].effect == -2.0
    with pytest.raises(MidstreamError, match="no log-probabilities"):
        measure(dose(DoseEffect(target=" x"), [1, 2]), [output()] * 25)


def test_a_probes_effect_is_the_mean_over_the_continued_prompts() -> None:
    outputs = [output("a", [1]), output("b", [2]), output(logprobs=[-1.0])] * 5
    result = measure(dose(DoseEffect(probe="p")), outputs)

    def score(value: float) -> ProbeScore:
        return ProbeScore("p", "d", ["x"], [value], 3, [None])

    ticket = [
        receipt(0, scores=[score(1.0)]),
        receipt(1, scores=[score(3.0)]),
        receipt(2, scores=[score(99.0)]),  # the held-out text
        receipt(3, scores=[score(-1.0)]),
    ]
    found = dose_result(to_msgpack(result), ticket)
    assert found.unsteered.effect == 2.0
    assert found.cells[0].effect == -1.0


def test_repetition_is_the_share_of_four_grams_that_came_before() -> None:
    assert repetition([1, 2, 3]) == 0.0
    assert repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([7] * 8) == pytest.approx(4 / 5)
    assert math.isclose(repetition([1, 2, 3, 4] * 2), 1 / 5)


BODY = {
    "model": "m",
    "prompts": ["a"],
    "steering": [{"layers": 0, "vector": [1.0]}],
    "scales": [1.0],
    "effect": {"words": ["a"]},
    "held_out": ["b"],
}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *(
            ({"effect": effect}, "exactly one")
            for effect in ({}, {"words": ["a"], "target": " b"}, {"target": " b", "probe": "p"})
        ),
        *(({"scales": scales}, r"scales") for scales in ([0.0, 1.0], [1.0, 1.0], [])),
    ],
)
def test_an_effect_is_one_measure_and_scales_differ_and_leave_out_zero(
    wrong: dict[str, object], said: str
) -> None:
    with pytest.raises(msgspec.ValidationError, match=said):
        msgspec.convert(BODY | wrong, DoseRequest)


@pytest.mark.parametrize(("tokens", "at"), [([1], 0), ([2, 1], 1), ([2, 1, 2], 1)])
def test_a_held_out_text_of_one_token_is_refused(tokens: list[int], at: int) -> None:
    """It has no loss: alone, it would make that of every cell NaN."""
    body = msgspec.convert(BODY | {"held_out": ["b"] * len(tokens)}, DoseRequest)
    prompts = [StoredPrompt(token_ids=[7] * count) for count in (1, *tokens)]
    fields = {"id": "j", "kind": "dose", "model": "m", "sampling": Sampling(), "created": 0.0}
    with refuses("has one token", status=400, field=f"held_out[{at}]"):
        expanded(Job(prompts=prompts, **fields), body, range(4))  # type: ignore[arg-type]
