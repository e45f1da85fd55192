"""What the pages may do, and the dashboard in a real browser, before a server that a test has scripted."""

import re

import pytest
from fake_server import FakeEngine, Output
from starlette.applications import Starlette
from starlette.testclient import TestClient

from jpaged.server.pages import page_routes, read_page

PAGES = ["dashboard", "chat"]


def share_pages(engine):
    """Three requests, two of which share a prompt's pages with the first, and cached pages of one that has ended."""
    engine.add("gone", list(range(500, 580)), max_tokens=1)
    engine.step()
    parent = engine.add("parent", list(range(100)), max_tokens=50)
    engine.step()
    for name in ("fork-1", "fork-2"):
        engine.add(name, list(range(100)), max_tokens=40, parent=parent)
    engine.step(3)


def pixels(page):
    """The colours in the map of each cell's corner, read at once."""
    return page.evaluate("""(() => {
        const { data, width } = map.getContext("2d").getImageData(0, 0, map.width, map.height);
        return [...state.snapshot.map.cells].map((_, at) => {
            const x = (at % grid.columns + 0.1) * grid.size, y = (Math.floor(at / grid.columns) + 0.1) * grid.size;
            const first = 4 * (Math.floor(y) * width + Math.floor(x));
            return `rgb(${[...data.slice(first, first + 3)].join(", ")})`;
        });
    })()""")


def tile(page, name):
    tiles = page.evaluate("[...document.querySelectorAll('#tiles > div')].map((tile) => tile.innerText.split('\\n'))")
    return next(texts[1] for texts in tiles if texts[0] == name)


# What the server says of the pages


