"""After warm-up nothing compiles, whatever comes; a second start compiles nothing; new weights compile nothing."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
import weakref

import engine_support as support
import jax
import pytest
import workloads

import jpaged
from jpaged.engine import api
from jpaged.engine.compile import CompiledSteps, LateCompileError, use_compilation_cache
from jpaged.host.batch import Buckets
from jpaged.host.sampling_params import SamplingParams


class Events(list):
    """What JAX says that it does: with the counter of the engine itself, a mistake there would pass."""

    def __init__(self):
        super().__init__()
        jax.monitoring.register_event_duration_secs_listener(lambda event, duration, **_: self.append(event))

    def compiles(self) -> int:
        """Programs that were compiled or brought from the persistent cache; traced functions too."""
        return sum(event.startswith("/jax/core/compile/") for event in self)


@pytest.fixture(scope="module")
def events():
    heard = Events()  # JAX has no public way to end listening, so there is one for the module
    jax.jit(lambda x: x * 3 + len(heard))(1.0)
    assert heard.compiles() > 0, "JAX's events have other names now, so this module would notice nothing"
    return heard


@pytest.fixture(scope="module")
def warm():
    shape = workloads.SHAPES[0]
    return support.build(
        support.tiny("llama"), warm_up=True, late_compile="error", max_model_len=workloads.MAX_MODEL_LEN, **shape
    )


def test_warm_up_runs_every_program_and_writes_to_the_null_page_alone(monkeypatch):
    ran = []
    run = CompiledSteps.run_each_once

    def watched(self, weights, kv_pages):
        ran.extend(self._programs)
        return run(self, weights, kv_pages)

    monkeypatch.setattr(CompiledSteps, "run_each_once", watched)
    engine = support.build(support.tiny("llama"), warm_up=True, max_num_seqs=1, max_num_batched_tokens=16)
    assert sorted(ran, key=str) == sorted(engine._steps._all_shapes(), key=str)
    assert not any(pages[1:].any() for pages in jax.tree.leaves(engine._kv_pages))


def test_a_warm_up_in_the_background_compiles_what_a_request_waits_for_first(monkeypatch):
    started, hold = [], threading.Event()
    compile_now = CompiledSteps._compile

    def compile_slowly(self, shape):
        started.append(shape)
        if threading.current_thread().name == "jpaged-compile":
            hold.wait(60)
        return compile_now(self, shape)

    monkeypatch.setattr(CompiledSteps, "_compile", compile_slowly)
    engine = support.build(support.tiny("llama"), warm_up="background", late_compile="error")
    assert not engine._steps.warm
    prompts = [[7] * 20, [8, 9]]
    try:
        outputs = support.serve(engine, prompts)  # while the threads have not finished one program
    finally:
        hold.set()
    engine.wait_until_warm()
    shapes = engine._steps._all_shapes()
    assert engine._steps.warm and len(started) == len(shapes) and set(started) == set(shapes)
    before = engine._compile_counter.requests
    assert support.tokens(support.serve(engine, prompts)) == support.tokens(outputs)
    assert engine._compile_counter.requests == before


def test_who_waits_is_told_how_far_it_is(monkeypatch, caplog):
    compile_now = CompiledSteps._compile

    def compile_slowly(self, shape):
        time.sleep(0.05)
        return compile_now(self, shape)

    monkeypatch.setattr(CompiledSteps, "_compile", compile_slowly)
    monkeypatch.setattr("jpaged.engine.compile.TELL_EVERY", 0.01)
    with caplog.at_level(logging.INFO, logger="jpaged"):
        engine = support.build(support.tiny("llama"), warm_up=True, max_num_seqs=1, max_num_batched_tokens=16)
    told = [re.fullmatch(r"compiled (\d+) of (\d+) programs", message) for message in caplog.messages]
    counts = [int(found[1]) for found in told if found]
    assert counts == sorted(counts) and len(set(counts)) > 1
    assert {int(found[2]) for found in told if found} == {len(engine._steps._all_shapes())}


def test_a_failed_compilation_in_the_background_reaches_whoever_needs_the_program(monkeypatch):
    def fail(self, shape):
        raise RuntimeError(f"no program for {shape}")

    with monkeypatch.context() as patch:
        patch.setattr(CompiledSteps, "_compile", fail)
        engine = support.build(support.tiny("llama"), warm_up="background")
        with pytest.raises(RuntimeError, match="no program for"):
            engine.wait_until_warm()
        engine.add_request([7, 8, 9], support.GREEDY, request_id="a")
        with pytest.raises(RuntimeError, match="no program for"):
            engine.step()
        engine.abort("a")
    assert engine.num_free_pages == engine.num_pages


def test_a_compilation_that_was_interrupted_is_tried_again(monkeypatch):
    compile_now = CompiledSteps._compile
    hold = threading.Event()

    def interrupt(self, shape):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        hold.wait(60)
        return compile_now(self, shape)

    with monkeypatch.context() as patch:
        patch.setattr(CompiledSteps, "_compile", interrupt)
        engine = support.build(support.tiny("llama"), warm_up="background", late_compile="error")
        engine.add_request([7] * 20, support.GREEDY)
        try:
            with pytest.raises(KeyboardInterrupt):
                support.finish(engine)
        finally:
            hold.set()
    assert support.tokens(support.finish(engine).values()) == support.tokens(support.serve(engine, [[7] * 20]))
    engine.wait_until_warm()
    assert engine._steps.warm


SETTINGS = {
    "no jit": lambda: jax.disable_jit(),
    "no transfers": lambda: jax.transfer_guard("disallow"),
    "64 bits": lambda: jax.enable_x64(True),
    "no broadcasting": lambda: jax.numpy_rank_promotion("raise"),
    "NaN is an error": lambda: jax.debug_nans(True),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_what_the_caller_has_set_in_jax_changes_no_token(name):
    prompts, sampling = [[7] * 20, [8, 9]], SamplingParams(temperature=1, seed=3, top_p=0.9, max_tokens=8)
    options = {"max_num_seqs": 2, "num_pages": 40}
    plain = support.tokens(support.serve(support.build(support.tiny("llama"), **options), prompts, sampling))
    with SETTINGS[name]():
        inside = support.tokens(support.serve(support.build(support.tiny("llama"), **options), prompts, sampling))
    assert inside == plain


def test_the_first_generate_of_params_may_come_while_another_function_is_traced(no_engines):
    prompt, options = [5, 6, 7], OPTIONS | {"warm_up": False}

    def traced(x):
        return x + support.tokens(jpaged.generate(support.tiny("llama"), prompt, support.GREEDY, **options))[0][0]

    first = jax.jit(traced)(0)
    assert support.tokens(jpaged.generate(support.tiny("llama"), prompt, support.GREEDY, **options))[0][0] == first


def test_a_cache_that_cannot_be_made_is_told_and_stops_nothing(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="compilation_cache_dir.*cannot be made"):
        use_compilation_cache(str(tmp_path / "file" / "x"))
    monkeypatch.setenv("JPAGED_CACHE", str(tmp_path / "file"))
    chosen = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    try:
        use_compilation_cache(None)
    finally:
        jax.config.update("jax_compilation_cache_dir", chosen)
    assert "compiled programs are not kept" in caplog.text


def test_a_ragged_workload_compiles_nothing_after_warm_up(warm, events):
    drawn = [workloads.draw_workload(random.Random(seed).randint) for seed in range(400, 440)]
    drawn = [workload for workload in drawn if workload.shape == 0]
    for workload in drawn:
        workloads.expect(workload)
    before = events.compiles()
    preemptions = sum(workloads.run(workload, served_by=warm) for workload in drawn)
    assert preemptions > 5 and any(a.abort_step is not None for workload in drawn for a in workload.arrivals)
    assert events.compiles() == before
    assert warm.stats.num_compiles == 0


def test_every_number_of_rows_and_tokens_has_a_compiled_shape(warm, events):
    before = events.compiles()
    sampling = SamplingParams(temperature=1, top_k=5, top_p=0.9, min_p=0.01, max_tokens=3, min_tokens=1)
    for rows in range(1, 6):
        for length in (1, 2, 15, 16, 17, 61):
            support.serve(warm, [[5] * length] * rows, sampling)
    assert events.compiles() == before


def test_a_late_compile_is_an_error_if_asked_and_the_engine_goes_on(warm, monkeypatch):
    expected = support.tokens(support.serve(warm, [[5, 6, 7], [8, 9]]))
    engine_buckets = warm._buckets
    ids = [warm.add_request(prompt, support.GREEDY) for prompt in ([5, 6, 7], [8, 9])]
    odd = engine_buckets._replace(decode=(3,), mixed=((17, 3),))
    monkeypatch.setattr(warm, "_buckets", odd)
    with pytest.raises(LateCompileError, match="17 tokens in 3 rows.*late_compile='error'"):
        warm.step()
    monkeypatch.setattr(warm, "_buckets", engine_buckets)
    warm.step()
    monkeypatch.setattr(warm, "_buckets", odd)
    with pytest.raises(LateCompileError, match="3 tokens in 3 rows"):
        warm.step()
    monkeypatch.setattr(warm, "_buckets", engine_buckets)
    finished = support.finish(warm)
    assert support.tokens(finished[i] for i in ids) == expected
    support.assert_idle(warm)


def test_a_late_compile_is_counted_and_told_if_allowed(caplog, monkeypatch):
    monkeypatch.setattr(Buckets, "all_shapes", lambda self: [(1, 1, True)])
    engine = support.build(support.tiny("llama"), warm_up=True, max_num_seqs=1, max_num_batched_tokens=16)
    support.serve(engine, [[1, 2, 3]])
    assert "a batch of 16 tokens in 1 rows was not compiled at warm-up: compiling it now" in caplog.text


SECOND_START = """
import json, sys
sys.path.insert(0, sys.argv[1])
import engine_support as support
engine = support.build(support.tiny("llama"), warm_up=True, late_compile="error", max_num_seqs=1,
                       compilation_cache_dir=sys.argv[2] or None)
