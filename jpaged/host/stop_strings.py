"""Owns `StopStrings`: finds the first of several strings in a text that arrives in parts."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopStrings(NamedTuple):
    """The strings as one automaton over characters (Aho and Corasick 1975), whose state is a number.

    State 0 is the start; `step` leads from one to the next in amortised constant time. Shared, so never changed
    once it is made.
    """

    strings: tuple[str, ...]
    children: Sequence[dict[str, int]]  # per state: where a further character of a string leads
    fallback: Sequence[int]  # the state of the longest proper suffix
    held: Sequence[int]  # how many last characters may yet become a string: they begin one and don't complete it
    ending: Sequence[int | None]  # the index of the first listed string that ends here

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        children = self.children
        while char not in children[state]:
            if not state:
                return 0
            state = self.fallback[state]
        return children[state][char]


@functools.lru_cache(maxsize=256)
def compile_stop_strings(strings: tuple[str, ...]) -> StopStrings:
    """The automaton of the strings. Raises ValueError for an empty one."""
    if not all(strings):
        raise ValueError("a stop string must not be empty")
    children: list[dict[str, int]] = [{}]
    depth = [0]
    ending: list[int | None] = [None]
    for index, string in enumerate(strings):
        state = 0
        for char in string:
            if char not in children[state]:
                children[state][char] = len(children)
                children.append({})
                depth.append(depth[state] + 1)
                ending.append(None)
            state = children[state][char]
        if ending[state] is None:
            ending[state] = index
    fallback, held = [0] * len(children), [0] * len(children)
    automaton = StopStrings(strings, children, fallback, held, ending)
    queue = deque([0])
    while queue:  # by depth, so that a fallback is complete before it is asked
        state = queue.popleft()
        held[state] = depth[state] if children[state] else held[fallback[state]]
        shorter = ending[fallback[state]]
        own = ending[state]
        if shorter is not None and (own is None or shorter < own):
            ending[state] = shorter
        for char, child in children[state].items():
            fallback[child] = automaton.step(fallback[state], char) if state else 0
            queue.append(child)
    return automaton
