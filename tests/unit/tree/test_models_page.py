"""docs/reference/models.md says what the walk found."""

import page
import results


def test_the_page_has_the_results_of_the_walk() -> None:
    text = page.PAGE.read_text()
    assert page.rewritten(text, results.read()) == text
