"""Check the numbers in the documentation: mutants, laws, models, reproductions.

Measured times, and the cell counts of past runs, are not checked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from suites.meta.documents import PAGES, ROOT
from suites.meta.test_mutants import KILLS, MISNAMED, SAMPLE, is_long
from zharness.laws import LAWS, find_laws
from zharness.mutants import MUTANTS, Origin
from zharness.releases.repros import get_distribution
from zharness.releases.repros import load_catalogue as reproductions
from zharness.run.mesh_claims import needs_mesh
from zharness.workload import MODELS

NUMBER_WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER = r"(\d[\d,]*|" + "|".join(NUMBER_WORDS) + ")"
LAWS_WITH_MODELS = [name for name, check in LAWS.items() if check.models]  # the other laws run on user models only
# A number before one of these words is checked by a CountedSentence, or listed in HISTORICAL_PHRASES.
COUNTED = re.compile(
    rf"\b{NUMBER} (?:more )?(?:mutants|broken engines|engines, each broken|engines broken|laws|models|bugs)\b",
    re.IGNORECASE,
)
HISTORICAL_PHRASES = (  # phrases with a number of a past run, or of a part
    "runs 797 cells of 141 laws",
    "19 combinations run 20 laws or more",
    "was permuted by five mutants",
    "record it 6 mutants",  # the number of a floor
    "27,917 cells all 280 mutants",
    "two models could draw a factor of zero",
    "7 bugs are gone on 2.13.0",  # its sum is checked below
    "Two laws run long programs",
    "gives two models that differ from one seed",
)


@dataclass(frozen=True)
class CountedSentence:
    """A sentence of a page whose ``{}`` are numbers, and a function that counts each of them."""

    page: str
    sentence: str
    counts: tuple[Callable[[], int], ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.sentence}"

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.sentence).replace(r"\{\}", NUMBER), re.IGNORECASE)


def count_mutants() -> int:
    return len(MUTANTS)


def count_bugs() -> int:
    return len(reproductions())


def count_torch_bugs() -> int:
    return sum(get_distribution(each.engine) == "torch" for each in reproductions())


def count_mutants_alive_at_two_ranks() -> int:
    """Count the mutants that no target at world size 2 kills."""
    found = [mutant for mutant in MUTANTS.values() if mutant.targets]
    return sum(all(target.world_size != 2 for target in mutant.targets) for mutant in found)


def count_laws_below_readme_extract() -> int:
    """Count the laws of the run at the top of the README, which has no mesh, that its extract leaves out."""
    extract = page_text("README.md").partition("more laws")[0]
    shown = [name for name in re.findall(r"(\w+\.\w+) +pass \d+", extract) if name in LAWS]
    return len([law for law in find_laws(()) if law.models and not needs_mesh(law)]) - len(shown)


COUNTED_SENTENCES = (
    CountedSentence("README.md", "shown by {} broken engines", (count_mutants,)),
    CountedSentence("README.md", "... {} more laws", (count_laws_below_readme_extract,)),
    CountedSentence("CHANGELOG.md", "{} laws, {} models", (lambda: len(LAWS), lambda: len(MODELS))),
    CountedSentence("CHANGELOG.md", "{} engines broken on purpose", (count_mutants,)),
    CountedSentence("docs/mutants.md", "holds {} engines, each broken", (count_mutants,)),
    CountedSentence(
        "docs/mutants.md", "; {} imitate a known bug", (lambda: sum(bool(m.imitates) for m in MUTANTS.values()),)
    ),
    CountedSentence("docs/mutants.md", "All but {} are killed at world size 2", (count_mutants_alive_at_two_ranks,)),
    CountedSentence("docs/mutants.md", "those of {} mutants (`MISNAMED`", (lambda: len(MISNAMED),)),
    CountedSentence(
        "docs/mutants.md",
        "for each law, {} of {};",
        (lambda: sum(not is_long(target) for _, target in SAMPLE), lambda: len(KILLS)),
    ),
    CountedSentence("docs/mutants.md", "{} sets more", (lambda: len(unseen_sets()),)),
    CountedSentence("docs/reproductions.md", "of the {} bugs in", (count_bugs,)),
    CountedSentence("docs/reproductions.md", "Of the {} scripts of torch's engines", (count_torch_bugs,)),
)


def unseen_sets() -> list[str]:
    """Return the series of mutants whose authors had not seen the laws."""
    return [origin.value for origin in Origin if origin.is_blind]


@cache
def page_text(page: str) -> str:
    """Return the text of a page with white space folded, because a sentence may span lines."""
    return re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))


def parse_number(word: str) -> int:
    return NUMBER_WORDS.index(word.lower()) if word.lower() in NUMBER_WORDS else int(word.replace(",", ""))


def find_stale_counts(stated: CountedSentence, text: str) -> list[str]:
    """Describe each number in ``counted`` that differs from the actual count."""
    match = stated.pattern.search(text)
    if match is None:
        return [f"{stated.page} no longer says {stated.sentence!r}: remove it from suites/meta/test_counts.py"]
    pairs = zip(match.groups(), (count() for count in stated.counts), strict=True)
    return [
        f"{stated.page} says {match[0]!r}, and {right} is right for {written}"
        for written, right in pairs
        if parse_number(written) != right
    ]


def find_unchecked_numbers(page: str, text: str) -> Iterator[str]:
    """Describe each number of a counted thing that no CountedSentence checks."""
    matches = [each.pattern.search(text) for each in COUNTED_SENTENCES if each.page == page]
    held = [match.span() for match in matches if match] + [
        match.span() for message in HISTORICAL_PHRASES for match in re.finditer(re.escape(message), text)
    ]
    for match in COUNTED.finditer(text):
        if not any(start <= match.start(1) < end for start, end in held):
            message = text[max(0, match.start() - 40) : match.end()]
            yield f"{page} says {message!r}: check it in COUNTED_SENTENCES, or add the phrase to HISTORICAL_PHRASES"


@pytest.mark.parametrize("stated", COUNTED_SENTENCES, ids=str)
def test_a_number_of_the_documentation_is_right(stated: CountedSentence) -> None:
    assert not (found := find_stale_counts(stated, page_text(stated.page))), found[0]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_every_number_of_the_documentation_is_checked(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    assert not (found := list(find_unchecked_numbers(name, page_text(name)))), found[0]


def test_every_historical_phrase_is_in_the_documentation() -> None:
    pages = "".join(page_text(page.relative_to(ROOT).as_posix()) for page in PAGES)
    assert not [message for message in HISTORICAL_PHRASES if message not in pages]


def test_a_stale_number_is_reported_with_file_and_right_number() -> None:
    stated = CountedSentence("README.md", "shown by {} broken engines", (lambda: 285,))
    assert find_stale_counts(stated, "is shown by 283 broken engines (") == [
        "README.md says 'shown by 283 broken engines', and 285 is right for 283"
    ]
    assert not find_stale_counts(stated, "is shown by 285 broken engines (")
    assert "no longer says" in find_stale_counts(stated, "is shown by some broken engines")[0]
    assert "'We have 12 mutants'" in next(find_unchecked_numbers("README.md", "We have 12 mutants."))


def test_the_matrix_of_results_has_exactly_the_laws() -> None:
    (matrix,) = re.findall(r"<summary>every law on every engine</summary>(.*?)</details>", page_text("docs/results.md"))
    laws = re.findall(r" ([a-z_]+\.[a-z_]+) +[-.:cxSFUE]", matrix)
    assert laws == LAWS_WITH_MODELS, "run scripts/generate_tables.py --records, as CONTRIBUTING.md says under Tables"


def test_the_table_of_results_has_exactly_the_bugs() -> None:
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (table,) = re.findall(
        r"<summary>every bug, on the releases that were run</summary>(.*?)</details>", text, re.DOTALL
    )
    rows = [name for name in re.findall(r"^\| \[?([\w-]+)", table, re.MULTILINE) if name != "bug"]
    expected = sorted(repro.id for repro in reproductions())
    assert sorted(rows) == expected, "run scripts/generate_tables.py --bugs, as CONTRIBUTING.md says under Tables"


def test_counts_of_torch_engine_bugs_by_release_add_up() -> None:
    output = r"engines (\d+) were run .*?: (\d+) bugs are gone on 2\.13\.0, (\d+) show on both, and (\d+) show"
    (found,) = re.findall(output, page_text("docs/reproductions.md"))
    run, *parts = map(int, found)
    assert run == sum(parts), f"docs/reproductions.md says that {run} were run, and tells of {sum(parts)}"


def test_every_unseen_set_of_mutants_has_its_row() -> None:
    assert re.findall(r"\((blind \d+)\) \|", page_text("docs/mutants.md")) == unseen_sets()
