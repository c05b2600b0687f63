"""Tests the report in a browser: clicks, keys and choices, and that no text runs as code and no
request leaves the page.
"""

import itertools
import json
import math
import re
import shutil

import numpy as np
import pytest

from dantinox.report.page import report_page
from dantinox.sampling.entropy_router import RULES, RouterConfig

from .page_sample import HOSTILE, STRATEGY_NAMES, trace

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser():
    from selenium import webdriver as driver

    binary = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    service = shutil.which("chromedriver")
    assert binary and service, (
        "chromium and chromedriver are needed: apt-get install chromium chromium-driver"
    )
    options = driver.ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--force-color-profile=srgb",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chromium = driver.Chrome(options=options, service=driver.ChromeService(service))
    chromium.set_window_size(1600, 1000)
    yield chromium
    chromium.quit()


@pytest.fixture
def opened(browser, tmp_path):
    """Opens documents as a page; at the end the browser must have logged no error and no network
    request.
    """

    def open_page(*documents):
        path = tmp_path / "page.html"
        path.write_bytes(report_page(documents).encode())
        browser.get(path.as_uri())
        return browser

    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    yield open_page
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert {url.split(":")[0] for url in urls} <= {"file", "about", "data"}
    assert len([url for url in urls if url.startswith("file:")]) <= 1


@pytest.fixture(scope="module")
def long_trace():
    return trace(2000)


def find(browser, css):
    return browser.find_element("css selector", css)


def token(browser, i):
    return browser.find_elements("css selector", ".token")[i]


def selected(browser):
    """Returns the index of the selected token, after checking that all parts of the page show the
    same one.
    """
    (i,) = browser.execute_script(
        "return state.nodes.flatMap((n, i) =>"
        " n.getAttribute('aria-selected') === 'true' ? [i] : [])"
    )
    assert browser.execute_script(
        "return state.nodes.flatMap((n, i) => n.tabIndex === 0 ? [i] : [])"
    ) == [i]
    assert f"Token {i + 1:,} of" in find(browser, ".place").text
    assert find(browser, "#strips").get_attribute("aria-valuenow") == str(i + 1)
    return i


def press(browser, *keys):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    for key in keys:
        ActionChains(browser).send_keys(getattr(Keys, key, key)).perform()


def focused(browser):
    return browser.switch_to.active_element


def text_on_screen(browser):
    """Returns the generated text without the signs for line breaks and control characters."""
    return browser.execute_script(
        "const copy = document.getElementById('tokens').cloneNode(true);"
        "copy.querySelectorAll('i').forEach((sign) => sign.remove()); return copy.textContent"
    )


def test_a_click_selects_one_of_two_thousand_tokens(opened, long_trace):
    browser = opened(long_trace)
    assert text_on_screen(browser) == long_trace["text"]
    line_breaks = browser.execute_script(
        "return [...document.querySelectorAll('.token i')].filter((i) => i.textContent ==="
        " '↵').length"
    )
    assert line_breaks == long_trace["text"].count("\n")
    assert selected(browser) == 0
    token(browser, 30).click()
    assert selected(browser) == 30
    assert long_trace["tokens"][30]["strategy"] in find(browser, ".head").text


def test_parts_of_a_long_text_have_the_same_lines_as_the_whole_text(opened, long_trace):
    browser = opened(long_trace)
    assert text_on_screen(browser) == long_trace["text"]
    parts = browser.execute_script(
        "return [...document.querySelectorAll('.part')].map((part) => part.textContent)"
    )
    assert len(parts) > 10 and all(part.endswith("\n") for part in parts[:-1])
    height = """
        document.querySelectorAll('.part').forEach((part) => {
          part.style.contentVisibility = 'visible';
          part.style.display = arguments[0];
        });
        return document.getElementById('text').scrollHeight"""
    assert browser.execute_script(height, "block") == browser.execute_script(height, "inline")


def test_selecting_is_fast(opened, long_trace):
    browser = opened(long_trace)
    load = browser.execute_script(
        "return performance.getEntriesByType('navigation')[0].domContentLoadedEventEnd"
    )
    per_token = browser.execute_script(
        "const start = performance.now(); for (let i = 0; i < 50; i += 1) { select(i * 40); point(i"
        " * 40 + 3); }return (performance.now() - start) / 50"
    )
    assert load < 5000 and per_token < 150  # milliseconds, generous for a busy machine


