import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.host.batch import STEP_COST, Buckets, pack
from jpaged.host.page_pool import NULL_PAGE
from jpaged.host.request import Request
from jpaged.host.row_table import RowTable
from jpaged.host.sampling_params import MAX_BANNED_IDS, SamplingParams

VOCAB_SIZE, PAGE_SIZE = 1000, 4
BUCKETS = Buckets.make(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=20, page_size=PAGE_SIZE)
TABLE = RowTable(1000, BUCKETS.pages_per_seq)  # no test gives a row back


def make_row(start, num_tokens, page_ids, prompt=None, outputs=(), seed=0, **sampling):
    """A row of a request that holds `page_ids`; without a prompt, one that the row's tokens complete."""
    prompt = prompt or list(range(100, 100 + start + num_tokens))
    params = SamplingParams(max_tokens=None, **sampling)
    request = Request("r", prompt, params, seed, frozenset({2}), 100, output_token_ids=list(outputs))
    TABLE.take(request)
    request.add_pages(page_ids)
    return request, start, num_tokens


def packed(*rows):
    return pack(rows, TABLE, BUCKETS, VOCAB_SIZE)[0]


def test_a_decode_batch_has_one_token_a_row_and_no_query_starts():
    batch = packed(make_row(5, 1, [3, 7]), make_row(3, 1, [9]), make_row(4, 1, [4, 2]))
    assert batch.query_starts is None
    assert batch.token_ids.tolist() == [105, 103, 104, 0]
    assert batch.positions.tolist() == [5, 3, 4, 0]
    assert batch.slot_mapping.tolist() == [7 * 4 + 1, 9 * 4 + 3, 2 * 4, 0]
    assert batch.context_lens.tolist() == [6, 4, 5, 0]
    assert batch.block_tables.tolist() == [[3, 7, 0, 0, 0], [9, 0, 0, 0, 0], [4, 2, 0, 0, 0], [0, 0, 0, 0, 0]]


def test_a_step_ahead_is_a_decode_batch_whose_tokens_are_still_to_come():
    # Its request has tokens 0 to 4; the step in flight draws token 5, this one computes it.
    row = make_row(5, 1, [3, 7], prompt=[5, 6, 7, 8], outputs=[9], min_tokens=2)
    batch, rows = pack([row], TABLE, BUCKETS, VOCAB_SIZE, ahead=True)
    assert batch.query_starts is None and rows == [row]
    assert (batch.positions[0], batch.slot_mapping[0], batch.context_lens[0]) == (5, 7 * 4 + 1, 6)
    # It draws the third output token; the second is drawn in flight, the last to be kept from ending the text.
    assert (batch.sampling.banned_ids == VOCAB_SIZE).all()
    assert pack([(row[0], 4, 1)], TABLE, BUCKETS, VOCAB_SIZE)[0].sampling.banned_ids[0, 0] == 2


def test_a_mixed_batch_lays_the_rows_tokens_one_after_another():
    batch = packed(make_row(5, 1, [3, 7]), make_row(2, 4, [5, 6]))
    assert batch.query_starts.tolist() == [0, 1, 5, 5, 5, 5, 5, 5, 5]
    assert batch.token_ids.tolist() == [105, 102, 103, 104, 105] + [0] * 11
    assert batch.positions.tolist() == [5, 2, 3, 4, 5] + [0] * 11
    assert batch.slot_mapping.tolist() == [29, 22, 23, 24, 25] + [0] * 11
    assert batch.context_lens.tolist() == [6, 6] + [0] * 6


def test_rows_with_one_token_come_first_and_otherwise_the_order_is_kept():
    rows = [make_row(0, 3, [1]), make_row(4, 1, [2, 3]), make_row(0, 2, [4]), make_row(3, 1, [5])]
    batch, in_order = pack(rows, TABLE, BUCKETS, VOCAB_SIZE)
    assert in_order == [rows[1], rows[3], rows[0], rows[2]]
    assert batch.query_starts[:5].tolist() == [0, 1, 2, 5, 7]
    assert batch.block_tables[:4, 0].tolist() == [2, 5, 1, 4]


