"""Tests the page in a browser: generating, stopping, retrying, continuing from a token, panels,
storage and files.
"""

import importlib.resources
import json
import os
from pathlib import Path

import pytest

from dantinox.report.page import report_page
from dantinox.report.trace_file import trace_lines
from dantinox.serve.app import make_app
from dantinox.serve.options import Options
from tests.report.page_sample import HOSTILE
from tests.report.test_page import tokens_of
from tests.report.test_page_in_browser import browser as browser
from tests.report.test_page_in_browser import find, focused, press

from .sockets import serving
from .varied import VariedEngine, app

pytestmark = pytest.mark.browser
OPEN_SETTINGS = (
    "openPanel('settings'); document.querySelectorAll('details').forEach((one) => { one.open ="
    " true; })"
)


@pytest.fixture
def engine():
    return VariedEngine(pause=0.002, max_new_tokens=30)


@pytest.fixture
def opened(browser, engine):
    """Opens the page; at the end the browser must have logged no error and no request to another
    server.
    """
    with serving(app(engine)) as port:
        browser.get(f"http://localhost:{port}/")
        browser.execute_script(
            "localStorage.clear(); sessionStorage.clear(); localStorage.setItem = () => {}"
        )
        browser.get_log("browser"), browser.get_log("performance")
        browser.get(f"http://localhost:{port}/")
        wait(browser, "return typeof writing === 'object' && writing.about !== null")
        assert browser.execute_script("return writing.mode") == "chat", (
            "a model with a chat template opens in a chat"
        )
        find(browser, "#mode input[value=story] + span").click()
        yield browser
        wrong = [
            entry for entry in browser.get_log("browser") if entry["level"] in ("WARNING", "SEVERE")
        ]
        events = [
            json.loads(entry["message"])["message"] for entry in browser.get_log("performance")
        ]
        asked = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        browser.get("about:blank")
    assert wrong == []
    assert {url for url in asked if not url.startswith(f"http://localhost:{port}/")} <= {
        "data:,",
        "about:blank",
    }


def wait(browser, script, *arguments, seconds=15):
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(browser, seconds, 0.02).until(
        lambda browser: browser.execute_script(script, *arguments)
    )


def done(browser):
    wait(browser, "return writing.abort === null")


def write(browser, text=""):
    """Types a text, sends it, and waits for the end of the response."""
    find(browser, "#draft").send_keys(text)
    find(browser, "#go").click()
    done(browser)


def setting(browser, name, value):
    script = "byId(arguments[0]).value = arguments[1]; settingsChanged()"
    browser.execute_script(script, f"setting-{name}", value)


def text_of(browser):
    return browser.execute_script("return current().parts.map(textOf).join('')")


def on_screen(browser):
    """Returns the text without the signs for line breaks and control characters."""
    return browser.execute_script(
        "const copy = byId('tokens').cloneNode(true); copy.querySelectorAll('i').forEach((i) =>"
        " i.remove());return copy.textContent"
    )


def ids(browser):
    return browser.execute_script("return state.sample.tokens.map((token) => token.id)")


def test_a_story_is_continued(opened, engine):
    write(opened, "Nel mezzo")
    tokenizer = engine.run.tokenizer
    prompt = list(engine.asked[0].ids)
    assert len(ids(opened)) == 30 and text_of(opened) == "Nel mezzo" + tokenizer.decode(
        ids(opened)
    ) == on_screen(opened)
    assert "30 tokens" in find(opened, "#status").text and find(opened, "#problem").text == ""
    first = ids(opened)
    write(opened, " e poi")
    assert list(engine.asked[1].ids) == prompt + first + tokenizer.encode(" e poi")
    write(opened)
    assert list(engine.asked[2].ids) == [*engine.asked[1].ids, *ids(opened)[30:60]]
    assert len(ids(opened)) == 90
    used = opened.execute_script("return writing.use.tokens")
    assert (
        used == len(engine.asked[2].ids) + 30 and f"{used} of 1,024" in find(opened, "#totals").text
    )


def test_stop_retry_undo_and_redo(opened, engine):
    engine.pause = 0.03
    find(opened, "#draft").send_keys("Nel mezzo")
    find(opened, "#go").click()
    wait(opened, "return state.nodes.length > 2")
    find(opened, "#stop").click()
    done(opened)
    stopped = ids(opened)
    assert 2 < len(stopped) < 30 and "Stopped" in find(opened, "#status").text
    wait(opened, "return true")
    engine.pause = 0.002
    find(opened, "#retry").click()
    done(opened)
    assert engine.asked[1].ids == engine.asked[0].ids
    assert engine.asked[1].config.generation.seed != engine.asked[0].config.generation.seed
    assert len(ids(opened)) == 30 and len(engine.cancelled) >= 1
    find(opened, "#undo").click()
    assert ids(opened) == stopped
    find(opened, "#undo").click()
    assert text_of(opened) == "" and not find(opened, "#undo").is_enabled()
    find(opened, "#redo").click()
    find(opened, "#redo").click()
    assert len(ids(opened)) == 30 and not find(opened, "#redo").is_enabled()


