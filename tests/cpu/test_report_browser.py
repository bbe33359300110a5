"""The report in headless Chromium: it opens without an error, shows its pictures and curves, and fits a phone."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from synthetic_run import write_run

from wandistill.evaluate.report import write_report

if TYPE_CHECKING:
    from selenium.webdriver import Chrome

pytestmark = pytest.mark.browser

DEMO = Path(os.environ.get("WANDISTILL_DEMO_DIR", "outputs/demo"))
WIDTHS = (400, 1200)

# For every picture whether it is decoded, for every prompt which sides it shows.
_PAIRS = """
return [...document.querySelectorAll('.pair')].map(pair => ({
  prompt: pair.querySelector('.prompt').textContent,
  pictures: [...pair.querySelectorAll('img')].map(image => ({
    description: image.alt, loaded: image.complete && image.naturalWidth > 0, shown: image.clientWidth > 40})),
}))
"""
_CURVE = """
const line = document.querySelector('svg#loss path.line:not(.faint)');
return line && {length: line.getTotalLength(), stroke: getComputedStyle(line).stroke};
"""


def _find(*names: str) -> str:
    """The path of a program; skips the test, or fails it in CI, where it must be there."""
    for name in names:
        if path := shutil.which(name):
            return path
    message = (
        f"{' or '.join(names)} is not on the PATH: install Chromium and its driver (apt: chromium chromium-driver)."
    )
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    chromium = _find("chromium", "chromium-browser", "google-chrome")
    driver = _find("chromedriver")
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = webdriver.Chrome(options, Service(driver))
    yield chrome
    chrome.quit()


def _open(browser: Chrome, page: Path, width: int, scheme: str = "light") -> None:
    """Opens a page in a window of exactly `width` CSS pixels."""
    metrics: dict[str, Any] = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.resolve().as_uri())


def _look(browser: Chrome, page: Path, width: int) -> None:
    """All that must hold of any evaluated run's page."""
    _open(browser, page, width)
    assert browser.get_log("browser") == []
    pairs = browser.execute_script(_PAIRS)
    assert len(pairs) >= 8
    for pair in pairs:
        assert [picture["description"].split(":")[0] for picture in pair["pictures"]] == ["teacher", "student"]
        assert all(picture["loaded"] and picture["shown"] for picture in pair["pictures"]), pair["prompt"]
    assert browser.execute_script("return [...document.images].every(i => i.complete && i.naturalWidth > 0)")
    curve = browser.execute_script(_CURVE)
    assert curve and curve["length"] > 50 and curve["stroke"] != "none"
    overflow = browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth")
    assert overflow <= 0, f"at {width} pixels the page is {overflow} pixels too wide"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_run(tmp_path_factory.mktemp("report") / "run"))


@pytest.mark.parametrize("width", WIDTHS)
def test_a_report_opens_without_an_error_and_fits(browser: Chrome, page: Path, width: int):
    _look(browser, page, width)


def test_a_hostile_prompt_is_only_text(browser: Chrome, page: Path):
    _open(browser, page, 1200)
    assert browser.execute_script("return document.scripts.length") == 0
    assert browser.execute_script("return document.querySelector('.pair .prompt').childElementCount") == 0


def test_details_open_and_still_fit_a_phone(browser: Chrome, page: Path):
    _open(browser, page, 400)
    browser.execute_script("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert browser.execute_script("return document.documentElement.scrollWidth - window.innerWidth") <= 0


def test_the_page_follows_light_and_dark(browser: Chrome, page: Path):
    colors = []
    for scheme in ("light", "dark"):
        _open(browser, page, 1200, scheme)
        colors.append(browser.execute_script("return getComputedStyle(document.body).backgroundColor"))
    assert colors[0] != colors[1]


def test_small_pictures_are_scaled_up_pixel_by_pixel(browser: Chrome, page: Path):
    _open(browser, page, 1200)
    style = "return getComputedStyle(document.querySelector('.pair img')).imageRendering"
    assert browser.execute_script(style) == "pixelated"


@pytest.mark.demo
@pytest.mark.parametrize("width", WIDTHS)
def test_the_demos_report_opens_without_an_error_and_fits(browser: Chrome, width: int):
    _look(browser, DEMO / "report.html", width)
    badges = browser.execute_script("return document.querySelectorAll('.pair .verdict').length")
    assert badges == browser.execute_script("return document.querySelectorAll('.pair img').length")
