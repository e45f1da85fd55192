"""Owns `PageTables`: which pages each request holds: found by their contents, shared with its parent, or its own."""

from __future__ import annotations

from itertools import islice

from .page_pool import PagePool
from .request import Request, RequestStatus


class PageTables:
    """Pages are shared in two ways. Full pages are published under a key for all tokens up to their end, and a request
    begins with the pages that are published for its own tokens (`prefix_caching`). A fork begins with all pages of the
    request that it branches off, if that one is running; whoever writes first into a page that others hold too writes
    into a copy.
    """

    def __init__(self, pool: PagePool, pages_per_seq: int, prefix_caching: bool):
        self.pool = pool
        self.pages_per_seq = pages_per_seq
        self.num_cached_tokens = 0  # that were not computed, as their KV was there
        self.copies: list[tuple[int, int]] = []  # (source, target), of the step that is being planned
        self._prefix_caching = prefix_caching

    def inheritance(self, request: Request) -> tuple[list[int], int]:
        """Pages that hold the first tokens of a request which is to start, and how many tokens they hold."""
        parent = request.parent
        if parent is not None and parent.status is RequestStatus.RUNNING and parent.has_computed_prompt:
            num_tokens = min(parent.num_computed_tokens, request.num_inherited_tokens)
            return parent.page_ids[: self.pool.pages_for(num_tokens)], num_tokens
        page_ids = self._found(request)
        return page_ids, len(page_ids) * self.pool.page_size

    def share(self, request: Request, page_ids: list[int], num_shared: int) -> None:
        """Gives a request further pages, filled up to its token `num_shared`. If that is all it has, the last token is
        computed once more, for what it predicts."""
        self.pool.fork(page_ids)
        request.add_pages(page_ids, self.pages_per_seq)
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

    def find_more(self, request: Request) -> bool:
        """Whether a request whose pages are full goes on with some that others have published since it was started."""
        if request.num_computed_tokens < len(request.page_ids) * self.pool.page_size:
            return False
        page_ids = self._found(request)
        if page_ids:
            self.share(request, page_ids, (len(request.page_ids) + len(page_ids)) * self.pool.page_size)
        return bool(page_ids)

    def publish(self, request: Request) -> None:
        """Lets others find the pages that are full now: their tokens are computed, and the request has not ended."""
        first, num_full = request.num_published_pages, request.num_computed_tokens // self.pool.page_size
        request.num_published_pages = num_full
        if self._prefix_caching and not request.is_stale:
            keys = request.keys(first, self.pool.page_size)
            for page_id, key in zip(request.page_ids[first:num_full], keys, strict=False):
                self.pool.publish(page_id, key)

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
        request.add_pages(page_ids, self.pages_per_seq)
        return True

    def follow(self, request: Request, parent: Request) -> None:
        """Gives a request the pages of another, whose tokens it is about to go on from, in the place of its own."""
        self.pool.fork(parent.page_ids)
        self.pool.release(request.drop_pages())
        request.add_pages(parent.page_ids, self.pages_per_seq)
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
        # All copies of a step are made at once: none may write what another reads. A page that one reads may be free by
        # now, if its holder was preempted.
        sources = {source for source, _ in self.copies}
        set_aside: list[int] = []
        while (acquired := self.pool.acquire(1)) and acquired[0] in sources:
            set_aside += acquired
        self.pool.release(set_aside)
        if acquired is None:
            return False
        page_id = request.replace_page(index, acquired[0])
        request.shares_tail = False
        # A copy that is only being made is no source either.
        source = next((source for source, target in self.copies if target == page_id), page_id)
        self.copies.append((source, acquired[0]))
        self.pool.release([page_id])
        return True

    def _found(self, request: Request) -> list[int]:
        """Published pages of its tokens, from those on that it holds no page for."""
        if not self._prefix_caching or request.is_stale:
            return []
        keys = request.keys(len(request.page_ids), self.pool.page_size)
        if request.score_from is not None:
            # The token before the first that is scored must be computed, with all after it: pages know no logits.
            useful = (request.score_from - 1) // self.pool.page_size
            keys = islice(keys, max(useful - len(request.page_ids), 0))
        return self.pool.match(keys)
