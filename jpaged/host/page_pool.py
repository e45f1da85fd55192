"""Owns `PagePool`: which pages of KV memory are free, and how many requests refer to each of the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

NULL_PAGE = 0  # padding reads and writes it, so it is never handed out


class PagePool:
    """Page ids with reference counts. `num_pages` counts the null page too: one page less can be acquired."""

    def __init__(self, num_pages: int, page_size: int):
        if num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page {NULL_PAGE} is kept for padding), got {num_pages}")
        if page_size < 1:
            raise ValueError(f"page_size must be at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        self.clear()

    def clear(self) -> None:
        """Takes all pages back, whoever holds them."""
        self._references = [0] * self.num_pages
        # A stack: what was released last is handed out first.
        self._free = list(range(self.num_pages - 1, NULL_PAGE, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_pages - 1 - len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """How many pages `num_tokens` tokens of one request take."""
        return -(-num_tokens // self.page_size)

    def acquire(self, num_pages: int) -> list[int] | None:
        """Hands out `num_pages` pages, each with one reference; None, and nothing is taken, if fewer are free."""
        if num_pages > len(self._free):
            return None
        page_ids = [self._free.pop() for _ in range(num_pages)]
        for page_id in page_ids:
            self._references[page_id] = 1
        return page_ids

    def share(self, page_ids: Iterable[int]) -> None:
        """Adds a reference to each of these pages, which somebody holds already."""
        for page_id in page_ids:
            assert self._references[page_id] > 0, f"page {page_id} is shared, but nobody holds it"
            self._references[page_id] += 1

    def release(self, page_ids: Iterable[int]) -> None:
        """Gives back one reference to each of these pages; a page without references is free again."""
        for page_id in page_ids:
            assert self._references[page_id] > 0, f"page {page_id} is released more often than it was handed out"
            self._references[page_id] -= 1
            if self._references[page_id] == 0:
                self._free.append(page_id)

    def check(self, block_tables: Iterable[list[int]]) -> None:
        """Asserts that the counts are exactly the references in `block_tables`, and that all other pages are free."""
        held = Counter(page_id for page_ids in block_tables for page_id in page_ids)
        counted = {page_id: count for page_id, count in enumerate(self._references) if count}
        assert NULL_PAGE not in held, f"a request holds page {NULL_PAGE}, which is kept for padding"
        assert held == counted, f"references (page: count) are {dict(held)}, but {counted} were counted"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is on the free list twice"
        assert free == set(range(1, self.num_pages)) - held.keys(), "the free pages are not those that nobody holds"
