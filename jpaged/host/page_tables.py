"""Owns `PageTables`: which pages each request holds: found by their contents, shared with its parent, or its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from .page_pool import NULL_PAGE, PagePool
from .request import Request, RequestStatus
from .row_table import RowTable


class Found(NamedTuple):
    """What there is of a request's tokens: pages of the pool, and after them keys of pages in swap space."""

    page_ids: Sequence[int]
    keys: Sequence[bytes]
    num_tokens: int  # in all of them


class PageTables:
    """Pages are shared in two ways. Full pages are published under a key for all tokens up to their end, and a request
    begins with the pages that are published for its own tokens (`prefix_caching`). A fork begins with all pages of the
    request that it branches off, if that one is running; whoever writes first into a page that others hold too writes
    into a copy.

    Pages that no token to come can see (`sliding_window`) are given back: a request holds the null page in their place.
    """

    def __init__(self, pool: PagePool, rows: RowTable, prefix_caching: bool = True, sliding_window: int | None = None):
        self.pool = pool
        self.rows = rows
        self.num_cached_tokens = 0  # that were not computed, as their KV was there
        self._copies: dict[int, int] = {}  # targets to sources, of the step that is being planned
        self._prefix_caching = prefix_caching
        self._sliding_window = sliding_window

    def inheritance(self, request: Request) -> Found:
        """What there is of the first tokens of a request which is to start."""
        parent = request.parent
        if parent is not None and parent.status is RequestStatus.RUNNING and parent.has_computed_prompt:
            num_tokens = min(parent.num_computed_tokens, request.num_inherited_tokens)
            page_ids = parent.page_ids[: self.pool.pages_for(num_tokens)]
            # Its last token may be computed once more, and sees one token more than the next one does.
            if parent.num_dropped_pages <= self._num_out_of_sight(num_tokens - 1):
                return Found(page_ids, (), num_tokens)
        return self._found(request)

    def share(self, request: Request, found: Found) -> None:
        """Gives a request what was found. If that is all it has, the last token is computed once more, for what it
        predicts."""
        swap_space, page_size, num_shared = self.pool.swap_space, self.pool.page_size, found.num_tokens
        self.pool.fork(found.page_ids)
        if request.block_table is None:
            self.rows.take(request)
        request.num_dropped_pages += sum(page_id == NULL_PAGE for page_id in found.page_ids)
        request.add_pages(found.page_ids)
        if found.keys:
            assert swap_space is not None
            places = swap_space.places_of(found.keys)
            page_ids = self._acquire_for_moves(len(places))
            for page_id, key, place in zip(page_ids, found.keys, places, strict=False):
                swap_space.swap_in(place, page_id)
                self.pool.publish(page_id, key)
            request.add_pages(page_ids)
            request.num_swapped_pages += len(page_ids)
            num_shared -= (len(places) - len(page_ids)) * page_size
        computed = request.num_computed_tokens
        request.num_computed_tokens = min(num_shared, request.num_tokens - 1)
        request.num_shared_tokens = num_shared
        request.num_published_pages = num_shared // self.pool.page_size
        self.num_cached_tokens += request.num_computed_tokens - computed

    def prompt_key(self, request: Request) -> bytes | None:
        """The key of the last full page of its prompt, None where there is none to be found."""
        size = self.pool.page_size
        if not self._prefix_caching or request.is_stale or request.num_prompt_tokens < size:
            return None
        return next(request.keys(request.num_prompt_tokens // size - 1, size))

    def num_shareable_pages(self, request: Request) -> int:
        """Pages of its prompt that it shares with others of the same prompt."""
        return request.num_prompt_tokens // self.pool.page_size if self._prefix_caching else 0

    def find_more(self, request: Request) -> bool:
        """Whether a request whose pages are full goes on with some that others have published since it was started."""
        if request.num_computed_tokens < len(request.page_ids) * self.pool.page_size:
            return False
        found, computed = self._found(request), request.num_computed_tokens
        # Pages in swap space are worth it only where they need not push out others.
        if found.page_ids or 0 < len(found.keys) <= self.pool.num_free:
            self.share(request, found)
        return request.num_computed_tokens > computed

    def publish(self, request: Request) -> None:
        """Lets others find the pages that are full now: their tokens are computed, and the request has not ended."""
        first, num_full = request.num_published_pages, request.num_computed_tokens // self.pool.page_size
        request.num_published_pages = num_full
        if self._prefix_caching and not request.is_stale:
            for index in range(first, num_full):
                self.pool.publish(request.page_ids[index], request.key(index, self.pool.page_size))

    def page_to_copy(self, request: Request, start: int, end: int) -> int | None:
        """Which of its pages a request must not write into for its tokens start .. end - 1, if any."""
        start = max(start, request.num_shared_tokens)
        index = start // self.pool.page_size
        if not request.shares_tail or start >= end:
            return None
        if index < len(request.page_ids) and self.pool.is_read_only(request.page_ids[index]):
            return index  # what follows it, if anything, is its own
        request.shares_tail = False
        return None

    def hold(self, request: Request, start: int, end: int) -> bool:
        """Gives a request the pages that it lacks for its tokens start .. end - 1; False if so many are not free."""
        missing = self._num_missing(request, start, end)
        if not missing:
            return True
        if missing > self.pool.num_free:
            return False
        index = self.page_to_copy(request, start, end)
        if index is not None and not self._copy(request, index):
            return False
        page_ids = self.pool.acquire(missing - (index is not None))
        assert page_ids is not None
        request.add_pages(page_ids)
        return True

    def give_back(self, request: Request) -> None:
        """Takes a request's pages from it, and what this step was to bring into those that nobody else holds."""
        page_ids = request.drop_pages()
        self.rows.give_back(request)
        self.pool.release(page_ids)
        for page_id in page_ids:
            if page_id in self._copies and not self.pool.is_held(page_id):
                del self._copies[page_id]

    def take_copies(self) -> list[tuple[int, int]]:
        """The copies (source, target) to be made before the step that was planned since the last call."""
        copies, self._copies = [(source, target) for target, source in self._copies.items()], {}
        return copies

    def clear(self) -> None:
        """Takes all pages back, whoever holds them."""
        self.pool.clear()
        self.rows.clear()
        self._copies.clear()

    def follow(self, request: Request, parent: Request) -> None:
        """Gives a request the pages of another, whose tokens it is about to go on from, in the place of its own."""
        self.pool.fork(parent.page_ids)
        self.pool.release(request.drop_pages())
        request.num_dropped_pages = parent.num_dropped_pages
        request.add_pages(parent.page_ids)
        request.num_computed_tokens = parent.num_computed_tokens
        request.num_published_pages = parent.num_published_pages
        request.is_stale = parent.is_stale
        request.shares_tail = parent.shares_tail = True

    def _num_missing(self, request: Request, start: int, end: int) -> int:
        """Pages that a request lacks to have its tokens start .. end - 1 written."""
        missing = max(self.pool.pages_for(end) - len(request.page_ids), 0)
        return missing + (self.page_to_copy(request, start, end) is not None)

    def _copy(self, request: Request, index: int) -> bool:
        """Gives a request a page of its own for one that it shares; False if there is none."""
        acquired = self._acquire_for_moves(1)
        if not acquired:
            return False
        page_id = request.replace_page(index, acquired[0])
        request.shares_tail = False
        request.num_page_copies += 1
        swap_space = self.pool.swap_space
        # Pages come back after the copies are made: one that is yet to be filled is no source.
        if swap_space is None or not swap_space.fill_alike(page_id, acquired[0]):
            # A copy that is only being made is none either.
            self._copies[acquired[0]] = self._copies.get(page_id, page_id)
        self.pool.release([page_id])
        return True

    def _acquire_for_moves(self, num_pages: int) -> list[int]:
        """As many pages as there are, at most so many, that no copy of this step reads: all are made at once, before
        the step. A page that one reads may be free by now, if its holder was preempted."""
        sources = set(self._copies.values())
        set_aside: list[int] = []
        acquired: list[int] = []
        while len(acquired) < num_pages and (page_ids := self.pool.acquire(1)):
            if page_ids[0] in sources:
                set_aside += page_ids
            else:
                acquired += page_ids
        self.pool.release(set_aside)
        return acquired

    def _found(self, request: Request) -> Found:
        """Published pages of its tokens, from those on that it holds no page for."""
        if not self._prefix_caching or request.is_stale:
            return Found((), (), 0)
        num_held = len(request.page_ids)
        page_ids = self.pool.match(self._keys(request, num_held))
        num_held += len(page_ids)
        keys: Sequence[bytes] = ()
        if self.pool.swap_space is not None:
            keys = self.pool.swap_space.find(self._keys(request, num_held))
        return Found(page_ids, keys, (num_held + len(keys)) * self.pool.page_size)

    @property
    def has_windows(self) -> bool:
        """Whether there are pages that go out of sight."""
        return self._sliding_window is not None

    def drop_unseen(self, request: Request) -> None:
        """Gives back the pages whose tokens are out of sight for all tokens to come."""
        if self._sliding_window is None:
            return
        first, last = request.num_dropped_pages, self._num_out_of_sight(request.num_computed_tokens)
        if last > first:
            self.pool.release([request.replace_page(index, NULL_PAGE) for index in range(first, last)])
            request.num_dropped_pages = last

    def goes_out_of_sight(self, positions: np.ndarray) -> list[int]:
        """For which of these positions a page goes out of sight that the one before saw: indices."""
        assert self._sliding_window is not None
        return ((positions - self._sliding_window + 1) % self.pool.page_size == 0).nonzero()[0].tolist()

    def _num_out_of_sight(self, position: int) -> int:
        """Pages at the front of which the token at a position sees none."""
        if self._sliding_window is None:
            return 0
        return max(position - self._sliding_window + 1, 0) // self.pool.page_size

    def _keys(self, request: Request, start: int) -> Iterator[bytes]:
        """The keys of its pages, from number `start` on, that are of use to it."""
        keys = request.keys(start, self.pool.page_size)
        if not request.lacks_scores:
            return keys
        assert request.score_from is not None
        # The token before the first that is scored must be computed, with all after it: pages know no logits.
        return islice(keys, max((request.score_from - 1) // self.pool.page_size - start, 0))
