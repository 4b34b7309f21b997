"""Which single sentences hold of the site ops? Each is a function of the two ops; both implementations are tried with all of them."""

import math
import secrets
from collections.abc import Callable

import torch
from site_kit import DTYPES, TOKENS, WIDTHS, Case, Op, check, random_case, run, same_bits

from midstream.kernels.plan import ROWS_PER_TOKEN, Does, SitePlan

Property = Callable[[Op, Op], None]
WIDTH = 37


def _case(plan: SitePlan, *, tokens: int = 7, dtype: torch.dtype = torch.bfloat16, pair: bool = True, name: str = "") -> Case:
    seed = secrets.randbits(32)
    torch.manual_seed(seed)
    hidden = torch.randn(tokens, plan.hidden_size).to(dtype) if pair else None
    stream = torch.randn(tokens, plan.hidden_size).to(dtype)
    return Case(plan, hidden, stream, 3 * tokens, tokens + 2, f"{name} seed {seed}, {dtype}, {'pair' if pair else 'single'}")


def _add(*values: float) -> Does:
    return Does(torch.tensor(values).repeat(WIDTH)[:WIDTH].reshape(1, WIDTH) if values else torch.randn(1, WIDTH))


def _replace(alpha: float) -> Does:
    return Does(torch.randn(1, WIDTH), (alpha,))


def a_random_step_is_what_the_definition_says(pair_site: Op, single_site: Op) -> None:
    for dtype in DTYPES:
        for width in WIDTHS:
            for tokens in TOKENS:
                for pair in (True, False):
                    case = random_case(secrets.randbits(32), dtype=dtype, width=width, tokens=tokens, pair=pair)
                    check(case, run(case, pair_site, single_site))


def nothing_planned_changes_nothing(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        case = _case(SitePlan(WIDTH, [{"add": _add(), "replace": _replace(1.0)}]), pair=pair)
        case.stream[3] = math.nan
        check(case, run(case, pair_site, single_site))


def listed_tokens_whose_rows_do_nothing_here_keep_their_bits(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        plan = SitePlan(WIDTH, [{}, {"replace": _replace(0.0)}, {"add": _add()}], {0: [1], 2: [0, 0], 3: [], 5: [2, 1], 6: [2, 2, 2, 0]})
        case = _case(plan, pair=pair)
        case.stream[:, 0] = -0.0
        case.stream[:, 1] = math.nan
        found = run(case, pair_site, single_site)
        check(case, found)
        assert same_bits(found.stream, case.stream), case.name


def a_full_replacement_gives_the_vectors_bits_whatever_was_there(pair_site: Op, single_site: Op) -> None:
    for dtype in DTYPES:
        for pair in (True, False):
            target = torch.randn(1, WIDTH)
            target[0, :2] = torch.tensor([-0.0, 0.0])
            case = _case(SitePlan(WIDTH, [{"replace": Does(target, (1.0,))}], {1: [1], 4: [1]}, after=[4, 1]), dtype=dtype, pair=pair)
            case.stream[1] = math.inf
            case.stream[4, 5] = math.nan
            found = run(case, pair_site, single_site)
            check(case, found)
            for row in (found.sum[1], found.sum[4], found.ring[0], found.ring[1]):
                assert same_bits(row, target[0].to(dtype)), case.name


def a_partial_replacement_mixes(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        target = torch.full((1, WIDTH), 4.0)
        case = _case(SitePlan(WIDTH, [{"replace": Does(target, (0.25,))}], {2: [1]}), dtype=torch.float32, pair=pair)
        found = run(case, pair_site, single_site)
        check(case, found)
        torch.testing.assert_close(found.sum[2], 0.75 * case.sum[2] + 1.0)


def replacements_come_first_in_column_order_then_additions(pair_site: Op, single_site: Op) -> None:
    configurations = [
        {"add": _add(0.5)},
        {"replace": Does(torch.full((1, WIDTH), 2.0), (1.0,)), "add": _add(8.0)},
        {"replace": Does(torch.full((1, WIDTH), 4.0), (0.5,))},
    ]
    for pair in (True, False):
        case = _case(SitePlan(WIDTH, configurations, {0: [1, 2, 3], 3: [3, 0, 2, 1]}), pair=pair)
        found = run(case, pair_site, single_site)
        check(case, found)
        assert found.sum[0].tolist() == [0.5 * 2 + 0.5 * 4 + 0.5 + 8] * WIDTH, case.name
        assert found.sum[3].tolist() == [2 + 0.5 + 8] * WIDTH, case.name


def many_rows_on_a_token_are_added_without_rounding_between(pair_site: Op, single_site: Op) -> None:
    # In bf16 256 + 1 is 256: rounding after each of four additions would lose all of them.
    for pair in (True, False):
        case = _case(SitePlan(WIDTH, [{"add": _add(1.0)}], {1: [1] * ROWS_PER_TOKEN}), pair=pair)
        case.stream[1] = 256.0
        if case.hidden is not None:
            case.hidden[1] = 0.0
        found = run(case, pair_site, single_site)
        check(case, found)
        assert found.sum[1].tolist() == [260.0] * WIDTH, case.name


def one_addition_is_the_models_own(pair_site: Op, single_site: Op) -> None:
    for dtype in DTYPES:
        for pair in (True, False):
            does = _add()
            case = _case(SitePlan(WIDTH, [{"add": does}], {1: [1]}), dtype=dtype, pair=pair)
            found = run(case, pair_site, single_site)
            assert same_bits(found.stream[1], case.stream[1] + does.vectors[0].to(dtype)), case.name


def before_sees_the_stream_unedited_and_after_edited(pair_site: Op, single_site: Op) -> None:
    for pair in (True, False):
        plan = SitePlan(WIDTH, [{"replace": _replace(1.0)}, {"add": _add()}], {0: [1], 1: [2], 2: [2]}, [0, 1, 5], [1, 6, 0], 4, 9)
        case = _case(plan, pair=pair)
        found = run(case, pair_site, single_site)
        check(case, found)
        assert same_bits(found.ring[4:7], case.sum[[0, 1, 5]]), case.name
        assert same_bits(found.ring[9:12], found.sum[[1, 6, 0]]), case.name
        assert not torch.equal(found.ring[4], found.ring[11]), case.name


def a_stream_with_a_leading_one_is_the_same_stream(pair_site: Op, single_site: Op) -> None:
    plan = SitePlan(WIDTH, [{"add": _add()}, {"replace": _replace(0.3)}], {0: [1], 4: [2, 1]}, [0, 1], [4, 3], 0, 5)
    for pair in (True, False):
        case = _case(plan, pair=pair)
        flat = run(case, pair_site, single_site)

        def wider(*tensors: torch.Tensor, op: Op = pair_site if pair else single_site, streams: int = 1 + pair) -> None:
            op(*(tensor.unsqueeze(0) for tensor in tensors[:streams]), *tensors[streams:])

        check(case, found := run(case, wider, wider))
        assert same_bits(found.stream, flat.stream), case.name
        assert same_bits(found.ring, flat.ring), case.name


#: Sentence → property.
PROPERTIES: dict[str, Property] = {
    name: value
    for name, value in list(globals().items())
    if callable(value) and getattr(value, "__module__", "") == __name__ and name[0] != "_" and name != "Property"
}
