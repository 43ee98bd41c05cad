"""A page of rollouts, opened in a browser or read without one."""

import base64
import json
import re
import zlib
from pathlib import Path

import numpy

from trl_otb.display import page


def unpacked(record: str) -> dict:
    """A recorded step, with `values`: a number of each token, by column."""
    packet = zlib.decompress(base64.b64decode(record.partition('">')[2].partition("<")[0]))
    text, _, numbers = packet.partition(b"\0")
    data = json.loads(text) | {"values": {}}
    planes = numpy.frombuffer(numbers, numpy.uint8).astype(int).reshape(-1, 2, data["tokens"])
    for (name, unit, differences), (low, high) in zip(data["columns"], planes, strict=True):
        zigzag = low + 256 * high
        values = (zigzag >> 1) ^ -(zigzag & 1)
        values = (values.cumsum() + 2**15) % 2**16 - 2**15 if differences else values
        data["values"][name] = values * unit
    return data


def steps_of(path: Path) -> list[dict]:
    return [unpacked(record) for record in page.records_of(path)]


class Opened:
    """A page in a browser; `errors` are those of its console."""

    def __init__(self, browser, path, link=""):
        browser.get("about:blank")
        browser.get_log("browser")
        browser.get(path.as_uri() + link)
        self.browser = browser
        self.settle()

    def settle(self):
        """Until the page has drawn what was asked for last."""
        from selenium.webdriver.support.wait import WebDriverWait

        drawn = "return document.readyState === 'complete' && document.body.getAttribute('aria-busy') === 'false'"
        WebDriverWait(self.browser, 20, 0.02).until(lambda browser: browser.execute_script(drawn))

    @property
    def errors(self):
        return self.browser.get_log("browser")

    def of(self, selector):
        return self.browser.find_elements("css selector", selector)

    def text(self, selector):
        return [element.text for element in self.of(selector)]

    def hover(self, element):
        from selenium.webdriver import ActionChains

        ActionChains(self.browser).move_to_element(element).perform()
        lines = self.browser.find_element("id", "tip").text.splitlines()[1:]
        numbers = dict(re.split(r"\s{2,}|(?<=GRPO)\s", line, maxsplit=1) for line in lines if "=" not in line)
        return numbers, [line.strip() for line in lines if "=" in line]

    def choose(self, value, what="colour"):
        from selenium.webdriver.support.select import Select

        Select(self.of(f"#{what}")[0]).select_by_value(value)
        self.settle()

    def press(self, key):
        from selenium.webdriver import ActionChains, Keys

        ActionChains(self.browser).send_keys(getattr(Keys, key, key)).perform()
        self.settle()

    def click(self, element):
        (self.of(element)[0] if isinstance(element, str) else element).click()
        self.settle()
