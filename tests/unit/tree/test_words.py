"""The documentation stays small enough to be read; `tools/pages/words.py` says what is counted."""

from pathlib import Path

from tree import ROOT
from words import WRITTEN, beside, pages, words

#: Words of all prose, pages, and words of one page.
PROSE = 80_000
PAGES = 24
PAGE = 5_000
#: Words by hand of a reference that a tool writes. Keys of Redis are written by hand.
BY_HAND = 250
HANDWRITTEN = {"redis.md"}


def test_the_prose_has_few_enough_words_on_few_enough_pages() -> None:
    assert sum(map(words, [*pages(), *beside()])) <= PROSE, "python tools/pages/words.py"
    assert len(pages()) <= PAGES


def test_no_page_has_too_many_words() -> None:
    counts = {path.name: words(path) for path in (*pages(), *beside())}
    assert {name: count for name, count in counts.items() if count > PAGE} == {}


def test_references_are_written_by_tools() -> None:
    references = [
        path for path in (ROOT / "docs" / "reference").glob("*.md") if path.name not in HANDWRITTEN
    ]
    assert [path.name for path in references if not WRITTEN.search(path.read_text())] == []
    assert {path.name: words(path) for path in references if words(path) > BY_HAND} == {}


def test_what_is_counted_is_prose_and_tables_by_hand(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# Two words\n\n```bash\nnot counted\n```\n\n| a | b |\n|---|---|\n| one | two |\n\n"
        "<!-- table: settings -->\n\n| not | counted |\n\n<!-- end of the table -->\n"
    )
    assert words(page) == 7
