"""Does the site ops' plain-torch definition do what the design says, and do compilers leave it
alone?
"""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from site_groups import check_groups
from site_kit import Case, begin, some_of
from site_plans import OpInputs, SitePlan, build_group
from site_properties import PROPERTIES
from site_truth import ORDER
from tree import ROOT

from midstream.kernels import pair_site, reference, single_site
from midstream.kernels.plan import (
    AFTER,
    ALIKE,
    ALIKE_FROM,
    BEFORE,
    COLUMNS,
    DEPTH,
    EDITS,
    EDITS_AT,
    ROWS_PER_TOKEN,
    Does,
    laid_out,
    lowrank,
    unit,
)
from midstream.schemas.base.limits import MAX_STEERING_ROWS
from midstream.schemas.requests.interventions import FAMILIES, MAX_RANK, PLACE, SCALARS

WIDTH = 24


@pytest.fixture(autouse=True)
def same_draws(request: pytest.FixtureRequest) -> None:
    """Of each test its own, in every run: a draw that is one in a million is found by those who
    look for it, not by whoever runs all.
    """
    begin(request.node.name)


@pytest.mark.parametrize("sentence", PROPERTIES)
def test_the_reference_has_the_property(sentence: str) -> None:
    PROPERTIES[sentence](pair_site, single_site)


@pytest.mark.long
def test_sites_that_share_a_launch_give_the_bits_of_one_launch_each() -> None:
    check_groups(pair_site, single_site, rounds=12, widths=(1, 37, 576))


def test_every_family_has_one_formula_and_a_place() -> None:
    assert [PLACE[family.name] for family in FAMILIES] == list(range(len(FAMILIES)))
    assert set(reference.REWRITES) == {
        family.name for family in FAMILIES if family.effect == "rewrite"
    }
    # sites add it without a formula
    assert {family.name for family in FAMILIES if family.effect == "shift"} == {"add"}
    assert list(ORDER) == [family.name for family in FAMILIES]
    for family in FAMILIES:
        assert len(family.scalars) <= SCALARS
        assert family.scalars or not family.has_strength, (
            f"{family.name}: its strength is its first scalar, and it has none"
        )
        assert set(family.of_each_term) <= set(family.scalars)


def test_the_entries_of_an_application_hold_what_the_table_says() -> None:
    rotation, weight = torch.randn(2, 3, WIDTH)
    vectors, scalars = laid_out(
        "lowrank", lowrank(0.5, rotation, weight, torch.tensor([7.0, 8.0, 9.0]))
    )
    family = FAMILIES[PLACE["lowrank"]]
    assert len(vectors) == family.entries(3) == 6
    assert torch.equal(vectors[::2], rotation)
    assert torch.equal(vectors[1::2], weight)
    assert scalars[0].tolist() == [0.5, 3.0, 7.0, *[0.0] * (SCALARS - 3)]
    assert scalars[::2, family.column("bias")].tolist() == [7.0, 8.0, 9.0]
    assert laid_out("replace", Does(vectors[:1], (0.25,)))[1].tolist() == [
        [0.25, *[0.0] * (SCALARS - 1)]
    ]


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.unit])
def test_directions_are_given_length_one(name: str) -> None:
    numbers = tuple(1.0 for _ in FAMILIES[PLACE[name]].scalars)
    for length in (1e-30, 1.0, 1e30):
        vectors, _ = laid_out(name, Does(torch.tensor([[3.0, 4.0]]) * length, numbers))
        assert vectors.dtype == torch.float32
        torch.testing.assert_close(vectors, torch.tensor([[0.6, 0.8]]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        # the sites of a launch edit the same tokens
        (
            lambda: build_group(
                [SitePlan(WIDTH, [{}], {1: [1]}), SitePlan(WIDTH, [{}], {2: [1]})], 4, torch.float32
            ),
            "edit the same tokens with the same rows",
        ),
        (
            lambda: SitePlan(WIDTH, [{}], {2: [1] * 17}).build(4, torch.float32),
            "token 2 has 17 configuration rows; at most 16 fit",
        ),
        *(
            (lambda values=values: unit(torch.tensor([values])), "must have a finite norm")
            for values in ([0.0, 0.0], [math.inf, 1.0], [math.nan, 1.0])
        ),
        # an application that its family does not have
        *(
            (
                lambda name=name, vectors=vectors, scalars=scalars: laid_out(
                    name, Does(torch.ones(vectors, WIDTH), scalars)
                ),
                message,
            )
            for name, vectors, scalars, message in (
                ("add", 2, (), "add takes 1 vectors for each of 1 to 1 terms, not 2"),
                (
                    "replace_masked",
                    1,
                    (1.0,),
                    "replace_masked takes 2 vectors for each of 1 to 1 terms, not 1",
                ),
                (
                    "lowrank",
                    3,
                    (1.0, 1.0, 0.0),
                    f"lowrank takes 2 vectors for each of 1 to {MAX_RANK} terms, not 3",
                ),
                ("lowrank", 2 * MAX_RANK + 2, (1.0, 1.0, 0.0), f"not {2 * MAX_RANK + 2}"),
                ("lowrank", 0, (1.0, 0.0, 0.0), "not 0"),
                (
                    "clamp",
                    1,
                    (1.0, 2.0),
                    r"clamp takes 3 scalars \(strength, low, high\), not \[1, 2\]",
                ),
            )
        ),
    ],
)
def test_what_cannot_be_laid_out_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_request_families_equal_kernel_families() -> None:
    assert ROWS_PER_TOKEN == 4 * MAX_STEERING_ROWS, (
        "for its request, everyone, policies of all traffic and those that it names"
    )


