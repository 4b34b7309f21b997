"""Does every family do on the real engine what its formula says, at every hook, and nothing where
it has nothing to do?

v1 runner, eager, fp32; the same batch in the other ways to run is in `test_modes.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import msgspec
import numpy as np
import pytest
from fidelity import options_of
from fidelity_page import Way
from host import Host, capture_of, prompt_of, relative_error
from nursery import Nursery
from reference import Edit, Reference
from tiny import HIDDEN, LAYERS, checkpoint
from tolerances import FP32_CANCELLED, FP32_COMPONENT, FP32_HOOKS, FP32_LOGPROBS, FP32_ROWS

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.prompts.selectors import HOOKS, STREAM_HOOKS

ALL = list(range(LAYERS))
PROMPT = 20
RNG = np.random.default_rng(11)
V, W = RNG.normal(size=(2, HIDDEN)).astype(np.float32)
UNIT = V / np.linalg.norm(V)
# orthonormal rows, as LoReFT trains it
ROTATION = np.linalg.qr(RNG.normal(size=(HIDDEN, 3)))[0].T.astype(np.float32)
WEIGHT = (RNG.normal(size=(3, HIDDEN)) / np.sqrt(HIDDEN)).astype(np.float32)
BIAS = RNG.normal(size=3).astype(np.float32)

#: Family → one of it at layer 1.
FAMILIES: dict[str, Edit] = {
    "replace": Edit(1, V, op="replace", alpha=0.25, scale=3.0),
    "lowrank": Edit(1, op="lowrank", rotation=ROTATION, weight=WEIGHT, bias=BIAS, strength=0.75),
    "add": Edit(1, V, op="add", scale=-1.5),
    "add_matched": Edit(1, V, op="add", scale=0.3, norm_match=True),
    "ablate": Edit(1, V, op="ablate"),
    "clamp": Edit(1, V, op="clamp", low=-0.25, high=0.5),
}
PLACES = [
    (family, hook)
    for family in FAMILIES
    for hook in HOOKS
    if family != "add_matched" or hook in STREAM_HOOKS
]


@dataclass(frozen=True)
class Trial:
    """One request's captured rows, before and after the edits of the same place."""

    tokens: list[int]
    before: dict[tuple[str, int], np.ndarray]
    after: dict[tuple[str, int], np.ndarray]
    logprobs: list[float]  # of the generated tokens
    applied: int


def trials(
    host: Host, wanted: dict[str, list[Edit]], max_tokens: int = 4, same_prompt: bool = False
) -> dict[str, Trial]:
    """One batch; name → what came of a request with these edits."""
    sites = {hook: ALL for hook in host.info["hooks"] if hook in HOOKS}
    captures = [capture_of([], "all", at, sites=sites, at=at) for at in ("before", "after")]
    jobs = {
        name: host.job(
            prompt_of(PROMPT, seed=0 if same_prompt else number),
            max_tokens=max_tokens,
            capture=captures,
            steering=host.steering(*edits),
            logprobs=0,
        )
        for number, (name, edits) in enumerate(wanted.items())
    }
    answers = host.run(*jobs.values())
    found = {}
    for name, job in jobs.items():
        output = answers[job.id][0]
        readers = [host.capture(job, number) for number in (0, 1)]
        before, after = (
            {(hook, layer): reader.array(layer, hook) for hook in sites for layer in ALL}
            for reader in readers
        )
        logprobs = [each.logprob for each in output.logprobs or []]
        found[name] = Trial(
            job.prompts[0].token_ids + output.token_ids,
            before,
            after,
            logprobs,
            host.receipts(job)[0].applied,
        )
    return found


def worst(found: Trial, reference: Reference, edits: list[Edit]) -> float:
    """The largest error of any row, before and after its edits, relative to the row's length."""
    errors = []
    for at, rows in (("before", found.before), ("after", found.after)):
        wanted = reference.rows(found.tokens[:-1], edits, at)
        errors += [relative_error(values, wanted[place]) for place, values in rows.items()]
    return max(errors)


# -- against transformers
# --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def at_every_hook(v1: Host) -> dict[str, Trial]:
    """A request for each family and hook, all in one batch of one engine."""
    return trials(
        v1, {f"{family} {hook}": [FAMILIES[family]._replace(hook=hook)] for family, hook in PLACES}
    )


