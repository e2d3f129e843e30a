from __future__ import annotations

from warmprefix.batch.planners import Placed, RelevancePlanner, no_progress


def test_orders_are_kept_and_equal_prefixes_run_together() -> None:
    contexts = [[2, 1, 3], [4, 0], [2, 1, 5], [1, 2], [4, 0]]
    assert RelevancePlanner().arrange(contexts, [1] * 6, no_progress) == [
        Placed(0, (2, 1, 3)),
        Placed(2, (2, 1, 5)),
        Placed(1, (4, 0)),
        Placed(4, (4, 0)),
        Placed(3, (1, 2)),
    ]
