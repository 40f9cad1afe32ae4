"""The page of a report in a real browser, without a network: at a desk, on a phone, in the dark."""

import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fuseport.exporter.verify.diagnosis import Diagnosis, Divergence
from fuseport.exporter.verify.report import FLOAT64, Report, Row
from fuseport.exporter.verify.report.html import BINS, histogram
from fuseport.exporter.verify.report.parts import groups

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

DESK, PHONE, SMALL = (1280, 900), (390, 844), (360, 640)
NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
RUNTIMES = ("eager", "torchscript", "onnxruntime", "exported_program")
CASES = ("export", "every dimension 1", "odd, transposed", "past a chunk, sliced", "given")
KINDS = ("norm.weight", "mixer.A_log", "mixer.D", "mixer.in_proj.weight", "mixer.conv1d.bias")
HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1>{{7*7}}"
Page = playwright.Page


def chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@pytest.fixture(scope="module")
def browser() -> Iterator[playwright.Browser]:
    path = chromium()
    if path is None:
        pytest.skip(f"no Chromium here, none of {', '.join(NAMES)}: see CONTRIBUTING.md")
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=path)
        yield started
        started.close()


@pytest.fixture
def opened(browser: playwright.Browser, tmp_path: Path) -> Iterator["Opener"]:
    opener = Opener(browser, tmp_path)
    yield opener
    for context in opener.contexts:
        context.close()
    assert opener.said == [], "nothing on the console, and no request for anything"


class Opener:
    """Opens reports as a reader does, from a file, and keeps what goes wrong."""

    def __init__(self, browser: playwright.Browser, folder: Path) -> None:
        self.browser, self.folder = browser, folder
        self.said: list[str] = []
        self.contexts: list[playwright.BrowserContext] = []

    def __call__(self, report: Report, size: tuple[int, int] = DESK, scheme: str = "light") -> Page:
        file = self.folder / f"r{len(self.contexts)}.html"
        file.write_text(report.to_html(), encoding="utf-8")
        context = self.browser.new_context(
            offline=True,
            viewport={"width": size[0], "height": size[1]},
            color_scheme=scheme,
            reduced_motion="reduce",
        )
        self.contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("request", lambda r: r.url.startswith("file:") or self.said.append(r.url))
        page.goto(file.as_uri())
        return page


def row(tensor: str, share: float, **changes: object) -> Row:
    made = Row(
        "onnxruntime", "CPUExecutionProvider", "gradient.onnx", "gradient", "run", "export",
        tensor, "pass", None, False, share * 1e-6, share * 5e-7, 1e-7, 1e-6, 1e-6, share * 1e-6, 1,
    )  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def report_of(*rows: Row, **changes: object) -> Report:
    environment = {"versions": {"torch": "2.13.0"}, "system": "Linux x86_64", "cuda": None}
    made = Report("bundle", "ab" * 32, environment, 75.0, rows, ("a note",))
    return replace(made, **changes)  # type: ignore[arg-type]


def large(layers: int = 95) -> Report:
    """9,500 rows of a model with many layers, one of which is wrong."""
    rows = []
    for i, runtime in enumerate(RUNTIMES):
        for j, case in enumerate(CASES):
            for layer in range(layers):
                for k, kind in enumerate(KINDS):
                    share = 0.05 + ((7 * i + 3 * j + 11 * layer + 5 * k) % 90) / 100
                    name = f"grad/backbone.layers.{layer}.{kind}"
                    rows.append(row(name, share, runtime=runtime, case=case))
    wrong = replace(
        rows[-7], verdict="fail", reason="off by 1 where 1e-06 is allowed", max_abs_error=1.0,
        rms_error=0.5, would_pass_at=1.0,
    )  # fmt: skip
    rows[-7] = wrong
    where = (wrong.runtime, wrong.artifact, wrong.program, wrong.way, wrong.case)
    begins = Divergence("mm_7", "aten::mm", "backbone.layers.93", "backward", "wrong here")
    diagnosis = Diagnosis(*where, "runtime", "another is right", begins, "intermediates")
    return report_of(*rows, diagnoses=(diagnosis,))


def small(*rows: Row) -> Report:
    return report_of(*(row(f"grad/layers.0.{kind}", 0.3) for kind in KINDS), *rows)


def shown(page: Page) -> list[str]:
    return page.locator("#list tbody tr:not(.detail) .tensor").all_inner_texts()