def test_the_columns_of_the_plan_are_distinct() -> None:
    columns = [EDITS, EDITS_AT, DEPTH, *BEFORE, *AFTER]
    assert len(set(columns)) == len(columns)
    assert max(columns) < COLUMNS


# -- what compilers see ----------------------------------------------------------------------------


def busy_case(*, pair: bool) -> Case:
    """Something of everything."""
    configurations = [
        {"replace": Does(torch.randn(1, WIDTH), (0.3,))},
        {"add": Does(torch.randn(1, WIDTH))},
        {"replace": Does(torch.randn(1, WIDTH), (1.0,)), "add": Does(torch.randn(1, WIDTH))},
        {
            "replace_masked": Does(some_of(torch.randn(1, WIDTH)), (0.3,)),
            "lowrank": lowrank(1.0, *torch.randn(2, 2, WIDTH), torch.randn(2)),
            "add_matched": Does(torch.randn(1, WIDTH), (0.1,)),
            "ablate": Does(torch.randn(1, WIDTH), (1.0,)),
            "clamp": Does(torch.randn(1, WIDTH), (1.0, 2.0, 3.0)),
        },
    ]
    edits = {0: [1], 1: [2, 4], 2: [3], 4: [2], 5: [4]}
    plan = SitePlan(
        WIDTH, configurations, edits, before=[0, 1, 3], after=[4, 2], before_row=1, after_row=5
    )
    hidden = torch.randn(6, WIDTH) if pair else None
    return Case(
        plan,
        hidden,
        torch.randn(6, WIDTH),
        9,
        8,
        f"{'pair' if pair else 'single'}, torch seed {torch.initial_seed()}",
    )


@pytest.mark.parametrize("pair", [True, False], ids=["pair", "single"])
def test_the_ops_declare_what_they_write(pair: bool) -> None:
    case = busy_case(pair=pair)
    tensors = [case.stream.clone(), torch.zeros(case.ring_rows, WIDTH), *case.planned]
    if case.hidden is not None:
        tensors.insert(0, case.hidden.clone())
    torch.library.opcheck(pair_site if pair else single_site, tensors)


