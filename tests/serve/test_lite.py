"""Tests of Kobold Lite in a browser. DANTINOX_LITE is the path of a copy, because Lite is not part
of this project.
"""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from dantinox.serve.app import make_app
from dantinox.serve.options import Options

from .fakes import FakeEngine, fake_run
from .sockets import serving

LITE = os.environ.get("DANTINOX_LITE", "")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not LITE,
        reason=(
            "DANTINOX_LITE is not set to a copy of Kobold Lite"
            " (github.com/LostRuins/lite.koboldai.net)"
        ),
    ),
]
SAYS = "the fox – 🦊 –\u2028said “ho”; "


@pytest.fixture(scope="module")
def chromium():
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
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = driver.Chrome(options=options, service=driver.ChromeService(service))
    yield found
    found.quit()


class Page:
    """Kobold Lite, connected, with an empty story."""

    def __init__(self, chromium, engine, port):
        self.chromium, self.engine, self.port = chromium, engine, port
        chromium.get_log("browser"), chromium.get_log("performance")
        chromium.get(f"http://127.0.0.1:{port}/lite")
        self.run(
            "localStorage.clear(); indexedDB.databases().then(all => all.forEach(one =>"
            " indexedDB.deleteDatabase(one.name)))"
        )
        chromium.get(f"http://127.0.0.1:{port}/lite")
        self.wait("koboldcpp_version")
        self.run(
            "localsettings.opmode = 1; localsettings.trimsentences = false; hide_popups();"
            " render_gametext()"
        )

    def run(self, script):
        return self.chromium.execute_script(script)

    def wait(self, expression, seconds=15):
        until = time.monotonic() + seconds
        while not (found := self.run(f"return {expression}")):
            assert time.monotonic() < until, expression
            time.sleep(0.02)
        return found

    def set(self, name, value):
        """Sets a field of the settings form."""
        self.run("display_settings()")
        self.run(f"document.getElementById({json.dumps(name)}).value = {json.dumps(value)}")
        self.run("confirm_settings()")

    def send(self, text):
        box = self.chromium.find_element("id", "input_text")
        box.clear()
        box.send_keys(text)
        self.chromium.find_element("id", "btnsend").click()

    @property
    def text(self):
        return self.run("return document.getElementById('gametext').innerText")

    def finish(self):
        self.wait("pending_response_id == ''")
        return self.text

    def asked(self):
        """Returns the requested addresses and their bodies, in order."""
        entries = [
            json.loads(entry["message"])["message"]
            for entry in self.chromium.get_log("performance")
        ]
        requests = [
            entry["params"]["request"]
            for entry in entries
            if entry["method"] == "Network.requestWillBeSent"
        ]
        return [
            (request["url"], request.get("postData"))
            for request in requests
            if request["url"].startswith("http")
        ]


@pytest.fixture
def page(chromium):
    engine = FakeEngine(fake_run(context=512), says=SAYS, pause=0.01)
    with serving(make_app(engine, Options(lite=Path(LITE)))) as port:
        yield Page(chromium, engine, port)
        chromium.get("about:blank")


def test_it_connects_only_to_its_own_server(page):
    urls = [url for url, _ in page.asked()]
    assert {url.split("/")[2] for url in urls} == {f"127.0.0.1:{page.port}"}
    paths = ["/" + url.split("/", 3)[3] for url in urls]
    assert {
        "/api/v1/model",
        "/api/extra/version",
        "/api/extra/preloadstory",
        "/sdapi/v1/sd-models",
    } <= set(paths)
    assert page.run("return koboldcpp_version") == "1.74"
    assert page.run("return selected_models[0].name") == "fake"
    complaints = [
        entry["message"] for entry in page.chromium.get_log("browser") if entry["level"] == "SEVERE"
    ]
    assert all("manifest" in complaint.lower() for complaint in complaints)


def test_a_text_is_streamed_completely(page):
    page.set("max_length", 120)
    page.send("Once upon a time")
    lengths = set()
    while page.run("return pending_response_id != ''"):
        lengths.add(len(page.text))
        time.sleep(0.02)
    assert len(lengths) > 10  # it was streamed
    ask = page.engine.asked[-1]
    new = ask.config.generation.max_new_tokens
    whole = (SAYS * 9).encode()[:new].decode(errors="replace")
    assert new == 120 and page.run("return gametext_arr") == ["Once upon a time", whole]


def test_the_next_turn_sends_the_whole_story(page):
    page.set("max_length", 20)
    page.send("One. ")
    first = page.finish()
    page.send("Two. ")
    page.finish()
    sent = [bytes(ask.ids).decode() for ask in page.engine.asked]
    assert sent[0] == "One. "
    assert sent[1].startswith(sent[0] + "the fox") and sent[1].endswith("Two. ")
    assert (
        first.replace("\n", "").startswith("One. the fox")
        and len(page.run("return gametext_arr")) == 4
    )