def test_the_page_can_be_used_by_keyboard(opened, long_trace):
    browser = opened(long_trace)
    reached = []
    for _ in range(12):
        press(browser, "TAB")
        reached.append(
            focused(browser).get_attribute("id")
            or focused(browser).get_attribute("class")
            or focused(browser).tag_name
        )
        if reached[-1].startswith("token"):
            break
    assert reached[0] == "theme" and reached[-1].startswith("token")
    press(browser, "ARROW_RIGHT", "ARROW_RIGHT", "ARROW_LEFT")
    assert selected(browser) == 1 and focused(browser) == token(browser, 1)
    assert find(browser, ".token:focus-visible").value_of_css_property("outline-style") == "solid"
    press(browser, "END")
    assert selected(browser) == 1999
    frame, box = find(browser, "#text").rect, token(browser, 1999).rect
    assert frame["y"] <= box["y"] and box["y"] + box["height"] <= frame["y"] + frame["height"]
    press(browser, "ARROW_RIGHT")
    assert selected(browser) == 1999
    press(browser, "ARROW_UP")
    above = selected(browser)
    assert 1900 < above < 1999 and token(browser, above).rect["y"] < token(browser, 1999).rect["y"]
    press(browser, "PAGE_UP", "HOME")
    assert selected(browser) == 0
    press(browser, "TAB")
    assert focused(browser).get_attribute("id") == "strips"
    press(browser, "ARROW_RIGHT")
    assert selected(browser) == 1 and focused(browser).get_attribute("id") == "strips"
    press(browser, "TAB")
    assert focused(browser).tag_name == "button" and "greedy" in focused(browser).text
    press(browser, "ENTER")
    names = [one["strategy"] for one in long_trace["tokens"]]
    assert selected(browser) == names.index("greedy", 2)


def test_tokens_are_shaded_by_the_chosen_metric(opened, long_trace):
    browser = opened(long_trace)
    shares = {}
    for name in ("varentropy", "surprisal", "entropy"):
        find(browser, f"#colors input[value={name}] + span").click()
        shares[name] = browser.execute_script(
            "return state.nodes.map((node) => parseInt(node.style.getPropertyValue('--share')))"
        )
        assert name == "surprisal" or find(browser, "#legend .ticks").text.endswith(
            {"entropy": "bits", "varentropy": "bits²"}[name]
        )
        expected = {
            "varentropy": [one["varentropy"] for one in long_trace["tokens"]],
            "entropy": [one["entropy"] for one in long_trace["tokens"]],
            "surprisal": [-one["logprob"] / math.log(2) for one in long_trace["tokens"]],
        }[name]
        end = float(re.search(r"≥ ([\d.]+)", find(browser, "#legend .ticks").text)[1])
        assert np.quantile(expected, 0.97) <= end <= 2 * np.quantile(expected, 0.99)
        np.testing.assert_allclose(
            shares[name], np.minimum(1, np.array(expected) / end) * 100, atol=0.51
        )
    find(browser, "#colors input[value=strategy] + span").click()
    shown = {
        name: find(browser, f".token.{name}").value_of_css_property("background-color")
        for name in STRATEGY_NAMES
    }
    assert len(set(shown.values())) == 5


def test_every_token_has_the_glyph_of_its_strategy(opened, long_trace):
    browser = opened(long_trace)
    signs = browser.execute_script(
        "return state.nodes.map((node) => [node.dataset.glyph, node.className])"
    )
    by_name = {
        one["strategy"]: glyph for one, (glyph, _) in zip(long_trace["tokens"], signs, strict=True)
    }
    assert set(by_name) == set(STRATEGY_NAMES) and len(set(by_name.values())) == 5
    assert all(
        one["strategy"] in kind for one, (_, kind) in zip(long_trace["tokens"], signs, strict=True)
    )


def number_of(text):
    return float(re.sub(r"[^\d.+-]", "", text.replace("−", "-")))


