"""What the documentation counts is what there is: mutants, laws, models, reproductions.

Times, and the cells of a run that is over, are of their day and stay as they were measured.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from suites.meta.documents import PAGES, ROOT
from suites.meta.test_mutants import KILLS, MISNAMED, SAMPLE
from zharness.laws import LAWS
from zharness.mutants import MUTANTS, Origin
from zharness.releases.repros import get_distribution
from zharness.releases.repros import load_catalogue as reproductions
from zharness.workload import MODELS

WORDS = ["no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
NUMBER = r"(\d[\d,]*|" + "|".join(WORDS) + ")"
STATED_FOR_MODELS = [name for name, check in LAWS.items() if check.models]  # the others are of anyone's model alone
# A number before one of these is held against the package, here or as what was so once.
COUNTED = re.compile(
    rf"\b{NUMBER} (?:more )?(?:mutants|broken engines|engines, each broken|engines broken|laws|models|bugs)\b",
    re.IGNORECASE,
)
ONCE = (  # words around a number that is of a day, or of a part
    "27,917 cells all 280 mutants",
    "two models could draw a factor of zero",
    "7 bugs are gone on 2.13.0",  # its sum is held below
    "Two laws play long programs",
    "gives two models that differ from one seed",
)


@dataclass(frozen=True)
class Stated:
    """A sentence of a page, whose ``{}`` are numbers, and what each of them counts."""

    page: str
    sentence: str
    counts: tuple[Callable[[], int], ...]

    def __str__(self) -> str:
        return f"{self.page}: {self.sentence}"

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(re.escape(self.sentence).replace(r"\{\}", NUMBER), re.IGNORECASE)


def mutants() -> int:
    return len(MUTANTS)


def bugs() -> int:
    return len(reproductions())


def bugs_of_torch() -> int:
    return sum(get_distribution(each.engine) == "torch" for each in reproductions())


def not_at_two_ranks() -> int:
    """Mutants that no target at world size 2 kills."""
    found = [mutant for mutant in MUTANTS.values() if mutant.targets]
    return sum(all(target.world_size != 2 for target in mutant.targets) for mutant in found)


def shown_in_the_readme() -> int:
    """Laws in the README's extract of a first run."""
    extract = text_of("README.md").partition("more laws")[0]
    return len([name for name in re.findall(r"(\w+\.\w+) +pass \d+", extract) if name in LAWS])


STATED = (
    Stated("README.md", "shown by {} broken engines", (mutants,)),
    Stated("README.md", "... {} more laws", (lambda: len(STATED_FOR_MODELS) - shown_in_the_readme(),)),
    Stated("CHANGELOG.md", "{} laws, {} models", (lambda: len(LAWS), lambda: len(MODELS))),
    Stated("CHANGELOG.md", "{} engines broken on purpose", (mutants,)),
    Stated("docs/mutants.md", "holds {} engines, each broken", (mutants,)),
    Stated("docs/mutants.md", "; {} imitate a known bug", (lambda: sum(bool(m.imitates) for m in MUTANTS.values()),)),
    Stated("docs/mutants.md", "All but {} are killed at world size 2", (not_at_two_ranks,)),
    Stated("docs/mutants.md", "those of {} mutants (`MISNAMED`", (lambda: len(MISNAMED),)),
    Stated("docs/mutants.md", "for each law, {} of {};", (lambda: len(SAMPLE), lambda: len(KILLS))),
    Stated("docs/mutants.md", "{} sets of 24 more", (lambda: len(sets()),)),
    Stated("docs/reproductions.md", "of the {} bugs in", (bugs,)),
    Stated("docs/reproductions.md", "Of the {} scripts of torch's engines", (bugs_of_torch,)),
)


def sets() -> list[str]:
    """Return the series of mutants whose authors had not seen the laws."""
    return [origin.value for origin in Origin if origin.is_blind]