class Layer(torch.nn.Module):
    """A small block with a pair site, whose buffers are the module's, as in the model."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.register_buffer("ring", torch.full((case.ring_rows, WIDTH), math.nan))
        for name, tensor in case.planned._asdict().items():
            self.register_buffer(name, tensor.clone())
        self.linear = torch.nn.Linear(WIDTH, WIDTH)
        self.requires_grad_(False)

    def site(self) -> list[torch.Tensor]:
        return [self.ring, *(getattr(self, name) for name in OpInputs._fields)]


class PairLayer(Layer):
    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.linear(hidden)
        residual = residual * 2
        pair_site(hidden, residual, *self.site())
        return torch.tanh(hidden + residual), residual


class SingleLayer(Layer):
    """Keeps its input as the residual, as GPT-2's block does: the edit must reach both names."""

    def forward(self, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        stream = stream * 2
        residual = stream
        single_site(stream.unsqueeze(0), *self.site())
        return residual + self.linear(torch.tanh(stream)), residual


class OnlyCaptures(Layer):
    """Nothing reads what the op wrote: a compiler that did not know about the ring would drop
    it.
    """

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        single_site(stream * 3, *self.site())
        return stream + 1


@pytest.fixture
def fresh_compiler() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# field case 5
@pytest.mark.long  # a minute of inductor
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("kind", [PairLayer, SingleLayer, OnlyCaptures])
def test_a_compiled_layer_gives_what_the_eager_one_gives(kind: type[Layer]) -> None:
    case = busy_case(pair=kind is PairLayer)
    eager = kind(case)
    traced = kind(case)
    traced.linear.load_state_dict(eager.linear.state_dict())
    compiled = torch.compile(traced, fullgraph=True)
    inputs = [case.stream] if case.hidden is None else [case.hidden, case.stream]
    with torch.no_grad():
        expected = eager(*(tensor.clone() for tensor in inputs))
        found = compiled(*(tensor.clone() for tensor in inputs))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(traced.ring, eager.ring, equal_nan=True)
        assert not traced.ring[1:4].isnan().any()

        # The same compiled code obeys other buffers.
        for layer in (eager, traced):
            layer.plan.zero_()
            layer.ring.fill_(math.nan)
        expected = eager(*(tensor.clone() for tensor in inputs))
        found = compiled(*(tensor.clone() for tensor in inputs))
        torch.testing.assert_close(found, expected)
        assert traced.ring.isnan().all()


def test_the_page_on_kernels_and_the_table_of_families_agree_both_ways() -> None:
    page = (ROOT / "docs" / "reference" / "kernels.md").read_text()
    assert re.findall(
        r"^\| `(\w+)` \| (rewrite|shift) \| (.+) \| (.+) \|$", page, re.MULTILINE
    ) == [(family.name, family.effect, family.formula, family.source) for family in FAMILIES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("configuration", [("add",), ("add", "clamp"), ("ablate",), ()])
def test_a_run_of_tokens_with_one_row_has_the_bits_of_tokens_taken_one_by_one(
    dtype: torch.dtype, configuration: tuple[str, ...]
) -> None:
    generator = torch.Generator().manual_seed(7)
    vector = torch.randn(1, 32, generator=generator)
    does = {
        "add": Does(-0.5 * vector),
        "clamp": Does(vector, (1.0, -0.1, 0.1)),
        "ablate": Does(vector, (1.0,)),
    }
    planned = SitePlan(
        32,
        [{}, {name: does[name] for name in configuration}],
        {token: (2,) for token in range(3, 300)},
    ).build(310, dtype)
    assert int(planned.plan[0, ALIKE]) == 2
    assert int(planned.plan[0, ALIKE_FROM]) == 3
    hidden, residual = (torch.randn(310, 32, generator=generator).to(dtype) for _ in range(2))
    found = []
    for alike in (2, 0):
        planned.plan[0, ALIKE] = alike
        streams = hidden.clone(), residual.clone()
        pair_site(*streams, torch.zeros(0, 32, dtype=dtype), *planned)
        found.append(torch.stack(streams))
    assert torch.equal(found[0].view(torch.uint8), found[1].view(torch.uint8))
    assert torch.equal(found[0][1], residual) == (not configuration)