def test_a_single_token_that_is_not_the_last_makes_the_batch_a_mixed_one():
    chunk = make_row(2, 1, [1], prompt=[5, 6, 7, 8])
    batch = packed(chunk)
    assert batch.query_starts[:2].tolist() == [0, 1]
    assert batch.token_ids[0] == 7


def test_tokens_are_read_across_the_end_of_the_prompt():
    batch = packed(make_row(1, 4, [1, 2], prompt=[50, 51, 52], outputs=[60, 61]))
    assert batch.token_ids[:4].tolist() == [51, 52, 60, 61]


def test_padding_touches_only_the_null_page_and_sees_no_context():
    batch = packed(make_row(0, 5, [1, 2]), make_row(0, 1, [3]))
    assert (batch.slot_mapping[6:] // PAGE_SIZE == NULL_PAGE).all()
    assert (batch.block_tables[2:] == NULL_PAGE).all()
    assert (batch.context_lens[2:] == 0).all()
    assert (batch.query_starts[3:] == 6).all()


def test_integers_are_32_bits_wide_and_reals_too():
    batch = packed(make_row(0, 5, [1, 2]))
    arrays = [array for array in batch if isinstance(array, np.ndarray)]
    assert {array.dtype for array in arrays} == {np.dtype(np.int32)}
    sampling = batch.sampling
    dtypes = [array.dtype.name for array in sampling]
    assert dtypes == ["float32", "int32", "float32", "float32", "uint32", "int32"]
    assert all(array.flags.c_contiguous for array in (*arrays, *sampling))


def test_the_arrays_of_one_step_are_not_touched_by_the_next():
    row = make_row(3, 1, [1])
    first = packed(row)
    before = [array.copy() for array in (*first[:5], *first.sampling)]
    row[0].append(9, 0.0, 0.0)
    row[0].add_pages([8])
    second = packed((row[0], 4, 1))
    assert second.block_tables[0].tolist() == [1, 8, 0, 0, 0]
    for array, old in zip((*first[:5], *first.sampling), before, strict=True):
        assert (array == old).all()
    assert not np.shares_memory(first.sampling.seed, second.sampling.seed)


def test_each_row_has_the_sampling_values_of_its_own_request():
    long = make_row(0, 3, [1], temperature=0.5, top_k=40, top_p=0.9, min_p=0.1, seed=2**32 * 7 + 5)
    short = make_row(3, 1, [2], temperature=0.0, top_k=-1, seed=2**64 - 1)
    sampling = packed(long, short).sampling
    assert sampling.temperature[:2].tolist() == [0.0, 0.5]
    assert sampling.top_k[:2].tolist() == [0, 40]
    assert sampling.top_p[:2].tolist() == [1.0, np.float32(0.9)]
    assert sampling.min_p[:2].tolist() == [0.0, np.float32(0.1)]
    assert sampling.seed[:2].tolist() == [[2**32 - 1, 2**32 - 1], [7, 5]]


def test_padding_rows_draw_greedily_without_limits():
    sampling = packed(make_row(3, 1, [1]), make_row(3, 1, [2]), make_row(3, 1, [3])).sampling
    assert [array[3].tolist() for array in sampling[:5]] == [0.0, 0, 1.0, 0.0, [0, 0]]
    assert (sampling.banned_ids[3] == VOCAB_SIZE).all()


def test_sampling_values_beyond_32_bits_keep_their_meaning():
    sampling = packed(make_row(3, 1, [1], temperature=1e300, top_k=10**12, top_p=1e-300)).sampling
    assert np.isfinite(sampling.temperature[0])
    assert sampling.top_k[0] == 2**31 - 1
    assert sampling.top_p[0] > 0


@pytest.mark.parametrize(
    ("num_outputs", "options", "banned"),
    [
        (0, {"min_tokens": 2, "stop_token_ids": [9, 5]}, [2, 5, 9]),
        (1, {"min_tokens": 2, "stop_token_ids": [9, 5]}, [2, 5, 9]),
        (2, {"min_tokens": 2, "stop_token_ids": [9, 5]}, []),
        (0, {"min_tokens": 2, "stop_token_ids": [9, 5], "ignore_eos": True}, [5, 9]),
        (0, {"stop_token_ids": [9, 5]}, []),
    ],
)
def test_ids_that_would_end_the_text_are_banned_until_min_tokens(num_outputs, options, banned):
    row = make_row(2 + num_outputs, 1, [1, 2], prompt=[1, 1, 1], outputs=[7] * num_outputs, **options)
    banned_ids = packed(row).sampling.banned_ids[0].tolist()
    assert banned_ids == banned + [VOCAB_SIZE] * (MAX_BANNED_IDS - len(banned))


# Buckets


def test_the_shapes_for_a_gpu_are_these():
    buckets = Buckets.make(max_num_seqs=256, max_num_batched_tokens=2048, max_model_len=8192, page_size=16)
    assert buckets.decode == (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert buckets.mixed[:6] == ((16, 8), (16, 16), (32, 8), (32, 32), (64, 8), (64, 64))
    tokens = sorted({num_tokens for num_tokens, _ in buckets.mixed})
    assert tokens == [16, 32, 64, 128, 256, 512, 1024, 2048]
    assert (buckets.pages_per_seq, buckets.page_size) == (512, 16)


def test_few_sequences_need_one_number_of_rows():
    buckets = Buckets.make(max_num_seqs=4, max_num_batched_tokens=100, max_model_len=50, page_size=16)
    assert buckets.decode == (1, 2, 4)
    assert buckets.mixed == ((16, 4), (32, 4), (64, 4), (112, 4))
    assert buckets.pages_per_seq == 4


def test_warm_up_meets_every_shape_once():
    buckets = Buckets.make(max_num_seqs=16, max_num_batched_tokens=32, max_model_len=50, page_size=16)
    shapes = buckets.all_shapes()
    assert len(shapes) == len(set(shapes)) == len(buckets.decode) + len(buckets.mixed)
    assert (16, 16, True) in shapes and (16, 16, False) in shapes and (32, 8, False) in shapes


@given(st.integers(1, 600), st.integers(1, 5000), st.data())
def test_whatever_the_scheduler_can_plan_has_a_shape_with_little_padding(max_num_seqs, max_num_batched_tokens, data):
    buckets = Buckets.make(max_num_seqs, max_num_batched_tokens, max_model_len=100, page_size=16)
    num_seqs = data.draw(st.integers(1, min(max_num_seqs, max_num_batched_tokens)))
    num_tokens = data.draw(st.integers(num_seqs, max_num_batched_tokens))

    rows = buckets.decode_rows(num_seqs)
    assert rows in buckets.decode and num_seqs <= rows <= max_num_seqs
    assert rows < 2 * num_seqs if num_seqs < 16 else rows - num_seqs < max(8, num_seqs / 4)

    tokens, seqs = shape = buckets.mixed_shape(num_tokens, num_seqs)
    assert shape in buckets.mixed and num_tokens <= tokens and num_seqs <= seqs <= max_num_seqs
    assert seqs == num_seqs or seqs <= max(8, tokens)
    assert tokens < 2 * num_tokens if num_tokens > 16 else tokens == 16
    assert len(buckets.all_shapes()) <= 64


@given(st.integers(1, 600), st.integers(1, 5000), st.data())
def test_a_step_leaves_tokens_to_the_next_one_only_where_that_wastes_less(max_num_seqs, max_num_batched_tokens, data):
    buckets = Buckets.make(max_num_seqs, max_num_batched_tokens, max_model_len=100, page_size=16)
    num_tokens = data.draw(st.integers(1, max_num_batched_tokens))
    now = buckets.step_size(num_tokens)
    (padded, _), left = buckets.mixed_shape(num_tokens, 1), num_tokens - now
    if left:
        assert now in buckets.mixed_tokens
        assert now + buckets.mixed_shape(left, 1)[0] + STEP_COST < padded
    else:
        assert now == num_tokens
