"""Takes the pictures of the page in docs/serving.md from a running server with a chat model, in
Chromium:

    dantinox serve runs/smollm2 &
    python docs/plots/page.py http://127.0.0.1:8000

It needs selenium, chromium and chromedriver (the extra `browser`).
"""

import base64
import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from selenium import webdriver
from selenium.webdriver.support.ui import WebDriverWait

PICTURES = Path(__file__).parents[1] / "images"
PROMPT = "Tell me in two sentences how rivers form."
SETTINGS = """
applyPreset("Balanced");
byId("setting-seed").value = 7;
byId("setting-max_new_tokens").value = 80;
settingsChanged();
"""
TOKEN = """
openPanel("token");
select(state.sample.tokens.findIndex(({entropy}, i) => i > 9 && entropy > 5), true);
"""
WIDE, NARROW = (1280, 800), (390, 780)


def main(address: str) -> None:
    """Takes all pictures; each has at most 64 colors and less than 150 kB."""
    browser = open_browser()
    try:
        browser.get(address)
        wait(browser, "return typeof writing === 'object' && writing.about !== null")
        browser.execute_script(SETTINGS)
        browser.execute_script("byId('draft').value = arguments[0]; go()", PROMPT)
        wait(browser, "return writing.abort === null")
        take(browser, "page", WIDE, TOKEN)
        take(browser, "page_phone", NARROW, TOKEN)
        take(browser, "page_phone_settings", NARROW, "openPanel('settings')")
        browser.execute_script(
            "current().parts = []; comparing.sides[0].preset = 'Creative'; toggleComparison(true)"
        )
        browser.execute_script("byId('draft').value = arguments[0]; go()", PROMPT)
        wait(browser, "return writing.abort === null")
        take(browser, "page_compare", WIDE, "openPanel('settings')")
        take(browser, "page_phone_compare", NARROW, "openPanel(null)")
    finally:
        browser.quit()


def open_browser() -> webdriver.Chrome:
    """Starts a browser without a window."""
    options = webdriver.ChromeOptions()
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    assert binary and driver, "chromium and chromedriver are needed"
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--force-color-profile=srgb",
    ):
        options.add_argument(argument)
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))


def wait(browser: webdriver.Chrome, script: str) -> None:
    """Waits until a script returns true."""
    WebDriverWait(browser, 300, 0.1).until(lambda browser: browser.execute_script(script))


def take(browser: webdriver.Chrome, name: str, size: tuple[int, int], script: str) -> None:
    """Sets the size of the window (width, height, in pixels), runs a script, and writes a
    picture.
    """
    metrics = {
        "width": size[0],
        "height": size[1],
        "deviceScaleFactor": 1,
        "mobile": size == NARROW,
    }
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.execute_script("dispatchEvent(new Event('resize'))")
    browser.execute_script(script)
    data = base64.b64decode(
        browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"]
    )
    picture = Image.open(io.BytesIO(data)).convert("RGB").quantize(64)
    picture.save(PICTURES / f"{name}.png", optimize=True)
    assert (PICTURES / f"{name}.png").stat().st_size < 150_000


if __name__ == "__main__":
    main(*sys.argv[1:])
