"""Use the page in a browser: filters, folding, keys, an opened cell, a comparison of two runs, printing.

Every test also checks that the page wrote nothing to the console and requested nothing over the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import pytest

from suites.report.browsers import PATIENCE, launch_chromium, missing, must_be_there
from suites.report.made_up import CAUSE, failed, records
from zharness.cell import Cell
from zharness.report.comparison import compare_runs
from zharness.report.page import write_page
from zharness.report.page.columns import OUTCOME_MEANINGS
from zharness.run import Record, Verdict

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(bool(missing()) and not must_be_there(), reason=missing() or "there is a browser")

BROKEN = Cell("training.grads", "reference", 0, 2, "fp32", "mlp")
HOSTILE = Cell("training.no_sync", "reference", 0, 2, "fp32", "mlp")
MARKUP = "<img src=x onerror=document.title='broken'> </script>"
Opened = Callable[..., "Page"]


def cells() -> list[Record]:
    """Invent one failing cell with evidence, one whose cause is markup, and passing ones."""
    passing = [mended(each) for each in records(320, bad=0.0)]
    hostile = Record(
        HOSTILE, 0, Verdict.CRASH, "0.1.0", "2.13.0", cause=MARKUP, expected_failure="deepspeedai/DeepSpeed#7352"
    )
    by_cell = {each.cell: each for each in [*passing, failed(BROKEN, "0.1.0"), hostile]}
    return list(by_cell.values())


def mended(record: Record) -> Record:
    """Return the record with its verdict changed to pass."""
    return replace(record, verdict=Verdict.PASS, cause="", expected_failure="") if record.verdict.is_broken else record


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launch_chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pages")
    write_page(cells(), 1.0, folder / "one.html", skipped=["r.jsonl, line 3: not a record"])
    before = [mended(each) for each in cells()][:-1]
    write_page(cells(), 1.0, folder / "two.html", comparison=compare_runs(before, cells()))
    return folder


@pytest.fixture
def opened(chromium: Browser, pages: Path) -> Iterator[Opened]:
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, offline=True)
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    console: list[str] = []
    requests: list[str] = []

    def open_(name: str = "one.html", cell: Cell | str = "") -> Page:
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        key = cell if isinstance(cell, str) else cell.id
        page.goto(f"{(pages / name).as_uri()}{'#' + quote(key, safe='') if key else ''}")
        page.locator("#count:not(:empty)").wait_for()
        return page

    yield open_
    context.close()
    assert console == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def focused(page: Page) -> str:
    """Return the label of the focused element, or else its text."""
    label: str = page.evaluate("document.activeElement.getAttribute('aria-label') ?? document.activeElement.innerText")
    return label


def test_the_filters_narrow_the_matrix_and_the_list_and_count_the_cells_shown(opened: Opened) -> None:
    from playwright.sync_api import expect

    page = opened()
    count, everything = page.locator("#count"), f"{len(cells())} of {len(cells())} cells shown"
    expect(count).to_have_text(everything)
    assert count.get_attribute("aria-live") == "polite"
    page.fill("#text", "training.grads zero0")
    expect(page.locator("#matrix tbody tr")).to_have_count(2)  # the group and its one law
    page.fill("#text", "")
    page.select_option("#axis-group", "backward")
    expect(page.locator("#matrix .group")).to_have_count(1)
    page.click("button[type=reset]")
    page.click("[data-outcome=fail]")
    expect(count).to_have_text(f"1 of {len(cells())} cells shown")
    expect(page.locator("#cells tbody tr")).to_have_count(1)
    assert page.locator("[data-outcome=pass]").get_attribute("aria-pressed") == "false"
    page.click("[data-outcome=fail]")
    expect(count).to_have_text(everything)


def test_a_long_list_is_drawn_while_scrolling(opened: Opened) -> None:
    from playwright.sync_api import expect

    page = opened()
    drawn = page.locator("#cells tbody tr")
    assert drawn.count() < len(cells())
    for _ in range(len(cells()) // 100):
        page.locator("#cells-heading").scroll_into_view_if_needed()
        page.mouse.wheel(0, 100_000)
    expect(drawn).to_have_count(len(cells()))
    expect(page.locator("#more")).to_be_hidden()


def test_a_group_folds_by_click_and_by_key_and_all_at_once(opened: Opened) -> None:
    page = opened()
    laws = page.locator("#matrix tr[data-check^='training.']")
    training = page.locator("#matrix tr[data-group=training] th")
    assert laws.count() > 5
    training.click()
    assert laws.count() == 0
    assert training.get_attribute("aria-expanded") == "false"
    page.keyboard.press("Enter")
    assert laws.count() > 5
    page.click("#fold")
    assert page.locator("#matrix tr[data-check]").count() == 0
    page.click("#unfold")
    assert page.locator("#matrix tr[data-check]").count() > 20


def test_every_square_has_a_letter_and_a_label_besides_its_colour(opened: Opened) -> None:
    page = opened()
    signs = page.locator("#matrix .square").all_inner_texts()
    assert {"F", "x", "·", "–"} <= set(signs)
    labels = page.eval_on_selector_all("#matrix .square", "all => all.map(each => each.getAttribute('aria-label'))")
    assert "training.grads, reference 0.1.0, stage 0, 2 ranks, fp32: 1 fail, 1 pass" in labels
    assert all(re.search(r": \d+ \w+", label) for label in labels)


def test_the_evidence_of_a_failing_cell_is_shown_as_text_and_charts(opened: Opened) -> None:
    from playwright.sync_api import expect

    page = opened()
    page.get_by_label("training.grads, reference 0.1.0, stage 0, 2 ranks, fp32: 1 fail, 1 pass").click()
    page.locator("#cell").get_by_text(BROKEN.id).click()
    pane = page.locator("#cell")
    pane.get_by_text(CAUSE).wait_for()
    assert pane.locator(".strip [aria-current=step]").inner_text().startswith("✗ reduction")
    assert pane.locator(".strip li").count() == 7
    assert "outside the bound" in pane.inner_text()
    assert f"zharness check '{BROKEN.id}'" in pane.locator(".command").inner_text()
    charts = pane.locator("svg.chart[role=img]")
    titles = [label.partition(":")[0] for label in charts.evaluate_all("all => all.map(one => one.ariaLabel)")]
    assert titles == [
        "Error over the parameter",
        "Distance from the float64 oracle",
        "Error along depth",
        "Loss",
        "Gradient norm",
    ]
    assert {"rank 0", "rank 1"} <= set(charts.first.locator("text").all_text_contents())
    assert charts.first.locator("g[stroke='var(--shard)'] path").count() == 1, "one edge between two shards"
    for summary in pane.locator(".numbers summary").all():
        summary.click()
    expect(pane.locator(".numbers table")).to_have_count(len(titles))
    assert "∞" in pane.locator(".numbers table").first.inner_text()


def test_the_copy_button_copies_the_command(opened: Opened) -> None:
    page = opened(cell=BROKEN)
    page.click(".copy")
    page.get_by_text("copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == f"zharness check '{BROKEN.id}'"


def test_an_address_opens_a_cell_and_an_unknown_cell_is_reported(opened: Opened) -> None:
    page = opened(cell=BROKEN)
    assert page.locator("#cell h2").inner_text() == "training.grads"
    assert page.locator("#matrix .chosen").inner_text() == "F"
    page.evaluate("location.hash = ''")
    page.locator("#cell").wait_for(state="hidden")
    assert "no cell nonsense" in opened(cell="nonsense").locator("#cell").inner_text()
    page.evaluate("location.hash = '%'")
    page.get_by_text("no cell %").wait_for()


def test_the_keys_walk_the_matrix_open_a_cell_and_come_back_to_its_square(opened: Opened) -> None:
    page = opened()
    page.keyboard.press("/")
    assert page.evaluate("document.activeElement.id") == "text"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.id") != "text"
    page.locator("#matrix [tabindex='0']").focus()
    page.keyboard.press("Control+Home")
    assert focused(page).startswith("▾ training")
    for key in ("ArrowDown", "ArrowRight", "ArrowRight", "ArrowLeft", "ArrowUp", "ArrowDown"):
        page.keyboard.press(key)
    assert focused(page).startswith("training.grads, reference 0.1.0, stage 0, 2 ranks, fp32: ")
    assert page.locator("#matrix tbody [tabindex='0']").count() == 1
    page.keyboard.press("End")
    page.keyboard.press("Home")
    assert focused(page) == "grads"
    page.keyboard.press("Control+End")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("PageUp")
    page.keyboard.press("Control+Home")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Enter")
    page.locator("#cell h2").wait_for()
    assert focused(page) == "training.grads"
    page.keyboard.press("Escape")
    assert page.locator("#cell").is_hidden()
    assert focused(page).startswith("training.grads, reference 0.1.0, stage 0, 2 ranks, fp32: ")


def test_the_text_of_a_record_is_escaped_and_its_issue_is_a_link(opened: Opened) -> None:
    page = opened(cell=HOSTILE)
    assert MARKUP in page.locator("#cell .words").inner_text()
    assert page.title() != "broken"
    link = page.locator("#cell dd a")
    assert link.get_attribute("href") == "https://github.com/deepspeedai/DeepSpeed/issues/7352"
    assert "1 line skipped" in page.locator("#skipped").inner_text()
    assert "r.jsonl, line 3" in page.locator("#skipped").inner_text()


def test_a_comparison_begins_with_newly_broken_cells(opened: Opened) -> None:
    page = opened("two.html")
    assert page.locator("#comparison h3").all_inner_texts() == ["newly broken 2", "new 1"]
    row = page.locator("#comparison tbody tr").filter(has_text=BROKEN.id)
    assert re.sub(r"\s+", " ", row.inner_text()).startswith(f"{BROKEN.id} · pass 0.1.0 F fail 0.1.0")
    row.get_by_role("link").click()
    page.locator("#cell").get_by_text(CAUSE).wait_for()


def test_in_print_the_controls_are_hidden_and_the_cell_starts_a_page(opened: Opened) -> None:
    page = opened(cell=BROKEN)
    page.emulate_media(media="print")
    assert page.locator("#filters").is_hidden()
    assert page.locator("#matrix").is_visible()
    assert page.locator("#cell .command").is_visible()
    assert page.locator("#cell").evaluate("each => getComputedStyle(each).breakBefore") == "page"
    assert page.pdf().startswith(b"%PDF")


def test_the_head_has_date_command_and_versions_and_the_legend_every_sign(opened: Opened) -> None:
    page = opened()
    head = page.locator("#run").inner_text()
    assert re.search(r"torch 2\.13\.0, reference 0\.1\.0.*page written \d{4}-\d\d-\d\d \d\d:\d\d UTC", head), head
    assert page.locator("#run code").inner_text()
    page.locator("#legend summary").click()
    meanings = page.locator("#legend dd").all_inner_texts()
    for word, meaning in OUTCOME_MEANINGS.items():
        assert f"{word}: {meaning}" in meanings
    assert len(page.locator("#legend dt").all()) == len(meanings) == len(OUTCOME_MEANINGS) + 3


def test_a_lone_failure_opens_by_itself(opened: Opened) -> None:
    page = opened("one.html")
    page.locator("#cell").get_by_text(CAUSE).wait_for()


def test_the_cause_is_visible_on_a_narrow_screen(opened: Opened) -> None:
    page = opened("two.html")
    page.set_viewport_size({"width": 390, "height": 800})
    page.keyboard.press("Escape")  # closes the lone failure
    box = page.locator("#cells .cause").filter(has_text=CAUSE[:20]).first.bounding_box()
    assert box is not None
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= 390


def test_the_page_has_light_and_dark_colours(opened: Opened) -> None:
    page = opened()
    shades = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        shades.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert shades == ["rgb(255, 255, 255)", "rgb(15, 20, 25)"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_accessibility_audit_finds_no_violation(opened: Opened, scheme: str) -> None:
    from axe_playwright_python.sync_playwright import Axe

    page = opened("two.html", BROKEN)
    page.emulate_media(color_scheme=scheme)
    audit = Axe().run(page)
    assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in audit.response["violations"]] == []
