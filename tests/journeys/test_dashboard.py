"""The dashboard in a real browser: what it shows, what it does when it is clicked and typed at, whom it turns away."""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Browser, ConsoleMessage, Error, Locator, Page, expect, sync_playwright

from foreword.base.config import CacheConfig, ScheduleConfig
from foreword.server import KeyFile
from foreword.server.auth import change_keys, new_key
from tests.journeys.conftest import Running, running

HEAD = "You are the night porter of the Grand Hotel at the lake, kind, brief and exact in all that you say. " * 3
EVIL = (
    "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script> and more of it, quite long."
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        try:
            opened = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        except Error as error:
            pytest.fail(f"no Chromium here; apt install chromium, or .venv/bin/playwright install chromium ({error})")
        yield opened
        opened.close()


@dataclass(slots=True)
class Seen:
    """A page, and all that it complained about and asked for."""

    page: Page
    complaints: list[str] = field(default_factory=list[str])
    urls: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self._heard(message))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))

    def _heard(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def tile(self, name: str) -> Locator:
        return self.page.locator("#tiles div", has=self.page.get_by_text(name, exact=True)).locator("dd")

    def rows(self, text: str) -> Locator:
        return self.page.get_by_role("treeitem").filter(has_text=text)


@pytest.fixture
def seen(browser: Browser, server: Running) -> Iterator[Seen]:
    """The page of the shared server."""
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    looking = Seen(page)
    page.goto(f"{server.url}/dashboard")
    expect(page.locator("#state")).to_have_text("live")
    yield looking
    page.close()
    assert looking.complaints == []
    assert {urlsplit(url).netloc for url in looking.urls if not url.startswith("data:")} == {
        urlsplit(server.url).netloc
    }


def chat(server: Running, text: str, question: str = "When?") -> dict[str, Any]:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": question}]
    return server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2, "temperature": 0}).json()


def test_what_happens_is_seen_without_a_reload(seen: Seen, server: Running) -> None:
    expect(seen.page.locator("#tree-empty")).to_contain_text("Nothing is cached yet")
    before = int((seen.tile("Tokens cached").text_content() or "").split("taken")[0].replace(",", ""))
    usage = [chat(server, HEAD, question)["usage"] for question in ("When?", "Where?")]
    cached = sum(each["prompt_tokens_details"]["cached_tokens"] for each in usage)
    assert cached > 0
    expect(seen.tile("Tokens cached")).to_contain_text(f"{before + cached:,}")
    expect(seen.page.locator("#say-rate")).to_contain_text(re.compile(r"[1-9]\d* % in the last 30 s"))
    expect(seen.page.locator("#say-saved")).not_to_have_text("0 s since this page was opened")
    expect(seen.page.locator("#reasons")).to_contain_text("never_seen")
    expect(seen.page.locator("#top")).to_contain_text("night porter")
    expect(seen.page.locator("#live")).to_contain_text("Nobody is waiting")
    assert seen.page.locator("canvas").count() == 4


def test_the_tree_by_mouse(seen: Seen, server: Running) -> None:
    for question in (
        "When does the last boat of the day leave the pier?",
        "Where may the bicycles of the guests be put?",
    ):
        chat(server, HEAD, question)
    chat(server, "Quite another thing: a list of rivers, lakes and seas, with their depths and shores. " * 2)
    porter = seen.rows("night porter").first
    expect(porter).to_be_visible()
    expect(seen.rows("rivers").first).to_be_visible()
    assert porter.get_attribute("aria-expanded") == "false"
    porter.click(position={"x": 60, "y": 12})
    expect(porter).to_have_attribute("aria-expanded", "true")
    expect(porter.get_by_role("treeitem")).to_have_count(2)

    seen.page.fill("#search", "RIVERS")
    expect(seen.rows("night porter")).to_have_count(0)
    expect(seen.rows("rivers")).not_to_have_count(0)
    seen.page.fill("#search", "no such text")
    expect(seen.page.locator("#tree-empty")).to_contain_text("No cached prefix begins so")
    seen.page.fill("#search", "")

    porter.get_by_role("button", name="Pin").first.click()
    expect(seen.page.locator("#told")).to_contain_text("Pinned")
    assert server.get("/v1/cache").json()["blocks"]["pinned"] > 0
    seen.rows("night porter").first.get_by_role("button", name="Unpin").first.click()
    expect(seen.page.locator("#told")).to_contain_text("pinned no longer")
    assert server.get("/v1/cache").json()["blocks"]["pinned"] == 0

    flush = seen.rows("rivers").first.get_by_role("button", name="Flush").first
    flush.click()
    seen.page.get_by_role("button", name="Keep it").click()
    expect(seen.rows("rivers").first).to_be_visible()
    flush.click()
    seen.page.locator("#sure").get_by_role("button", name="Flush").click()
    expect(seen.rows("rivers")).to_have_count(0)
    expect(seen.rows("night porter").first).to_be_visible()
    seen.page.get_by_role("button", name="Flush everything").click()
    seen.page.locator("#sure").get_by_role("button", name="Flush").click()
    expect(seen.page.locator("#tree-empty")).to_contain_text("Nothing is cached yet")
    assert server.get("/v1/cache").json()["blocks"]["cached"] == 0


