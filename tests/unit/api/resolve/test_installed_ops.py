"""Installed ops: what is refused at the start, what requests may ask, and what a site makes of
them.
"""

import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extension_kit import install, install_example, install_unruly
from model_kit import HIDDEN, bounds, model
from refusal_kit import refuses
from site_plans import SitePlan

from midstream.api.resolve.edits.steering import resolve_edits, resolve_module
from midstream.kernels import installed, single_site
from midstream.kernels.installed import OPS
from midstream.kernels.plan import Does
from midstream.schemas.base.tensors import from_numpy
from midstream.schemas.extensions import Extension
from midstream.schemas.model.banks import RowShape
from midstream.schemas.requests.specs import SteeringSpec, StoredSteering, steering_digest
from midstream.workers.runner.base.extensions import ExtensionError, trusted
from midstream.workers.runner.edits.installed_ops import ON_CPUS, check_here, load_ops

VECTOR = from_numpy(np.arange(HIDDEN, dtype=np.float32))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "site"
    install_unruly(install_example(folder))
    monkeypatch.syspath_prepend(str(folder))
    yield folder
    OPS.clear()
    for module in [
        name
        for name in sys.modules
        if name.partition(".")[0] in ("row_geometry", "unruly", "other")
    ]:
        del sys.modules[module]


def loaded(*packages: str, cpu: bool = True) -> dict[str, Extension]:
    return {each.name: each for each in load_ops(trusted(packages), HIDDEN, cpu=cpu)}


