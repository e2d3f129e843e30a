from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from warmprefix_redis.followed_stream import Retention


@given(st.integers(1, 500), st.lists(st.integers(1, 64), max_size=200))
def test_retention_keeps_about_the_configured_number_of_orders(keep: int, entries: list[int]) -> None:
    retention = Retention(keep)
    for number, orders in enumerate(entries):
        retention.add(b"%d-0" % number, orders)
        seen = entries[: number + 1]
        if retention.start is None:
            assert sum(seen) < keep
            continue
        kept = sum(seen[int(retention.start.partition(b"-")[0]) :])
        # One step is at most an entry longer than it has to be.
        assert keep <= kept < keep + max(keep // 64, 1) + 64
    assert len(retention._steps) <= 2 * 64 + 2
