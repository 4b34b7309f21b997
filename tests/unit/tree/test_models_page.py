"""docs/models.md says what the walk found, and the walk found what the project promises."""

import configs
import page
import pytest
import results
from families import CHANGED, FAMILIES

FOUND = results.read()


def test_the_page_has_the_results_of_the_walk() -> None:
    text = page.PAGE.read_text()
    assert page.rewritten(text, FOUND) == text


def test_sixty_classes_and_every_named_family_equal_transformers() -> None:
    """Those of the families that stock vLLM runs here."""
    served = [result for result in FOUND.values() if result.outcome == "served"]
    assert len(page.distinct(served)) >= 60
    stock = [architecture for name, architecture in FAMILIES.items() if name not in CHANGED]
    assert {name: FOUND[name].outcome for name in stock} == dict.fromkeys(stock, "served")


def test_what_differs_is_refused_and_what_is_served_is_certified() -> None:
    assert [result.name for result in FOUND.values() if result.outcome == "differs"] == []
    served = [result for result in FOUND.values() if result.outcome in ("served", "laws")]
    assert [result.name for result in served if not result.laws] == []


@pytest.mark.slow("imports vLLM")
def test_what_transformers_does_not_have_is_refused_or_served_with_a_caveat() -> None:
    alone = [result for result in FOUND.values() if not configs.has_class(result.name)]
    assert [result for result in FOUND.values() if result.alone] == alone
    assert {result.outcome for result in alone} == {"laws", "refused"}
    without = [
        result.name
        for result in alone
        if result.outcome == "laws" and page.LOADED not in " ".join(result.caveats)
    ]
    assert without == []