def test_the_text_continues_from_a_chosen_alternative(opened, engine):
    write(opened, "Nel mezzo")
    first = ids(opened)
    opened.execute_script("state.nodes[9].click()")
    rows = opened.find_elements("css selector", ".alternatives tbody tr:not(.muted)")
    other = next(i for i, row in enumerate(rows) if "is-chosen" not in row.get_attribute("class"))
    one = opened.execute_script("return state.sample.tokens[9].alternatives[arguments[0]]", other)
    rows[other].find_element("css selector", ".pick").click()
    done(opened)
    assert list(engine.asked[1].ids) == [*engine.asked[0].ids, *first[:9], one["id"]]
    assert ids(opened)[:10] == [*first[:9], one["id"]] and len(ids(opened)) == 40
    record = opened.execute_script("return state.sample.tokens[9]")
    assert (record["rank"], record["forced"], record["logprob"]) == (other, True, one["logprob"])
    find(opened, "#retry").click()
    done(opened)
    assert engine.asked[2].ids == engine.asked[1].ids and ids(opened)[:10] == [
        *first[:9],
        one["id"],
    ]
    find(opened, "#undo").click()
    find(opened, "#undo").click()
    assert ids(opened) == first


def test_an_edit_keeps_the_tokens_before_it(opened, engine):
    write(opened, "Nel mezzo")
    before, first = text_of(opened), ids(opened)
    find(opened, "#edit").click()
    editor = find(opened, "#editor")
    assert focused(opened) == editor and editor.get_attribute("value") == before
    cut = len("Nel mezzo" + engine.run.tokenizer.decode(first[:12]))
    opened.execute_script("byId('editor').value = arguments[0]", before[:cut] + "XYZ")
    find(opened, "#edited").click()
    assert ids(opened) == first[:12] and text_of(opened) == before[:cut] + "XYZ"
    write(opened)
    assert list(engine.asked[1].ids) == [
        *engine.asked[0].ids,
        *first[:12],
        *engine.run.tokenizer.encode("XYZ"),
    ]
    find(opened, "#edit").click()
    press(opened, "ESCAPE")
    assert find(opened, "#text").is_displayed() and len(ids(opened)) == 42


def test_a_reload_keeps_text_draft_and_settings(opened, engine):
    setting(opened, "temperature", "0.5")
    write(opened, "Nel mezzo")
    find(opened, "#draft").send_keys("not sent yet")
    shown, tokens = text_of(opened), opened.execute_script("return state.sample.tokens")
    opened.refresh()
    wait(
        opened,
        "return typeof writing === 'object' && writing.about !== null && state.nodes.length > 0",
    )
    assert text_of(opened) == shown == on_screen(opened)
    again = opened.execute_script("return state.sample.tokens")
    assert [one["id"] for one in again] == [one["id"] for one in tokens]
    assert [one["entropy"] for one in again] == pytest.approx(
        [one["entropy"] for one in tokens], rel=1e-8
    )
    assert find(opened, "#draft").get_attribute("value") == "not sent yet"
    find(opened, "#go").click()
    done(opened)
    assert engine.asked[-1].config.generation.temperature == 0.5
    assert list(engine.asked[-1].ids[: len(engine.asked[0].ids)]) == list(engine.asked[0].ids)


def generate_and_stop(opened, engine, condition):
    """Generates slowly by keyboard, and stops when a script returns true."""
    engine.pause = 0.03
    with_key(opened, "CONTROL", "ENTER")
    wait(opened, condition)
    press(opened, "ESCAPE")
    done(opened)
    engine.pause = 0.002


def test_the_page_can_be_used_by_keyboard(opened, engine):
    opened.execute_script("byId('draft').focus()")
    press(opened, *"Nel mezzo")
    with_key(opened, "CONTROL", "ENTER")
    done(opened)
    assert len(ids(opened)) == 30
    generate_and_stop(opened, engine, "return state.nodes.length > 33")
    opened.execute_script("byId('draft').focus()")
    with_key(opened, "SHIFT", "TAB")
    assert "token" in focused(opened).get_attribute("class").split()
    press(opened, "HOME", "ARROW_RIGHT", "ARROW_RIGHT")
    assert opened.execute_script("return state.at") == 2
    press(opened, "ENTER")
    assert "pick" in focused(opened).get_attribute("class")
    press(opened, "ESCAPE")
    assert "token" in focused(opened).get_attribute("class")
    press(opened, "ENTER", "ENTER")
    done(opened)
    assert len(ids(opened)) == 33


def with_key(browser, held, key):
    from selenium.webdriver import ActionChains, Keys

    held = getattr(Keys, held)
    ActionChains(browser).key_down(held).send_keys(getattr(Keys, key)).key_up(held).perform()


def test_a_chat(opened, engine):
    find(opened, "#mode input[value=chat] + span").click()
    write(opened, "Who are you?")
    prompt = engine.run.tokenizer.decode(engine.asked[0].ids)
    assert "User:\nWho are you?" in prompt and prompt.endswith("Assistant:\n")
    answer = ids(opened)
    opened.execute_script("select(4)")
    one = opened.execute_script(
        "return state.sample.tokens[4].alternatives.find(({id}) => id !=="
        " state.sample.tokens[4].id)"
    )
    opened.execute_script("pick(arguments[0])", one)
    done(opened)
    assert list(engine.asked[1].ids) == [*engine.asked[0].ids, *answer[:4], one["id"]]
    write(opened, "And now?")
    third = engine.run.tokenizer.decode(engine.asked[2].ids)
    assert third.count("User:") == 2 and third.count("Assistant:") == 2
    assert [turn.text.split("\n")[0].split()[0] for turn in opened.find_elements("css selector",
        ".turn")] == [
        "You", "Model", "You", "Model",
    ]  # fmt: skip
    find(opened, "#mode input[value=story] + span").click()
    assert text_of(opened) == ""


