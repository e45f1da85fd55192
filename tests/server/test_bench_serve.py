"""`jpaged bench serve`, against a server that answers by a script."""

from __future__ import annotations

import json
import subprocess
import sys

import click.testing
import numpy as np
import pytest
from fake_openai import BREAK, FakeServer, chunk, plain_answer, serving, usage_chunk
from starlette.responses import JSONResponse

from jpaged.bench_serve.answer import Answer, EventLines, Meter, message_of
from jpaged.bench_serve.calls import Call, arrival_times, drawn_calls, shuffled
from jpaged.bench_serve.load import Run
from jpaged.bench_serve.summary import meets, parse_goodput, running_requests, summarize, token_rates
from jpaged.cli import main


@pytest.fixture(scope="module")
def running_server():
    with serving(FakeServer()) as server:
        yield server


@pytest.fixture
def server(running_server):
    """One server for all tests, as new for each."""
    vars(running_server).update(vars(FakeServer()) | {"url": running_server.url})
    return running_server


@pytest.fixture
def bench(server, tmp_path):
    """Runs the command and returns its result, with what it wrote as JSON."""

    def run(*arguments, expect=0, url=None):
        path = tmp_path / "out.json"
        flags = ["bench", "serve", "--url", url or server.url, "--json", path, *arguments]
        result = click.testing.CliRunner(env={"OPENAI_API_KEY": ""}).invoke(main, [str(flag) for flag in flags])
        assert result.exit_code == expect, result.output
        result.figures = json.loads(path.read_text()) if path.exists() else None
        return result

    return run


def few(count=2, output_len=2):
    return "--num-requests", count, "--input-len", 4, "--output-len", output_len


def answered(*events, sent=0.0, end=None):
    """The Answer to a stream of (time, event)."""
    answer = Answer(sent)
    meter = Meter(answer)
    for now, event in events:
        meter.see(now, event if isinstance(event, str) else json.dumps(event))
    meter.end(events[-1][0] if end is None else end)
    return answer


# What one stream measures.


def test_the_times_of_a_stream_are_those_of_its_chunks():
    words = [(1.5, chunk("a", 1)), (1.75, chunk("b", 2)), (2.5, chunk("c", 3, "stop"))]
    answer = answered(*words, (2.5, usage_chunk(3)), (2.5, "[DONE]"), sent=1.0)
    assert (answer.ttft, answer.tpot, answer.itl, answer.e2e_latency) == (0.5, 0.5, [0.25, 0.75], 1.5)
    assert (answer.num_prompt_tokens, answer.num_output_tokens, answer.error, answer.exact) == (3, 3, None, True)


def test_tokens_that_come_in_one_chunk_have_gaps_of_zero_between_them():
    answer = answered((1.0, chunk("a b", 2)), (2.0, chunk("c d e", 5, "length")), (2.0, "[DONE]"))
    assert answer.itl == [0.0, 1.0, 0.0, 0.0]
    assert answer.tpot == 0.25 == sum(answer.itl) / len(answer.itl)


def test_a_chunk_of_a_token_without_text_counts_when_the_server_tells_tokens():
    answer = answered((1.0, chunk("", 1)), (2.0, chunk("é", 2)), (3.0, chunk("", 2, "stop")), (3.0, "[DONE]"))
    assert (answer.ttft, answer.itl, answer.num_output_tokens) == (1.0, [1.0], 2)


def test_without_counts_in_chunks_each_chunk_with_content_is_a_gap_and_usage_the_count():
    role = {"choices": [{"delta": {"role": "assistant", "content": ""}}]}
    words = [{"choices": [{"delta": {"content": text}}]} for text in ("a b", "c d")]
    end = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": None}
    answer = answered((1.0, role), (2.0, words[0]), (4.0, words[1]), (4.5, end), (5.0, usage_chunk(5)), (5.0, "[DONE]"))
    assert (answer.ttft, answer.itl, answer.num_output_tokens, answer.exact) == (2.0, [2.0], 5, False)
    assert answer.tpot == 0.5
    assert answer.pieces == [(2.0, 2.5), (4.0, 2.5)]


def test_without_any_usage_chunks_are_counted():
    answer = answered((1.0, chunk("a")), (2.0, chunk("b", None, "stop")), (2.0, "[DONE]"))
    assert (answer.num_output_tokens, answer.exact) == (2, False)