def test_the_tree_by_keyboard(seen: Seen, server: Running) -> None:
    for question in (
        "When does the last boat of the day leave the pier?",
        "Where may the bicycles of the guests be put?",
    ):
        chat(server, HEAD, question)
    press, here = seen.page.keyboard.press, seen.page.locator(":focus")
    expect(seen.rows("night porter").first).to_be_visible()
    seen.page.focus("#search")
    press("Tab")
    expect(here).to_have_text("Flush everything")
    press("Tab")
    expect(here).to_have_attribute("role", "treeitem")
    assert seen.page.evaluate("getComputedStyle(document.activeElement.firstChild).outlineStyle") == "solid"
    press("ArrowRight")
    expect(here).to_have_attribute("aria-expanded", "true")
    expect(here.get_by_role("treeitem")).to_have_count(2)
    press("ArrowRight")
    expect(here).to_have_attribute("aria-level", "2")
    press("ArrowDown")
    press("ArrowUp")
    press("ArrowLeft")
    expect(here).to_have_attribute("aria-level", "1")
    press("p")
    expect(seen.page.locator("#told")).to_contain_text("Pinned")
    press("p")
    expect(seen.page.locator("#told")).to_contain_text("pinned no longer")
    press("End")
    expect(here).to_have_attribute("aria-level", "2")
    press("Home")
    press("Delete")
    seen.page.locator("#sure").wait_for(state="visible")
    press("Escape")
    expect(seen.rows("night porter").first).to_be_visible()
    seen.rows("night porter").first.focus()
    press("Delete")
    press("Tab")
    press("Enter")
    expect(seen.rows("night porter")).to_have_count(0)


def test_text_of_prompts_stays_text(seen: Seen, server: Running) -> None:
    for number in range(5):
        chat(server, f"{number} o'clock. {EVIL}" + EVIL, EVIL)
    server.post("/chat", {"prompt": EVIL * 2, "max_tokens": 1, "cache": {"key": "<b>"}})
    server.post("/chat", {"prompt": EVIL * 2, "max_tokens": 1})
    expect(seen.page.locator("#tree")).to_contain_text("<img src=x onerror=")
    expect(seen.page.locator("#top")).to_contain_text("<img src=x onerror=")
    expect(seen.page.locator("#advice")).to_contain_text("calls that missed here")
    assert seen.page.title() == "Foreword: the cache"
    assert seen.page.locator("main img, main script, main b").count() == 0


def test_light_dark_and_narrow(browser: Browser, server: Running) -> None:
    paper: dict[str, str] = {}
    for scheme in ("light", "dark"):
        page = browser.new_page(color_scheme=scheme, viewport={"width": 400, "height": 900})
        page.goto(f"{server.url}/dashboard")
        expect(page.locator("#state")).to_have_text("live")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        paper[scheme] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.click("#theme")
        paper[f"not {scheme}"] = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.close()
    assert paper["light"] == paper["not dark"] != paper["dark"] == paper["not light"]


def test_an_admin_key_opens_it_and_no_other(browser: Browser, tmp_path: Path) -> None:
    path, secrets = tmp_path / "keys.json", dict[str, str]()
    for tenant, admin in (("red", False), ("ops", True)):
        secrets[tenant], key = new_key(tenant, admin=admin)
        change_keys(path, lambda keys, key=key: keys.with_key(key, None, None))
    with running(CacheConfig(kv_cache="64"), ScheduleConfig(), keys=KeyFile(path)) as server:
        headers = {"authorization": f"Bearer {secrets['red']}"}
        httpx.post(f"{server.url}/chat", json={"prompt": HEAD, "max_tokens": 1}, headers=headers, timeout=60)
        page = browser.new_page()
        urls: list[str] = []
        page.on("request", lambda request: urls.append(request.url))
        page.goto(f"{server.url}/dashboard")
        for secret, said in (("fw-wrong", "not known here"), (secrets["red"], "needs an admin key")):
            page.fill("#key", secret)
            page.keyboard.press("Enter")
            expect(page.locator("#refused")).to_contain_text(said)
            expect(page.locator("#board")).to_be_hidden()
            assert "night porter" not in (page.text_content("body") or "")
        page.fill("#key", secrets["ops"])
        page.keyboard.press("Enter")
        expect(page.locator("#tenants")).to_contain_text("red")
        expect(page.locator("#tree")).to_contain_text("night porter")
        page.get_by_role("treeitem").first.get_by_role("button", name="Flush").click()
        page.locator("#sure").get_by_role("button", name="Flush").click()
        expect(page.locator("#tree-empty")).to_contain_text("Nothing is cached yet")
        assert not any(secret in url for secret in secrets.values() for url in urls)
        page.click("#leave")
        expect(page.locator("#sign-in")).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
        page.close()


def test_a_server_that_is_gone(browser: Browser, server: Running) -> None:
    page = browser.new_page()
    page.goto(f"{server.url}/dashboard")
    expect(page.locator("#state")).to_have_text("live")
    page.route("**/v1/**", lambda route: route.abort())
    expect(page.locator("#state")).to_have_text("server not reached")
    expect(page.locator("#trouble")).to_contain_text("What is shown is old")
    page.unroute("**/v1/**")
    expect(page.locator("#state")).to_have_text("live")
    expect(page.locator("#trouble")).to_be_hidden()
    page.close()


def test_the_files_are_few_and_strict(server: Running) -> None:
    page = httpx.get(f"{server.url}/dashboard")
    links = re.findall(r'(?:src|href)="(/[^"]+)"', page.text)
    assert len(links) == 4
    assert json.dumps(page.text).count("<script>") == page.text.count(" style=") == page.text.count("onclick") == 0
    for path in ("/dashboard", *links):
        response = httpx.get(server.url + path)
        assert response.status_code == 200
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
    for name in ("../auth.py", "__init__.py", "index.html", "LICENSE"):
        assert httpx.get(f"{server.url}/dashboard/{name}").status_code in (401, 404)
