"""Options of vLLM in the list of proven ones give transformers' rows; the others are refused or
stamped.
"""

from contextlib import closing
from pathlib import Path

import pytest
from fidelity import Truth, capture, judge, options_of
from fidelity_page import Way, hooks_of
from host import Host
from option_cases import CASES, Case
from reference import Reference
from tiny import checkpoint

pytestmark = pytest.mark.long

TOKENS = 3


def run_case(case: Case, folder: Path, nurseries) -> str:
    """Raises AssertionError where rows or tokens are not transformers'; returns the largest
    figures.
    """
    path = checkpoint(case.name, folder / case.name)
    served = case.served(folder, path) if case.served else path
    truth = case.truth(folder, path) if case.truth else path
    way = Way(
        "v1",
        "eager" if case.settings.get("engine.enforce_eager", True) else "compiled",
        str(case.settings.get("engine.dtype", "float32")),
    )
    settings = options_of(way) | case.settings | {"engine_options": case.options(folder, path)}
    env = {"HF_HUB_OFFLINE": "1"}
    if case.on_hub:
        env["HF_HUB_CACHE"] = str(folder / "hub")
    if case.ranks > 1 or case.on_hub:
        (folder / "engine").mkdir()
        host = Host(
            folder / "engine",
            served,
            env,
            **{"engine.tensor_parallel_size": case.ranks},
            **settings,
        )
    else:
        host = nurseries("v1").host(folder / "engine", served, env, **settings)
    with closing(host):
        assert [caveat for caveat in host.info["caveats"] if "certif" not in caveat] == []
        outcomes = [
            capture(host, hooks_of(case.name), draw)
            for draw in range(2 if way.dtype == "float32" else 1)
        ]
    figures = [judge([outcome], Truth(truth, way.dtype), way.dtype) for outcome in outcomes]
    assert {
        hook: str(figure)
        for each in figures
        for hook, figure in each.items()
        if figure.worst > way.tolerance
    } == {}
    if way.dtype == "float32":
        reference, tokens = Reference(truth), outcomes[0][""].token_ids
        reference.rows(tokens)
        assert tokens[-TOKENS + 1 :] == reference.logits[-TOKENS:-1].argmax(axis=-1).tolist()
    return str(max(figure.worst for each in figures for figure in each.values()))


def _marks(case: Case) -> list[pytest.MarkDecorator]:
    return (
        [] if case.fast else [pytest.mark.matrix] + ([pytest.mark.ranks] if case.ranks > 1 else [])
    )


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.id, marks=_marks(case)) for case in CASES]
)
def test_a_proven_option_gives_transformers_rows_and_tokens(
    case: Case, nurseries, tmp_path: Path
) -> None:
    run_case(case, tmp_path, nurseries)
