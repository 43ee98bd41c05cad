import shutil

import pytest


@pytest.fixture(scope="session")
def browser():
    if shutil.which("chromedriver") is None:
        pytest.skip("chromedriver is not installed: apt-get install chromium-driver")
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--window-size=1300,900"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))
    yield driver
    driver.quit()
