"""The size of the KV pool, with devices that are not there."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import engine_support as support
import psutil
import pytest

from jpaged.device.kv_pages import page_bytes
from jpaged.engine import blueprint
from jpaged.engine.memory import CPU_SHARE, choose_num_pages
from jpaged.host.config import EngineConfig

MIB = 2**20


class Device:
    """A device with these statistics."""

    def __init__(self, platform, statistics=None):
        self.platform = platform
        self._statistics = statistics

    def memory_stats(self):
        return self._statistics

    def __str__(self):
        return "cuda:7"


def choose(device, *, useful_pages=10**6, step_bytes=100 * MIB, page_bytes=MIB, **options):
    config = EngineConfig(**options)
    return choose_num_pages(
        config, device=device, page_bytes=page_bytes, useful_pages=useful_pages, step_bytes=lambda: step_bytes
    )


def never():
    raise AssertionError("the largest step is compiled though its memory does not matter")


def test_a_gpu_gives_what_weights_and_the_largest_step_leave():
    device = Device("gpu", {"bytes_limit": 1000 * MIB, "bytes_in_use": 300 * MIB, "peak_bytes_in_use": 999 * MIB})
    assert choose(device) == 496  # of 1000 * 0.9 - 300 - 100, in steps of 16
    assert choose(device, gpu_memory_utilization=0.5) == 100
    assert choose(device, gpu_memory_utilization=1.0, step_bytes=0) == 672  # of 700, in steps of 32
    assert choose(device, page_bytes=3 * MIB) == 496 // 3


def test_a_little_more_or_less_free_memory_gives_the_same_pool(monkeypatch):
    used = [300 * MIB, 302 * MIB, 304 * MIB]
    assert {choose(Device("gpu", {"bytes_limit": 1000 * MIB, "bytes_in_use": one})) for one in used} == {496}
    for available in (4200 * MIB, 6000 * MIB, 8100 * MIB):
        monkeypatch.setattr(psutil, "virtual_memory", lambda available=available: SimpleNamespace(available=available))
        assert choose(Device("cpu")) == 1024


@pytest.mark.parametrize("statistics", [None, {}, {"bytes_in_use": 5}])
def test_a_gpu_without_statistics_needs_a_size(statistics):
    device = Device("gpu", statistics)
    with pytest.raises(ValueError, match="cuda:7 reports no memory statistics.*kv_cache_memory or num_pages"):
        choose(device)
    assert choose(device, kv_cache_memory="1GiB") == 1024


@pytest.mark.parametrize("utilization, in_use", [(0.1, 300), (0.9, 800), (0.4, 299)])
def test_a_gpu_that_is_full_is_told_with_the_numbers(utilization, in_use):
    device = Device("gpu", {"bytes_limit": 1000 * MIB, "bytes_in_use": in_use * MIB})
    with pytest.raises(ValueError, match=rf"gpu_memory_utilization={utilization} of cuda:7.*give it more memory"):
        choose(device, gpu_memory_utilization=utilization)


def test_a_cpu_gives_a_share_of_the_free_ram(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=512 * MIB, total=10**12))
    assert choose(Device("cpu")) == 512 * CPU_SHARE
    with pytest.raises(ValueError, match=f"at least two pages of {300 * MIB} bytes.*{128 * MIB} bytes"):
        choose(Device("cpu"), page_bytes=300 * MIB)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_given_size_is_taken_at_its_word(platform):
    device = Device(platform)
    for options, expected in (
        ({"kv_cache_memory": 12 * MIB + 5}, 12),
        ({"kv_cache_memory": "0.5GiB"}, 512),
        ({"num_pages": 77}, 77),
    ):
        config = EngineConfig(**options)
        arguments = {"device": device, "page_bytes": MIB, "useful_pages": 10**6, "step_bytes": never}
        assert choose_num_pages(config, **arguments) == expected
    with pytest.raises(ValueError, match="two pages.*kv_cache_memory"):
        choose(device, kv_cache_memory=MIB)


def test_no_more_pages_than_all_rows_can_fill(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=10**12))
    device = Device("gpu", {"bytes_limit": 10**12, "bytes_in_use": 0})
    assert choose(device, useful_pages=33) == choose(Device("cpu"), useful_pages=33) == 33
    assert choose(device, useful_pages=33, kv_cache_memory="1GiB") == 33


def test_an_engine_takes_no_more_than_its_rows_can_fill():
    engine = support.build(support.tiny("llama"), num_pages=None, max_num_seqs=3, max_model_len=50)
    assert engine.num_pages == 3 * 13


def test_a_pool_of_bytes_holds_as_many_pages_as_fit():
    config = support.tiny("llama").config
    one = page_bytes(config, 4, "float32")
    assert one == 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim * 4
    engine = support.build(support.tiny("llama"), num_pages=None, kv_cache_memory=20 * one + 1)
    assert engine.num_pages == 19
    assert sum(array.nbytes for layer in engine._kv_pages for array in layer) == 20 * one
    half = support.build(support.tiny("llama"), num_pages=None, kv_cache_memory=20 * one, dtype="bfloat16")
    assert half.num_pages == 39


def test_the_models_length_is_lowered_to_what_the_pool_holds_with_a_warning(caplog):
    params = support.tiny("llama")
    engine = support.build(params, max_model_len=None, num_pages=11)
    assert engine.max_model_len == 40 < params.config.max_position
    assert f"max_model_len is 40, all that the KV cache holds, and not the model's {params.config.max_position}" in (
        caplog.text
    )
    (output,) = support.serve(engine, [[5] * 30], support.GREEDY)
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (10, "length")
    with pytest.raises(ValueError, match="40 tokens and max_model_len is 40"):
        engine.add_request([5] * 40)


def test_the_models_length_stays_where_it_fits(caplog):
    params = support.tiny("llama")
    engine = support.build(params, max_model_len=None, num_pages=1 + params.config.max_position // 4)
    assert engine.max_model_len == params.config.max_position and not caplog.records


def test_a_length_that_was_asked_for_is_never_lowered():
    with pytest.raises(ValueError, match="41.*11 pages of 4 tokens.*has 10.*lower max_model_len to 40"):
        support.build(support.tiny("llama"), max_model_len=41, num_pages=11)


def test_the_log_says_how_many_tokens_fit(caplog):
    with caplog.at_level(logging.INFO, "jpaged"):
        support.build(support.tiny("llama"), num_pages=41)
    assert "KV cache: 160 tokens in 40 pages of 4" in caplog.text and "2.5 sequences of 64" in caplog.text


def test_on_a_gpu_the_engine_asks_the_compiled_step_for_its_memory(monkeypatch):
    """The arrays of a CPU with the statistics of a GPU."""
    asked = {}

    def remember(config, **arguments):
        asked.update(arguments, bytes=arguments["step_bytes"]())
        return 65

    monkeypatch.setattr(blueprint, "choose_num_pages", remember)
    support.build(support.tiny("llama"), num_pages=None)
    params = support.tiny("llama")
    logits = 4 * params.config.vocab_size * 4
    assert asked["useful_pages"] == 65 and asked["page_bytes"] == page_bytes(params.config, 4, "float32")
    # At least the logits of all rows, and no more than a few copies of what a step of 16 tokens holds.
    assert logits <= asked["bytes"] < 100 * logits
