"""The page of a job in a real browser, Debian's chromium: ``make test-browser``."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"

api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test-browser")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: make test-browser"),
]
MILLISECONDS = 60_000
PICTURES = Path(__file__).parents[2] / "out"
PROGRAM = (PROGRAMS / "run_until_told.py").read_text()


@pytest.fixture(scope="module")
def browser():
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser):
    page = browser.new_page(viewport={"width": 1200, "height": 1250})
    page.set_default_timeout(MILLISECONDS)
    messages = []
    page.on("console", lambda message: messages.append(message.text))
    page.on("pageerror", lambda error: messages.append(str(error)))
    requests = []
    page.on("request", lambda request: requests.append(request.url))
    page.messages, page.requests = messages, requests
    yield page
    page.close()


@pytest.fixture
def start(meshrun):
    def start(slow):
        flags = ("--monitor", "--on-failure", "continue", "-n", "4", meshrun.script(PROGRAM))
        job = meshrun.start(*flags, env={"SLOW": str(slow)})
        return job, re.search(r"http://\S+", job.stderr.readline())[0]

    return start


def cells(page):
    return page.locator("#mesh .cell")


def picture(page, name):
    PICTURES.mkdir(exist_ok=True)
    page.screenshot(path=PICTURES / f"monitor-{name}.png", full_page=True)


def test_a_healthy_job(page, start, meshrun):
    job, url = start(-1)
    page.goto(url)
    expect = api.expect
    expect(page.locator("#headline")).to_have_text("4 ranks are present.", timeout=MILLISECONDS)
    expect(cells(page)).to_have_count(4)
    assert page.locator("#mesh h3").text_content().split() == ["dp", "↓", "tp", "→"]
    expect(page.locator("#dims tr")).to_have_count(4, timeout=MILLISECONDS)
    expect(page.locator("#steps td").nth(1)).to_contain_text("s", timeout=MILLISECONDS)
    expect(page.locator("#history polyline")).to_have_count(3, timeout=MILLISECONDS)
    expect(page.locator(".cell.slow")).to_have_count(0)
    picture(page, "healthy")
    assert page.messages == []
    assert all(one.startswith((url.partition("#")[0], "data:")) for one in page.requests)
    (meshrun.folder / "end").touch()
    assert meshrun.finish(job).code == 0
    expect(page.locator("#headline")).to_contain_text("does not answer", timeout=MILLISECONDS)


def test_a_straggler_and_a_lost_rank(page, start, meshrun):
    job, url = start(3)
    page.goto(url)
    expect = api.expect
    headline = page.locator("#headline")
    expect(headline).to_contain_text("rank 3 keeps the others waiting", timeout=MILLISECONDS)
    expect(page.locator(".cell.slow")).to_have_text("3 !")
    picture(page, "straggler")
    cells(page).nth(3).click()
    expect(page.locator("#chosen")).to_contain_text("Rank 3 (dp=1, tp=1)")
    page.locator("#ask").click()
    expect(page.locator("#stacks")).to_contain_text("in compute", timeout=MILLISECONDS)
    (meshrun.folder / "die").touch()
    expect(page.locator(".cell.lost")).to_have_text("2", timeout=MILLISECONDS)
    expect(headline).to_contain_text("rank 2 was lost")
    expect(page.locator("#notes")).to_contain_text("was killed by SIGKILL", timeout=MILLISECONDS)
    expect(page.locator("body")).to_have_class("bad")
    picture(page, "lost")
    assert page.messages == []
    (meshrun.folder / "end").touch()
    meshrun.finish(job)


def test_a_wrong_token_is_told(page, start, meshrun):
    job, url = start(-1)
    page.goto(url + "x")
    api.expect(page.locator("#headline")).to_contain_text("the token is missing or wrong")
    api.expect(cells(page)).to_have_count(0)
    (meshrun.folder / "end").touch()
    assert meshrun.finish(job).code == 0
