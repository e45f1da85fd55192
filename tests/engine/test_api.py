"""`generate`, `stream` and `LLM`: what may be given, in which order results come, what is left behind."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import engine_support as support
import jax.numpy as jnp
import numpy as np
import pytest
import stored_tokenizers

import jpaged
from jpaged.engine import api
from jpaged.host.config import EngineConfig
from jpaged.host.sampling_params import SamplingParams
from jpaged.host.tokenizer import Tokenizer

OPTIONS = support.LIMITS | {"warm_up": False, "check_integrity": True}
IDS = [[5, 6, 7], [8, 9], [10] * 20]


@pytest.fixture(scope="module")
def params():
    return support.tiny("llama")


@pytest.fixture(scope="module")
def talker():
    """A parrot with a chat template."""
    plain = stored_tokenizers.smollm2()
    tokenizer = Tokenizer(
        plain._backend, special_tokens=plain.special_tokens, chat_templates={"default": stored_tokenizers.CHATML}
    )
    return support.parrot(tokenizer, tokenizer.encode(" one two three", add_special_tokens=False))


@pytest.fixture(autouse=True)
def engines_are_idle():
    yield
    for engine in api._engines.values():
        support.assert_idle(engine)
        assert engine.weights is None, "the params are kept alive"


@pytest.fixture(scope="module")
def expected(params):
    engine = support.build(params)
    return [support.tokens(support.serve(engine, [ids]))[0] for ids in IDS]


def generate(params, prompts, sampling=support.GREEDY, **options):
    return jpaged.generate(params, prompts, sampling, **(OPTIONS | options))


@pytest.mark.parametrize(
    "prompts",
    [
        IDS,
        tuple(map(tuple, IDS)),
        [np.array(ids) for ids in IDS],
        [jnp.array(ids) for ids in IDS],
        [np.array(ids, np.uint16) for ids in IDS],
        [IDS[0], tuple(IDS[1]), np.array(IDS[2])],
        [[np.int32(i) for i in ids] for ids in IDS],
    ],
    ids=["lists", "tuples", "numpy", "jax", "uint16", "mixed", "numpy numbers"],
)
def test_several_prompts_of_token_ids(params, expected, prompts):
    outputs = generate(params, prompts)
    assert support.tokens(outputs) == expected
    assert [output.prompt_token_ids for output in outputs] == IDS
    assert all(output.prompt is None and output.outputs[0].text == "" and output.finished for output in outputs)


@pytest.mark.parametrize("as_one", [list, tuple, np.array, jnp.array, lambda ids: [np.int64(i) for i in ids]])
def test_one_prompt_of_token_ids(params, expected, as_one):
    assert support.tokens(generate(params, as_one(IDS[0]))) == expected[:1]


@pytest.mark.parametrize("array", [np.array, jnp.array])
def test_rows_of_an_array_are_prompts(params, array):
    rows = [[5, 6, 7], [8, 9, 10]]
    assert support.tokens(generate(params, array(rows))) == support.tokens(generate(params, rows))


def test_no_prompts_give_no_results(params):
    assert generate(params, []) == []
    assert list(jpaged.stream(params, [], **OPTIONS)) == []


CHAT = [{"role": "user", "content": "Count."}]


def test_text_and_chats_are_prompts(talker):
    asked = {"one text": "Count:", "texts": ["Count:"], "one chat": CHAT, "chats": [CHAT], "a tuple": (tuple(CHAT),)}
    for kind, prompts in asked.items():
        (output,) = generate(talker, prompts, SamplingParams(temperature=0))
        assert output.outputs[0].text == " one two three", kind
        assert output.prompt == ("Count:" if "text" in kind else "<|im_start|>user\nCount.<|im_end|>\n"), kind
    mixed = generate(talker, ["Count:", talker.tokenizer.encode("Count"), CHAT], SamplingParams(temperature=0))
    assert [output.outputs[0].text for output in mixed] == [" one two three"] * 3


def test_one_sampling_for_all_or_one_each(params, expected):
    each = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (3, 1, 7)]
    assert support.tokens(generate(params, IDS, each)) == [ids[:n] for ids, n in zip(expected, (3, 1, 7), strict=True)]
    assert support.tokens(generate(params, IDS, tuple(each)))[2] == expected[2][:7]
    assert [len(output.outputs[0].token_ids) for output in generate(params, IDS, None)] <= [16] * 3


def test_results_come_in_the_order_of_the_prompts(params):
    """The first prompt is the last to finish, and more prompts come than rows."""
    each = [SamplingParams(temperature=0, max_tokens=20 - 2 * i, ignore_eos=True) for i in range(9)]
    prompts = [[20 + i, 5] for i in range(9)]
    outputs = generate(params, prompts, each)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert [len(ids) for ids in support.tokens(outputs)] == [20 - 2 * i for i in range(9)]


# Streams


def test_a_stream_yields_each_growth_and_ends_as_generate_does(params, expected):
    seen = {str(i): [] for i in range(3)}
    for output in jpaged.stream(params, IDS, support.GREEDY, **OPTIONS):
        seen[output.request_id].append(output)
    for i, outputs in enumerate(seen.values()):
        assert [output.outputs[0].token_ids for output in outputs] == [expected[i][: n + 1] for n in range(20)]
        assert [output.finished for output in outputs] == [False] * 19 + [True]


def test_a_streams_text_grows_to_that_of_generate(talker):
    texts = [output.outputs[0].text for output in jpaged.stream(talker, "Count:", support.GREEDY, **OPTIONS)]
    assert texts[:3] == [" one", " one two", " one two three"]


def test_a_bad_prompt_is_told_when_the_stream_is_made(params):
    with pytest.raises(ValueError, match="400 is outside"):
        jpaged.stream(params, [[5], [400]], **OPTIONS)


@pytest.mark.parametrize("how", ["break", "close", "error", "never begun", "forgotten"])
def test_a_stream_that_is_left_frees_everything(params, expected, how):
    outputs = jpaged.stream(params, IDS, support.GREEDY, **OPTIONS)
    if how in ("break", "error"):
        try:
            for count, _ in enumerate(outputs):
                if count == 4:
                    if how == "break":
                        break
                    raise KeyError
        except KeyError:
            pass
    elif how != "never begun":
        next(outputs)
    if how == "close":
        outputs.close()
        assert list(outputs) == []
    del outputs
    gc.collect()
    (engine,) = [engine for engine in api._engines.values() if engine.config == EngineConfig(**OPTIONS)][-1:]
    assert not engine.has_unfinished_requests() and engine.num_free_pages == engine.num_pages
    assert support.tokens(generate(params, IDS)) == expected


def test_the_engine_is_free_once_the_last_request_of_a_stream_has_finished(params, expected):
    first = jpaged.stream(params, IDS[0], support.GREEDY, **OPTIONS)
    while not next(first).finished:
        pass
    second = jpaged.stream(params, IDS[1], support.GREEDY, **OPTIONS)
    next(second)
    first.close()  # has the same request ids, but nothing to abort
    assert [output.outputs[0].token_ids for output in second][-1] == expected[1]


def test_an_open_stream_is_not_disturbed_by_who_comes_meanwhile(params, expected):
    outputs = jpaged.stream(params, IDS[0], support.GREEDY, **OPTIONS)
    next(outputs)
    with pytest.raises(ValueError, match="in use: finish or close the running stream"):
        generate(params, IDS[1])
    with pytest.raises(ValueError, match="in use: finish or close the running stream"):
        jpaged.stream(params, IDS[1], **OPTIONS)
    assert [output.outputs[0].token_ids for output in outputs][-1] == expected[0]


def test_an_interrupted_generate_leaves_nothing_behind(params, expected, monkeypatch):
    generate(params, IDS)
    engine = next(reversed(api._engines.values()))
    steps, step = iter(range(5)), engine.step

    def interrupted():
        if next(steps) == 4:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(params, IDS)
    assert support.tokens(generate(params, IDS)) == expected


# Options


def test_options_reach_the_engine(params):
    given = {
        "page_size": 8,
        "max_num_seqs": 3,
        "max_num_batched_tokens": 24,
        "max_model_len": 40,
        "num_pages": 7,
        "dtype": "bfloat16",
        "warm_up": False,
        "check_integrity": True,
    }
    jpaged.generate(params, [[5]], SamplingParams(max_tokens=1), **given)
    made = next(reversed(api._engines.values()))
    llm = jpaged.LLM(params, **{name: value for name, value in given.items() if name != "dtype"}).engine
    for engine in (made, llm):
        assert (engine.max_model_len, engine.num_pages, engine._pool.page_size) == (40, 6, 8)
        assert engine._scheduler._queues.max_num_seqs == 3 and engine._scheduler.max_num_batched_tokens == 24
        assert engine._steps._programs.keys() <= {(16, 3, False), (24, 3, False), (1, 1, True)}
    assert made._kv_pages[0][0].dtype == "bfloat16" and llm._kv_pages[0][0].dtype == "float32"


def test_options_override_a_config(params):
    config = EngineConfig(**OPTIONS)
    engine = jpaged.Engine(params, config, max_num_seqs=2)
    assert engine.config == EngineConfig(**(OPTIONS | {"max_num_seqs": 2}))


# LLM


@pytest.fixture(scope="module")
def llm(talker):
    return jpaged.LLM(talker, **OPTIONS)


def test_llm_serves_prompts_and_chats(llm):
    greedy = SamplingParams(temperature=0)
    outputs = llm.generate(["Count:", "Again:"], greedy)
    assert [output.outputs[0].text for output in outputs] == [" one two three"] * 2
    assert [output.prompt for output in outputs] == ["Count:", "Again:"]
    (one,) = llm.chat(CHAT, greedy)
    several = llm.chat([CHAT, [*CHAT, {"role": "assistant", "content": "No."}]], [greedy, greedy])
    assert one.prompt == several[0].prompt == "<|im_start|>user\nCount.<|im_end|>\n"
    assert [output.outputs[0].text for output in [one, *several]] == [" one two three"] * 3
    support.assert_idle(llm.engine)


@pytest.mark.parametrize("messages", ["hello", ["hello"], [1, 2], [[1, 2]], [CHAT, "hello"], None])
def test_llm_chat_takes_nothing_but_messages(llm, messages):
    with pytest.raises(ValueError, match="messages"):
        llm.chat(messages)
    support.assert_idle(llm.engine)


def test_llm_loads_a_path_with_a_dtype(expected):
    llm = jpaged.LLM(str(support.CHECKPOINTS / "llama"), **OPTIONS)
    assert support.tokens(llm.generate(IDS, support.GREEDY)) == expected
    half = jpaged.LLM(str(support.CHECKPOINTS / "llama"), dtype="bfloat16", **OPTIONS)
    assert half.engine.weights["final_norm"].dtype == half.engine._kv_pages[0][0].dtype == "bfloat16"
    with pytest.raises(ValueError, match="Params already"):
        jpaged.LLM(support.tiny("llama"), dtype="float32")


# The progress bar


def test_no_progress_bar_where_no_terminal_is(params, capfd, monkeypatch):
    monkeypatch.setattr("jpaged.engine.progress.PATIENCE", 0.0)
    generate(params, IDS)
    assert capfd.readouterr() == ("", "")


def test_a_progress_bar_where_it_is_asked_for(params, capfd):
    generate(params, IDS, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and "3/3" in err and "tokens/s" in err


TERMINAL = """
import pty, os, sys
pid, master = pty.fork()
if not pid:
    os.execvp(sys.argv[1], sys.argv[1:])
