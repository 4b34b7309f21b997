"""Which single sentences hold of the site ops?

Each is a function of the two ops; both implementations are tried with all of them.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from site_kit import (
    DTYPES,
    SHAPES,
    Case,
    Op,
    Outcome,
    check_sizes,
    checked,
    new_seed,
    random_case,
    run,
    same_bits,
    some_of,
)
from site_plans import SitePlan

from midstream.kernels.plan import LARGEST_SIZE, OVERFLOWED, ROWS_PER_TOKEN, UNSOUND, Does, lowrank
from midstream.schemas.requests.interventions import FAMILIES, MAX_RANK

Property = Callable[[Op, Op], None]
WIDTH = 37
#: Every dtype, with a pair and with a single tensor.
EVERY = tuple(itertools.product(DTYPES, (True, False)))


def _case(
    plan: SitePlan,
    *,
    tokens: int = 7,
    dtype: torch.dtype = torch.bfloat16,
    pair: bool = True,
    name: str = "",
) -> Case:
    seed = new_seed()
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, plan.hidden_size).to(dtype) if pair else None
    return Case(
        plan,
        hidden,
        torch.randn(tokens, plan.hidden_size).to(dtype),
        3 * tokens,
        tokens + 2,
        f"{name} seed {seed}, {dtype}, {'pair' if pair else 'single'}",
    )


def _add(*values: float) -> Does:
    return Does(
        torch.tensor(values).repeat(WIDTH)[:WIDTH].reshape(1, WIDTH)
        if values
        else torch.randn(1, WIDTH)
    )


def _replace(alpha: float) -> Does:
    return Does(torch.randn(1, WIDTH), (alpha,))


def _axis(lane: int, *scalars: float) -> Does:
    """Of a family with a direction: the one of a single lane, so that results are whole numbers."""
    direction = torch.zeros(1, WIDTH)
    direction[0, lane] = 3.0
    return Does(direction, scalars)


def _of_strength(strength: float) -> dict[str, Does]:
    """One application of each family that has a strength; `clamp` leaves no row as it is."""
    vectors = {
        family.name: torch.randn(family.entries(), WIDTH)
        for family in FAMILIES
        if family.has_strength
    }
    vectors["replace_masked"] = some_of(torch.randn(1, WIDTH))
    does = {
        name: Does(vector, (strength,))
        for name, vector in vectors.items()
        if name not in ("lowrank", "clamp", "feature")
    }
    rotation, weight = vectors["lowrank"].unsqueeze(1) / math.sqrt(WIDTH)
    return does | {
        "lowrank": lowrank(strength, rotation, weight, torch.ones(1)),
        "clamp": Does(vectors["clamp"], (strength, 50.0, 60.0)),
        "feature": Does(vectors["feature"].abs(), (strength, 50.0, 0.0, 0.0, 0.0)),
    }


def _fill(case: Case, tokens: int | slice, value: float | torch.Tensor) -> None:
    """The stream of these tokens; of a pair, all of it is in the residual."""
    case.stream[tokens] = value
    if case.hidden is not None:
        case.hidden[tokens] = 0


def _lanes(case: Case, token: int, *values: float) -> None:
    """The token's stream is `values`, then zeros; of a pair, the first value is in `hidden`
    alone.
    """
    _fill(case, token, torch.tensor([*values, *[0.0] * (WIDTH - len(values))]))
    if case.hidden is not None:
        case.hidden[token, 0] = values[0]
        case.stream[token, 0] = 0.0


def _assert_untouched(case: Case, found: Outcome) -> None:
    assert same_bits(found.stream, case.stream), case.name
    if found.hidden is not None and case.hidden is not None:
        assert same_bits(found.hidden, case.hidden), case.name


def a_random_step_is_what_the_definition_says(pair_site: Op, single_site: Op) -> None:
    for (dtype, pair), (width, tokens) in itertools.product(EVERY, SHAPES):
        case = random_case(new_seed(), dtype=dtype, width=width, tokens=tokens, pair=pair)
        checked(case, pair_site, single_site)


def listed_tokens_whose_rows_do_nothing_here_keep_their_bits(
    pair_site: Op, single_site: Op
) -> None:
    for pair in (True, False):
        plan = SitePlan(
            WIDTH,
            [{}, {"replace": _replace(0.0)}, {"add": _add()}],
            {0: [1], 2: [0, 0], 3: [], 5: [2, 1], 6: [2, 2, 2, 0]},
        )
        case = _case(plan, pair=pair)
        case.stream[:, 0] = -0.0
        case.stream[:, 1] = math.nan
        assert same_bits(checked(case, pair_site, single_site).stream, case.stream), case.name


def a_rewrite_that_gives_the_row_back_leaves_both_halves_of_a_pair(
    pair_site: Op, single_site: Op
) -> None:
    """A norm may take their sum before it is rounded: another pair of the same sum would give
    another norm.
    """
    for dtype in DTYPES:
        case = _case(SitePlan(WIDTH), dtype=dtype, name="gives back")
        assert case.hidden is not None
        own = (case.hidden + case.stream)[2:3].float()
        replaced = Does(own, (1.0,))
        one = Does(torch.ones(1, WIDTH))
        configurations = [{"replace": replaced}, {"replace": replaced, "add": one}]
        back = Case(
            SitePlan(WIDTH, configurations, {2: [1]}, after=[2]),
            case.hidden,
            case.stream,
            3,
            9,
            case.name,
        )
        _assert_untouched(case, run(back, pair_site, single_site))
        behind = Case(
            SitePlan(WIDTH, configurations, {2: [2]}), case.hidden, case.stream, 3, 9, case.name
        )
        assert same_bits(run(behind, pair_site, single_site).sum[2], (own[0] + 1).to(dtype)), (
            "what comes behind it comes once"
        )


def a_row_that_an_edit_makes_not_finite_is_marked(pair_site: Op, single_site: Op) -> None:
    """By every family, in every dtype, also where the row fits the dtype only before it is rounded;
    −: it came so.
    """
    for dtype in DTYPES:
        large = 0.75 * torch.finfo(dtype).max
        breaking = {"add": _add(large), **_of_strength(1e30)}
        assert breaking.keys() == {family.name for family in FAMILIES}
        for pair in (True, False):
            for name, does in breaking.items():
                plan = SitePlan(
                    WIDTH,
                    [{name: does}, {"add": _add()}],
                    {token: [1 + (token % 2)] for token in range(6)},
                    site=7,
                )
                case = _case(plan, dtype=dtype, pair=pair, name=f"{name} breaks rows")
                _fill(case, slice(None), large)
                case.stream[4, 3] = math.nan
                found = run(case, pair_site, single_site)
                check_sizes(case, found)
                sizes = found.sizes[6]
                assert sizes[:3].isinf().tolist() == [True, False, True], (case.name, dtype)
                assert sizes[4] == UNSOUND, (case.name, dtype)
            run_of_tokens = _case(
                SitePlan(WIDTH, [{"add": _add(large)}], {token: [1] for token in range(3)}, site=7),
                dtype=dtype,
                pair=pair,
            )
            _fill(run_of_tokens, slice(None), large)
            run_of_tokens.stream[1, 3] = math.nan
            sizes = run(run_of_tokens, pair_site, single_site).sizes[6, :3]
            assert sizes.tolist() == [OVERFLOWED, UNSOUND, OVERFLOWED], dtype


def a_finite_row_is_not_marked_whatever_its_norm(pair_site: Op, single_site: Op) -> None:
    """Squares of finite values overflow, as the difference of two may, and those of subnormal ones
    are zero; one value among them that is not finite is found.
    """
    rows = {"large": 0.6, "subnormal": 0.0, "infinite": math.inf, "negative": -math.inf}
    for dtype, pair in EVERY:
        facts = torch.finfo(dtype)
        values = {name: share * facts.max for name, share in rows.items()}
        values["subnormal"] = facts.smallest_normal / 4
        values["broken"] = math.nan
        for limit in (0.0, 0.5, -0.5):
            configurations = [
                {"add": _add(facts.smallest_normal)._replace(limit=limit)},
                {"replace": _replace(1.0)._replace(limit=limit)},
                {"clamp": Does(torch.randn(1, WIDTH), (0.0, 1.0, 2.0))},
                {"add": _add()._replace(limit=limit, operator=True)},
                {"replace": Does(torch.full((1, WIDTH), -0.6 * facts.max), (1.0,), limit)},
            ]
            edits = [[1], [2], [3], [1, 4], [5]]
            for name, value in values.items():
                case = _case(
                    SitePlan(WIDTH, configurations, dict(enumerate(edits))),
                    dtype=dtype,
                    pair=pair,
                    name=f"{name}, limit {limit}",
                )
                _fill(case, slice(None), 0.6 * facts.max)
                case.stream[:, 7 if math.isinf(value) or math.isnan(value) else slice(None)] = value
                _check_marks(case, run(case, pair_site, single_site))


def _check_marks(case: Case, found: Outcome) -> None:
    """Rows that are not finite are marked as such, since when they are; others are not."""
    for token in case.plan.edits:
        came, left = (bool(torch.isfinite(rows[token]).all()) for rows in (case.sum, found.sum))
        size = abs(float(found.sizes[0, token]))
        where = f"{case.name}, token {token}: {size}"
        assert (size == UNSOUND) == (not came), where
        assert (size == OVERFLOWED) == (came and not left), where
        assert size <= LARGEST_SIZE or not (came and left), where


def a_full_replacement_gives_the_vectors_bits_whatever_was_there(
    pair_site: Op, single_site: Op
) -> None:
    for dtype, pair in EVERY:
        target = torch.randn(1, WIDTH)
        target[0, :2] = torch.tensor([-0.0, 0.0])
        case = _case(
            SitePlan(WIDTH, [{"replace": Does(target, (1.0,))}], {1: [1], 4: [1]}, after=[4, 1]),
            dtype=dtype,
            pair=pair,
        )
        case.stream[1] = math.inf
        case.stream[4, 5] = math.nan
        found = checked(case, pair_site, single_site)
        for row in (found.sum[1], found.sum[4], found.ring[0], found.ring[1]):
            assert same_bits(row, target[0].to(dtype)), case.name


def a_masked_replacement_writes_its_dimensions_and_leaves_the_others_their_bits(
    pair_site: Op, single_site: Op
) -> None:
    for dtype, pair in EVERY:
        target = torch.randn(1, WIDTH)
        target[0, :2] = torch.tensor([-0.0, 0.0])
        both = some_of(target)
        written = both[1] == 1
        left = both[1] == 0
        configurations = [{"replace_masked": Does(both, (alpha,))} for alpha in (1.0, 0.25)]
        case = _case(
            SitePlan(WIDTH, configurations, {1: [1], 4: [2], 5: [1], 6: [2]}, after=[5]),
            dtype=dtype,
            pair=pair,
        )
        case.stream[5, written] = math.inf
        case.stream[5, left] = -0.0
        if case.hidden is not None:
            case.hidden[5, left] = -0.0
        case.stream[6, left] = math.nan
        found = run(case, pair_site, single_site)
        for token in (1, 4):
            assert same_bits(found.sum[token, left], case.sum[token, left]), case.name
        for row in (found.sum[1], found.sum[5], found.ring[0]):
            assert same_bits(row[written], target[0, written].to(dtype)), case.name
        assert same_bits(found.sum[5, left], case.sum[5, left]), case.name
        assert found.sum[6, left].isnan().all(), case.name
        assert not found.sum[6, written].isnan().any(), case.name
        case.stream[5:] = 1.0
        checked(case, pair_site, single_site)


def masked_replacements_come_behind_full_ones_and_in_column_order(
    pair_site: Op, single_site: Op
) -> None:
    half = (torch.arange(WIDTH) % 2).float()

    def masked(value: float, alpha: float) -> dict[str, Does]:
        return {"replace_masked": Does(torch.stack([torch.full((WIDTH,), value), half]), (alpha,))}

    configurations = [
        masked(8.0, 0.5),
        {"replace": Does(torch.full((1, WIDTH), 2.0), (1.0,))},
        masked(1.0, 0.5),
    ]
    for pair in (True, False):
        case = _case(
            SitePlan(WIDTH, configurations, {0: [1, 2], 2: [1, 2, 3], 3: [3, 2, 1]}), pair=pair
        )
        found = checked(case, pair_site, single_site)
        for token, odd in ((0, 5.0), (2, 3.0), (3, 4.75)):
            assert found.sum[token].tolist() == torch.where(half == 1, odd, 2.0).tolist(), case.name


def replacements_come_first_in_column_order_then_additions(pair_site: Op, single_site: Op) -> None:
    configurations = [
        {"add": _add(0.5)},
        {"replace": Does(torch.full((1, WIDTH), 2.0), (1.0,)), "add": _add(8.0)},
        {"replace": Does(torch.full((1, WIDTH), 4.0), (0.5,))},
    ]
    for pair in (True, False):
        case = _case(SitePlan(WIDTH, configurations, {0: [1, 2, 3], 3: [3, 0, 2, 1]}), pair=pair)
        found = checked(case, pair_site, single_site)
        assert found.sum[0].tolist() == [0.5 * 2 + 0.5 * 4 + 0.5 + 8] * WIDTH, case.name
        assert found.sum[3].tolist() == [2 + 0.5 + 8] * WIDTH, case.name


def many_rows_on_a_token_are_added_without_rounding_between(pair_site: Op, single_site: Op) -> None:
    # In bf16 256 + 1 is 256: rounding after each addition would lose all of them.
    for pair in (True, False):
        case = _case(SitePlan(WIDTH, [{"add": _add(1.0)}], {1: [1] * ROWS_PER_TOKEN}), pair=pair)
        _fill(case, 1, 256.0)
        found = checked(case, pair_site, single_site)
        assert found.sum[1].tolist() == [256.0 + ROWS_PER_TOKEN] * WIDTH, case.name


def an_addition_of_nothing_leaves_the_rows_bits(pair_site: Op, single_site: Op) -> None:
    for dtype, pair in EVERY:
        none = {"add": Does(torch.zeros(1, WIDTH))}
        case = _case(
            SitePlan(WIDTH, [none, none], {0: [1], 2: [1, 2], 3: [2]}), dtype=dtype, pair=pair
        )
        case.stream[0] = -0.0
        case.stream[2, :3] = -0.0
        case.stream[3] = 0.0
        assert same_bits(run(case, pair_site, single_site).stream, case.stream), case.name


def a_strength_of_zero_leaves_the_rows_bits(pair_site: Op, single_site: Op) -> None:
    for dtype, pair in EVERY:
        none = _of_strength(0.0)
        plan = SitePlan(
            WIDTH,
            [{name: does} for name, does in none.items()] + [none],
            {0: [1, 2, 3, 4], 2: [5], 3: [6], 6: [6, 5]},
        )
        case = _case(plan, dtype=dtype, pair=pair)
        case.stream[0] = -0.0
        case.stream[2, :3] = math.inf
        case.stream[3, 4] = math.nan
        _assert_untouched(case, run(case, pair_site, single_site))


def every_graded_family_of_a_strength_changes_the_row(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        some = _of_strength(0.5)
        plan = SitePlan(
            WIDTH,
            [{name: does} for name, does in some.items()],
            {number: [number + 1] for number in range(len(some))},
        )
        case = _case(plan, pair=pair)
        found = checked(case, pair_site, single_site)
        for token in range(len(some)):
            assert not torch.equal(found.sum[token], case.sum[token]), case.name


def an_addition_beside_rewrites_with_nothing_to_do_is_an_addition_alone(
    pair_site: Op, single_site: Op
) -> None:
    for dtype, pair in EVERY:
        idle = _of_strength(0.0) | {"clamp": Does(torch.randn(1, WIDTH), (1.0, -1e4, 1e4))}
        does = _add()
        case = _case(
            SitePlan(
                WIDTH,
                [{"add": does}, idle, idle | {"add": does}],
                {1: [2, 1], 4: [3], 5: [0, 1]},
            ),
            dtype=dtype,
            pair=pair,
        )
        found = checked(case, pair_site, single_site)
        for token in (1, 4, 5):
            assert same_bits(found.stream[token], case.stream[token] + does.vectors[0].to(dtype)), (
                case.name
            )


def a_matched_addition_is_measured_by_the_whole_stream(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        case = _case(
            SitePlan(WIDTH, [{"add_matched": _axis(5, 2.0)}], {1: [1], 3: [1, 1]}), pair=pair
        )
        _lanes(case, 1, 3.0, 4.0)
        _lanes(case, 3, 3.0, 4.0)
        found = run(case, pair_site, single_site)
        assert found.sum[1].tolist() == [3.0, 4.0, 0.0, 0.0, 0.0, 10.0] + [0.0] * (WIDTH - 6), (
            case.name
        )
        assert found.sum[3, 5] == 32.25, case.name  # 10 + 2 · √125 is 32.36, which bf16 rounds


def an_ablated_direction_is_gone(pair_site: Op, single_site: Op) -> None:
    for dtype, pair in EVERY:
        case = _case(
            SitePlan(
                WIDTH, [{"ablate": _axis(1, 1.0)}, {"ablate": _axis(1, 0.5)}], {1: [1], 2: [2]}
            ),
            dtype=dtype,
            pair=pair,
        )
        _lanes(case, 1, 3.0, 4.0, 5.0)
        _lanes(case, 2, 3.0, 4.0, 5.0)
        found = checked(case, pair_site, single_site)
        assert found.sum[1, :4].tolist() == [3.0, 0.0, 5.0, 0.0], case.name
        assert found.sum[2, :4].tolist() == [3.0, 2.0, 5.0, 0.0], case.name


def a_component_is_moved_to_the_nearest_end_of_its_range(pair_site: Op, single_site: Op) -> None:
    # (strength, low, high) → where a component of 4 goes
    goes = {
        (1.0, 5.0, 6.0): 5.0,
        (1.0, -2.0, 1.0): 1.0,
        (0.5, -2.0, 1.0): 2.5,
        (1.0, 2.0, 2.0): 2.0,
        (1.0, -math.inf, -3.0): -3.0,
        (1.0, 8.0, math.inf): 8.0,
    }
    for pair in (True, False):
        configurations = [{"clamp": _axis(1, *numbers)} for numbers in goes]
        case = _case(
            SitePlan(WIDTH, configurations, {token: [token + 1] for token in range(len(goes))}),
            pair=pair,
        )
        for token in range(len(goes)):
            _lanes(case, token, 3.0, 4.0, 5.0)
        found = checked(case, pair_site, single_site)
        assert found.sum[: len(goes), 1].tolist() == list(goes.values()), case.name
        assert found.sum[: len(goes), 2].tolist() == [5.0] * len(goes), case.name


def _unit_feature(*numbers: float) -> Does:
    """A feature that reads lane 1 and writes lane 3, so that results are whole numbers."""
    lanes = torch.eye(4, WIDTH)
    return Does(
        torch.stack([lanes[1], torch.zeros(WIDTH), torch.zeros(WIDTH), lanes[3]]), (*numbers, 0.0)
    )


def a_feature_is_moved_to_its_target_and_the_rest_of_the_row_stays(
    pair_site: Op, single_site: Op
) -> None:
    # (strength, target, bias, threshold) → what lane 3 gets, where lane 1 is 4
    goes = {
        (1.0, 9.0, 0.0, 0.0): 5.0,
        (1.0, 0.0, 0.0, 0.0): -4.0,
        (0.5, 0.0, -2.0, 0.0): -1.0,
        (1.0, 3.0, -2.0, 2.0): 3.0,  # p is 2, which is not above the threshold
        (1.0, 3.0, -2.0, 1.0): 1.0,
        (1.0, 3.0, -5.0, 0.0): 3.0,
    }
    for dtype, pair in EVERY:
        configurations = [{"feature": _unit_feature(*numbers)} for numbers in goes]
        case = _case(
            SitePlan(WIDTH, configurations, {token: [token + 1] for token in range(len(goes))}),
            dtype=dtype,
            pair=pair,
        )
        for token in range(len(goes)):
            _lanes(case, token, 3.0, 4.0, 5.0, 1.0)
        found = checked(case, pair_site, single_site)
        assert found.sum[: len(goes), 3].tolist() == [1.0 + moved for moved in goes.values()], (
            case.name
        )
        assert found.sum[: len(goes), :3].tolist() == [[3.0, 4.0, 5.0]] * len(goes), case.name


def a_feature_that_has_its_target_leaves_the_rows_bits(pair_site: Op, single_site: Op) -> None:
    """Also up to the rounding of a sum in another order, which is how the value that is asked for
    was found.
    """
    for dtype, pair in EVERY:
        case = _case(SitePlan(WIDTH), dtype=dtype, pair=pair, name="has its target")
        case.stream[:, 0] = -0.0
        encoder = torch.randn(WIDTH)
        encoder *= torch.sign(
            case.sum[1].float() @ encoder
        )  # active at token 1, not at token 2, whose row is its negative
        for rows in (case.stream, *([] if case.hidden is None else [case.hidden])):
            rows[2] = -rows[1]
        parts = [encoder.to(dtype).float()]
        parts.append((encoder - parts[0]).to(dtype).float())
        parts.append((encoder - parts[0] - parts[1]).to(dtype).float())
        held = sum(part.double() for part in parts)
        value = float(case.sum[1].double() @ held) + 0.25
        does = [
            Does(torch.stack([*parts, torch.randn(WIDTH)]), (1.0, target, 0.25, 0.0, 0.0))
            for target in (value, 0.0)
        ]
        does[1] = Does(does[1].vectors, (1.0, 0.0, -0.25, 0.0, 0.0))
        plan = SitePlan(WIDTH, [{"feature": each} for each in does], {1: [1], 2: [2]})
        found = run(Case(plan, case.hidden, case.stream, 21, 9, case.name), pair_site, single_site)
        _assert_untouched(case, found)


def the_families_follow_each_other_in_the_documented_order(pair_site: Op, single_site: Op) -> None:
    lanes = torch.eye(2, WIDTH)
    everything = {
        "replace": Does(torch.full((1, WIDTH), 2.0), (1.0,)),
        "replace_masked": Does(
            torch.stack(
                [torch.full((WIDTH,), 5.0), lanes.new_tensor([0.0, 0.0, 1.0] + [0.0] * (WIDTH - 3))]
            ),
            (1.0,),
        ),
        "lowrank": lowrank(1.0, lanes, 3 * lanes, torch.tensor([0.0, 1.0])),  # 6, 7
        "add": Does(
            torch.tensor([[-3.0, -3.0, -5.0] + [-2.0] * (WIDTH - 3)])
        ),  # 3, 4, and nothing else
        "add_matched": _axis(2, 2.0),  # 10
        "ablate": _axis(0, 1.0),  # 0
        "clamp": _axis(2, 1.0, 0.0, 8.0),  # 8
        "feature": _unit_feature(1.0, 5.0, -1.0, 0.0),  # reads 4 − 1, adds 2
    }
    for pair in (True, False):
        case = _case(SitePlan(WIDTH, [everything], {1: [1]}), pair=pair)
        found = checked(case, pair_site, single_site)
        assert found.sum[1].tolist() == [0.0, 4.0, 8.0, 2.0] + [0.0] * (WIDTH - 4), case.name


def a_low_rank_edit_sets_what_its_rows_read(pair_site: Op, single_site: Op) -> None:
    # Orthonormal R: the coordinates along its rows become W·s + b; the rest stays.
    rotation = torch.eye(2, WIDTH)
    weight = torch.eye(WIDTH)[[4, 1]] * 2
    for pair in (True, False):
        case = _case(
            SitePlan(
                WIDTH,
                [{"lowrank": lowrank(1.0, rotation, weight, torch.tensor([0.5, -1.0]))}],
                {1: [1]},
            ),
            pair=pair,
        )
        _lanes(case, 1, 3.0, 4.0, 5.0, 6.0, 7.0)
        found = checked(case, pair_site, single_site)
        assert found.sum[1, :5].tolist() == [14.5, 7.0, 5.0, 6.0, 7.0], case.name


def a_low_rank_edit_has_as_many_terms_as_the_table_allows(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        rotation, weight = torch.randn(2, MAX_RANK, WIDTH) / math.sqrt(WIDTH)
        one = lowrank(0.5, rotation[:1], weight[:1], torch.ones(1))
        most = lowrank(0.5, rotation, weight, torch.randn(MAX_RANK))
        case = _case(
            SitePlan(
                WIDTH, [{"lowrank": most}, {"lowrank": one}], {1: [2, 1], 3: [1], 4: [2], 5: [1]}
            ),
            pair=pair,
        )
        checked(case, pair_site, single_site)


def before_sees_the_stream_unedited_and_after_edited(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        plan = SitePlan(
            WIDTH,
            [{"replace": _replace(1.0)}, {"add": _add()}],
            {0: [1], 1: [2], 2: [2]},
            before=[0, 1, 5],
            after=[1, 6, 0],
            before_row=4,
            after_row=9,
        )
        case = _case(plan, pair=pair)
        found = checked(case, pair_site, single_site)
        assert same_bits(found.ring[4:7], case.sum[[0, 1, 5]]), case.name
        assert same_bits(found.ring[9:12], found.sum[[1, 6, 0]]), case.name
        assert not torch.equal(found.ring[4], found.ring[11]), case.name


def a_stream_with_a_leading_one_is_the_same_stream(pair_site: Op, single_site: Op) -> None:
    plan = SitePlan(
        WIDTH,
        [{"add": _add()}, {"replace": _replace(0.3)}],
        {0: [1], 4: [2, 1]},
        before=[0, 1],
        after=[4, 3],
        before_row=0,
        after_row=5,
    )
    for pair in (True, False):
        case = _case(plan, pair=pair)
        flat = run(case, pair_site, single_site)

        def wider(
            *tensors: torch.Tensor,
            op: Op = pair_site if pair else single_site,
            streams: int = 1 + pair,
        ) -> None:
            op(*(tensor.unsqueeze(0) for tensor in tensors[:streams]), *tensors[streams:])

        found = checked(case, wider, wider)
        assert same_bits(found.stream, flat.stream), case.name
        assert same_bits(found.ring, flat.ring), case.name


def edits_beyond_their_limit_are_scaled_to_it(pair_site: Op, single_site: Op) -> None:
    """Rows of length 1 get edits of 0.5, and of 2 and more; those of tokens 0 to 4 are limited."""
    unit = torch.zeros(1, WIDTH)
    limit = 0.7
    unit[0, 3] = 1
    others = {
        "add_matched": Does(torch.randn(1, WIDTH), (2.0,), limit),
        "replace": Does(torch.full((1, WIDTH), 9.0), (1.0,), limit),
        "lowrank": lowrank(1.0, unit, torch.zeros(1, WIDTH), torch.tensor([4.0]))._replace(
            limit=limit
        ),
    }
    for dtype in (torch.float32, torch.bfloat16):
        for pair in (True, False):
            for name, does in {"add": Does(2 * unit, limit=limit), **others}.items():
                plan = SitePlan(
                    WIDTH,
                    [{"add": Does(0.5 * unit, limit=limit)}, {name: does}, {"add": Does(2 * unit)}],
                    {0: [1], 1: [2], 2: [2, 1], 3: [3, 1], 4: [2], 5: [3]},
                    after=[1, 2],
                )
                case = _case(plan, dtype=dtype, pair=pair, name=name)
                _fill(case, slice(None), torch.nn.functional.normalize(case.stream.float()))
                found = run(case, pair_site, single_site)
                edits = found.sum.float() - case.sum.float()
                sizes = edits.norm(dim=1) / case.sum.float().norm(dim=1)
                most = limit if dtype == torch.float32 else limit * 1.01
                assert bool((sizes[:5] <= most).all()), f"{case.name}: {sizes}"
                assert bool((sizes[1:5] >= 0.99 * limit).all()), f"{case.name}: {sizes}"
                assert sizes[5] > 1.9, f"{case.name}: {sizes}"
                assert torch.allclose(found.sizes[0, :6], sizes[:6], rtol=1e-5), case.name
                free = _run_unlimited(case, pair_site, single_site)
                turned = torch.nn.functional.cosine_similarity(
                    edits[:5], free.sum.float()[:5] - case.sum.float()[:5]
                )
                assert bool((turned > 0.999).all()), f"{case.name}: another direction {turned}"
                assert same_bits(free.sum[[0, 5]], found.sum[[0, 5]]), f"{case.name}: below it"
                assert same_bits(found.ring[:2], found.sum[[1, 2]]), f"{case.name}: captured"


def _run_unlimited(case: Case, pair_site: Op, single_site: Op) -> Outcome:
    plan = replace(
        case.plan,
        configurations=[
            {name: does._replace(limit=0.0) for name, does in configuration.items()}
            for configuration in case.plan.configurations
        ],
    )
    return run(replace(case, plan=plan), pair_site, single_site)


def edits_beyond_a_failing_limit_have_negative_sizes(pair_site: Op, single_site: Op) -> None:
    """The smallest limit counts: to scale (positive), or to fail (negative), which wins a tie."""
    matched = [
        {"add_matched": Does(torch.randn(1, WIDTH), (1.0,), limit)}
        for limit in (0.0, -0.9, -1.1, 0.5, 0.9)
    ]
    edits = {0: [1], 1: [2], 2: [3], 3: [2, 4], 4: [2, 5], 5: [3, 1]}
    for pair in (True, False):
        case = _case(SitePlan(WIDTH, matched, edits), dtype=torch.float32, pair=pair)
        case.stream[6] = 0
        sizes = run(case, pair_site, single_site).sizes[0]
        assert (sizes < 0).tolist()[:6] == [False, True, False, False, True, True], sizes
        assert math.isclose(-sizes[1], 1.0, rel_tol=1e-5), sizes
    zero = _case(SitePlan(WIDTH, [{"add": _add(1.0)._replace(limit=-2.0)}], {0: [1]}), pair=False)
    zero.stream[0] = 0
    assert float(run(zero, pair_site, single_site).sizes[0, 0]) == -LARGEST_SIZE
    zero.stream[0, 0] = math.nan
    assert float(run(zero, pair_site, single_site).sizes[0, 0]) == -UNSOUND


def a_limit_bounds_the_edits_of_its_owner(pair_site: Op, single_site: Op) -> None:
    """Rows of length 1: the operator adds 2, and the request 3 in another direction; one of them
    has a limit, which bounds its part alone.
    """
    first, second = torch.zeros(2, 1, WIDTH).unbind()
    first[0, 3] = 2
    second[0, 5] = 3
    third = second / 3
    for dtype in (torch.float32, torch.bfloat16):
        for pair, own, higher in itertools.product(
            (True, False), (0.0, 1e-3, -1e-3, 0.5, -4.0), (0.0, 0.1, -0.1, -3.0)
        ):
            plan = SitePlan(
                WIDTH,
                [
                    {"add": Does(first, limit=higher, operator=True)},
                    {"add": Does(second, limit=own)},
                    {
                        "lowrank": lowrank(1.0, third, third, torch.tensor([3.0]))._replace(
                            limit=own
                        )
                    },
                ],
                {0: [1, 2], 1: [2, 1], 2: [1], 3: [2], 4: [1, 3]},
            )
            case = _case(plan, dtype=dtype, pair=pair, name=f"limits {own}, {higher}")
            _fill(case, slice(None), torch.nn.functional.normalize(case.stream.float()))
            found = run(case, pair_site, single_site)
            parts = [
                (length * (limit / length if 0 < limit < length else 1), 0 > limit > -length)
                for length, limit in ((2.0, higher), (3.0, own))
            ]
            moved, failed = zip(*parts, strict=True)
            edits = (found.sum.float() - case.sum.float())[:, [3, 5]]
            wanted = torch.tensor(
                [moved, moved, (moved[0], 0.0), (0.0, moved[1]), moved], dtype=torch.float32
            )
            close = 2e-5 if dtype == torch.float32 else 4e-2
            assert torch.allclose(edits[:5], wanted, atol=close), f"{case.name}: {edits}"
            negative = [any(failed), any(failed), failed[0], failed[1], any(failed)]
            assert (found.sizes[0, :5] < 0).tolist() == negative, f"{case.name}: {found.sizes}"


#: Sentence → property.
PROPERTIES: dict[str, Property] = {
    name: value
    for name, value in list(globals().items())
    if callable(value)
    and getattr(value, "__module__", "") == __name__
    and name[0] != "_"
    and name != "Property"
}