@pytest.mark.parametrize(("family", "hook"), PLACES)
# field case 3
def test_every_family_at_every_hook_gives_the_reference_rows_there_and_downstream(
    at_every_hook, reference, family: str, hook: str
) -> None:
    found, edit = at_every_hook[f"{family} {hook}"], FAMILIES[family]._replace(hook=hook)
    assert worst(found, reference, [edit]) <= FP32_ROWS
    plain = reference.rows(found.tokens[:-1], [], "after")
    moved = np.linalg.norm(found.after[hook, 1] - plain[hook, 1], axis=-1) / np.linalg.norm(
        plain[hook, 1], axis=-1
    )
    touched = moved > 0.01
    # A clamp leaves rows alone whose component is inside its range.
    assert touched.any() if family == "clamp" else touched.mean() > 0.8
    assert relative_error(found.before["post_block", 3], plain["post_block", 3]) > 0.01


@pytest.fixture(scope="module")
def other_models(
    nursery: Nursery, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Host, Reference]]:
    folder = tmp_path_factory.mktemp("others")

    @cache
    def start(name: str) -> tuple[Host, Reference]:
        path = checkpoint(name, folder / name)
        return nursery.host(
            folder / f"{name}-engine", path, **options_of(Way("v1", "eager", "float32"))
        ), Reference(path)

    return start


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tolerance"),
    [
        pytest.param("gpt2", FP32_ROWS, marks=pytest.mark.matrix),
        pytest.param("gemma3", FP32_ROWS, marks=pytest.mark.matrix),
        ("qwen3-moe", FP32_HOOKS),
    ],
)
def test_other_architectures_are_steered_alike(other_models, name: str, tolerance: float) -> None:
    """One that keeps its stream in one tensor, one with norms after its branches, and one whose MLP
    chooses experts.
    """
    host, reference = other_models(name)
    wanted = {
        f"{family} {hook}": [FAMILIES[family]._replace(hook=hook)]
        for family, hook in PLACES
        if hook in host.info["hooks"]
    }
    found = trials(host, wanted, max_tokens=2)
    errors = {place: worst(found[place], reference, edits) for place, edits in wanted.items()}
    assert {place: error for place, error in errors.items() if error > tolerance} == {}


def test_a_stack_of_all_families_is_applied_in_the_documented_order(
    v1: Host, reference: Reference
) -> None:
    stack = [
        edit._replace(vector=None if edit.vector is None else RNG.normal(size=HIDDEN))
        for edit in FAMILIES.values()
    ]
    shuffled = [stack[index] for index in (4, 1, 5, 3, 0, 2)]
    found = trials(v1, {"in order": stack, "shuffled": shuffled})
    assert worst(found["in order"], reference, stack) <= FP32_ROWS
    assert worst(found["shuffled"], reference, stack) <= FP32_ROWS
    assert worst(found["shuffled"], reference, shuffled) > 0.01, "the order matters here"


def test_steering_phases_are_prompt_or_generated(v1: Host, reference: Reference) -> None:
    """Prefill-only and decode-only steering, and the two as one."""  # field case 9
    prompt = prompt_of(100)  # two steps of prefill
    tiers = {"all_prompt": range(100), "all_generated": range(100, 104), "last_prompt": [99]}
    edit = FAMILIES["clamp"]
    jobs = {}
    for positions in tiers:
        (entry,) = v1.steering(edit)
        entry = msgspec.structs.replace(entry, positions=positions)
        jobs[positions] = v1.job(
            prompt, max_tokens=5, capture=capture_of(ALL, "all"), steering=[entry]
        )
    answers = v1.run(*jobs.values())
    for positions, job in jobs.items():
        tokens = prompt + answers[job.id][0].token_ids
        wanted = reference.post_block(
            tokens[:-1], [edit._replace(positions=list(tiers[positions]))]
        )
        for layer in ALL:
            assert relative_error(v1.capture(job).array(layer), wanted[layer]) <= FP32_ROWS
        assert v1.receipts(job)[0].applied == len(tiers[positions])


