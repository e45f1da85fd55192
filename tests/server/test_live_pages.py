"""The dashboard and the chat before a real server, with a model whose weights are random."""

import re
import time

import pytest
import server_support as support


@pytest.fixture
def slow(live, monkeypatch):
    """The server, its engine taking its time."""
    step = live.engine.step
    monkeypatch.setattr(live.engine, "step", lambda: (time.sleep(0.02), step())[1])
    return live


def talk(page, text, max_tokens):
    page.wait("document.querySelector('#model').value === 'tiny'")
    page.write("#max-tokens", str(max_tokens))
    page.write("#prompt", text)
    page.press("Enter", 13, "\r")


def test_a_conversation_with_the_model_and_what_the_dashboard_shows_of_it(open_url, slow):
    dashboard = open_url(f"{slow.url}/dashboard")
    dashboard.wait_for_text("Live", "#status")
    dashboard.wait_for_text("tiny", "#model")
    chat = open_url(f"{slow.url}/chat")
    chat.click("#toggle")
    talk(chat, "Say something", 100)
    dashboard.wait("state.snapshot.requests[0]?.num_output_tokens > 5")
    row = dashboard.text("#requests li")
    assert re.match(r"\d+:", row) and "running" in row and "/100" in row
    assert "1" in dashboard.evaluate("state.snapshot.map.cells")
    chat.wait("running === null")
    assert "100 tokens" in chat.text("#messages") and "cut at the most tokens" in chat.text("#messages")
    dashboard.wait_for_text("1 sequence", "#latency-note")
    dashboard.wait("state.snapshot.requests.length === 0 && state.snapshot.map.cells.includes('c')")
    chat.click("#new")
    talk(chat, "Say something", 3)  # it is there already
    dashboard.wait("state.totals.num_cached_tokens > 0")
    chat.wait("running === null")


def test_stop_ends_the_request_in_the_engine(open_url, slow):
    chat = open_url(f"{slow.url}/chat")
    chat.click("#toggle")
    talk(chat, "Talk for ever", 200)
    chat.wait("document.querySelector('.note')?.textContent.includes('token')")
    assert slow.engine.has_unfinished_requests()
    chat.click("#stop")
    slow.assert_idle()
    chat.wait_for_text("stopped", "#messages")


def test_what_the_server_refuses_is_said_in_its_words(open_url, live):
    chat = open_url(f"{live.url}/chat")
    chat.click("#toggle")
    talk(chat, "Hello", 100000)
    error = chat.wait("document.querySelector('#messages .error')?.innerText")
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 100000}
    assert error == live.refused("/v1/chat/completions", body)["message"]


def test_the_pages_are_open_what_they_fetch_needs_the_key(open_url):
    with support.Live(support.build(support.random_params()), api_keys=["right"]) as guarded:
        for path, status in (("/dashboard", 200), ("/chat", 200), ("/dashboard/state", 401), ("/v1/models", 401)):
            assert guarded.call("GET", path)[0] == status
        page = open_url(f"{guarded.url}/dashboard")
        page.wait("document.querySelector('#key-dialog').open")
        assert "this server needs an API key" in page.text("#key-reason")
        page.write("#key", "right")
        page.press("Enter", 13, "\r")
        page.wait_for_text("Live", "#status")


def test_without_the_option_there_are_no_pages():
    with support.Live(support.build(support.random_params()), pages=False) as live:
        assert {live.call("GET", path)[0] for path in ("/dashboard", "/chat", "/dashboard/state")} == {404}