@pytest.mark.parametrize("size", [DESK, PHONE, SMALL])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_shows_the_verdict_first_and_fits_the_width(
    opened: Opener, size: tuple[int, int], scheme: str
) -> None:
    page = opened(large(), size, scheme)
    heading = page.locator("h1")
    assert heading.inner_text() == "Fail"
    assert heading.bounding_box()["y"] < 150
    assert "1 of 9,500 comparisons is beyond the bound" in page.inner_text("header")
    width = page.evaluate("document.documentElement.scrollWidth")
    assert width <= size[0], "nothing to scroll sideways"
    for part in ("diagnoses", "failures", "runtimes", "layers", "worst", "rows", "environment"):
        assert page.locator(f"#{part} h2").is_visible()
    assert "The runtime is at fault" in page.inner_text("#diagnoses")
    assert "would pass at --atol 1" in page.inner_text("#failures")
    assert "2.13.0" in page.inner_text("#environment")
    brightness = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g)[0]")
    assert (int(brightness) > 128) == (scheme == "light")


def test_thousands_of_rows_open_fast_in_a_file_of_moderate_size(
    opened: Opener, tmp_path: Path
) -> None:
    report = large()
    assert len(report.results) == 9500
    assert len(report.to_html().encode()) < 3_000_000
    page = opened(report)
    took = page.evaluate("performance.getEntriesByType('navigation')[0].domComplete")
    assert took < 5000, "ms, on a slow machine"
    assert 0 < len(shown(page)) <= 300, "the others come when they are scrolled to"
    before = len(shown(page))
    page.locator("#more").scroll_into_view_if_needed()
    playwright.expect(page.locator("#list tbody tr").nth(before)).to_be_visible()


@pytest.mark.parametrize("size", [DESK, PHONE])
def test_filters_narrow_and_a_row_opens_with_its_figures(
    opened: Opener, size: tuple[int, int]
) -> None:
    page = opened(large(), size)
    assert shown(page)[0] == "grad/backbone.layers.93.mixer.in_proj.weight", "the failure"
    page.fill("#filters [name=text]", "layers.7.mixer.D odd")
    assert page.inner_text("#shown") == "4 of 9,500 comparisons"
    page.select_option("#filters [name=runtime]", "torchscript")
    assert shown(page) == ["grad/backbone.layers.7.mixer.D"]
    page.click("#list tbody tr")
    detail = page.locator("#list .detail")
    assert "CPUExecutionProvider" in detail.inner_text()
    assert "root mean square error" in detail.inner_text()
    page.click("#list tbody tr")
    assert detail.count() == 0
    page.click("#filters [type=reset]")
    playwright.expect(page.locator("#shown")).to_have_text("9,500 comparisons")
    page.select_option("#filters [name=verdict]", "fail")
    assert len(shown(page)) == 1
    page.click("#list tbody tr")
    assert "off by 1 where 1e-06 is allowed; would pass at --atol 1" in detail.inner_text()


def test_columns_sort_both_ways(opened: Opener) -> None:
    page = opened(small(row("z", 0.9), row("a", 0.1)))
    shares = page.locator("#list tbody .share")
    found = [float(text) for text in shares.all_inner_texts()]
    assert found == sorted(found, reverse=True)
    page.click("[data-sort=share]")
    assert [float(text) for text in shares.all_inner_texts()] == found[::-1]
    assert page.locator("[aria-sort=ascending]").inner_text() == "error / bound ↑"
    page.click("[data-sort=tensor]")
    assert shown(page)[-2:] == ["z", "a"], "in the model's order"


def test_a_program_and_a_cell_of_a_map_lead_to_their_rows(opened: Opener) -> None:
    page = opened(small(row("grad/layers.1.D", 0.8, runtime="eager", artifact="model")))
    page.click("[data-group='1']")
    assert shown(page) == ["grad/layers.1.D"]
    assert "eager · model" in page.inner_text("#shown")
    page.locator("#maps svg").first.locator("rect").first.click()
    assert shown(page) == ["grad/layers.0.norm.weight"]


def test_all_of_it_works_from_the_keyboard(opened: Opener) -> None:
    page = opened(small())
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to all comparisons"
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(({dataset, name, tagName}) => dataset.group ?? dataset.sort ?? name ?? tagName)"
                "(document.activeElement)"
            )
        )
    assert {"0", "share", "tensor", "text", "runtime", "verdict", "svg"} <= reached
    page.locator("#maps svg").focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    assert page.locator("#tip").inner_text().startswith("grad/layers.0.")
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()
    page.keyboard.press("Enter")
    assert len(shown(page)) == 1
    assert page.evaluate("document.activeElement.closest('#list') !== null"), "focus goes along"
    page.keyboard.press("Enter")
    assert page.locator("#list .detail").is_visible()