def test_settings_are_sent_and_an_invalid_one_is_marked(opened, engine):
    for name, value in {
        "top_p": "0.9",
        "min_p": "0.05",
        "stop": "zzz\nyyy",
        "dry_multiplier": "0.8",
        "seed": "5",
    }.items():
        setting(opened, name, value)
    write(opened, "Nel mezzo")
    generation = engine.asked[0].config.generation
    assert (generation.top_p, generation.min_p, generation.dry_multiplier, generation.seed) == (
        0.9,
        0.05,
        0.8,
        5,
    )
    assert generation.stop == ("zzz", "yyy")
    opened.execute_script("byId('order-group').open = true")
    find(opened, '#order [data-step="top_p"] button').click()
    setting(opened, "temperature", "0.5")
    write(opened)
    order = engine.asked[1].config.generation.sampler_order
    assert order.index("top_p") == order.index("top_k") - 1
    setting(opened, "dynatemp_high", "2")
    find(opened, "#draft").send_keys("my words")
    find(opened, "#go").click()
    done(opened)
    assert "dynatemp_high" in find(opened, "#problem").text and len(engine.asked) == 2
    assert find(opened, "#draft").get_attribute("value") == "my words" and len(ids(opened)) == 60
    setting(opened, "dynatemp_high", "")
    setting(opened, "top_p", "1.5")
    find(opened, "#go").click()
    assert (
        "Top-p" in find(opened, "#problem").text
        and find(opened, "#setting-top_p").get_attribute("aria-invalid") == "true"
    )
    opened.get_log("browser")  # the browser logs the 400 response


def test_generated_text_is_not_interpreted_as_html(opened, engine):
    from tests.serve.fakes import BYTES

    engine.run.tokenizer, engine.says = BYTES, HOSTILE
    engine._record = lambda token, logprobs, first=False: {
        "id": int(token), "text": BYTES.decode([token]), "entropy": 1.0, "varentropy": 1.0,
        "logprob": -1.0,
        "logprob_sampled": -1.0, "rank": 0, "survivors": 1, "alternatives": [{"id": 1,
            "text": HOSTILE, "logprob": -1.0,
        "logprob_sampled": -1.0}],
    }  # fmt: skip
    setting(opened, "max_new_tokens", "90")
    write(opened, HOSTILE.split("<!")[0])
    opened.execute_script("select(3)")
    assert (
        opened.execute_script("return window.ran") is None
        and opened.find_elements("css selector", "img") == []
    )
    assert "</script>" in on_screen(opened)


def test_saved_files_equal_those_of_a_trace(opened, engine, tmp_path):
    setting(opened, "strategy", '"entropy"')
    write(opened, "Nel <b>mezzo")
    write(opened, " e poi")
    documents = opened.execute_script("return documentsOf(current().parts)")
    lines = opened.execute_script("return linesOf(documentsOf(current().parts))")
    assert [json.loads(line) for line in lines.splitlines()] == [
        json.loads(line) for line in trace_lines(documents)
    ]
    assert [document["prompt"][:12] for document in documents] == ["Nel <b>mezzo"] * 2 and len(
        documents[1]["tokens"]
    ) == 30
    html = opened.execute_async_script(
        "const end = arguments[0]; reportOf(documentsOf(current().parts)).then(end)"
    )

    def data(html):
        return json.loads(
            html.split('<script id="data" type="application/json">')[1].split("</script>")[0]
        )

    ours, theirs = data(html), data(report_page(documents))
    assert ours.keys() == theirs.keys()
    for sample in (0, 1):
        assert tokens_of(ours, sample) == tokens_of(theirs, sample)
        rest = [
            {k: v for k, v in one["samples"][sample].items() if k not in ("columns", "lists")}
            for one in (ours, theirs)
        ]
        assert rest[0] == rest[1]
    file = tmp_path / "saved.html"
    file.write_text(html, encoding="utf-8")
    opened.execute_script("window.open('about:blank')")
    opened.switch_to.window(opened.window_handles[-1])
    opened.get(file.as_uri())
    assert len(opened.find_elements("css selector", ".token")) == 30
    assert "Generation trace" in find(opened, "h1").text
    opened.close()
    opened.switch_to.window(opened.window_handles[0])
    opened.get_log("performance")  # the opened file is not a request of the page


