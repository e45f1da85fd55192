"""Owns `SwapSpace`: the pages outside the pool, in host memory and on disk, and what is moved to and from them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .swap_costs import SwapCosts


class Moves(NamedTuple):
    """What is moved before a step. What `swap_in` and `spills` read is there before anything is written.

    Places are numbers of pages in swap space: those in host memory come first, then those on disk.
    """

    swap_in: Sequence[tuple[int, int]]  # (place, page id)
    spills: Sequence[tuple[int, int]]  # (place in host memory, place on disk)
    swap_out: Sequence[tuple[int, int]]  # (page id, place in host memory)


NO_MOVES = Moves((), (), ())


class SwapSpace:
    """Contents of full pages by their keys, after the pool needed their place for others.

    What is least recently used goes from host memory to disk, if there is one, and is then forgotten. A page that is
    brought back is kept here too: the next time it is moved out, it is there already.
    """

    def __init__(self, num_pages: int, costs: SwapCosts, num_disk_pages: int = 0):
        if num_pages < 1:
            raise ValueError(f"the swap space must have at least one page, got {num_pages}")
        self.num_pages = num_pages
        self.num_disk_pages = num_disk_pages
        self.costs = costs
        self.num_swapped_in = self.num_swapped_out = 0
        self.clear()

    def clear(self) -> None:
        self._host: OrderedDict[bytes, int] = OrderedDict()  # places, the least recently used first
        self._disk: OrderedDict[bytes, int] = OrderedDict()
        # What the next step's moves are: pages to places, pairs of places, and keys of what they are yet to bring.
        self._swap_in: dict[int, int] = {}
        self._spills: list[tuple[int, int]] = []
        self._swap_out: list[tuple[int, int]] = []
        self._under_way: set[bytes] = set()

    @property
    def num_held(self) -> int:
        return self.num_in_memory + self.num_on_disk

    @property
    def num_in_memory(self) -> int:
        return len(self._host)

    @property
    def num_on_disk(self) -> int:
        return len(self._disk)

    def find(self, keys: Iterable[bytes]) -> list[bytes]:
        """The first of these keys, up to the first whose page is not here to be read; none if they are not worth it."""
        found: list[bytes] = []
        for key in keys:
            if key in self._under_way or not (key in self._host or key in self._disk):
                break
            found.append(key)
        return found if self.costs.pays(len(found)) else []

    def places_of(self, keys: Sequence[bytes]) -> list[int]:
        """Where the pages of keys lie that `find` has found. Whatever is planned for this step after this, they can be
        read there by its moves."""
        places = []
        for key in reversed(keys):  # of a sequence that others may begin with, what comes first is the last to go
            tier = self._host if key in self._host else self._disk
            tier.move_to_end(key)
            places.append(tier[key])
        return places[::-1]

    def swap_in(self, place: int, page_id: int) -> None:
        """Plans to fill a page with what lies at a place."""
        self._swap_in[page_id] = place
        self.num_swapped_in += 1

    def fill_alike(self, page_id: int, other: int) -> bool:
        """Whether a page is to be filled in this step. Then the other one is, with the same."""
        place = self._swap_in.get(page_id)
        if place is not None:
            self.swap_in(place, other)
        return place is not None

    def cancel(self, page_id: int) -> bool:
        """Whether a page was to be filled in this step, which it is not any more: it found no room after all."""
        cancelled = self._swap_in.pop(page_id, None) is not None
        self.num_swapped_in -= cancelled
        return cancelled

    def swap_out(self, key: bytes, page_id: int) -> None:
        """Plans to keep the contents of a page that is about to be written."""
        if self.cancel(page_id):
            return
        if key in self._host:
            self._host.move_to_end(key)
        elif key in self._disk:
            self._disk.move_to_end(key)
        elif self.costs.ever_pays and (place := self._make_place()) is not None:
            self._host[key] = place
            self._under_way.add(key)
            self._swap_out.append((page_id, place))
            self.num_swapped_out += 1

    def take_moves(self) -> Moves:
        """What is to be moved before the step that was planned since the last call."""
        if not (self._swap_in or self._swap_out):  # spills only make room for what comes out
            return NO_MOVES
        moves = Moves([(place, page_id) for page_id, place in self._swap_in.items()], self._spills, self._swap_out)
        self._swap_in, self._spills, self._swap_out = {}, [], []
        self._under_way.clear()
        return moves

    def check(self) -> None:
        """Asserts that every place that was ever taken is taken, once."""
        assert sorted(self._host.values()) == list(range(len(self._host))), "places in memory are lost"
        assert sorted(self._disk.values()) == [self.num_pages + i for i in range(len(self._disk))], "or on disk"
        assert len(self._host) <= self.num_pages and len(self._disk) <= self.num_disk_pages, "more pages than places"
        assert not self._host.keys() & self._disk.keys(), "a page lies in two places of swap space"

    def _make_place(self) -> int | None:
        """A free place in host memory; None if all are still to be filled."""
        if len(self._host) < self.num_pages:
            return len(self._host)
        key = next(iter(self._host))
        if key in self._under_way:
            return None
        place = self._host.pop(key)
        on_disk = None
        if len(self._disk) < self.num_disk_pages:
            on_disk = self.num_pages + len(self._disk)
        elif self._disk and next(iter(self._disk)) not in self._under_way:
            on_disk = self._disk.popitem(last=False)[1]
        if on_disk is not None:
            self._disk[key] = on_disk
            self._under_way.add(key)
            self._spills.append((place, on_disk))
        return place
