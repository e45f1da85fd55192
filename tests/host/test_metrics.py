import pytest

from jpaged.host.metrics import EngineStats, Latencies, latency_summary, percentiles
from jpaged.host.request import Request
from jpaged.host.sampling_params import SamplingParams


def make_request(arrival, token_times, finish_time):
    request = Request("r", [1], SamplingParams(), 0, frozenset(), 16, arrival)
    for time in token_times:
        request.append(5, 0.0, time)
    request.finish_time = finish_time
    return request


def test_steps_are_added_up():
    stats = EngineStats()
    stats.record_step(num_tokens=100, batch_tokens=128, is_decode=False, num_output_tokens=3)
    stats.record_step(num_tokens=12, batch_tokens=12, is_decode=True, num_output_tokens=12)
    assert (stats.num_steps, stats.num_decode_steps) == (2, 1)
    assert (stats.num_scheduled_tokens, stats.num_padded_tokens, stats.num_output_tokens) == (112, 28, 15)
    assert stats.padding == 28 / 140


def test_utilization_is_sampled_where_memory_is_allocated():
    stats = EngineStats()
    stats.record_kv(num_tokens=30, num_slots=32)
    stats.record_kv(num_tokens=0, num_slots=0)
    stats.record_kv(num_tokens=8, num_slots=16)
    assert stats.kv_utilization_mean == (30 / 32 + 8 / 16) / 2
    assert stats.kv_utilization_min == 0.5


def test_a_utilization_of_zero_stays_the_least():
    stats = EngineStats()
    stats.record_kv(num_tokens=0, num_slots=16)
    stats.record_kv(num_tokens=8, num_slots=16)
    assert stats.kv_utilization_min == 0.0


def test_before_the_first_step_there_is_nothing_to_divide_by():
    stats = EngineStats()
    assert (stats.padding, stats.kv_utilization_mean, stats.kv_utilization_min) == (0.0, None, None)
    assert stats.as_dict()["kv_utilization_mean"] is None
    assert stats.as_dict()["num_compiles"] == 0


def test_latencies_of_a_request():
    latencies = Latencies.of(make_request(10.0, [11.0, 11.5, 13.0], 13.25))
    assert latencies == Latencies(ttft=1.0, tpot=1.0, itl=[0.5, 1.5], e2e_latency=3.25)


def test_a_single_token_has_no_time_per_output_token():
    assert Latencies.of(make_request(10.0, [11.0], 11.0)) == Latencies(1.0, None, [], 1.0)


def test_a_request_without_tokens_has_no_time_to_the_first():
    assert Latencies.of(make_request(10.0, [], None)) == Latencies(None, None, [], None)


def test_percentiles_are_interpolated():
    assert percentiles([float(value) for value in range(101)]) == {
        "mean": 50.0,
        "p50": 50.0,
        "p90": 90.0,
        "p99": 99.0,
        "max": 100.0,
    }
    assert percentiles([1.0, 2.0])["p50"] == 1.5
    assert percentiles([]) is None


def test_a_summary_pools_the_gaps_of_all_requests_and_skips_what_is_missing():
    summary = latency_summary(
        [make_request(0.0, [1.0, 2.0, 5.0], 5.0), make_request(0.0, [3.0], 4.0), make_request(0.0, [], None)]
    )
    assert summary["ttft"]["mean"] == 2.0
    assert summary["tpot"]["mean"] == 2.0
    assert summary["itl"]["mean"] == 2.0
    assert summary["e2e_latency"]["max"] == pytest.approx(5.0)
    assert latency_summary([])["ttft"] is None