def test_counts_in_the_last_chunk_alone_are_not_taken_for_counts_of_each():
    answer = answered((1.0, chunk("a")), (2.0, chunk("b")), (3.0, chunk("c", 3, "stop")), (3.0, "[DONE]"))
    assert (answer.num_output_tokens, answer.exact, answer.itl) == (3, False, [1.0, 1.0])


def test_thoughts_and_tool_calls_are_content():
    chunks = [
        {"choices": [{"delta": delta}]} for delta in ({"reasoning_content": "hm"}, {"tool_calls": [{"index": 0}]})
    ]
    assert answered((1.0, chunks[0]), (2.0, chunks[1]), (2.0, "[DONE]")).itl == [1.0]


def test_an_answer_ends_with_done_and_not_with_the_connection():
    assert answered((1.0, chunk("a", 1, "stop")), (1.5, "[DONE]"), end=9.0).e2e_latency == 1.5
    without_done = answered((1.0, chunk("a", 1, "stop")), end=9.0)
    assert (without_done.e2e_latency, without_done.error) == (9.0, None)


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([(1.0, chunk("a", 1))], "broken stream"),
        ([(1.0, "{half")], "broken stream"),
        ([(1.0, "[1]")], "broken stream"),
        ([(1.0, {"error": {"message": "out of memory"}}), (1.0, "[DONE]")], "error in the stream"),
    ],
)
def test_a_stream_without_its_end_or_with_an_error_is_one(events, kind):
    assert answered(*events).error == kind


def test_events_are_cut_wherever_their_bytes_were():
    stream = 'data: {"a": "é"}\r\n\r\n: a comment\n\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]'.encode()
    whole = ['{"a": "é"}', "one\ntwo"]
    for cut in range(len(stream)):
        lines = EventLines()
        assert lines.feed(stream[:cut]) + lines.feed(stream[cut:]) == whole
        assert lines.end() == ["[DONE]"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"error": {"message": "too long"}}, "too long"),
        ({"message": "too long"}, "too long"),
        ({"error": "too long"}, "too long"),
        ({"detail": "too long"}, "too long"),
        (["too long"], "['too long']"),
    ],
)
def test_the_message_of_an_error_is_found_as_servers_put_it(data, message):
    assert message_of(data) == message


# What many of them measure.


def finished(sent, *times, **fields):
    return Answer(sent, ended=times[-1], pieces=[(time, 1) for time in times], num_output_tokens=len(times), **fields)


def test_a_summary_counts_what_was_answered_over_the_whole_time():
    answers = [
        finished(0.0, 1.0, 2.0, due=0.0, num_prompt_tokens=10),
        finished(1.0, 3.0, 4.0, due=1.0, num_prompt_tokens=30),
        Answer(0.5, 0.5, ended=0.75, error="status 500", detail="first", num_output_tokens=99),
        Answer(0.5, 0.5, ended=0.75, error="status 500", detail="second"),
    ]
    found = summarize(Run(answers, 4.0, [0.001]), {"ttft": 1.5})
    assert (found.num_requests, found.num_failed, found.errors) == (4, 2, {"status 500": 2})
    assert found.error_details == {"status 500": "first"}
    assert (found.request_throughput, found.output_throughput, found.total_throughput) == (0.5, 1.0, 11.0)
    assert (found.goodput, found.goodput_share) == (0.25, 0.25)
    assert (found.concurrency_max, found.concurrency_mean) == (3, (2 + 3 + 0.25 * 2) / 4)
    assert (found.ttft["mean"], found.ttft["max"], found.tpot["p50"], found.itl["p99"]) == (1.5, 2.0, 1.0, 1.0)
    assert found.warnings == ["2 of 4 requests failed; no figure includes them"]


def test_goodput_asks_for_all_limits_at_once():
    one = finished(0.0, 1.0, 1.5, 2.0)
    assert meets(one, {"ttft": 1.0, "tpot": 0.5, "e2e": 2.0})
    for limits in ({"ttft": 0.9, "e2e": 9}, {"tpot": 0.4}, {"ttft": 1.0, "tpot": 0.5, "e2e": 1.9}):
        assert not meets(one, limits)
    assert meets(finished(0.0, 1.0), {"tpot": 0.001}), "one token has no time per token"
    assert not meets(Answer(0.0, ended=0.1), {"ttft": 9.0}), "no token came"
    assert not meets(finished(0.0, 1.0, error="timeout"), {"ttft": 9.0})