BROKEN: dict[str, tuple[str, str]] = {
    "another shape": ("return rows[:, :2]", "returned float32 of shape (6, 2)"),
    "another dtype": ("return rows.astype(np.float64)", "returned float64"),
    "not finite": ("return rows / np.float32(0)", "not finite"),
    "random": ("return rows + np.float32(np.random.rand())", "different results for the same rows"),
    "of other rows": (
        "return rows - rows.mean(axis=0, keepdims=True)",
        "depends on the rows next to it",
    ),
    "writes": ("rows.flags.writeable = True; rows += 1; return rows", "changes its input"),
    "raises": ("raise KeyError('x')", "KeyError"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_op_that_breaks_a_law_is_refused_at_the_start(site: Path, case: str) -> None:
    body, words = BROKEN[case]
    source = f"import numpy as np\nclass Other:\n def edit(self, rows, vector):\n  {body}\n"
    install(site, "other", "2.0", {"other.py": source}, "[midstream.ops]\nother = other:Other\n")
    with pytest.raises(ExtensionError, match=r"op other of other 2\.0") as refused:
        loaded("other")
    assert words in str(refused.value)
    assert not OPS


def test_an_op_takes_two_floats_at_most(site: Path) -> None:
    head = "from midstream.schemas.extensions import Option\nclass Other:\n options = "
    for options in ("{'k': Option(default=1)}", "{name: Option(default=1.0) for name in 'abc'}"):
        install(
            site,
            "other",
            "2.0",
            {"other.py": head + options},
            "[midstream.ops]\nother = other:Other\n",
        )
        sys.modules.pop("other", None)
        with pytest.raises(
            ExtensionError, match="at most 2 options, and their defaults are floats"
        ):
            loaded("other")


def test_accelerators_list_ops_and_refuse_them(site: Path) -> None:
    facts = loaded("row-geometry", cpu=False)["norm-cap"]
    assert facts.refused == ON_CPUS
    assert not OPS
    with refuses("the kernels of accelerators do not call Python"):
        resolved([{"extension": "norm-cap", "layers": 0}], facts)


# --- Requests
# --------------------------------------------------------------------------------------------------


def resolved(wish: list[dict[str, Any]], *facts: Extension) -> list[StoredSteering]:
    limits = bounds(hooks=["pre_attn", "post_block"], extensions=list(facts))
    (entries,), _ = resolve_edits([], [SteeringSpec(**each) for each in wish], limits)
    return entries


def test_an_entry_holds_strength_options_and_the_code_of_the_op(site: Path) -> None:
    ops = loaded("row-geometry", "unruly")
    cap, along = resolved(
        [
            {"extension": "norm-cap", "layers": "0-1", "options": {"limit": 4}},
            {"extension": "along", "layers": 2, "vector": VECTOR},
        ],
        *ops.values(),
    )
    assert cap.family == "installed"
    assert cap.layers == [0, 1]
    assert cap.numbers == [1.0, 4.0, 0.0, float(ops["norm-cap"].code)]
    assert along.numbers == [1.0, 0.0, 0.0, float(ops["along"].code)]
    assert struct.unpack("f", struct.pack("f", cap.numbers[-1]))[0] == cap.numbers[-1], (
        "float32 holds it exactly"
    )
    other = StoredSteering(
        **{name: getattr(cap, name) for name in cap.__struct_fields__}
        | {"numbers": [*cap.numbers[:-1], 1.0]}
    )
    assert steering_digest([cap]) != steering_digest([other])
    check_here([cap, along])
    with pytest.raises(LookupError, match="another version of it"):
        check_here([other])


@pytest.mark.parametrize(
    ("wish", "field", "words"),
    [
        ({"extension": "cap"}, "extension", "unknown op 'cap'; valid: along, norm-cap, unruly"),
        ({"extension": "norm-cap"}, "layers", "is required"),
        ({"extension": "norm-cap", "layers": 4}, "layers", "layer 4"),
        ({"extension": "norm-cap", "layers": 1, "hook": "mlp_out"}, "hook", "unknown hook"),
        (
            {"extension": "norm-cap", "layers": 1, "vector": VECTOR},
            "vector",
            "is not valid for op 'norm-cap'",
        ),
        ({"extension": "along", "layers": 1}, "vector", "is required for op 'along'"),
        (
            {"extension": "along", "layers": 1, "vector": from_numpy(np.ones(3, np.float32))},
            "vector",
            "has shape [3]",
        ),
        (
            {
                "extension": "along",
                "layers": 1,
                "vector": from_numpy(np.full(HIDDEN, np.nan, np.float32)),
            },
            "vector",
            "is not finite",
        ),
        ({"extension": "norm-cap", "layers": 1, "strength": 101.0}, "strength", "out of range"),
        (
            {"extension": "norm-cap", "layers": 1, "options": {"low": 1.0}},
            "options.low",
            "valid options of norm-cap: limit",
        ),
        (
            {"extension": "norm-cap", "layers": 1, "options": {"limit": -1.0}},
            "options.limit",
            "of at least 0",
        ),
        (
            {"extension": "norm-cap", "layers": 1, "op": "add"},
            "op",
            "is not valid together with extension",
        ),
        (
            {"module": "m", "extension": "norm-cap"},
            "extension",
            "is not valid together with module",
        ),
        (
            {"layers": 1, "vector": VECTOR, "options": {"limit": 1.0}},
            "options",
            "is not valid without `extension`",
        ),
    ],
)
def test_refusals_name_field_and_valid_values(
    site: Path, wish: dict[str, Any], field: str, words: str
) -> None:
    with refuses(words, field=f"steering[0].{field}"):
        resolved([wish], *loaded("row-geometry", "unruly").values())


def test_ops_edit_the_stream_of_requests_and_no_rows_inside_of_a_layer(site: Path) -> None:
    """Also where a row inside happens to have the model's size."""
    facts = loaded("row-geometry")["norm-cap"]
    shape = RowShape(heads=2, width=HIDDEN // 2)
    limits = bounds(hooks=["post_block", "z"], inside={"z": shape}, extensions=[facts])
    with refuses("not those of z; valid: ", status=400, field="steering[0].hook"):
        resolve_edits(
            [],
            [SteeringSpec(extension="norm-cap", layers=1, hook="z")],
            limits,
        )
    served = model(extensions=list(loaded("row-geometry").values()))
    with refuses("not valid in named modules and global steering"):
        resolve_module([SteeringSpec(extension="norm-cap", layers=1)], served)


def test_a_doses_scale_bounds_the_strength_and_not_the_vector(site: Path) -> None:
    limits = bounds(hooks=["post_block"], extensions=list(loaded("unruly").values()))
    along = [SteeringSpec(extension="along", layers=2, vector=[2e3] * HIDDEN)]
    with refuses("steering[0]'s strength: 101 is out of range", status=400, field="scales[1]"):
        resolve_edits([], along, limits, scales=[50.0, 101.0])


# --- A site
# --------------------------------------------------------------------------------------------------


def edited(does: list[Does], stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row 0 is edited by the first configuration, and so on; the rest is not.

    The new stream, and which rows an edit made not finite.
    """
    planned = SitePlan(
        HIDDEN,
        [{"installed": each} for each in does],
        {token: [token + 1] for token in range(len(does))},
    ).build(len(stream), stream.dtype)
    new = stream.clone()
    single_site(new, torch.zeros(1, HIDDEN, dtype=stream.dtype), *planned)
    return new, planned.sizes[0].isinf()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_site_calls_the_op_of_each_row_and_keeps_bits_elsewhere(
    site: Path, dtype: torch.dtype
) -> None:
    ops = loaded("row-geometry", "unruly")
    cap = float(ops["norm-cap"].code)
    along = float(ops["along"].code)
    vector = torch.nn.functional.one_hot(torch.tensor(2), HIDDEN).float()[None]
    none = torch.zeros(1, HIDDEN)
    stream = torch.randn(6, HIDDEN).to(dtype)
    stream[0] = 3.0
    stream[1] = 0.25
    does = [
        Does(none, (1.0, 4.0, 0.0, cap)),
        Does(none, (1.0, 4.0, 0.0, cap)),
        Does(vector, (1.0, 0.0, 0.0, along)),
        Does(vector, (0.0, 0.0, 0.0, along)),
        Does(vector, (0.5, 0.0, 0.0, along)),
    ]
    new, broken = edited(does, stream)
    assert not broken.any()
    assert float(new[0].float().norm()) == pytest.approx(
        4.0, rel=1e-2 if dtype == torch.bfloat16 else 1e-6
    )
    doubled = stream[2].clone()
    doubled[2] = 2 * doubled[2]
    assert torch.equal(new[2], doubled)
    half = stream[4].float()
    half[2] *= 1.5
    assert torch.equal(new[4], half.to(dtype)), "a strength of a half"
    for row in (1, 3, 5):
        assert torch.equal(new[row].view(torch.uint8), stream[row].view(torch.uint8)), row


@pytest.mark.parametrize("mood", [1.0, 2.0, 3.0, 4.0])
def test_what_an_op_does_wrong_is_marked_on_its_rows_alone(site: Path, mood: float) -> None:
    code = float(loaded("unruly")["unruly"].code)
    stream = torch.randn(4, HIDDEN)
    new, broken = edited(
        [
            Does(torch.zeros(1, HIDDEN), (1.0, mood, 0.0, code)),
            Does(torch.zeros(1, HIDDEN), (1.0, 0.0, 0.0, code)),
        ],
        stream,
    )
    assert broken.tolist() == [True, False, False, False]
    assert not torch.isfinite(new[0]).all()
    assert torch.equal(new[1], stream[1] + 1)
    assert torch.equal(new[2:], stream[2:])


def test_rows_that_fail_alone_take_no_others_with_them() -> None:
    """Requests with equal edits share a call: only the rows that the op cannot edit become NaN."""

    def edit(rows: np.ndarray, vector: np.ndarray, numbers: tuple[float, float]) -> np.ndarray:
        if (rows > 10).any():
            raise ValueError("too large")
        return rows + np.float32(2)

    OPS[5] = edit
    try:
        rows = torch.tensor([[1.0] * HIDDEN, [11.0] * HIDDEN, [3.0] * HIDDEN])
        for strength in (1.0, 0.5):
            new = installed.edited(5, rows, torch.zeros(HIDDEN), strength, (0.0, 0.0))
            assert torch.equal(new[[0, 2]], rows[[0, 2]] + 2 * strength)
            assert new[1].isnan().all()
        assert installed.edited(5, rows[1:2], torch.zeros(HIDDEN), 1.0, (0.0, 0.0)).isnan().all()
    finally:
        OPS.clear()
