import pytest
from hypothesis import given
from hypothesis import strategies as st

from jpaged.host.page_pool import NULL_PAGE, PagePool


def test_every_page_but_the_null_page_is_handed_out_once():
    pool = PagePool(num_pages=5, page_size=4)
    assert pool.num_free == 4
    assert sorted(pool.acquire(3) + pool.acquire(1)) == [1, 2, 3, 4]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_what_does_not_fit_is_none_and_takes_nothing():
    pool = PagePool(num_pages=3, page_size=4)
    assert pool.acquire(3) is None
    assert pool.num_free == 2
    assert pool.acquire(0) == []


def test_a_released_page_is_handed_out_again():
    pool = PagePool(num_pages=2, page_size=4)
    page_ids = pool.acquire(1)
    pool.release(page_ids)
    assert pool.acquire(1) == page_ids


def test_a_shared_page_is_free_only_when_its_last_reference_is_released():
    pool = PagePool(num_pages=3, page_size=4)
    page_ids = pool.acquire(2)
    pool.fork(page_ids[:1])
    pool.check([page_ids, page_ids[:1]])
    pool.release(page_ids)
    assert pool.num_free == 1
    pool.check([page_ids[:1]])
    pool.release(page_ids[:1])
    assert pool.num_free == 2
    pool.check([])


@pytest.mark.parametrize(("num_tokens", "num_pages"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_page_is_needed_for_each_page_size_tokens_begun(num_tokens, num_pages):
    assert PagePool(num_pages=2, page_size=4).pages_for(num_tokens) == num_pages


def test_a_page_released_twice_is_refused():
    pool = PagePool(num_pages=3, page_size=4)
    page_ids = pool.acquire(1)
    pool.release(page_ids)
    with pytest.raises(AssertionError, match=f"page {page_ids[0]} is released more often"):
        pool.release(page_ids)


def test_a_page_that_nobody_holds_cannot_be_shared():
    pool = PagePool(num_pages=3, page_size=4)
    with pytest.raises(AssertionError, match="page 1 is shared, but nobody holds it"):
        pool.fork([1])


def test_check_finds_a_page_that_is_held_but_not_counted():
    with pytest.raises(AssertionError, match="were counted"):
        PagePool(num_pages=3, page_size=4).check([[1]])


def test_check_finds_a_page_that_is_counted_but_not_held():
    pool = PagePool(num_pages=3, page_size=4)
    pool.acquire(1)
    with pytest.raises(AssertionError, match="were counted"):
        pool.check([])


def test_check_finds_a_page_in_two_tables_that_was_never_shared():
    pool = PagePool(num_pages=3, page_size=4)
    page_ids = pool.acquire(1)
    with pytest.raises(AssertionError, match="were counted"):
        pool.check([page_ids, page_ids])


def test_check_finds_the_null_page_in_a_table():
    with pytest.raises(AssertionError, match="kept for padding"):
        PagePool(num_pages=3, page_size=4).check([[NULL_PAGE]])


def test_check_finds_a_page_that_is_twice_on_the_free_list():
    pool = PagePool(num_pages=3, page_size=4)
    pool._free.append(2)
    with pytest.raises(AssertionError, match="twice"):
        pool.check([])


def test_check_finds_a_page_that_is_neither_held_nor_free():
    pool = PagePool(num_pages=3, page_size=4)
    pool._free.remove(2)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.check([])


@pytest.mark.parametrize(("num_pages", "page_size", "name"), [(1, 4, "num_pages"), (2, 0, "page_size")])
def test_a_pool_without_a_usable_page_is_refused(num_pages, page_size, name):
    with pytest.raises(ValueError, match=f"{name} must be at least"):
        PagePool(num_pages, page_size)


@given(st.lists(st.tuples(st.sampled_from(["acquire", "fork", "release"]), st.integers(0, 6)), max_size=40))
def test_the_accounts_stay_right_through_any_sequence_of_calls(calls):
    pool, tables = PagePool(num_pages=8, page_size=1), []
    for call, number in calls:
        if call == "acquire":
            free = pool.num_free
            page_ids = pool.acquire(number)
            assert (page_ids is None) == (number > free)
            if page_ids is not None:
                tables.append(page_ids)
        elif tables and call == "fork":
            tables.append(list(tables[number % len(tables)]))
            pool.fork(tables[-1])
        elif tables:
            pool.release(tables.pop(number % len(tables)))
        pool.check(tables)