@pytest.mark.parametrize("family", ["ablate", "clamp", "add_matched", "lowrank"])
def test_a_position_is_edited_once_and_not_again_in_later_chunks_or_steps(
    v1: Host, reference: Reference, family: str
) -> None:
    """Each of these but `ablate` would do something else the second time."""  # field case 9
    edit, prompt = FAMILIES[family]._replace(positions=[3, 70]), prompt_of(100)
    job = v1.job(prompt, max_tokens=4, capture=capture_of(ALL, "all"), steering=v1.steering(edit))
    tokens = prompt + v1.run(job)[job.id][0].token_ids
    wanted = reference.post_block(tokens[:-1], [edit])
    for layer in ALL:
        assert relative_error(v1.capture(job).array(layer), wanted[layer]) <= FP32_ROWS
    assert v1.receipts(job)[0].applied == 2


def test_steered_outputs_are_judged_by_their_logprobs_within_one_batch(
    v1: Host, reference: Reference
) -> None:
    # field case 12
    """Greedy tokens flip where two are almost equally good; what the model thinks of them does
    not.
    """
    wanted = {family: [edit] for family, edit in FAMILIES.items()}
    found = trials(v1, {"plain": [], **wanted}, same_prompt=True)
    seen = {}
    for name, trial in found.items():
        reference.rows(trial.tokens[:-1], wanted.get(name, []))
        logits = reference.logits[PROMPT - 1 :].astype(np.float64)
        logprobs = (
            logits
            - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
            - logits.max(-1, keepdims=True)
        )
        generated = trial.tokens[PROMPT:]
        np.testing.assert_allclose(
            trial.logprobs,
            logprobs[np.arange(len(generated)), generated],
            atol=FP32_LOGPROBS,
            rtol=0,
        )
        seen[name] = logprobs[0]
    for name in wanted:
        assert np.abs(seen[name] - seen["plain"]).max() > 100 * FP32_LOGPROBS, (
            f"{name} has an effect to be judged"
        )


# -- what each means -------------------------------------------------------------------------------


def same_bits(found: Trial, wanted: Trial) -> bool:
    return found.tokens == wanted.tokens and all(
        np.array_equal(rows, others[place])
        for mine, others in ((found.before, wanted.before), (found.after, wanted.after))
        for place, rows in mine.items()
    )


def alone(host: Host, edits: list[Edit]) -> Trial:
    """In a batch of its own: two such runs are composed alike, step by step."""
    return trials(host, {"it": edits})["it"]


NOTHING = {
    "a scale of 0": [FAMILIES["add"]._replace(scale=0.0)],
    "a matched scale of 0": [FAMILIES["add_matched"]._replace(scale=0.0)],
    "an alpha of 0": [FAMILIES["replace"]._replace(alpha=0.0)],
    "ablating with a strength of 0": [FAMILIES["ablate"]._replace(strength=0.0)],
    "a lowrank with a strength of 0": [FAMILIES["lowrank"]._replace(strength=0.0)],
    "a clamp with a strength of 0": [FAMILIES["clamp"]._replace(strength=0.0)],
    "a clamp whose range holds every component": [
        Edit(layer, V, op="clamp", low=-1e4, high=1e4, hook=hook) for layer in ALL for hook in HOOKS
    ],
    "a clamp from below that every component passes": [Edit(2, V, op="clamp", low=-1e4)],
    "an addition and its negative": [FAMILIES["add"], FAMILIES["add"]._replace(scale=1.5)],
}


@pytest.fixture(scope="module")
def plain(v1: Host) -> Trial:
    return alone(v1, [])


@pytest.mark.parametrize("what", NOTHING)
def test_no_op_interventions_are_bit_exact(v1: Host, plain: Trial, what: str) -> None:
    found = alone(v1, NOTHING[what])
    assert found.applied > 0, "it was applied, and changed nothing"
    assert same_bits(found, plain)


def test_an_addition_subtracted_at_the_next_site_leaves_the_stream_up_to_rounding(
    v1: Host, plain: Trial
) -> None:
    """`post_block` of layer 1 is the stream at `pre_attn` of layer 2."""
    found = alone(
        v1, [FAMILIES["add"], FAMILIES["add"]._replace(layer=2, hook="pre_attn", scale=1.5)]
    )
    assert relative_error(found.after["post_block", 1], plain.after["post_block", 1]) > 0.01
    for place in (("pre_attn", 2), ("attn_out", 2), ("post_block", 3)):
        assert relative_error(found.after[place], plain.after[place]) <= FP32_CANCELLED