@pytest.fixture
def on_phone(opened):
    size = {"width": 360, "height": 740, "deviceScaleFactor": 1, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    yield opened
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


IN_WINDOW = """
const {top, bottom, height} = arguments[0].getBoundingClientRect();
return height > 0 && top >= 0 && bottom <= innerHeight;
"""


def in_window(browser, node):
    return browser.execute_script(IN_WINDOW, node)


def test_the_composer_is_visible_on_a_phone(on_phone):
    for panel in (None, "settings"):
        on_phone.execute_script("openPanel(arguments[0])", panel)
        assert all(in_window(on_phone, find(on_phone, css)) for css in ("#draft", "#go", "#retry"))
    write(on_phone, "Nel mezzo")
    for panel in (None, "token", "settings", "statistics"):
        on_phone.execute_script("openPanel(arguments[0])", panel)
        assert all(
            in_window(on_phone, find(on_phone, css))
            for css in ("header", "#text", "#draft", "#go", "#retry", ".tabs")
        )
        assert on_phone.execute_script("return document.documentElement.scrollHeight") == 740


def test_a_tap_on_a_token_shows_its_alternatives_on_a_phone(on_phone):
    write(on_phone, "Nel mezzo")
    assert not find(on_phone, "#token-panel").is_displayed()
    node = on_phone.execute_script("return state.nodes[20]")
    on_phone.execute_script("reveal(arguments[0])", node)
    node.click()
    assert in_window(on_phone, find(on_phone, "#token-panel")) and in_window(on_phone, node)
    panel = find(on_phone, "#token-panel").rect
    for row in on_phone.find_elements("css selector", ".alternatives tbody tr")[:8]:
        assert (
            panel["y"] <= row.rect["y"]
            and row.rect["y"] + row.rect["height"] <= panel["y"] + panel["height"]
        )
    press(on_phone, "ESCAPE")
    assert not find(on_phone, "#token-panel").is_displayed() and focused(on_phone) == node


def test_sheets_open_and_close_on_a_phone(on_phone):
    write(on_phone, "Nel mezzo")
    for name in ("settings", "statistics", "token"):
        button, panel = find(on_phone, f"#show-{name}"), find(on_phone, f"#{name}-panel")
        for close in ("button", "cross", "key"):
            button.click()
            assert (
                panel.is_displayed()
                and button.get_attribute("aria-expanded") == "true"
                and focused(on_phone) == panel
            )
            if close == "button":
                button.click()
            elif close == "cross":
                find(on_phone, f"#{name}-panel .close").click()
            else:
                press(on_phone, "ESCAPE")
            assert not panel.is_displayed() and button.get_attribute("aria-expanded") == "false"
    find(on_phone, "#menu").click()
    assert find(on_phone, "#undo").is_displayed()
    find(on_phone, "#undo").click()
    assert text_of(on_phone) == "" and not find(on_phone, "#undo").is_displayed()


def choose(browser, css, value):
    """Chooses an option of a select."""
    from selenium.webdriver.support.ui import Select

    Select(find(browser, css)).select_by_value(value)


def chosen_preset(browser):
    return find(browser, "#preset-choice").get_attribute("value")


def test_presets_fill_the_fields(opened, engine):
    assert chosen_preset(opened) == "Server defaults"
    expected = {
        "Greedy": ("chain", 0, 1, 0, 0),
        "Precise": ("chain", 0.3, 0.9, 0, 0),
        "Balanced": ("chain", 0.8, 1, 0, 0.05),
        "Creative": ("chain", 1.2, 1, 0, 0.03),
        "Storyteller": ("chain", 1, 1, 0, 0.03),
        "Mirostat 2": ("chain", 1, 1, 0, 0),
        "Top n sigma": ("chain", 1.2, 1, 0, 0),
        "Entropy router": ("entropy", 1, None, None, 0),
    }
    for number, (name, values) in enumerate(expected.items()):
        choose(opened, "#preset-choice", name)
        assert chosen_preset(opened) == name and find(opened, "#preset-about").text
        write(opened, "Nel mezzo")
        generation = engine.asked[number].config.generation
        names = ("strategy", "temperature", "top_p", "top_k", "min_p")
        assert tuple(getattr(generation, name) for name in names) == values
    assert (
        engine.asked[4].config.generation.xtc_probability == 0.5
        and engine.asked[5].config.generation.mirostat == 2
    )
    setting(opened, "temperature", "0.9")
    assert chosen_preset(opened) == ""
    setting(opened, "max_new_tokens", "7")
    choose(opened, "#preset-choice", "Server defaults")
    assert opened.execute_script("return chosenSettings()") == {"max_new_tokens": 7}, (
        "a preset keeps the length"
    )


def test_own_presets_are_kept_exported_and_imported(opened, tmp_path):
    opened.execute_script(
        "const kept = {}; localStorage.setItem = (key, text) => { kept[key] = text; };"
        "Storage.prototype.getItem = (key) => kept[key] ?? null;"
        "download = (...file) => { window.file = file; }"
    )
    setting(opened, "temperature", "0.77")
    setting(opened, "dry_breakers", "a\nb\\n")
    find(opened, "#own-presets summary").click()
    for name, problem in (("", "Write a name"), ("Greedy", "choose another name")):
        find(opened, "#preset-name").clear()
        find(opened, "#preset-name").send_keys(name)
        find(opened, "#preset-save").click()
        assert problem in find(opened, "#problem").text
    find(opened, "#preset-name").clear()
    find(opened, "#preset-name").send_keys("mine")
    find(opened, "#preset-save").click()
    chosen = opened.execute_script("return chosenSettings()")
    assert chosen_preset(opened) == "mine" and chosen == {
        "temperature": 0.77,
        "dry_breakers": ["a", "b\n"],
    }
    find(opened, "#preset-export").click()
    name, _, text = opened.execute_script("return window.file")
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    choose(opened, "#preset-choice", "Greedy")
    choose(opened, "#preset-choice", "mine")
    assert opened.execute_script("return chosenSettings()") == chosen
    find(opened, "#preset-file").send_keys(str(path))
    wait(opened, "return Object.keys(ownPresets()).length === 2")
    assert opened.execute_script("return Object.keys(ownPresets())") == [
        "mine",
        "mine 2",
    ], "none is overwritten"
    find(opened, "#preset-delete").click()
    assert opened.execute_script("return Object.keys(ownPresets())") == ["mine 2"]
    path.write_text("{", encoding="utf-8")
    find(opened, "#preset-file").send_keys(str(path))
    wait(opened, "return !byId('problem').hidden")
    assert "presets.json is not a file of presets" in find(opened, "#problem").text


def test_sliders_and_search(opened, engine):
    setting(opened, "temperature", "1.5")
    assert find(opened, "#slider-temperature").get_attribute("value") == "1.5"
    opened.execute_script(
        "const one = byId('slider-top_k'); one.value = 40;for (const name of ['input', 'change'])"
        " one.dispatchEvent(new Event(name, {bubbles: true}))"
    )
    assert opened.execute_script("return chosenSettings()") == {"temperature": 1.5, "top_k": 40}
    find(opened, "#search").send_keys("mirostat tau")
    rows = [
        row
        for row in opened.find_elements("css selector", "#settings .setting")
        if row.is_displayed()
    ]
    assert [row.get_attribute("data-of") for row in rows] == ["mirostat_tau"] and find(
        opened, "#found"
    ).text == "1 found"
    find(opened, "#search").clear()
    find(opened, "#search").send_keys(" ")
    assert (
        find(opened, "#setting-temperature").is_displayed()
        and not find(opened, "#setting-mirostat_tau").is_displayed()
    )


def test_a_comparison(opened, engine):
    ids_of, equal = engine._token_ids, []

    def without_one(ask, sample, room):
        found = ids_of(ask, sample, room + 1)
        if ask.config.generation.temperature:
            return found[:room]
        dropped = next(i for i in range(5, room) if found[i] != found[i + 1])
        equal.append(dropped)
        return found[:dropped] + found[dropped + 1 :]

    engine._token_ids = without_one
    write(opened, "Nel mezzo")
    before = text_of(opened)
    find(opened, "#compare").click()
    find(opened, "#draft").send_keys(" e poi")
    find(opened, "#go").click()
    done(opened)
    one, two = engine.asked[1:]
    assert one.ids == two.ids and one.config.generation.seed == two.config.generation.seed
    assert sorted(ask.config.generation.temperature for ask in (one, two)) == [0, 1]
    sides = opened.find_elements("css selector", ".side")
    texts = [
        side.find_element("css selector", ".continuation").get_attribute("textContent")
        for side in sides
    ]
    counts = [
        [len(side.find_elements("css selector", css)) for css in (".piece", ".differs")]
        for side in sides
    ]
    assert counts == [[30, 1], [30, 1]] and texts[0] != texts[1]
    assert f"The first {equal[-1]} tokens are equal" in find(opened, "#status").text
    assert text_of(opened) == before, "nothing is added before a side is kept"
    sides[1].find_element("css selector", ".keep").click()
    assert (
        text_of(opened) == before + " e poi" + texts[1]
        and find(opened, "#draft").get_attribute("value") == ""
    )
    assert not find(opened, "#comparison").is_displayed() and len(ids(opened)) == 60
    find(opened, "#undo").click()
    assert text_of(opened) == before


def test_differences_are_those_of_the_longest_common_subsequence(opened):
    found = opened.execute_script("return differences([...'abcdefg'], [...'abxdeyg'])")
    assert [[i for i, different in enumerate(marks) if different] for marks in found] == [
        [2, 5],
        [2, 5],
    ]
    found = opened.execute_script("return differences([...'abc'], [...'ab'])")
    assert found == [[False, False, True], [False, False]]


def test_copy(opened):
    write(opened, "Nel mezzo")
    opened.execute_script(
        "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
    )
    find(opened, "#copy").click()
    assert wait(opened, "return window.copied") == text_of(opened)
    assert find(opened, "#status").text == f"Copied {len(text_of(opened))} characters."
    opened.execute_script(
        "navigator.clipboard.writeText = async () => { throw new Error(); };"
        "document.execCommand = () => { window.selected = getSelection().toString(); return true; }"
    )
    find(opened, "#copy").click()
    assert wait(opened, "return window.selected") == text_of(opened)
    find(opened, "#mode input[value=chat] + span").click()
    write(opened, "Who?")
    opened.execute_script("navigator.clipboard.writeText = async (text) => { window.chat = text; }")
    find(opened, "#copy").click()
    assert wait(opened, "return window.chat").startswith("You: Who?\n\nModel: ")


def test_a_saved_story_is_loaded(opened, engine, tmp_path):
    write(opened, "Nel mezzo")
    write(opened, " e poi")
    lines = opened.execute_script("return linesOf(documentsOf(current().parts))")
    saved, tokens = text_of(opened), ids(opened)
    find(opened, "#clear").click()
    path = tmp_path / "story.jsonl"
    path.write_text(lines, encoding="utf-8")
    load(opened, path)
    assert text_of(opened) == saved == on_screen(opened) and ids(opened) == tokens
    assert find(opened, "#status").text == "story.jsonl was loaded."
    assert opened.execute_script("return linesOf(documentsOf(current().parts))") == lines
    write(opened)
    assert list(engine.asked[2].ids) == [*engine.asked[1].ids, *tokens[30:]]
    find(opened, "#undo").click()
    find(opened, "#undo").click()
    assert text_of(opened) == ""
    path.write_text(lines.replace('"vocab_size":315', '"vocab_size":99'), encoding="utf-8")
    load(opened, path)
    assert (
        text_of(opened) == saved
        and ids(opened) == []
        and "another vocabulary" in find(opened, "#status").text
    )


def load(browser, path):
    browser.execute_script("showStatus(''); showProblem(null)")
    find(browser, "#file").send_keys(str(path))
    wait(browser, "return byId('status').textContent !== '' || !byId('problem').hidden")


@pytest.mark.parametrize(
    "content",
    [
        "",
        "no JSON",
        '{"kind": "sample"}',
        '{"kind": "sample", "prompt": "a", "text": "b", "tokens": 3}',
    ],
)
def test_another_file_is_not_loaded(opened, tmp_path, content):
    write(opened, "Nel mezzo")
    before = text_of(opened)
    path = tmp_path / "other.jsonl"
    path.write_text(content, encoding="utf-8")
    load(opened, path)
    assert "other.jsonl" in find(opened, "#problem").text and text_of(opened) == before


def test_chat_is_off_without_a_chat_template(browser):
    engine = VariedEngine()
    with serving(make_app(engine, Options(template=None))) as port:
        browser.get(f"http://localhost:{port}/")
        browser.execute_script("localStorage.clear()")
        browser.refresh()
        wait(browser, "return typeof writing === 'object' && writing.about !== null")
        radio = find(browser, "#mode input[value=chat]")
        assert not radio.is_enabled() and browser.execute_script("return writing.mode") == "story"
        reason = find(browser, f"#{radio.get_attribute('aria-describedby')}").get_attribute(
            "textContent"
        )
        assert "no chat template" in reason and reason in find(browser, "#nothing").text
        find(browser, "#mode input[value=chat] + span").click()
        assert find(browser, "#status").text == reason
        browser.get("about:blank")


def test_shades_compare_the_tokens_of_the_text(opened, engine):
    record = engine._record
    engine._record = lambda *given: (
        record(*given) | {"entropy": 6 + (len(engine.asked) + engine.counters["records"]) % 20 / 10}
    )
    write(opened, "Nel mezzo")
    shares = opened.execute_script(
        "return state.nodes.map((node) => parseInt(node.style.getPropertyValue('--share')))"
    )
    assert (
        min(shares) == 0
        and max(shares) > 90
        and find(opened, "#legend .ticks").text.startswith("≤ 6")
    )


@pytest.mark.parametrize("width", [320, 400, 900, 1600])
def test_the_page_fits_the_width_of_the_window(opened, width):
    setting(opened, "strategy", '"entropy"')
    write(opened, "Nel mezzo")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        opened.execute_script(OPEN_SETTINGS)
        wide = opened.execute_script(
            "const edge = document.documentElement.clientWidth; return"
            " [...document.querySelectorAll('body *')].filter((one)"
            " =>one.getBoundingClientRect().right > edge + 0.5).map((one) => `${one.tagName}"
            " ${one.id} ${one.className}`)"
        )
        assert wide == []
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_the_page_requests_a_key(browser, engine):
    with serving(app(engine, key="a long secret")) as port:
        browser.get(f"http://localhost:{port}/")
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.refresh()
        wait(browser, "return !byId('key-form').hidden")
        assert not find(browser, "#go").is_enabled() and "API key" in find(browser, "#problem").text
        find(browser, "#key").send_keys("a long secret")
        find(browser, "#key-form button").click()
        wait(browser, "return typeof writing === 'object' && writing.about !== null")
        assert not find(browser, "#key-form").is_displayed()
        write(browser, "Nel mezzo")
        assert len(ids(browser)) == 30
        browser.get("about:blank")
        browser.get_log("browser")


STORED_CALL = """
const call = {id: "call_1", type: "function", function: {name: "weather", arguments: '{"city": "Rome"}'}};
const texts = ["<think>", "Hm.", "</think>", "I look.", "<tool_call>", "{}", "</tool_call>"];
const tokens = texts.map((text) => ({...state.sample.tokens[0], text}));
const message = {role: "assistant", content: "I look.", reasoning_content: "Hm.", tool_calls: [call]};
writing.about.markers.reasoning = {begin: "<think>", end: "</think>"};
current().parts = current().parts.with(-1, {...current().parts.at(-1), tokens, message, hasTools: true});
drawAll();
"""


def test_tools_of_a_chat(opened, engine):
    find(opened, "#mode input[value=chat] + span").click()
    opened.execute_script("byId('tools-group').open = true")
    find(opened, "#tools").send_keys('[{"nam')
    find(opened, "#draft").send_keys("Rome?")
    find(opened, "#go").click()
    assert "Tools: it is not JSON" in find(opened, "#problem").text and focused(opened) == find(
        opened, "#tools"
    )
    assert find(opened, "#draft").get_attribute("value") == "Rome?" and engine.asked == []
    find(opened, "#tools").clear()
    find(opened, "#tools").send_keys('[{"name": "weather", "parameters": {"type": "object"}}]')
    find(opened, "#go").click()
    done(opened)
    assert '"weather"' in engine.run.tokenizer.decode(engine.asked[0].ids)
    opened.execute_script(STORED_CALL)
    sections = opened.find_elements("css selector", ".turn .section")
    assert [one.find_element("css selector", "summary").text for one in sections] == [
        "Reasoning, 3 tokens", "Tool call as the model wrote it, 3 tokens",
    ]  # fmt: skip
    assert not any(one.get_attribute("open") for one in sections)
    assert find(opened, ".call").text.split("\n") == ["Calls weather", "city", "Rome"]
    opened.execute_script("select(3, true)")
    press(opened, "ARROW_LEFT")
    assert sections[0].get_attribute("open") and focused(opened) == opened.execute_script(
        "return state.nodes[2]"
    )
    find(opened, ".result textarea").send_keys("sunny, 21 degrees")
    find(opened, ".results button").click()
    done(opened)
    prompt = engine.run.tokenizer.decode(engine.asked[1].ids)
    assert (
        "sunny, 21 degrees" in prompt
        and prompt.index('"city": "Rome"') < prompt.index("sunny")
        and "Hm." not in prompt
    )
    assert [part["who"] for part in opened.execute_script("return current().parts")] == [
        "person",
        "model",
        "tool",
        "model",
    ]
    turn = opened.find_elements("css selector", ".turn.tool")[0]
    assert (
        "Result of weather" in turn.text and opened.find_elements("css selector", ".results") == []
    )


def test_the_format_of_an_answer(opened, engine):
    opened.execute_script("byId('format-group').open = true")
    choose(opened, "#format-kind", "schema")
    for text, problem in (
        ("", "it is empty"),
        ("{", "it is not JSON"),
        ("[1]", "it must be a JSON object"),
    ):
        find(opened, "#format").clear()
        find(opened, "#format").send_keys(text)
        find(opened, "#go").click()
        assert problem in find(opened, "#problem").text and focused(opened) == find(
            opened, "#format"
        )
    find(opened, "#format").clear()
    find(opened, "#format").send_keys('{"type": "object"}')
    write(opened, "Nel mezzo")
    constraint = engine.asked[0].constraint
    assert (constraint.kind, json.loads(constraint.source)) == ("json_schema", {"type": "object"})
    opened.execute_script("select(9); pick(state.sample.tokens[9])")
    done(opened)
    assert engine.asked[1].begun == 10 and engine.asked[1].constraint == constraint
    for kind, source in (("regex", "a+"), ("gbnf", 'root ::= "a"'), ("lark", 'start: "a"')):
        choose(opened, "#format-kind", kind)
        find(opened, "#format").clear()
        find(opened, "#format").send_keys(source)
        write(opened)
        assert (engine.asked[-1].constraint.kind, engine.asked[-1].constraint.source) == (
            kind,
            source,
        )
    choose(opened, "#format-kind", "text")
    write(opened)
    assert engine.asked[-1].constraint is None


def test_a_request_waits_for_a_model_that_is_loading(opened, engine):
    engine.state = "loading"
    opened.execute_script("byId('draft').value = 'Nel mezzo'; go()")
    wait(opened, "return byId('status').textContent === 'The model is loading …'")
    find(opened, "#stop").click()
    done(opened)
    assert find(opened, "#status").text == "Stopped after 0 tokens." and text_of(opened) == ""
    assert find(opened, "#draft").get_attribute("value") == "Nel mezzo", "nothing is lost"
    find(opened, "#go").click()
    wait(opened, "return byId('status').textContent === 'The model is loading …'")
    engine.state = "ready"
    done(opened)
    assert len(ids(opened)) == 30
    engine.state = "draining"
    find(opened, "#go").click()
    done(opened)
    assert "draining" in find(opened, "#problem").text and len(ids(opened)) == 30
    opened.get_log("browser")  # the browser logs the 503 responses


def test_models_and_adapters(browser, engine):
    engine.loras = {"poems": None, "prose": None}
    with serving(app(engine)) as port:
        browser.get(f"http://localhost:{port}/")
        browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        browser.refresh()
        wait(
            browser,
            "return typeof writing === 'object' && writing.about !== null && state.sample &&"
            " byId('preset-choice')",
        )
        options = [
            one.text for one in browser.find_elements("css selector", "#model-choice option")
        ]
        assert (
            options == ["varied", "varied:poems", "varied:prose"]
            and not find(browser, "#model-name").is_displayed()
        )
        find(browser, "#mode input[value=story] + span").click()
        write(browser, "Nel mezzo")
        choose(browser, "#model-choice", "varied:poems")
        write(browser)
        assert [ask.lora for ask in engine.asked] == [None, "poems"]
        assert list(engine.asked[1].ids) == [
            *engine.asked[0].ids,
            *ids(browser)[:30],
        ], "adapters share the vocabulary"
        find(browser, "#compare").click() if find(browser, "#compare").is_displayed() else None
        choose(browser, "#side-model-0", "varied:prose")
        find(browser, "#go").click()
        done(browser)
        assert {ask.lora for ask in engine.asked[2:]} == {"prose", "poems"}
        browser.execute_script(
            "writing.models = [{id: 'varied', base: 'varied'}, {id: 'other', base: 'other'}]"
        )
        body = browser.execute_script(
            "return requestBody(current().parts, newPart([], 'other'), {}, 'other')"
        )
        assert all(isinstance(one, str) for one in body["prompt"]) and body["model"] == "other"
        browser.get("about:blank")
        browser.get_log("browser")


def test_texts_are_saved_and_opened_in_every_format(opened, engine, tmp_path):
    opened.execute_script("download = (...file) => { window.file = file; }")
    write(opened, "Nel mezzo")
    setting(opened, "temperature", "0.5")
    write(opened, " e poi")
    saved, tokens, parts = (
        text_of(opened),
        ids(opened),
        opened.execute_script("return current().parts"),
    )

    def save(kind):
        find(opened, "#save").click()
        find(opened, f"[data-save={kind}]").click()
        name, _, text = wait(opened, "const file = window.file; window.file = null; return file")
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    for kind in ("json", "lines", "text", "markdown", "kobold"):
        path = save(kind)
        find(opened, "#clear").click()
        load(opened, path)
        assert text_of(opened) == saved, kind
        assert ids(opened) == (tokens if kind in ("json", "lines") else [])
        if kind == "json":
            assert opened.execute_script("return current().parts") == parts
            assert find(opened, "#status").text.endswith(
                "Its settings are the preset varied-story."
            )
        while text_of(opened) != saved or ids(opened) != tokens:
            find(opened, "#undo").click()
    content = json.loads(save("kobold").read_text())
    assert content["gamestarted"] and "".join([content["prompt"], *content["actions"]]) == saved
    assert save("report").suffix == ".html"


def test_a_chat_of_kobold_lite(opened, tmp_path):
    opened.execute_script("download = (...file) => { window.file = file; }")
    path = tmp_path / "chat.json"
    turns = ["\n{{[INPUT]}}\nWho?\n{{[OUTPUT]}}\nI.", "\n{{[INPUT]}}\nWhy?\n{{[OUTPUT]}}\nBecause."]
    path.write_text(
        json.dumps({"prompt": "", "actions": turns, "memory": "Be brief.", "authorsnote": "x"}),
        encoding="utf-8",
    )
    load(opened, path)
    parts = opened.execute_script("return current().parts.map(({who, text}) => [who, text])")
    assert parts == [["person", "Who?"], ["model", "I."], ["person", "Why?"], ["model", "Because."]]
    assert (
        find(opened, "#system").get_attribute("value") == "Be brief."
        and "the author's note" in find(opened, "#status").text
    )
    opened.execute_script("save('kobold')")
    again = json.loads(wait(opened, "return window.file")[2])
    assert (
        "".join([again["prompt"], *again["actions"]]) == "".join(turns)
        and again["memory"] == "Be brief."
    )


def test_compare_and_dialogs_by_keyboard(opened, engine):
    opened.execute_script("byId('compare').focus()")
    press(opened, "ENTER")
    assert focused(opened) == find(opened, "#draft")
    press(opened, *"Nel mezzo")
    generate_and_stop(opened, engine, "return comparing.sides.every(({nodes}) => nodes.length > 2)")
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(opened, 5, 0.02).until(lambda _: len(engine.cancelled) >= 2)
    assert "Stopped after" in opened.find_elements("css selector", ".side .status")[0].text
    opened.execute_script("document.querySelector('.keep').focus()")
    press(opened, "ENTER")
    assert text_of(opened).startswith("Nel mezzo") and focused(opened) == find(opened, "#draft")
    opened.execute_script("byId('show-settings').focus()")
    press(opened, "?")
    assert find(opened, "#help").is_displayed()
    press(opened, "ESCAPE")
    assert not find(opened, "#help").is_displayed() and focused(opened) == find(
        opened, "#show-settings"
    )
    opened.execute_script("byId('draft').focus()")
    press(opened, "?")
    assert (
        not find(opened, "#help").is_displayed()
        and find(opened, "#draft").get_attribute("value") == "?"
    )


# --- accessibility


def axe_source():
    """Returns the source of axe-core: the file of `DANTINOX_AXE`, or the one in the package
    axe-core-python.
    """
    if path := os.environ.get("DANTINOX_AXE"):
        return Path(path).read_text(encoding="utf-8")
    return (
        importlib.resources.files("axe_core_python")
        .joinpath("axe.min.js")
        .read_text(encoding="utf-8")
    )


STATES = ("empty", "story", "chat", "tools", "compare", "settings", "editing", "help", "save")


def show_state(browser, name):
    """Brings the page into a state."""
    setting(browser, "strategy", '"entropy"')
    if name in ("chat", "tools"):
        find(browser, "#mode input[value=chat] + span").click()
    if name not in ("empty", "settings"):
        write(browser, "Nel mezzo")
    script = {
        "tools": STORED_CALL,
        "compare": "toggleComparison(true); go()",
        "settings": OPEN_SETTINGS,
        "editing": "edit('all')",
        "help": "byId('help').showModal()",
        "save": "openSaving()",
    }.get(name)
    browser.execute_script(script or "openPanel('token')")
    done(browser)


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", STATES)
def test_axe_finds_nothing_serious(opened, width, name):
    size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 500}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    try:
        show_state(opened, name)
        assert opened.execute_script("return document.documentElement.scrollWidth") <= width
        opened.execute_script(axe_source())
        for theme in ("light", "dark"):
            opened.execute_script(
                "document.documentElement.dataset.theme = arguments[0]; drawTheme()", theme
            )
            found = opened.execute_async_script(
                "const end = arguments[0]; axe.run(document).then(end)"
            )
            serious = [(one["id"],
                        [node["html"][:120] for node in one["nodes"]][:3]) for one in found["violations"]
                       if one["impact"] in ("serious", "critical")]  # fmt: skip
            assert serious == [], theme
    finally:
        opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