tokens = support.tokens(support.serve(engine, [[5, 6, 7], [8, 9]]))
print(json.dumps([engine.warm_up_compiles, engine.stats.num_compiles, tokens]))
"""


@pytest.mark.parametrize("by_option", [True, False])
def test_a_second_start_compiles_nothing(tmp_path, by_option):
    """The cache is the one of the option, or, if the program chose none, that of the user."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    env |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    env["JPAGED_CACHE"] = str(tmp_path / "user")
    command = [sys.executable, "-c", SECOND_START, os.path.dirname(__file__), str(tmp_path / "own") * by_option]
    starts = []
    for _ in range(2):
        result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert result.returncode == 0, result.stderr
        starts.append(json.loads(result.stdout.splitlines()[-1]))
    (first_compiles, _, first_tokens), (second_compiles, late_compiles, second_tokens) = starts
    assert first_compiles >= 3 and second_compiles == late_compiles == 0
    assert first_tokens == second_tokens
    assert any((tmp_path / ("own" if by_option else "user/xla")).iterdir())
    assert (tmp_path / "user").exists() is not by_option


def test_a_cache_that_the_program_chose_stays():
    chosen = jax.config.jax_compilation_cache_dir
    assert chosen, "conftest.py chooses one"
    use_compilation_cache(None)
    assert jax.config.jax_compilation_cache_dir == chosen