@pytest.mark.parametrize("name", PAGES)
def test_a_page_may_load_nothing_and_run_nothing_but_itself(name):
    response = TestClient(Starlette(routes=page_routes(None))).get(f"/{name}")
    policy = dict(part.split(" ", 1) for part in response.headers["Content-Security-Policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'" and policy["img-src"] == "data:"
    for directive in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]+'", policy[directive]), "hashes alone"
    assert response.headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize("root_path", ["", "/behind/a/proxy"])
def test_the_address_alone_leads_to_the_dashboard(root_path):
    client = TestClient(Starlette(routes=page_routes(None)), root_path=root_path)
    response = client.get(f"{root_path}/")
    assert response.status_code == 200 and response.url.path == f"{root_path}/dashboard"


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_one_file_without_handlers_in_its_elements_or_text_set_as_html(name):
    html = read_page(f"{name}.html")
    assert not re.findall(r"<[^>]*\s(on\w+|style)=", html)
    assert not re.findall(r"(src=|@import|url\(|<link rel=.stylesheet|innerHTML|outerHTML|insertAdjacentHTML)", html)
    assert not re.findall(r"https?://(?!www\.w3\.org/2000/svg)", html)


def test_a_time_that_is_none_is_an_error_that_says_so():
    client = TestClient(Starlette(routes=page_routes(None)))
    for since in ("yesterday", "nan"):
        response = client.get("/dashboard/state", params={"since": since})
        assert response.status_code == 400 and since in response.json()["error"]["message"]


@pytest.mark.parametrize("name", PAGES)
def test_everything_that_can_be_used_has_a_name_and_nothing_is_wider_than_a_telephone(open_page, server, name):
    share_pages(server.engine)
    page = open_page(name, width=360, height=740)
    page.wait("state" if name == "dashboard" else "document.querySelector('#model').value")
    nodes = page.call("Accessibility.getFullAXTree")["nodes"]
    wanted = {"button", "textbox", "combobox", "checkbox", "image", "link", "region", "spinbutton", "dialog"}
    found = [node for node in nodes if not node.get("ignored") and node["role"]["value"] in wanted]
    assert len(found) > 4
    assert [node for node in found if not node.get("name", {}).get("value", "").strip()] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


# The dashboard


@pytest.mark.parametrize("dark", [False, True])
def test_every_page_of_the_pool_is_drawn_in_the_colour_of_its_state(open_page, server, dark):
    share_pages(server.engine)
    cells = server.engine.snapshot()["map"]["cells"]
    assert {".", "c", "1", "3"} <= set(cells)
    page = open_page("dashboard", dark=dark)
    page.wait("state")
    expected = {cell: page.evaluate(f"colourOf('{cell}').replaceAll(/,? /g, ', ')") for cell in set(cells)}
    assert len(set(expected.values())) == len(expected)
    assert pixels(page) == [expected[cell] for cell in cells]


def test_the_legend_and_the_canvas_say_in_words_how_many_pages_are_in_each_state(open_page, server):
    share_pages(server.engine)
    pages = server.engine.snapshot()["pages"]
    page = open_page("dashboard")
    page.wait("state")
    held = pages["used"] - pages["shared"]
    texts = [f"{held} held by one request", f"{pages['shared']} shared", f"{pages['free']} free"]
    label = page.evaluate("map.getAttribute('aria-label')")
    assert all(text in label for text in texts)
    assert page.text("#legend").split() != [] and str(pages["cached"]) in page.text("#legend")


def test_each_request_shows_its_state_and_its_progress(open_page, server):
    server.engine = FakeEngine(max_num_seqs=1)
    server.engine.add("first", list(range(100)), max_tokens=50)
    server.engine.add("second", list(range(200, 220)), max_tokens=60, priority=3)
    server.engine.step(5)
    page = open_page("dashboard")
    page.wait("state")
    first, second = page.evaluate("[...document.querySelectorAll('#requests li')].map((row) => row.innerText)")
    assert "running" in first and "prompt 100/100 · output 5/50 · 7 pages" in first
    assert "waiting" in second and "prompt 0/20 · output 0/60 · 0 pages" in second and "priority 3" in second
    assert "1 running, 1 waiting" in page.text("#requests-note")


def test_pointing_at_a_request_lights_up_its_pages_and_pointing_at_a_page_names_its_holders(open_page, server):
    share_pages(server.engine)
    requests = server.engine.snapshot()["requests"]
    page = open_page("dashboard")
    page.wait("state")
    lit = page.evaluate("colours.lit")
    page.point_at("#requests li:nth-child(2)")
    page.wait_for_text(f"{requests[1]['id']} holds {requests[1]['num_pages']} pages", "#hint")
    shown = [page_id for page_id, colour in enumerate(pixels(page), start=1) if colour == lit]
    assert shown == sorted(requests[1]["block_table"])

    page.evaluate("map.scrollIntoView()")
    shared = requests[0]["block_table"][0]
    x, y = page.evaluate(f"""(() => {{
        const box = map.getBoundingClientRect(), at = {shared - 1};
        return [(at % grid.columns + .5) * grid.size + box.x, (Math.floor(at / grid.columns) + .5) * grid.size + box.y];
    }})()""")
    page.point(x, y)
    page.wait_for_text(f"Page {shared} shared by 3: parent, fork-1, fork-2", "#hint")
    assert page.evaluate("document.querySelectorAll('#requests li.lit').length") == 3


def test_the_map_can_be_walked_by_keyboard(open_page, server):
    page = open_page("dashboard")
    page.wait("state")
    page.evaluate("map.focus()")
    for key, code in (("ArrowRight", 39), ("ArrowRight", 39), ("ArrowDown", 40)):
        page.press(key, code)
    page.wait_for_text(f"Page {2 + page.evaluate('grid.columns')} free", "#hint")


def test_rates_figures_and_latencies_follow_the_engine(open_page, server):
    page = open_page("dashboard")
    page.wait("state")
    assert tile(page, "Output tokens/s") == "0" and "none ended" in page.text("#latency-note")
    with server.lock:
        server.engine.add("a", list(range(64)), max_tokens=20)
        server.engine.step(20)
        server.watch.record(Output(server.engine.ended[0]))
    page.wait("document.querySelector('#latency-note').innerText.includes('1 sequence')")
    assert tile(page, "Output tokens/s") != "0" and tile(page, "Prompt tokens/s") != "0"
    rows = page.text("#latencies").split("\n")
    assert len(rows) == 4 and all(row.endswith(("ms", " s")) for row in rows)
    assert "prompts" in page.evaluate("document.querySelector('#batch-chart').getAttribute('aria-label')")


def test_swap_space_is_shown_where_there_is_some(open_page, server):
    page = open_page("dashboard")
    page.wait("state")
    assert page.text("#swap") == ""
    with server.lock:
        server.engine = FakeEngine(num_pages=64, swap_pages=30)
        for i in range(4):
            server.engine.add(f"{i}", list(range(1000 * i, 1000 * i + 500)), max_tokens=2)
        server.engine.step(12)
        num_held = server.engine.pool.swap_space.num_in_memory
    assert num_held
    page.wait_for_text(f"{num_held} of 30 pages", "#swap")


def test_the_dashboard_asks_for_the_key_keeps_it_for_the_tab_and_sends_it(open_page, server):
    server.key = "right"
    page = open_page("dashboard")
    page.wait("document.querySelector('#key-dialog').open")
    assert page.text("#status") == "Key needed" and "Incorrect API key provided." in page.text("#key-reason")
    page.write("#key", "wrong")
    page.press("Enter", 13, "\r")
    page.wait_for_text("Incorrect API key provided.", "#banner")
    page.click("#banner-key")
    page.write("#key", "right")
    page.press("Enter", 13, "\r")
    page.wait_for_text("Live", "#status")
    page.wait_for_text("tiny-llama", "#model")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]


