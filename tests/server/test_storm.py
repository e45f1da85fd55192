"""Many clients at once, as `storm.py` sends them: here few and short."""

from __future__ import annotations

import collections
import sys

import pytest
from server_support import Live, build, random_params
from storm import weather


@pytest.mark.skipif(sys.platform != "linux", reason="counts descriptors in /proc")
def test_after_a_storm_all_is_as_before():
    with Live(build(random_params(), num_pages=129), max_waiting=20) as live:
        outcomes = collections.Counter[str]()
        for _ in range(6):  # on a slow machine one is not enough to see all kinds
            outcomes += weather(live, num_clients=60, seconds=5)
            if {"stream", "plain", "left", "429", "rubbish 400"} <= outcomes.keys():
                return
    raise AssertionError(outcomes)
