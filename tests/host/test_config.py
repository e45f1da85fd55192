import dataclasses
from pathlib import Path

import numpy as np
import pytest

from jpaged.host.config import EngineConfig


def test_by_default_the_engine_chooses():
    config = EngineConfig()
    assert config.page_size == 16
    assert config.gpu_memory_utilization == 0.9
    assert (config.warm_up, config.late_compile, config.check_integrity) == ("background", "allow", False)
    left_open = [field.name for field in dataclasses.fields(config) if getattr(config, field.name) is None]
    assert left_open == [
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_model_len",
        "kv_cache_memory",
        "num_pages",
        "dtype",
        "swap_space",
        "swap_disk_space",
        "swap_dir",
        "preemption",
        "logits_processor",
        "compilation_cache_dir",
        "kernels",
    ]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("2GiB", 2 * 1024**3),
        ("1.5 gib", 3 * 1024**3 // 2),
        ("500MB", 500 * 1000**2),
        ("64KiB", 65536),
        ("1TiB", 1024**4),
        ("4096B", 4096),
        (12345, 12345),
    ],
)
def test_memory_is_given_in_bytes_or_as_text(text, num_bytes):
    assert EngineConfig(kv_cache_memory=text).kv_cache_memory == num_bytes


@pytest.mark.parametrize("value", ["2 gigs", "GiB", "-1GiB", "2iB", "0MB", "", 0, -5, 1.5, True])
def test_memory_that_cannot_be_read_is_refused(value):
    with pytest.raises(ValueError, match="kv_cache_memory must be bytes above 0, or text such as '2GiB'"):
        EngineConfig(kv_cache_memory=value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0),
        ("page_size", None),
        ("max_num_seqs", 0),
        ("max_num_seqs", 1.5),
        ("max_num_seqs", True),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("num_pages", 1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.1),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", "90%"),
        ("dtype", "int8"),
        ("dtype", np.int32),
        ("dtype", 5),
        ("warm_up", 1),
        ("late_compile", "warn"),
        ("compilation_cache_dir", 3),
        ("check_integrity", "yes"),
    ],
)
def test_an_option_out_of_range_is_refused_by_name_with_its_value(name, value):
    with pytest.raises(ValueError) as refused:
        EngineConfig(**{name: value})
    assert name in str(refused.value)
    assert repr(value) in str(refused.value)


def test_two_sizes_of_the_cache_are_one_too_many():
    with pytest.raises(ValueError, match="both fix the size of the KV cache: give one"):
        EngineConfig(kv_cache_memory="1GiB", num_pages=100)


def test_every_compilation_would_be_late_without_warm_up():
    with pytest.raises(ValueError, match="late_compile='error' needs warm_up=True"):
        EngineConfig(late_compile="error", warm_up=False)


@pytest.mark.parametrize("value", ["float32", np.float32, np.dtype("float32")])
def test_a_dtype_is_kept_by_its_name(value):
    assert EngineConfig(dtype=value).dtype == "float32"


def test_a_path_is_kept_as_text():
    assert EngineConfig(compilation_cache_dir=Path("a") / "b").compilation_cache_dir == str(Path("a") / "b")


def test_options_are_read_by_name():
    assert EngineConfig.from_options({"page_size": 32, "num_pages": 10}) == EngineConfig(page_size=32, num_pages=10)


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match="unknown engine option 'max_num_seq': did you mean max_num_seqs?"):
        EngineConfig.from_options({"max_num_seq": 3})


def test_an_option_like_no_other_is_refused_with_the_list_of_names():
    with pytest.raises(ValueError, match="unknown engine option 'xyzzy': the options are page_size, max_num_seqs"):
        EngineConfig.from_options({"xyzzy": 3})


def test_equal_configs_are_one_key():
    assert len({EngineConfig(kv_cache_memory="1KiB"), EngineConfig(kv_cache_memory=1024)}) == 1


@pytest.mark.parametrize(("text", "size"), [("1000000000", 10**9), (" 12 ", 12), ("12b", 12), ("1.5kib", 1536)])
def test_bytes_may_be_text_as_on_a_command_line(text, size):
    assert EngineConfig(kv_cache_memory=text).kv_cache_memory == size


def test_more_beams_than_sequences_are_refused():
    with pytest.raises(ValueError, match=r"max_num_beams \(8\) must not exceed max_num_seqs \(4\)"):
        EngineConfig(max_num_beams=8, max_num_seqs=4)