def test_limits_of_goodput_are_read_or_refused():
    assert parse_goodput("ttft=0.5, tpot=0.05,e2e=10") == {"ttft": 0.5, "tpot": 0.05, "e2e": 10.0}
    assert parse_goodput(None) is None
    for text in ("ttft", "ttft=", "ttft=soon", "ttft=-1", "ttft=nan", "itl=1", ""):
        with pytest.raises(ValueError, match="limits in seconds"):
            parse_goodput(text)


def test_a_client_that_is_late_says_so():
    def warnings(lag, delay, ttft):
        answers = [finished(i + lag, i + lag + ttft, due=i) for i in range(20)]
        return " ".join(summarize(Run(answers, 30.0, [delay])).warnings)

    assert warnings(0.0, 0.0, 0.1) == ""
    assert warnings(0.04, 0.0, 1.0) == "", "small beside what is measured"
    assert "sent more than 40 ms after they were due" in warnings(0.04, 0.0, 0.1)
    assert "busy" in warnings(0.0, 0.04, 0.1)


def test_the_timeline_has_every_request_and_token():
    answers = [finished(0.0, 1.0, 2.0), finished(1.0, 3.0), finished(2.0, 4.0)]
    assert running_requests(answers) == [(0.0, 1), (1.0, 2), (2.0, 1), (2.0, 2), (3.0, 1), (4.0, 0)]
    rates = token_rates(answers, 4.0, num_bins=4)
    assert rates == [(0.5, 0.0), (1.5, 1.0), (2.5, 1.0), (3.5, 2.0)]
    assert sum(rate for _, rate in rates) == 4


# What is sent, and when.