def test_the_rules_are_listed_with_their_signed_margins(opened, long_trace):
    browser = opened(long_trace)
    config = RouterConfig()
    for name in STRATEGY_NAMES:
        i = [one["strategy"] for one in long_trace["tokens"]].index(name)
        browser.execute_script("select(arguments[0])", i)
        one = long_trace["tokens"][i]
        rows = browser.find_elements("css selector", ".rules tbody tr")[:-1]
        margins = [number_of(row.find_elements("css selector", "td")[-1].text) for row in rows]
        expected = [
            (1 if relation == ">" else -1) * (one[metric] - float(getattr(config, threshold)))
            for conditions in RULES.values()
            for metric, relation, threshold in conditions
        ]
        np.testing.assert_allclose(margins, expected, rtol=6e-3, atol=6e-4)
        assert [row.find_element("css selector", ".left span").text == "✓" for row in rows] == [
            m > 0 for m in expected
        ]
        applied = browser.find_elements("css selector", ".rules tr.applied")
        assert name in applied[0].text and len(applied) == (2 if name in RULES else 1)


def test_alternatives_show_both_distributions(opened, long_trace):
    browser = opened(long_trace)
    i = next(
        i
        for i, one in enumerate(long_trace["tokens"])
        if one["strategy"] == "explore" and 3 < one["survivors"] < 9
    )
    browser.execute_script("select(arguments[0])", i)
    one = long_trace["tokens"][i]
    rows = browser.find_elements("css selector", ".alternatives tbody tr")
    for row, other in zip(rows, one["alternatives"], strict=False):
        _, before, after = (cell.text for cell in row.find_elements("css selector", "td"))
        assert number_of(before) / 100 == pytest.approx(
            math.exp(other["logprob"]), rel=0.06, abs=6e-4
        )
        if other["logprob_sampled"] is None:
            assert after == "×"
        else:
            assert number_of(after) / 100 == pytest.approx(
                math.exp(other["logprob_sampled"]), rel=0.06, abs=6e-4
            )
    (chosen,) = browser.find_elements("css selector", ".alternatives .is-chosen")
    assert chosen.text.endswith("%")
    light, dark = (bar.rect["width"] for bar in rows[0].find_elements("css selector", ".bars i"))
    first = one["alternatives"][0]
    assert light / dark == pytest.approx(
        math.exp(first["logprob"] - first["logprob_sampled"]), rel=0.1
    )


def test_totals_shares_and_transitions(opened, long_trace):
    browser = opened(long_trace)
    tokens = long_trace["tokens"]
    facts = dict(
        row.text.split("\n", 1) for row in browser.find_elements("css selector", "#totals > div")
    )
    perplexity = math.exp(-np.mean([one["logprob"] for one in tokens]))
    assert number_of(facts["Perplexity"].split()[0]) == pytest.approx(perplexity, rel=6e-3)
    entropies = [one["entropy"] for one in tokens]
    mean, _, deviation = facts["Mean entropy"].split()[:3]
    assert number_of(mean) == pytest.approx(np.mean(entropies), rel=6e-3)
    assert number_of(deviation) == pytest.approx(np.std(entropies), rel=6e-3)
    assert (
        facts["Speed"] == "173 tokens/s"
        and facts["Seed"] == "7"
        and facts["Length"].startswith("2,000 tokens")
    )
    names = [one["strategy"] for one in tokens]
    for name, row in zip(
        STRATEGY_NAMES,
        browser.find_elements("css selector", ".strategy-table tbody tr"),
        strict=True,
    ):
        count, share, *following = (cell.text for cell in row.find_elements("css selector", "td"))
        assert int(count) == names.count(name)
        assert number_of(share) == pytest.approx(100 * names.count(name) / 2000, abs=0.06)
        pairs = list(itertools.pairwise(names))
        assert [int(times) for times in following] == [
            pairs.count((name, other)) for other in STRATEGY_NAMES
        ]


def test_a_click_in_a_plot_selects_a_token(opened, long_trace):
    from selenium.webdriver import ActionChains

    browser = opened(long_trace)
    canvas = find(browser, "#strips canvas")
    ActionChains(browser).move_to_element(canvas).perform()
    hovered = browser.execute_script("return state.pointed")
    assert abs(hovered - 1000) < 20 and "pointed" in token(browser, hovered).get_attribute("class")
    ActionChains(browser).click().perform()
    assert selected(browser) == hovered
    i = max(range(2000), key=lambda i: long_trace["tokens"][i]["varentropy"])
    at = browser.execute_script(
        "const {x, y} = mapAxes(); const t = state.sample.tokens[arguments[0]];return"
        " [x.at(t.entropy) - byId('map').clientWidth / 2, y.at(t.varentropy) -"
        " byId('map').clientHeight / 2]",
        i,
    )
    ActionChains(browser).move_to_element_with_offset(
        find(browser, "#map"), *map(round, at)
    ).click().perform()
    assert selected(browser) == i
    frame, box = find(browser, "#text").rect, token(browser, i).rect
    assert frame["y"] <= box["y"] <= frame["y"] + frame["height"]


