"""Owns the accounts of the scheduler: how much its requests hold, and whether they and the pool agree about it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter

from .decode_rows import DecodeRows
from .page_pool import PagePool
from .request import Request, RequestStatus

BY_ORDER = attrgetter("order")


def num_held_tokens(pool: PagePool, running: Sequence[Request]) -> int:
    """Tokens whose KV is held, those that requests share counted once."""
    size, seen = pool.page_size, set()
    if not pool.num_shared:
        return sum([request.num_computed_tokens - request.num_dropped_pages * size for request in running])
    empty = 0
    for request in running:
        full = request.num_computed_tokens // size
        for index in range(full, len(request.page_ids)):
            page_id = request.page_ids[index]
            # Of those that share a page, one may have gone on in it: then the others are about to leave it.
            if page_id not in seen:
                empty += size - (request.num_computed_tokens - full * size if index == full else 0)
                seen.add(page_id)
    return pool.num_used * size - empty


def check_accounts(
    pool: PagePool,
    running: Sequence[Request],
    waiting: Sequence[Request],
    requests: dict[str, Request],
    decode_rows: DecodeRows,
) -> None:
    """Asserts that the pool and the requests agree about every page, and the rows that decode with both. `requests`:
    all that are unfinished."""
    decode_rows.check(running)
    pool.check(request.page_ids[request.num_dropped_pages :] for request in running)
    for request in running:
        num_pages, num_computed = len(request.page_ids), request.num_computed_tokens
        assert request.status is RequestStatus.RUNNING, f"{request.request_id} runs as {request.status}"
        assert not any(request.page_ids[: request.num_dropped_pages]), f"{request.request_id} holds unseen pages"
        assert num_computed <= num_pages * pool.page_size, f"{request.request_id} has outgrown its pages"
        assert request.num_shared_tokens <= num_computed + 1, f"{request.request_id} knows nothing of its KV"
        assert request.block_table is not None
        assert request.block_table.tolist() == request.page_ids + [0] * (len(request.block_table) - num_pages)
        assert not (request.forks and request.has_computed_prompt), f"{request.request_id} holds up its forks"
    attached = [fork for request in requests.values() for fork in request.forks]
    for request in [*waiting, *attached]:
        assert request.status is RequestStatus.WAITING, f"{request.request_id} waits as {request.status}"
        assert not request.page_ids, f"{request.request_id} holds pages while it waits"
        assert request.num_computed_tokens == 0, f"{request.request_id} has computed tokens without pages"
    for queue in (running, waiting):
        assert queue == sorted(queue, key=BY_ORDER), "not in order"
    known = [request.request_id for request in [*running, *waiting, *attached]]
    assert sorted(known) == sorted(requests), "a request is lost or known twice"