@cache
def text_of(page: str) -> str:
    """A page with one space for each stretch of blanks, as a sentence may go on in the next line."""
    return re.sub(r"\s+", " ", (ROOT / page).read_text(encoding="utf-8"))


def value(word: str) -> int:
    return WORDS.index(word.lower()) if word.lower() in WORDS else int(word.replace(",", ""))


def stale(stated: Stated, text: str) -> list[str]:
    """What a page says too few or too many of, a sentence for each."""
    match = stated.pattern.search(text)
    if match is None:
        return [f"{stated.page} no longer says {stated.sentence!r}: leave it out of suites/meta/test_counts.py"]
    pairs = zip(match.groups(), (count() for count in stated.counts), strict=True)
    return [
        f"{stated.page} says {match[0]!r}, and {right} is right for {told}"
        for told, right in pairs
        if value(told) != right
    ]


def unaccounted(page: str, text: str) -> Iterator[str]:
    """Numbers of what is counted here that no sentence holds."""
    matches = [each.pattern.search(text) for each in STATED if each.page == page]
    held = [match.span() for match in matches if match] + [
        match.span() for words in ONCE for match in re.finditer(re.escape(words), text)
    ]
    for match in COUNTED.finditer(text):
        if not any(start <= match.start(1) < end for start, end in held):
            words = text[max(0, match.start() - 40) : match.end()]
            yield f"{page} says {words!r}: hold it in STATED, or say that it was so ONCE"


@pytest.mark.parametrize("stated", STATED, ids=str)
def test_a_number_of_the_documentation_is_right(stated: Stated) -> None:
    assert not (found := stale(stated, text_of(stated.page))), found[0]


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_number_of_the_documentation_is_left_alone(page: Path) -> None:
    name = page.relative_to(ROOT).as_posix()
    assert not (found := list(unaccounted(name, text_of(name)))), found[0]


def test_what_was_so_once_is_still_told() -> None:
    pages = "".join(text_of(page.relative_to(ROOT).as_posix()) for page in PAGES)
    assert not [words for words in ONCE if words not in pages]


def test_a_stale_number_is_told_with_the_file_and_the_right_one() -> None:
    stated = Stated("README.md", "shown by {} broken engines", (lambda: 285,))
    assert stale(stated, "is shown by 283 broken engines (") == [
        "README.md says 'shown by 283 broken engines', and 285 is right for 283"
    ]
    assert not stale(stated, "is shown by 285 broken engines (")
    assert "no longer says" in stale(stated, "is shown by some broken engines")[0]
    assert "'We have 12 mutants'" in next(unaccounted("README.md", "We have 12 mutants."))


def test_the_readme_s_matrix_has_every_law_and_no_other() -> None:
    (matrix,) = re.findall(r"<summary>every law on every engine</summary>(.*?)</details>", text_of("README.md"))
    assert re.findall(r" ([a-z_]+\.[a-z_]+) +[-.:cxSFUE]", matrix) == STATED_FOR_MODELS


def test_the_readme_s_table_has_every_bug_and_no_other() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (table,) = re.findall(
        r"<summary>every bug, on the releases that were run</summary>(.*?)</details>", text, re.DOTALL
    )
    rows = [name for name in re.findall(r"^\| \[?([\w-]+)", table, re.MULTILINE) if name != "bug"]
    assert sorted(rows) == sorted(each.id for each in reproductions())


def test_what_was_seen_of_torch_s_engines_by_release_adds_up() -> None:
    told = r"engines (\d+) were run .*?: (\d+) bugs are gone on 2\.13\.0, (\d+) show on both, and (\d+) show"
    (found,) = re.findall(told, text_of("docs/reproductions.md"))
    run, *parts = map(int, found)
    assert run == sum(parts), f"docs/reproductions.md says that {run} were run, and tells of {sum(parts)}"


def test_every_unseen_set_of_mutants_has_its_row() -> None:
    assert re.findall(r"\((blind \d)\) \|", text_of("docs/mutants.md")) == sets()
