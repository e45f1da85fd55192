"""The chat in a real browser, before a server that says what a test has scripted."""

import json
import re


def talk(page, text):
    page.write("#prompt", text)
    page.press("Enter", 13, "\r")


def finish(page):
    page.wait("running === null")


def test_an_answer_is_shown_as_it_comes_and_the_conversation_is_sent_with_the_next_message(open_page, server):
    server.say = ["Once ", "upon ", 1.0, "a time."]
    page = open_page("chat")
    page.wait("document.querySelector('#model').value === 'tiny-llama'")
    talk(page, "Tell me a story")
    page.wait_for_text("Once upon", "#messages")
    assert "a time." not in page.text("#messages")
    finish(page)
    assert re.search(r"3 tokens · first after \d\.\d\d s · \d\.\d tokens/s", page.text("#messages"))
    talk(page, "Go on")
    finish(page)
    first, second = server.asked
    assert first == {
        "model": "tiny-llama",
        "messages": [{"role": "user", "content": "Tell me a story"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = {"role": "assistant", "content": "Once upon a time."}
    assert second["messages"] == [*first["messages"], answer, {"role": "user", "content": "Go on"}]


def test_what_is_set_is_sent(open_page, server):
    page = open_page("chat")
    page.wait("document.querySelector('#model').value")
    page.click("#toggle")
    page.write("#system", "Be brief.")
    page.write("#temperature", "0")
    page.write("#max-tokens", "12")
    page.evaluate("document.querySelector('#model').value = 'tiny-llama:adapter'")
    talk(page, "Hi")
    finish(page)
    (asked,) = server.asked
    assert asked["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (asked["model"], asked["temperature"], asked["max_tokens"]) == ("tiny-llama:adapter", 0, 12)


def test_what_the_model_says_is_shown_as_text_alone(open_page, server):
    evil = "<img src=x onerror=\"document.title='gone'\"><script>document.title='gone'</script>&amp;"
    server.say = [evil, "\n```html\n", evil, "\n```\n", "second\n  line"]
    page = open_page("chat")
    talk(page, evil)
    finish(page)
    assert page.evaluate("document.querySelectorAll('#messages img, #messages script').length") == 0
    assert page.evaluate("document.querySelector('#messages pre').textContent") == evil
    texts = page.evaluate("[...document.querySelectorAll('#messages .text')].map((text) => text.textContent)")
    assert texts == [evil, evil, "second\n  line"]
    assert page.evaluate("document.title") == "jpaged: chat"


def test_code_blocks_are_found_while_they_are_still_being_written(open_page):
    page = open_page("chat")
    text = "a\n````md title=x\n```\ninner\n```\n````\nb\n```\nopen"
    found = page.evaluate(f"blocks({json.dumps(text)}).map((b) => [b.code, b.language, b.text])")
    assert found == [[False, "", "a"], [True, "md", "```\ninner\n```"], [False, "", "b"], [True, "", "open"]]


def test_events_are_read_however_their_bytes_are_cut(open_page):
    page = open_page("chat")
    stream = 'data: {"a": "é→😀"}\r\n\r\n: comment\n\nevent: x\ndata: two\ndata: lines\n\ndata:[DONE]\n\n'
    found = page.evaluate(f"""(async () => {{
        const bytes = new TextEncoder().encode({json.dumps(stream)}), all = [];
        for (let size = 1; size <= bytes.length; size++) {{
            const cut = new ReadableStream({{ start(to) {{
                for (let at = 0; at < bytes.length; at += size) to.enqueue(bytes.slice(at, at + size));
                to.close();
            }} }});
            const data = [];
            for await (const one of events(cut)) data.push(one);
            all.push(JSON.stringify(data));
        }}
        return [...new Set(all)];
    }})()""")
    assert [json.loads(one) for one in found] == [['{"a": "é→😀"}', "two\nlines", "[DONE]"]]


def test_stop_ends_the_request_and_keeps_what_came(open_page, server):
    server.say = ["One, ", "two", 30.0, "three"]
    page = open_page("chat")
    talk(page, "Count")
    page.wait_for_text("One, two", "#messages")
    page.click("#stop")
    finish(page)
    assert "2 tokens" in page.text("#messages") and "stopped" in page.text("#messages")
    assert page.evaluate("turns.map((turn) => turn.content)") == ["Count", "One, two"]
    for _ in range(100):
        if server.num_gone:
            break
        page.evaluate("new Promise((done) => setTimeout(done, 20))")
    assert server.num_gone == 1


def test_an_error_of_the_server_is_shown_and_the_message_can_be_sent_again(open_page, server):
    server.error = 400, {"error": {"message": "max_tokens is too large: <b>12</b>", "type": "invalid_request_error"}}
    page = open_page("chat")
    talk(page, "Hello")
    page.wait_for_text("max_tokens is too large: <b>12</b>", "#messages .error")
    assert page.evaluate("[turns.length, document.querySelector('#prompt').value]") == [0, "Hello"]
    server.error = None
    talk(page, "Hello")
    finish(page)
    assert page.evaluate("document.querySelectorAll('.error').length") == 0


def test_an_error_in_the_middle_of_an_answer_is_shown_after_it(open_page, server):
    server.say = ["So far", {"error": {"message": "the engine has stopped"}}]
    page = open_page("chat")
    talk(page, "Hello")
    page.wait_for_text("the engine has stopped", "#messages .error")
    assert "So far" in page.text("#messages")


def test_an_answer_that_ends_before_it_is_whole_is_kept_and_said_to_be_cut(open_page, server):
    server.say, server.ends = ["So far"], False
    page = open_page("chat")
    talk(page, "Hello")
    page.wait_for_text("the answer ended early", "#messages .error")
    assert "So far" in page.text("#messages")


def test_a_server_that_is_gone_is_said_to_be(open_page, server):
    page = open_page("chat")
    page.wait("document.querySelector('#model').value")
    server.stop()
    talk(page, "Hello")
    page.wait_for_text("The connection to the server was lost", "#messages .error")


def test_the_chat_asks_for_the_key_and_sends_it(open_page, server):
    server.key = "right"
    page = open_page("chat")
    page.wait("document.querySelector('#key-dialog').open")
    page.write("#key", "right")
    page.press("Enter", 13, "\r")
    page.wait("document.querySelector('#model').value")
    talk(page, "Hi")
    page.wait_for_text("Hello.", "#messages")


def test_a_new_chat_begins_with_nothing(open_page, server):
    page = open_page("chat")
    talk(page, "Hi")
    finish(page)
    page.click("#new")
    talk(page, "Again")
    finish(page)
    assert server.asked[1]["messages"] == [{"role": "user", "content": "Again"}]