def test_the_map_has_every_parameter_in_the_model_s_order(opened: Opener) -> None:
    page = opened(large(layers=12))
    first = page.locator("#maps svg").first
    boxes = first.locator("rect:not(.cursor)")
    assert boxes.count() == 12 * len(KINDS)
    kinds = first.locator("text:not(.tick)").all_text_contents()
    assert [kind.lstrip("…") in whole for kind, whole in zip(kinds, KINDS, strict=True)]
    numbers = [int(text) for text in first.locator(".tick").all_text_contents()]
    assert numbers == sorted(numbers)
    assert page.locator("#maps rect.cf").count() == 1


def test_nothing_in_a_report_becomes_code(opened: Opener) -> None:
    hostile = row(f"grad/{HOSTILE}", math.inf, case=HOSTILE, artifact=HOSTILE, verdict="fail")
    hostile = replace(hostile, reason=HOSTILE, runtime=HOSTILE, provider=HOSTILE)
    told = Diagnosis(HOSTILE, HOSTILE, HOSTILE, "run", HOSTILE, None, HOSTILE)
    report = report_of(
        hostile, bundle=HOSTILE, notes=(HOSTILE,), environment={HOSTILE: HOSTILE}, diagnoses=(told,)
    )
    page = opened(report)
    assert shown(page) == [f"grad/{HOSTILE}"]
    page.click("#list tbody tr")
    page.locator("#maps rect").first.hover()
    page.locator("#maps rect").first.click()
    assert page.evaluate("window.hacked") is None
    assert page.locator("img").count() == 0
    assert "49" not in page.inner_text("header")


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        ((), "Nothing compared"),
        ((row("y", 0.0, program="forward"),), "Pass"),
        ((row("*", 0.0, verdict="error", reason="killed", max_abs_error=None),), "Error"),
        ((row("*", 0.0, verdict="unsupported", max_abs_error=None, artifact="*"),), "Unsupported"),
        ((row("grad/w", 0.2, runtime=FLOAT64),), "Nothing compared"),
        ((row("y", 0.1, verdict="fail", max_abs_error=None, rms_error=None),), "Fail"),
    ],
)
def test_a_report_without_figures_or_gradients_opens_too(
    opened: Opener, rows: tuple[Row, ...], title: str
) -> None:
    page = opened(report_of(*rows))
    assert page.inner_text("h1") == title
    assert len(shown(page)) == len(rows)


def test_it_prints(opened: Opener) -> None:
    page = opened(small(), scheme="dark")
    page.emulate_media(media="print")
    colours = page.evaluate(
        "[document.body, document.querySelector('h2')].map((part) => getComputedStyle(part))"
        ".map((style, i) => Number((i ? style.color : style.backgroundColor).match(/\\d+/)[0]))"
    )
    assert colours[0] > 200 > 100 > colours[1], "dark on light, whatever the screen has"
    assert page.locator("#filters").is_hidden()
    assert page.locator("h1").is_visible()
    assert page.pdf().startswith(b"%PDF")


def test_it_names_no_address_and_no_other_file() -> None:
    text = re.sub(r"https?://www\.w3\.org/2000/svg", "", large(layers=3).to_html())
    assert not re.search(r"https?:|//\w|@import|url\(|<link|<iframe|\bsrc=", text)


def test_histograms_count_every_row_and_keep_to_their_side_of_the_bound() -> None:
    shares = [0.0, 1e-9, 1e-3, 0.02, 0.5, 0.999999, 1.0, 1.0000001, 3.0, 10.0, 1e9, math.inf]
    rows = [row(f"t{i}", share, rms_bound=None) for i, share in enumerate(shares)]
    rows[-1] = replace(rows[-1], max_abs_error=1.0, bound=0.0)
    (group,) = groups(report_of(*rows))
    bars = histogram(group)
    assert sum(bar.count for bar in bars) == len(rows)
    assert sum(bar.count for bar in bars if bar.beyond) == 5
    assert max(bar.height for bar in bars) == 1.0
    assert {bars[0].bin, bars[-1].bin} == {0, BINS - 1}
