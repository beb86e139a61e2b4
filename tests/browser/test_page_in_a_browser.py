# SPDX-License-Identifier: Apache-2.0

# DeepSpeed Team
"""The page of `ds_affine explain --html` in headless Chromium: `nox -s browser`.

Needs the system's packages chromium and chromium-driver.
"""

import json

import pytest
from selenium import webdriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from ds_affine.cli import main

SHAPES = {"up.weight": (4096, 1024), "down.weight": (1024, 4096), "norm.weight": (1024, )}
SWITCHES = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
            "--disable-component-update", "--disable-sync", "--window-size=1200,1700")


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    for switch in SWITCHES:
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options=options) as driver:
        yield driver


@pytest.fixture(params=[(1, "rows-1"), (4, "columns-2"), (256, "columns-8"), (1000, "rows-1000")], ids=str)
def opened(request, browser, tmp_path, capsys):
    """The browser with a page, the figures of the plan, and the numbers of ranks."""
    ranks, target = request.param
    table, path = tmp_path / "model.json", tmp_path / "page.html"
    table.write_text(json.dumps({"parameters": SHAPES}))
    assert main(["explain", "up.weight", f"zero3-{ranks}:{table}", target, "--html", str(path)]) == 0
    assert main(["plan", f"zero3-{ranks}:{table}", target, "--json"]) == 0
    browser.get(path.as_uri())
    assert browser.find_element(By.TAG_NAME, "html").get_attribute("data-ready") == "yes"
    return browser, json.loads(capsys.readouterr().out), ranks, path


def says(browser, figure):
    return browser.find_element(By.ID, f"{figure}-says").text


def colours(browser, figure):
    """How many different colours a figure shows."""
    return browser.execute_script(
        """const canvas = document.getElementById(arguments[0]), pen = canvas.getContext('2d');
        const pixels = new Uint32Array(pen.getImageData(0, 0, canvas.width, canvas.height).data.buffer);
        return new Set(pixels).size;""", figure)


def test_it_opens_without_errors_and_is_small(opened):
    browser, _, _, path = opened
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
    assert path.stat().st_size < 2_000_000


def test_figures_are_drawn(opened):
    browser, _, ranks, _ = opened
    assert colours(browser, "source") >= min(ranks, 100)
    assert colours(browser, "target") >= 1 and colours(browser, "traffic") >= 1


def test_hovering_shows_a_piece(opened):
    browser, _, ranks, _ = opened
    canvas = browser.find_element(By.ID, "source")
    ActionChains(browser).move_to_element_with_offset(canvas, 0, -canvas.size["height"] // 2 + 2).perform()
    assert says(browser, "source").startswith("location 0: rows 0 to ")
    ActionChains(browser).move_to_element_with_offset(canvas, 0, canvas.size["height"] // 2 - 3).perform()
    location = int(says(browser, "source").split()[1].rstrip(":"))
    assert location >= 0.98 * (ranks - 1)


def test_everything_is_reached_by_keyboard(opened):
    browser, facts, _, _ = opened
    for figure in ("source", "target", "traffic"):
        ActionChains(browser).send_keys(Keys.TAB).perform()
        assert browser.switch_to.active_element.get_attribute("id") == figure
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT, Keys.ARROW_LEFT)
    if len(facts["links"]) < 256:
        source, target, numbytes = facts["links"][0]
        assert says(browser, "traffic") == f"from process {source} to process {target}: {numbytes:,} bytes"
    assert says(browser, "traffic").endswith(" bytes")


def test_numbers_equal_the_plans(opened):
    browser, facts, _, _ = opened
    cells = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#numbers td")]
    assert f"{facts['segments']:,}" in cells and f"{facts['sent_bytes']:,}" in cells
    first = [cell.text for cell in browser.find_elements(By.CSS_SELECTOR, "#links tbody tr:first-child td")]
    assert first == [f"{number:,}" if place == 2 else str(number) for place, number in enumerate(facts["links"][0])]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes(opened, scheme):
    browser, *_ = opened
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    paper = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(13, 17, 23)"}[scheme]


def test_colours_and_axes_are_told(opened):
    browser, facts, ranks, _ = opened
    entries = {
        figure: [entry.text for entry in browser.find_elements(By.CSS_SELECTOR, f"#{figure}-key li")]
        for figure in ("source", "traffic")
    }
    told = range(ranks) if ranks <= 24 else (0, ranks - 1)
    assert entries["source"] == [f"location {location}" for location in told]
    processes = [{link[end] for link in facts["links"]} for end in (0, 1)]
    assert entries["traffic"][0] == f"rows, from the top: from process {min(processes[0])} to {max(processes[0])}"
    assert entries["traffic"][1] == f"columns: to process {min(processes[1])} to {max(processes[1])}"
    if len(facts["links"]) < 256:
        assert entries["traffic"][2] == f"{facts['links'][0][2]:,} bytes"
    swatch = browser.find_element(By.CSS_SELECTOR, "#source-key i")
    assert swatch.value_of_css_property("background-color") not in ("", "rgba(0, 0, 0, 0)")