def test_a_connection_that_is_lost_is_said_and_found_again(open_page, server):
    page = open_page("dashboard")
    page.wait_for_text("Live", "#status")
    server.stop()
    page.wait_for_text("Connection lost", "#status")
    assert "The server cannot be reached. Trying again every 2 seconds." in page.text("#banner")
    assert re.search(r"What you see is of \d+ seconds? ago", page.text("#banner-age"))
    assert page.evaluate("document.querySelector('#main').classList.contains('stale')")
    server.start(server.port)
    page.wait_for_text("Live", "#status")
    assert page.evaluate("document.querySelector('#banner').hidden")
    assert not page.evaluate("document.querySelector('#main').classList.contains('stale')")


def test_an_engine_that_is_busy_is_said_to_be(open_page, server):
    page = open_page("dashboard")
    page.wait_for_text("Live", "#status")
    server.delay = 3.2
    page.wait_for_text("Waiting", "#status")
    page.wait_for_text("Live", "#status")


def test_a_page_that_is_hidden_asks_nothing(open_page, server):
    page = open_page("dashboard")
    page.wait_for_text("Live", "#status")
    page.evaluate("""Object.defineProperty(document, 'hidden', {get: () => globalThis.isHidden, configurable: true});
        globalThis.isHidden = true; document.dispatchEvent(new Event('visibilitychange'))""")
    page.evaluate("new Promise((done) => setTimeout(done, 700))")
    before = server.num_looks
    page.evaluate("new Promise((done) => setTimeout(done, 1200))")
    assert server.num_looks == before
    page.evaluate("globalThis.isHidden = false; document.dispatchEvent(new Event('visibilitychange'))")
    page.wait(f"state.time > {page.evaluate('state.time')}")


def test_a_large_pool_and_many_requests_are_drawn_quickly(open_page, server):
    server.engine = FakeEngine(num_pages=20000, max_num_seqs=256, max_num_batched_tokens=2**18)
    for i in range(300):
        server.engine.add(f"request-{i}", list(range(7 * i, 7 * i + 900)))
    server.engine.step(3)
    page = open_page("dashboard")
    page.wait("state")
    page.wait_for_text("a cell is 5 pages", "#pool-note")
    assert page.evaluate("document.querySelectorAll('#requests li').length") == 256
    assert page.evaluate("(() => { const t = performance.now(); draw(); return performance.now() - t })()") < 400