@pytest.mark.parametrize("hook", HOOKS)
def test_ablation_removes_only_the_component(at_every_hook, hook: str) -> None:
    found = at_every_hook[f"ablate {hook}"]
    before, after = found.before[hook, 1], found.after[hook, 1]
    assert np.abs(before @ UNIT).max() > 0.05
    assert (np.abs(after @ UNIT) <= FP32_COMPONENT * np.linalg.norm(before, axis=-1)).all()
    rest = before - (before @ UNIT)[:, None] * UNIT
    assert relative_error(after, rest) <= FP32_ROWS


def test_a_direction_ablated_everywhere_is_absent_from_every_later_stream(v1: Host) -> None:
    everywhere = [Edit(layer, V, op="ablate", hook=hook) for layer in ALL for hook in STREAM_HOOKS]
    found = alone(v1, everywhere)
    for layer in ALL:
        rows = found.after["post_block", layer]
        assert (np.abs(rows @ UNIT) <= FP32_COMPONENT * np.linalg.norm(rows, axis=-1)).all()


@pytest.mark.parametrize("hook", HOOKS)
def test_clamp_bounds_a_component_and_keeps_rows_within_the_range_bit_for_bit(
    at_every_hook, hook: str
) -> None:
    found, edit = at_every_hook[f"clamp {hook}"], FAMILIES["clamp"]
    before, after = found.before[hook, 1], found.after[hook, 1]
    component, clamped = before @ UNIT, after @ UNIT
    assert edit.low is not None
    assert edit.high is not None
    room = FP32_COMPONENT * np.linalg.norm(before, axis=-1)
    inside = (component > edit.low + room) & (component < edit.high - room)
    assert inside.any()
    assert not inside.all()
    assert np.array_equal(after[inside], before[inside])
    assert (np.abs(clamped - component.clip(edit.low, edit.high)) <= room).all()


@pytest.mark.parametrize("hook", sorted(STREAM_HOOKS))
def test_norm_match_scales_to_the_stream_norm(at_every_hook, hook: str) -> None:
    # field case 10
    """Of hidden + residual, which vLLM keeps apart: a branch alone is shorter or longer."""
    found = at_every_hook[f"add_matched {hook}"]
    before, step = found.before[hook, 1], found.after[hook, 1] - found.before[hook, 1]
    lengths = np.linalg.norm(before, axis=-1)
    assert lengths.max() > 1.1 * lengths.min(), "rows of different lengths"
    np.testing.assert_allclose(np.linalg.norm(step, axis=-1), 0.3 * lengths, rtol=1e-4)
    np.testing.assert_allclose(step, 0.3 * lengths[:, None] * UNIT, atol=1e-4 * lengths.max())


def test_norm_match_is_refused_at_branches(v1: Host) -> None:
    with pytest.raises(MidstreamError, match="attn_out is a branch"):  # field case 10
        v1.steering(FAMILIES["add_matched"]._replace(hook="attn_out"))


def test_directions_are_independent_of_vector_length(v1: Host) -> None:
    for family in ("ablate", "clamp", "add_matched"):
        once, longer = (
            alone(v1, [FAMILIES[family]._replace(vector=length * V)]) for length in (1.0, 64.0)
        )
        assert same_bits(once, longer), family


def test_lowrank_with_zero_weight_and_bias_removes_the_subspace(v1: Host) -> None:
    edit = Edit(1, op="lowrank", rotation=ROTATION, weight=0 * WEIGHT, bias=0 * BIAS)
    found = alone(v1, [edit])
    after = found.after["post_block", 1]
    assert (
        np.abs(after @ ROTATION.T) <= FP32_COMPONENT * np.linalg.norm(after, axis=-1)[:, None]
    ).all()
    assert np.abs(found.before["post_block", 1] @ ROTATION.T).max() > 0.05


def test_lowrank_sets_the_subspace_to_the_learned_values(v1: Host) -> None:
    """With orthonormal rows R·s becomes W·s + b: what LoReFT means."""
    found = alone(v1, [FAMILIES["lowrank"]._replace(strength=1.0)])
    before, after = found.before["post_block", 1], found.after["post_block", 1]
    wanted = before @ WEIGHT.T + BIAS
    assert (
        np.abs(after @ ROTATION.T - wanted)
        <= FP32_COMPONENT * np.linalg.norm(before, axis=-1)[:, None]
    ).all()