@pytest.fixture
def no_engines():
    api._engines.clear()
    yield
    api._engines.clear()


OPTIONS = support.LIMITS | {"max_num_seqs": 2, "check_integrity": True}


def test_new_weights_of_the_same_shapes_compile_nothing_and_count(no_engines, events):
    params = support.tiny("llama")
    prompt = support.reference("llama")["input_ids"][0].tolist()
    stored = support.reference("llama")["greedy"][0].tolist()
    assert support.tokens(jpaged.generate(params, prompt, support.GREEDY, **OPTIONS)) == [stored]
    other = jax.block_until_ready(jax.tree.map(lambda w: w[::-1] * 1.5, params))
    before = events.compiles()
    changed = support.tokens(jpaged.generate(other, prompt, support.GREEDY, **OPTIONS))
    assert events.compiles() == before
    assert changed != [stored]
    assert changed == support.tokens(support.serve(support.build(other, **OPTIONS), [prompt]))
    assert support.tokens(jpaged.generate(params, prompt, support.GREEDY, **OPTIONS)) == [stored]
    assert len(api._engines) == 1


def test_the_engine_that_is_kept_does_not_keep_the_weights_alive(no_engines):
    params = jax.tree.map(lambda w: w + 0, support.tiny("llama"))
    jpaged.generate(params, [1, 2, 3], support.GREEDY, **OPTIONS)
    for output in jpaged.stream(params, [1, 2, 3], support.GREEDY, **OPTIONS):
        assert output.outputs
    with pytest.raises(ValueError):
        jpaged.generate(params, [], **OPTIONS) or jpaged.generate(params, [[]], **OPTIONS)
    with pytest.raises(ValueError):
        jpaged.stream(params, [999], **OPTIONS)
    watched = [weakref.ref(leaf) for leaf in jax.tree.leaves(params)]
    del params
    gc.collect()
    assert [ref for ref in watched if ref() is not None] == []
    assert len(api._engines) == 1, "the engine itself is kept"


def test_few_engines_are_kept(no_engines):
    params = support.tiny("llama")
    kept = []
    # Engines that differ, and not in what they compile.
    for differs in ({}, {"prefix_caching": False}, {"async_scheduling": False}):
        options = OPTIONS | {"warm_up": False} | differs
        jpaged.generate(params, [1, 2], SamplingParams(max_tokens=1), **options)
        kept.append(weakref.ref(next(reversed(api._engines.values()))))
    assert len(api._engines) == api.MAX_ENGINES == 2
    gc.collect()
    assert kept[0]() is None, "the oldest one's KV pool is freed"


def test_the_same_checkpoint_loaded_again_shares_the_engine(no_engines):
    for _ in range(2):
        params = jpaged.load(support.CHECKPOINTS / "llama")
        jpaged.generate(params, [1, 2], support.GREEDY, **OPTIONS)
    assert len(api._engines) == 1
