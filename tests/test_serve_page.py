"""The page of the server in a browser: what a reader sees. Writes `.cache/screenshots/page.png`."""

from __future__ import annotations

import pathlib
import time

import pytest

from specjax import LLM
from support import browser, cli
from support import server as servers

pytestmark = pytest.mark.skipif(
    browser.program() is None, reason="Chromium is not installed: apt-get install chromium"
)

SCREENSHOT = pathlib.Path(__file__).parents[1] / ".cache" / "screenshots" / "page.png"
TEXTS = "[...document.querySelectorAll('.assistant .text')].map(e => e.textContent)"
FIGURES = "[...document.querySelectorAll('.figures')].at(-1)?.textContent || ''"
IS_IDLE = "!document.getElementById('send').disabled && document.getElementById('stop').hidden"


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    path = tmp_path_factory.mktemp("page") / "model"
    cli.write_model(path, max_position_embeddings=2048)
    return LLM(
        path,
        speculative_model="ngram",
        num_speculative_tokens=2,
        max_num_seqs=1,
        seconds_per_call=0.02,
    )


def ask(page, text: str, max_tokens: int = 60) -> None:
    """Types a message, and sends it."""
    page.run(
        f"find('tokens').value = {max_tokens}; find('input').value = {text!r}; "
        "find('form').requestSubmit()"
    )


def test_what_a_reader_sees(llm, tmp_path):
    with (
        servers.running(lambda: llm) as server,
        server.client() as client,
        browser.opened(server.url, tmp_path) as page,
    ):
        page.wait("find('model').textContent.includes('tiny, 2048 tokens')")
        ask(page, "hello")
        page.wait(f"{IS_IDLE} && {FIGURES}.includes('ended')")
        body = {"messages": [{"role": "user", "content": "hello"}], "temperature": 0}
        answer = client.post("/v1/chat/completions", json={**body, "max_tokens": 60}).json()
        assert page.run(TEXTS) == [answer["choices"][0]["message"]["content"]]
        figures = page.run(FIGURES)
        for part in ("60 tokens", "tokens per round", "drafts accepted", "ended: length"):
            assert part in figures
        drafts = "[...document.querySelectorAll('.text .draft')]"
        num_drafted = page.run(f"{drafts}.reduce((sum, e) => sum + e.textContent.length, 0)")
        assert 0 < num_drafted < 60
        colours = f"[{drafts}[0], document.body].map(e => getComputedStyle(e).backgroundColor)"
        draft, plain = page.run(colours)
        assert draft != plain
        page.screenshot(SCREENSHOT)

        ask(page, "again", max_tokens=1500)
        page.wait(f"{FIGURES}.includes('tokens/s')")
        assert page.run("!find('stop').hidden && find('send').disabled")
        page.run("find('stop').click()")
        page.wait(f"{IS_IDLE} && {FIGURES}.includes('ended: stopped')")
        servers.wait_until(lambda: server.server.engine.num_unfinished == 0)

        ask(page, "x" * 3000)
        page.wait("document.querySelector('.error')?.textContent.includes('2047 fit')")
        page.run("find('clear').click()")
        assert page.run("find('messages').children.length") == 0
        ask(page, "<b>bold</b>", max_tokens=5)
        page.wait(f"{IS_IDLE} && {FIGURES}.includes('5 tokens')")
        assert page.run("document.querySelector('.user .text').textContent") == "<b>bold</b>"
        assert page.run("document.querySelectorAll('b').length") == 0, "text is not HTML"


def test_it_asks_for_the_key(llm, tmp_path):
    with (
        servers.running(lambda: llm, api_keys=("sesame",)) as server,
        browser.opened(server.url, tmp_path) as page,
    ):
        page.wait("!find('key-form').hidden && find('model').textContent.includes('API key')")
        page.run("find('key').value = 'sesame'; find('key-form').requestSubmit()")
        page.wait("find('key-form').hidden && find('model').textContent.includes('tiny')")
        ask(page, "hello", max_tokens=4)
        page.wait(f"{FIGURES}.includes('4 tokens')")
        server.end(at_once=True)
        server.wait()
        time.sleep(0.1)
        ask(page, "still there?")
        page.wait("document.querySelector('.error')?.textContent.includes('fetch')")
