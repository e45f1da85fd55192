"""Owns `PagePool`: which pages of KV memory are free, who shares the others, and which contents can be found again."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from .swap_space import SwapSpace

NULL_PAGE = 0  # padding reads and writes it, so it is never handed out


class PagePool:
    """Page ids with reference counts. `num_pages` counts the null page too: one page less can be acquired.

    A full page can be published under a key for its contents, and then be found by it, also after the last reference to
    it is gone: until it is handed out again, which comes to pages without a key first and then to those released
    longest ago. What was in it then goes to the swap space, if there is one.
    """

    def __init__(self, num_pages: int, page_size: int, swap_space: SwapSpace | None = None):
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page {NULL_PAGE} is kept for padding), got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.swap_space = swap_space
        self.clear()

    def clear(self) -> None:
        """Takes all pages back, whoever holds them, and forgets what is in them."""
        if self.swap_space is not None:
            self.swap_space.clear()
        self._references = [0] * self.num_pages
        self.num_shared = 0  # pages with more than one reference
        # A stack: what was released last is handed out first.
        self._free = list(range(self.num_pages - 1, NULL_PAGE, -1))
        self._page_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # published and held by nobody, least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - self.num_free

    @property
    def num_cached(self) -> int:
        """Free pages whose contents can be found again."""
        return len(self._idle)

    @property
    def references(self) -> Sequence[int]:
        """How many hold each page, by its id."""
        return self._references

    @property
    def idle_page_ids(self) -> Collection[int]:
        """The free pages whose contents can be found, those that are handed out first in front."""
        return self._idle.keys()

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens of one request take."""
        return -(-num_tokens // self.page_size)

    def acquire(self, num_pages: int) -> list[int] | None:
        """Hands out `num_pages` pages, each with one reference; None, and nothing is taken, if fewer are free."""
        if num_pages > self.num_free:
            return None
        page_ids = [self._free.pop() if self._free else self._evict() for _ in range(num_pages)]
        for page_id in page_ids:
            self._references[page_id] = 1
        return page_ids

    def fork(self, page_ids: Iterable[int]) -> None:
        """Adds a reference to each of these pages, which somebody holds already or which `match` has found."""
        for page_id in page_ids:
            if page_id == NULL_PAGE:
                continue
            references = self._references[page_id]
            if references == 0:
                assert page_id in self._idle, f"page {page_id} is shared, but nobody holds it"
                del self._idle[page_id]
            self.num_shared += references == 1
            self._references[page_id] = references + 1

    def release(self, page_ids: Sequence[int]) -> None:
        """Gives back one reference to each of these pages of one request; a page without references is free again."""
        # From the end: of a sequence that others may begin with, what comes first is the last to be forgotten.
        for page_id in reversed(page_ids):
            if page_id == NULL_PAGE:
                continue  # in the place of one that was given back before
            assert self._references[page_id] > 0, f"page {page_id} is released more often than it was handed out"
            self._references[page_id] -= 1
            self.num_shared -= self._references[page_id] == 1
            if self._references[page_id] == 0:
                if page_id in self._key_of:
                    self._idle[page_id] = None
                else:
                    self._free.append(page_id)
                    if self.swap_space is not None:
                        self.swap_space.cancel(page_id)

    def is_held(self, page_id: int) -> bool:
        return self._references[page_id] > 0

    def is_read_only(self, page_id: int) -> bool:
        """Whether others hold this page too, or may find it."""
        return self._references[page_id] > 1 or page_id in self._key_of

    def publish(self, page_id: int, key: bytes) -> None:
        """Lets a page, which somebody holds and nobody will write any more, be found under `key`. Of equal pages only
        the first can be found."""
        assert self._references[page_id] > 0, f"page {page_id} is published, but nobody holds it"
        if key not in self._page_of:
            assert page_id not in self._key_of, f"page {page_id} is published twice"
            self._page_of[key] = page_id
            self._key_of[page_id] = key

    def match(self, keys: Iterable[bytes]) -> list[int]:
        """The pages published under the first of these keys, up to the first that is unknown. `fork` holds them."""
        page_ids = []
        for key in keys:
            page_id = self._page_of.get(key)
            if page_id is None:
                break
            page_ids.append(page_id)
        return page_ids

    def num_idle(self, page_ids: Iterable[int]) -> int:
        """How many of these pages are free: to hold them takes as many from `num_free`."""
        return sum(self._references[page_id] == 0 for page_id in page_ids if page_id != NULL_PAGE)

    def forget(self) -> None:
        """No page can be found by its contents any more."""
        if self.swap_space is not None:
            self.swap_space.clear()
        self._free += self._idle
        self._idle.clear()
        self._page_of.clear()
        self._key_of.clear()

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Asserts that the counts are exactly the references in `block_tables`, and that all other pages are free."""
        held = Counter(page_id for page_ids in block_tables for page_id in page_ids)
        counted = {page_id: count for page_id, count in enumerate(self._references) if count}
        assert NULL_PAGE not in held, f"a request holds page {NULL_PAGE}, which is kept for padding"
        assert held == counted, f"references (page: count) are {dict(held)}, but {counted} were counted"
        free = {*self._free, *self._idle}
        assert len(free) == self.num_free, "a page is free twice"
        assert free == set(range(1, self.num_pages)) - held.keys(), "the free pages are not those that nobody holds"
        assert self._key_of == {page_id: key for key, page_id in self._page_of.items()}, "keys and pages disagree"
        assert self.num_shared == sum(count > 1 for count in counted.values()), "shared pages are miscounted"
        if self.swap_space is not None:
            self.swap_space.check()
        assert self._idle.keys() == self._key_of.keys() - held.keys(), "not all published pages that are free are idle"

    def _evict(self) -> int:
        page_id, _ = self._idle.popitem(last=False)
        key = self._key_of.pop(page_id)
        del self._page_of[key]
        if self.swap_space is not None:
            self.swap_space.swap_out(key, page_id)
        return page_id