CONTRAST = """
const pen = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
const rgb = (color) => {
  pen.fillStyle = color;
  pen.fillRect(0, 0, 1, 1);
  return [...pen.getImageData(0, 0, 1, 1).data.slice(0, 3)];
};
const style = getComputedStyle(arguments[0]);
return [rgb(style.color), rgb(style.backgroundColor)];
"""
TOO_WIDE = """
const right = (one) => one.getBoundingClientRect().right;
const isTooWide = (one) => right(one) > right(one.closest('.panel')) - 8;
return state.nodes.some((_, i) => {
  select(i);
  return [...document.querySelectorAll('table, td, canvas, #colors')].some(isTooWide);
});
"""


def contrast(pair):
    """Returns the contrast ratio of WCAG 2 between two sRGB colors."""
    linear = [
        np.where(
            np.array(c) / 255 <= 0.04045,
            np.array(c) / 255 / 12.92,
            ((np.array(c) / 255 + 0.055) / 1.055) ** 2.4,
        )
        for c in pair
    ]
    low, high = sorted(float(c @ [0.2126, 0.7152, 0.0722]) for c in linear)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_has_enough_contrast_on_every_shade(opened, theme):
    browser = opened(trace(300))
    if theme == "dark":
        find(browser, "#theme").click()
    background = find(browser, "body").value_of_css_property("background-color")
    dark = sum(map(int, re.findall(r"\d+", background)[:3])) < 200
    assert dark == (theme == "dark")
    browser.execute_script("state.nodes[0].style.setProperty('--share', '100%')")
    assert contrast(browser.execute_script(CONTRAST, token(browser, 0))) >= 4.5
    find(browser, "#colors input[value=strategy] + span").click()
    for name in STRATEGY_NAMES:
        assert contrast(browser.execute_script(CONTRAST, find(browser, f".token.{name}"))) >= 4.5


def test_the_page_follows_the_system_theme_until_the_button_overrides_it(opened):
    browser = opened(trace(30))
    lightness = "return getComputedStyle(document.body).backgroundColor"
    try:
        shades = []
        for scheme in ("dark", "light"):
            features = [{"name": "prefers-color-scheme", "value": scheme}]
            browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
            shades.append(browser.execute_script(lightness))
        assert shades[0] != shades[1]
        find(browser, "#theme").click()
        assert browser.execute_script(lightness) == shades[0]
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_scripts_in_generated_text_do_not_run(opened):
    document = trace(12)
    document["prompt"] = document["tokens"][3]["text"] = document["tokens"][4]["alternatives"][0][
        "text"
    ] = HOSTILE
    document["settings"] = {"stop": [HOSTILE]}
    browser = opened(document)
    for i in range(12):
        browser.execute_script("select(arguments[0])", i)
    assert browser.execute_script("return window.ran") is None
    assert browser.find_elements("css selector", "img") == []
    assert "</script><script>" in token(browser, 3).text
    assert "\u202e" not in token(browser, 3).text and "‹202e›" in token(browser, 3).text


