"""The static site in headless Chromium: filters and their address, links, narrow screens, accessibility."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from suites.report.browsers import PATIENCE, launch_chromium, missing, must_be_there
from suites.site.many_runs import MARKUP, RETAINED, make, many_runs
from zharness.run import Verdict
from zharness.site.command import build_site

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.skipif(bool(missing()) and not must_be_there(), reason=missing() or "there is a browser")

WIDTHS = (390, 1400)
LAW_PAGE, OTHER_LAW_PAGE = "laws/training.grads.html", f"laws/{RETAINED}.html"
Opened = Callable[..., "Page"]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with launch_chromium() as launched:
        yield launched


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    others = [make("zharness.mutants:never_reduces", f"{i}.0", "training.grads", Verdict.PASS) for i in range(8)]
    lines = "".join(json.dumps(record.as_json()) + "\n" for record in [*many_runs(), *others])
    (folder / "r.jsonl").write_text(lines, encoding="utf-8")
    build_site([folder / "r.jsonl"], folder / "out")
    return folder / "out"


@pytest.fixture
def opened(chromium: Browser, site: Path) -> Iterator[Opened]:
    context = chromium.new_context(viewport={"width": 1400, "height": 900}, offline=True)
    console: list[str] = []
    requests: list[str] = []

    def open_(address: str = "index.html") -> Page:
        page = context.new_page()
        page.set_default_timeout(PATIENCE)
        page.on("console", lambda message: console.append(message.text))
        page.on("pageerror", lambda error: console.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        path, _, anchor = address.partition("#")
        page.goto(f"{(site / path).as_uri()}#{anchor}")
        return page

    yield open_
    context.close()
    assert console == []
    assert [url for url in requests if not url.startswith(("file:", "data:"))] == []


def shown_laws(page: Page) -> list[str]:
    """Return the names of the laws whose rows are visible."""
    return page.locator("#laws tbody tr:not(.group):visible th").all_inner_texts()


def shown_columns(page: Page) -> int:
    """Return the number of engine releases whose columns are visible."""
    return page.locator("#laws thead th[data-engine]:visible").count()


def test_the_filters_narrow_rows_and_columns_and_are_kept_in_the_address(opened: Opened) -> None:
    from playwright.sync_api import expect

    page = opened()
    count = page.locator("#count")
    expect(count).to_have_text("3 of 3 laws, 13 of 13 engine releases shown")
    assert count.get_attribute("aria-live") == "polite"
    page.select_option("[name=engine]", "deepspeed")
    expect(count).to_have_text("2 of 3 laws, 3 of 13 engine releases shown")
    assert shown_laws(page) == ["training.grads", "torch_func.grad"]
    page.select_option("[name=verdict]", "excused")
    assert shown_laws(page) == ["torch_func.grad"]
    assert page.locator("#laws .group:visible").all_inner_texts()[0].startswith("torch_func")
    assert page.url.endswith("#engine=deepspeed&verdict=excused")
    page.click("button[type=reset]")
    expect(count).to_have_text("3 of 3 laws, 13 of 13 engine releases shown")
    assert page.url.endswith("#")
    page.check("[name=failing]")
    page.select_option("[name=group]", "double_backward")
    assert shown_laws(page) == [RETAINED]
    assert page.url.endswith("#group=double_backward&failing=1")


def test_an_address_opens_a_filtered_view_and_a_changed_address_changes_it(opened: Opened) -> None:
    from playwright.sync_api import expect

    page = opened("index.html#engine=ddp&failing=1")
    assert shown_laws(page) == [RETAINED]
    assert shown_columns(page) == 1
    assert page.input_value("[name=engine]") == "ddp"
    assert page.is_checked("[name=failing]")
    page.evaluate("location.hash = 'only=1&engine=no such engine'")
    expect(page.locator("#count")).to_have_text("2 of 3 laws, 13 of 13 engine releases shown")
    assert shown_laws(page) == ["training.grads", RETAINED]
    assert page.locator("#laws tr:not(.group) .only").count() == 2


def test_a_law_leads_to_its_history_and_its_failure_to_the_finding(opened: Opened) -> None:
    page = opened()
    page.get_by_role("link", name=RETAINED).click()
    page.locator("h1", has_text=RETAINED).wait_for()
    page.get_by_text("excused in 2.13.0+cpu").click()
    page.get_by_text(f"zharness check '{RETAINED}[ddp==2.13.0-zero0-w2-fp32-mlp]'").wait_for()
    page.get_by_role("link", name="pytorch/pytorch#47260").click()
    page.get_by_text("zharness repro 47260", exact=True).wait_for()
    page.get_by_role("link", name=RETAINED).click()
    page.get_by_role("link", name="zharness", exact=True).click()
    page.locator("#count:not(:empty)").wait_for()


def test_markup_in_a_record_is_shown_as_text(opened: Opened) -> None:
    page = opened(LAW_PAGE)
    page.get_by_text("fail in 0.18.8").click()
    assert MARKUP in page.locator(".words:visible").inner_text()
    assert page.title() != "broken"


def test_the_table_works_without_scripts(chromium: Browser, site: Path) -> None:
    context = chromium.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((site / "index.html").as_uri())
    assert page.locator("#laws tbody tr:visible").count() == 6
    context.close()


@pytest.mark.parametrize("width", WIDTHS)
def test_no_page_is_wider_than_the_screen_and_names_can_be_read(opened: Opened, site: Path, width: int) -> None:
    for path in [page.relative_to(site).as_posix() for page in site.rglob("*.html")]:
        page = opened(path)
        page.set_viewport_size({"width": width, "height": 844})
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path
        page.close()
    page = opened()
    page.set_viewport_size({"width": width, "height": 844})
    name = page.locator("#laws tbody .law").first.bounding_box()
    assert name is not None
    assert 120 <= name["width"] <= width / 2, "a law's name is neither squeezed nor covers the table"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_an_accessibility_audit_finds_no_violation(opened: Opened, site: Path, scheme: str, width: int) -> None:
    from axe_playwright_python.sync_playwright import Axe

    findings = [page.relative_to(site).as_posix() for page in (site / "findings").glob("*.html")]
    for path in ("index.html", LAW_PAGE, OTHER_LAW_PAGE, *findings):
        page = opened(path)
        page.set_viewport_size({"width": width, "height": 844})
        page.emulate_media(color_scheme=scheme)
        page.evaluate("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        violations = Axe().run(page).response["violations"]
        assert [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in violations] == [], path
        page.close()