def test_an_abort_keeps_the_text_and_frees_the_slot(page):
    page.set("max_length", 400)
    page.send("Once")
    page.wait("document.getElementById('gametext').innerText.length > 20")
    page.run("abort_generation()")
    page.finish()
    until = time.monotonic() + 30
    while page.engine.tasks and time.monotonic() < until:
        time.sleep(0.01)
    assert len(page.engine.cancelled) == 1 and not page.engine.tasks
    assert any(url.endswith("/api/extra/abort") for url, _ in page.asked())
    assert 10 < len("".join(page.run("return gametext_arr"))) < 400
    # If Lite sends a request before its abort is answered, the abort also ends this request. So
    # wait for the answer.
    page.wait(
        "performance.getEntriesByType('resource').some(one => one.name.endsWith('/abort') &&"
        " one.responseEnd > 0)"
    )
    time.sleep(1)
    page.send("more")  # the story continues
    page.wait("document.getElementById('gametext').innerText.includes('morethe fox')")
    assert len(page.engine.asked) == 2


def test_sampler_settings_of_the_form_are_sent(page):
    page.set("max_length", 8)
    for name, value in (
        ("sampler_order", "5,6,0,1,2,3,4"),
        ("temperature", 0.55),
        ("min_p", 0.05),
        ("dynatemp_range", 0.25),
    ):
        page.set(name, value)
    page.run(
        "localsettings.dry_multiplier = 0.8; localsettings.xtc_probability = 0.4;"
        " localsettings.mirostat = 0"
    )
    page.send("Once")
    page.finish()
    found = page.engine.asked[-1].config.generation
    assert (found.preset, found.sampler_order) == ("koboldcpp", (5, 6, 0, 1, 2, 3, 4))
    assert (found.dynatemp_low, found.dynatemp_high) == pytest.approx(
        (0.3, 0.8)
    ) and found.min_p == 0.05
    assert (found.dry_multiplier, found.xtc_probability) == (0.8, 0.4)


def test_polling_shows_the_text(page):
    page.run("localsettings.tokenstreammode = 1")
    page.run("localsettings.max_length = 300")
    page.send("Once")
    page.wait("document.getElementById('gametext').innerText.includes('fox')")
    assert page.run("return pending_response_id != ''")  # still running: the text came from /check
    page.run("abort_generation()")
    assert any(url.endswith("/api/extra/generate/check") for url, _ in page.asked())


def test_log_probabilities_are_fetched_after_a_stream(page):
    page.run("localsettings.request_logprobs = true; localsettings.max_length = 5")
    page.send("Once")
    page.wait("last_response_obj && last_response_obj.results[0].logprobs")
    content = page.run("return last_response_obj.results[0].logprobs.content")
    assert [token["token"] for token in content] == list("the f")


def test_a_key_can_be_entered(chromium):
    engine = FakeEngine(fake_run(context=512), says=SAYS)
    with serving(make_app(engine, Options(lite=Path(LITE), key="secret-key"))) as port:
        chromium.get(f"http://127.0.0.1:{port}/lite")
        until = time.monotonic() + 15
        while (
            "try a different URL or API type" not in chromium.find_element("tag name", "body").text
        ):
            assert time.monotonic() < until
        chromium.find_element("link text", "try a different URL or API type").click()
        chromium.find_element("id", "customkoboldkey").send_keys("secret-key")
        chromium.execute_script("connect_custom_endpoint()")  # the form has several buttons
        while chromium.execute_script("return koboldcpp_version") != "1.74":
            assert time.monotonic() < until
        chromium.get("about:blank")


def test_a_full_queue_is_shown(page):
    page.engine.full = True
    page.send("Once")
    page.wait("document.body.innerText.includes('all slots are busy and the queue is full')")


def test_memory_author_note_and_banned_phrases_are_sent(page):
    """The anti-slop list of the form separates phrases with `||$||`."""
    page.set("max_length", 8)
    page.set("tokenbans", "shivers down||$||a testament to\\n")
    page.run("current_memory = 'The fox is red.'; current_anote = 'Be brief.'; anote_strength = 0")
    page.send("Once upon a time")
    page.finish()
    ask = page.engine.asked[-1]
    assert bytes(ask.ids).decode() == "The fox is red.\nOnce upon a time[Author's note: Be brief.]"
    assert ask.config.generation.banned_strings == ("shivers down", "a testament to\n")


def test_tokens_are_counted(page):
    ids = page.chromium.execute_async_script("kcpp_tokenize('Héllo', arguments[0])")
    assert ids == list("Héllo".encode())