def test_poisson_arrivals_have_the_mean_and_the_spread_of_their_rate():
    times = arrival_times(20_000, 50.0, "poisson", 7)
    gaps = np.diff(times)
    assert times[0] == 0
    assert np.mean(gaps) == pytest.approx(1 / 50, rel=0.03)
    assert np.std(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert times == arrival_times(20_000, 50.0, "poisson", 7) != arrival_times(20_000, 50.0, "poisson", 8)


def test_other_arrivals_are_even_or_all_at_once():
    assert arrival_times(3, 4.0, "fixed", 0) == [0.0, 0.25, 0.5]
    assert arrival_times(3, float("inf"), "poisson", 0) == [0.0] * 3
    assert arrival_times(1, 4.0, "poisson", 0) == [0.0]


def test_drawn_prompts_have_their_lengths_and_their_seed():
    calls = drawn_calls(200, 20, 10, 0.5, 3, vocab_size=100)
    assert {len(call.prompt) for call in calls} == set(range(10, 31))
    assert {call.max_tokens for call in calls} == set(range(5, 16))
    assert max(max(call.prompt) for call in calls) == 99
    assert calls == drawn_calls(200, 20, 10, 0.5, 3, vocab_size=100) != drawn_calls(200, 20, 10, 0.5, 4, vocab_size=100)
    words = drawn_calls(3, 20, 1, 0.0, 3, vocab_size=None)
    assert [len(call.prompt.split(" ")) for call in words] == [20] * 3
    assert drawn_calls(5, 1, 1, 1.0, 0, vocab_size=9)[0].max_tokens >= 1


@pytest.mark.parametrize("prompt", [list(range(50)), " ".join(map(str, range(50)))])
def test_a_shuffled_prompt_has_the_same_words_in_another_order(prompt):
    call = shuffled(Call(prompt, 5), 0)
    assert call.prompt != prompt and sorted(call.prompt) == sorted(prompt) and call.max_tokens == 5
    image = {"role": "user", "content": [{"type": "image_url"}]}
    messages = [{"role": "user", "content": " ".join(map(str, range(50)))}, image]
    found = shuffled(Call(messages, 5), 0).prompt
    assert found[0]["content"] != messages[0]["content"] and found[1] == image


# The command.


def test_every_request_is_sent_once_and_its_tokens_are_counted(bench, server):
    result = bench(*few(5, 3), "--seed", 1)
    figures = result.figures
    assert (figures["num_requests"], figures["num_output_tokens"], figures["num_prompt_tokens"]) == (5, 15, 15)
    assert (figures["num_failed"], figures["exact_gaps"], figures["tokens_per_chunk"]) == (0, True, 1.0)
    assert [len(figures["requests"]), figures["settings"]["model"], figures["settings"]["rate"]] == [5, "tiny", None]
    probe, *bodies = server.seen
    assert probe["max_tokens"] == 1 and len(bodies) == 5
    expected = drawn_calls(5, 4, 3, 0.0, 1, vocab_size=320)
    assert sorted(body["prompt"] for body in bodies) == sorted(call.prompt for call in expected)
    assert all(body["temperature"] == 0 and body["ignore_eos"] and body["model"] == "tiny" for body in bodies)
    for label in ("requests/s", "output tokens/s", "TTFT", "TPOT", "ITL", "latency", "sent late by", "p99"):
        assert label in result.stdout
    assert figures["ttft"].keys() == {"mean", "p50", "p90", "p99", "max"}


def test_delays_of_the_server_are_in_the_figures(bench, server):
    def slow(body):
        if body["max_tokens"] == 1:  # the probe
            return plain_answer(body)
        return [0.15, chunk("a", 1), 0.2, chunk("b", 2), 0.25, chunk("c", 3, "stop"), 0.1, usage_chunk(3), "[DONE]"]

    server.script = slow
    figures = bench(*few(3, 3), "--goodput", "ttft=30,e2e=60").figures
    assert 0.15 <= figures["ttft"]["p50"] < 5
    assert 0.22 <= figures["tpot"]["p50"] < 5
    assert 0.24 <= figures["itl"]["max"] < 5
    assert 0.69 <= figures["e2e_latency"]["p50"] < 10
    assert figures["goodput_share"] == 1
    assert bench(*few(3, 3), "--goodput", "ttft=30,tpot=0.1").figures["goodput_share"] == 0


def test_an_open_loop_sends_whatever_has_come_back(bench, server):
    all_there = lambda: server.most_running == 6  # noqa: E731
    server.script = lambda body: plain_answer(body) if body["max_tokens"] == 1 else [all_there, *plain_answer(body)]
    figures = bench(*few(6), "--rate", 40, "--arrivals", "fixed").figures
    assert figures["concurrency_max"] == server.most_running == 6
    assert [one["due"] for one in figures["requests"]] == [index / 40 for index in range(6)]
    assert all(one["sent"] >= one["due"] for one in figures["requests"])
    assert figures["lag"]["mean"] >= 0


def test_a_closed_loop_keeps_so_many_under_way(bench, server):
    server.script = lambda body: [0.02, *plain_answer(body)]
    figures = bench(*few(9), "--concurrency", 3).figures
    assert figures["concurrency_max"] == server.most_running == 3
    assert figures["lag"] is None and len(server.seen) == 10


def test_failures_are_counted_by_kind_and_the_rest_is_measured(bench, server):
    fates = {
        0: lambda body: JSONResponse({"error": {"message": "overloaded"}}, 503),
        1: lambda body: [chunk("a", 1), BREAK],
        2: lambda body: [chunk("a", 1), 60.0],
        3: lambda body: [{"error": {"message": "out of pages"}}],
        4: lambda body: [chunk("a", 1)],
    }
    count = iter(range(-1, 99))
    server.script = lambda body: fates.get(next(count), plain_answer)(body)
    result = bench(*few(7), "--timeout", 2, "--concurrency", 1)
    assert result.figures["errors"] == {"broken stream": 2, "status 503": 1, "timeout": 1, "error in the stream": 1}
    assert result.figures["num_output_tokens"] == 4
    assert result.figures["error_details"]["status 503"] == "overloaded"
    assert "5 of 7 requests failed" in result.stderr
    assert [one["error"] for one in result.figures["requests"]][:2] == ["status 503", "broken stream"]


def test_a_last_chunk_without_its_empty_line_counts(bench, server):
    end = b"data: " + json.dumps(chunk("b", 2, "stop")).encode()
    server.script = lambda body: [chunk("a", 1), end]
    assert bench(*few(2)).figures["num_output_tokens"] == 4


def test_stream_options_that_a_server_refuses_are_left_out(bench, server):
    def picky(body):
        if "continuous_usage_stats" in body.get("stream_options", {}):
            return JSONResponse({"error": {"message": "unknown field"}}, 400)
        return plain_answer(body)

    server.script = picky
    result = bench(*few(2, 3))
    assert server.seen[-1]["stream_options"] == {"include_usage": True}
    assert (result.figures["exact_gaps"], result.figures["num_output_tokens"]) == (False, 6)
    assert "ITL is the time between chunks" in result.stderr


def test_without_a_stream_only_the_whole_is_timed(bench, server):
    usage = {"prompt_tokens": 4, "completion_tokens": 2}
    server.script = lambda body: JSONResponse({"choices": [{"text": "a b"}], "usage": usage})
    figures = bench(*few(3), "--no-stream").figures
    assert figures["ttft"] is figures["tpot"] is figures["itl"] is None
    assert figures["e2e_latency"]["p50"] > 0 and figures["num_output_tokens"] == 6
    assert all(body["stream"] is False and "stream_options" not in body for body in server.seen)


def test_prompts_of_a_file_go_to_the_chat(bench, server, tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    (tmp_path / "prompts").write_text(json.dumps("hi") + "\n\n" + json.dumps(messages) + "\n")
    flags = ["--prompts", tmp_path / "prompts", "--endpoint", "chat", "--output-len", 5, "--concurrency", 1]
    bench(*flags, "--extra-body", '{"temperature": 0.5, "top_k": 7}', "--api-key", "secret")
    bodies = server.seen[1:]
    assert [body["messages"] for body in bodies] == [[{"role": "user", "content": "hi"}], messages]
    assert all((body["temperature"], body["top_k"], body["max_tokens"]) == (0.5, 7, 5) for body in bodies)
    assert "ignore_eos" not in bodies[0]
    assert server.headers[-1]["authorization"] == "Bearer secret"


def test_a_workload_is_sent_as_token_ids(bench, server, tmp_path):
    works = [{"prompt": [1, 2, 3], "max_tokens": 3}, {"prompt": [4], "max_tokens": 2}, {"prompt": [5], "max_tokens": 9}]
    (tmp_path / "work.json").write_text(json.dumps({"ignore_eos": True, "w1": works}))
    flags = ["--workload", tmp_path / "work.json", "--name", "w1", "--num-requests", 2, "--concurrency", 1]
    bench(*flags)
    assert [(body["prompt"], body["max_tokens"]) for body in server.seen[1:]] == [([1, 2, 3], 3), ([4], 2)]
    assert all(body["ignore_eos"] for body in server.seen)
    bench(*flags, "--no-ignore-eos")
    assert "ignore_eos" not in server.seen[-1]


def test_a_server_without_a_vocabulary_gets_words(bench, server):
    server.vocab_size = None
    bench(*few())
    assert all(len(body["prompt"].split(" ")) == 4 for body in server.seen)


def test_requests_to_warm_up_are_sent_ahead_and_not_measured(bench, server):
    figures = bench(*few(2), "--warm-up-requests", 3).figures
    assert (len(server.seen), figures["num_requests"]) == (1 + 3 + 2, 2)
    prompts = [tuple(body["prompt"]) for body in server.seen]
    assert len(set(prompts[-2:]) & set(prompts[:-2])) == 0


def test_pictures_are_drawn(bench, server, tmp_path):
    bench(*few(), "--plots", tmp_path / "figures")
    names = {f"{name}.{kind}" for name in ("latencies", "timeline") for kind in ("png", "svg")}
    assert {path.name for path in (tmp_path / "figures").iterdir()} == names
    usage = {"prompt_tokens": 4, "completion_tokens": 2}
    server.script = lambda body: JSONResponse({"choices": [{"text": "a b"}], "usage": usage})
    bench(*few(), "--plots", tmp_path / "figures", "--no-stream")


# What goes wrong is told in a sentence, and leaves no file.


def sentence(result):
    assert len(result.stderr.splitlines()) == 1, result.stderr
    return result.stderr


def test_a_server_that_is_not_there_is_told(bench):
    assert "no server answers at http://127.0.0.1:9" in sentence(bench(url="http://127.0.0.1:9", expect=2))
    assert "must begin with http" in sentence(bench(url="localhost:8000", expect=2))


def test_a_key_that_is_refused_is_told(bench, server):
    server.api_key = "secret"
    assert "refuses the key (status 401): give --api-key" in sentence(bench(*few(), expect=2))
    bench(*few(), "--api-key", "secret")
    bench(*few(), "--api-key", "secret", url=server.url + "/v1/")


def test_a_model_that_is_unknown_is_told_with_those_there_are(bench, server):
    result = bench("--model", "absent", expect=2)
    assert "has no model absent; it has: tiny, other" in sentence(result)
    bench("--model", "other", *few())
    assert server.seen[-1]["model"] == "other"
    server.models = []
    assert "name one with --model" in sentence(bench(expect=2))
    bench("--model", "unlisted", *few())


def test_a_first_request_that_fails_is_told_with_the_servers_words(bench, server):
    server.script = lambda body: JSONResponse({"error": {"message": "ignore_eos is unknown"}}, 400)
    assert "status 400 (ignore_eos is unknown)" in sentence(bench(*few(), expect=2))


def test_a_run_without_any_answer_is_an_error_and_leaves_the_file_as_it_was(bench, server, tmp_path):
    bench(*few())
    before = (tmp_path / "out.json").read_text()
    count = iter(range(99))
    server.script = lambda body: plain_answer(body) if not next(count) else JSONResponse({"message": "no"}, 500)
    assert "no request was answered: 2 x status 500 (no)" in sentence(bench(*few(), expect=2))
    assert (tmp_path / "out.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_file_that_cannot_be_written_is_told_before_anything_is_sent(bench, server, tmp_path):
    assert bench("--json", tmp_path / "absent" / "out.json", expect=2).exit_code == 2
    assert server.seen == []


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--rate", 1, "--concurrency", 1], "leave one out"),
        (["--rate", 0], "--rate must be greater than 0"),
        (["--rate", "nan"], "--rate must be greater than 0"),
        (["--goodput", "itl=1"], "limits in seconds"),
        (["--no-stream", "--goodput", "ttft=1"], "e2e alone"),
        (["--extra-body", "{"], "not JSON"),
        (["--extra-body", "[1]"], "no JSON object"),
        (["--extra-body", '{"n": 2}'], "must not hold 'n'"),
        (["--name", "w1"], "--workload, which is not given"),
        (["--prompts", "PROMPTS", "--input-len", 3], "leave --input-len out"),
        (["--prompts", "PROMPTS"], "go to --endpoint chat"),
        (["--prompts", "PROMPTS", "--endpoint", "chat", "--num-requests", 2], "the file has 1 requests"),
        (["--prompts", "BAD"], "line 2 is neither"),
        (["--prompts", "EMPTY"], "has no prompts"),
        (["--workload", "WORK"], "needs --name"),
        (["--workload", "WORK", "--name", "w1", "--output-len", 3], "leave --output-len out"),
        (["--workload", "WORK", "--name", "w1", "--endpoint", "chat"], "go to --endpoint completions"),
        (["--workload", "WORK", "--name", "w2"], "no workload w2; it holds: w1"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_anything_is_sent(bench, server, tmp_path, flags, complaint):
    files = {
        "PROMPTS": '[{"role": "user", "content": "hello"}]\n',
        "BAD": '"good"\n[1, 2]\n',
        "EMPTY": "\n",
        "WORK": json.dumps({"w1": [{"prompt": [1], "max_tokens": 1}]}),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    result = bench(*(tmp_path / flag if flag in files else flag for flag in flags), expect=2)
    assert complaint in " ".join(result.stderr.replace("│", " ").split())
    assert server.seen == []


def test_the_command_imports_no_jax_and_tells_what_is_missing_without_aiohttp():
    code = """if True:
        import sys
        sys.modules.update(dict.fromkeys(BLOCKED))
        import click.testing
        from jpaged.cli import main
        result = click.testing.CliRunner().invoke(main, "bench serve --url http://127.0.0.1:9".split())
        print(result.stderr, sorted(sys.modules.keys() & {"jax", "jaxlib", "matplotlib"}))
    """

    def run(*blocked):
        command = [sys.executable, "-c", code.replace("BLOCKED", repr(blocked))]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    told = run()
    assert "no server answers" in told and told.endswith(" []\n")
    assert 'aiohttp, which is missing here: pip install "jpaged[bench]"' in run("aiohttp")