@pytest.mark.parametrize("width", [400, 900, 1600])
def test_the_page_fits_the_width_of_the_window(opened, width):
    browser = opened(trace(80))
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        browser.execute_script(
            "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
        )
        assert browser.execute_script(
            "return document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
        assert not browser.execute_script(TOO_WIDE)
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_trace_without_the_router_shows_no_strategies(opened):
    browser = opened(trace(50, routed=False, attention=False))
    shown = find(browser, "body").text
    assert (
        "Strategies" not in shown and "greedy" not in shown and "Sampling parameters" not in shown
    )
    assert [radio.get_attribute("value") for radio in browser.find_elements("css selector",
        "#colors input")] == [
        "entropy", "varentropy", "surprisal",
    ]  # fmt: skip
    strips = [
        value.get_attribute("data-of")
        for value in browser.find_elements("css selector", "#strips .value")
    ]
    assert strips == ["entropy", "varentropy", "surprisal"]
    press(browser, "TAB", "TAB", "TAB", "ARROW_RIGHT")
    assert selected(browser) == 1


def test_missing_attention_metrics_are_omitted(opened):
    browser = opened(trace(50, attention=False))
    assert (
        "ttention" not in find(browser, "main").text and "Strategies" in find(browser, "main").text
    )


def test_the_attention_of_each_head_is_a_map(opened):
    document, layers, heads = trace(3, routed=False, attention=False), 4, 6
    names = ("entropy", "varentropy", "agreement", "strength")
    for n, record in enumerate(document["tokens"]):
        record["heads"] = {
            name: np.arange(layers * heads).reshape(layers, heads).__add__(n).tolist()
            for name in names
        }
    browser = opened(document)
    assert len(browser.find_elements("css selector", ".heads figure")) == 4
    cells = browser.find_elements("css selector", ".heads figure:first-of-type .cells i")
    assert len(cells) == layers * heads and cells[6].get_attribute("title") == "layer 1, head 0: 6"
    assert [float(cell.value_of_css_property("opacity")) for cell in (cells[0], cells[-1])] == [
        0,
        1,
    ]
    press(browser, "TAB", "TAB", "TAB", "ARROW_RIGHT")
    assert "mean 12.5, largest 24 bits" in find(browser, ".heads").text


def test_a_sample_can_be_chosen_and_an_empty_one_shows_a_note(opened):
    from selenium.webdriver.support.ui import Select

    documents = [trace(20), trace(0, seed=8), trace(30, seed=9, routed=False, attention=False)]
    browser = opened(*documents)
    chooser = Select(find(browser, "#sample"))
    assert len(chooser.options) == 3
    chooser.select_by_index(1)
    assert "Nothing was generated" in find(browser, "#token").text
    chooser.select_by_index(2)
    assert text_on_screen(browser) == documents[2]["text"] and selected(browser) == 0
    chooser.select_by_index(0)
    assert text_on_screen(browser) == documents[0]["text"] and selected(browser) == 0


def test_an_impossible_token_is_marked(opened):
    document = trace(4)
    document["tokens"][2].update(logprob=-math.inf, logprob_sampled=None, forced=True)
    browser = opened(document)
    browser.execute_script("select(2)")
    shown = find(browser, "#token").text
    assert "0 %" in shown and "impossible" in shown and "Forced" in shown and "∞ bits" in shown
    assert find(browser, "#totals").text.split("\n")[1].startswith("∞")


def test_tokens_that_were_not_drawn_are_underlined(opened):
    document = trace(6)
    for place, token in enumerate(document["tokens"]):
        token["forced"] = 2 <= place < 5
    browser = opened(document)
    lines = [
        node.value_of_css_property("text-decoration-line")
        for node in browser.find_elements("css selector", ".token")
    ]
    assert lines == ["none"] * 2 + ["underline"] * 3 + ["none"]
    assert "forced" in browser.find_elements("css selector", ".token")[3].get_attribute(
        "aria-label"
    )
    assert "not sampled" in find(browser, "#legend").text


def test_candidates_are_listed_in_the_order_of_their_draws(opened):
    document = trace(60, candidates=12)
    browser = opened(document)
    adaptive = [
        i
        for i, one in enumerate(document["tokens"])
        if one["strategy"] == "adaptive" and not one["forced"]
    ]
    browser.execute_script("select(arguments[0])", adaptive[0])
    rows = browser.find_elements("css selector", ".candidates tbody tr")
    drawn = document["tokens"][adaptive[0]]["candidates"]
    assert len(rows) == 12
    for row, one in zip(rows, drawn, strict=True):
        before, score = (cell.text for cell in row.find_elements("css selector", "td"))
        assert number_of(before) / 100 == pytest.approx(
            math.exp(one["logprob"]), rel=0.06, abs=6e-4
        )
        assert number_of(score) == pytest.approx(one["score"], rel=6e-3, abs=6e-3)
    (chosen,) = browser.find_elements("css selector", ".candidates .is-chosen")
    first = next(
        c for c, one in enumerate(drawn) if one["id"] == document["tokens"][adaptive[0]]["id"]
    )
    assert chosen.id == rows[first].id and "chosen" in chosen.text
    other = next(i for i, one in enumerate(document["tokens"]) if one["strategy"] != "adaptive")
    browser.execute_script("select(arguments[0])", other)
    assert not browser.find_elements("css selector", ".candidates")