text = b""
while True:
    try:
        part = os.read(master, 4096)
    except OSError:
        break
    if not part:
        break
    text += part
sys.stdout.buffer.write(text)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""

LONG_WORK = """
import sys
sys.path.insert(0, sys.argv[1])
import engine_support as support, jpaged
from jpaged.engine import progress
progress.PATIENCE = float(sys.argv[2])
options = support.LIMITS | {"warm_up": False}
outputs = jpaged.generate(support.tiny("llama"), [[5, 6]] * 9, support.GREEDY, **options)
print("done", len(outputs))
"""


@pytest.mark.parametrize("patience, shown", [(0.0, True), (1000.0, False)])
def test_on_a_terminal_long_work_shows_a_bar_and_short_work_none(patience, shown):
    command = [sys.executable, "-c", TERMINAL, sys.executable, "-c", LONG_WORK, os.path.dirname(__file__), patience]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm"}
    result = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "done 9" in result.stdout
    assert ("tokens/s" in result.stdout) is shown


# Arrays on several devices

SHARDED = """
import sys
sys.path.insert(0, sys.argv[1])
import dataclasses, engine_support as support, jax, jpaged
from jax.sharding import AxisType, NamedSharding, PartitionSpec

mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
stored = support.reference("llama")

def split(w):
    last = "x" if w.shape[-1] % 4 == 0 else None
    return jax.device_put(w, NamedSharding(mesh, PartitionSpec(*[None] * (w.ndim - 1), last)))

def served(move, **others):
    params = jax.tree.map(move, support.tiny("llama"))
    options = support.LIMITS | {"max_num_seqs": 1, "max_num_batched_tokens": 64, "warm_up": False} | others
    asked = [support.GREEDY, dataclasses.replace(support.GREEDY, logprobs=2)]
    outputs = jpaged.generate(params, list(stored["input_ids"]), asked, **options)
    assert support.tokens(outputs) == stored["greedy"].tolist()
    return outputs[1].outputs[0].top_logprobs

served(lambda w: jax.device_put(w, jax.devices()[2]))
served(lambda w: jax.device_put(w, NamedSharding(mesh, PartitionSpec())))
served(split)
jax.config.update("jax_disable_most_optimizations", False)  # for bits, see conftest.py
exact = served(split, deterministic=True)
assert served(split, deterministic=True, max_num_seqs=2, max_num_batched_tokens=16, page_size=8) == exact
print("all as stored")
"""


@pytest.mark.slow
def test_params_may_lie_on_another_device_or_on_several():
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
    }
    command = [sys.executable, "-c", SHARDED, os.path.dirname(__file__)]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0 and "all as stored" in result.stdout, result.stderr
