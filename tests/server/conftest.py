"""Lets the tests of the server import what lies beside them, and lends them servers that run for all of them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(Path(__file__).parent), *(str(TESTS / name) for name in ("host", "device", "engine"))]
support = importlib.import_module("server_support")
Browser = importlib.import_module("browser").Browser
FakeServer = importlib.import_module("fake_server").FakeServer


@pytest.fixture(scope="session")
def live_server():
    """A model with random weights: its texts hold anything."""
    with support.Live(support.build(support.random_params())) as live:
        yield live


@pytest.fixture
def live(live_server):
    yield live_server
    live_server.assert_idle()


@pytest.fixture(scope="session")
def parrot_server():
    """Says what `support.saying` tells it."""
    with support.Live(support.build(support.parrot_params([1000]))) as live:
        yield live


@pytest.fixture
def parrot(parrot_server):
    yield parrot_server
    parrot_server.assert_idle()


@pytest.fixture(scope="session")
def llama_parrot_server():
    """The same with SentencePiece's tokenizer, which begins texts with <s>."""
    engine = support.build(support.parrot_params([1000], support.llama_tokenizer()))
    with support.Live(support.engine_support.of_few_shapes(engine)) as live:
        yield live


@pytest.fixture
def llama_parrot(llama_parrot_server):
    yield llama_parrot_server
    llama_parrot_server.assert_idle()


@pytest.fixture(params=["parrot", "llama_parrot"])
def any_parrot(request):
    """Each of the two."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def plain_server():
    """A checkpoint with stored references, without a tokenizer."""
    engine = support.build(support.engine_support.tiny("llama"), max_model_len=64, max_num_beams=4)
    with support.Live(support.engine_support.of_few_shapes(engine)) as live:
        yield live


@pytest.fixture
def plain(plain_server):
    yield plain_server
    plain_server.assert_idle()


@pytest.fixture(scope="session")
def browser(tmp_path_factory):
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture
def open_url(browser):
    """Opens pages; at the end of the test nothing may have been wrong with any."""
    pages = []

    def open_url(url, **view):
        pages.append(browser.open(url, **view))
        return pages[-1]

    yield open_url
    for page in pages:
        problems = page.problems
        page.close()
        assert problems == []


@pytest.fixture
def server():
    """Its engine computes nothing, and its chat says what a test wants."""
    server = FakeServer()
    yield server
    server.stop()


@pytest.fixture
def open_page(open_url, server):
    return lambda name, **view: open_url(f"{server.url}/{name}", **view)
