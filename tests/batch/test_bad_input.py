"""Bad arguments of the parts of batch planning are refused with a complete message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from warmprefix.batch import BatchRequest, Placed, as_requests, device_for, plan_scope, planners_for
from warmprefix_baselines.cluster import ContextIndexPlanner
from warmprefix_kernels.batch_device import use_cuda

anything: Any = 7.5


class Fixed:
    """A planner that always returns the same plan."""

    def __init__(self, *placed: Placed) -> None:
        self._placed = list(placed)

    def arrange(self, *_: object, **__: object) -> list[Placed]:
        return self._placed


def planned(*placed: Placed) -> object:
    return plan_scope([BatchRequest("1", ["a", "b"]), BatchRequest("2", ["c"])], [Fixed(*placed)], None, None)


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: BatchRequest(anything, []), TypeError, "id must be a str or an int, got float"),
    (lambda: BatchRequest("", []), ValueError, "id must not be empty, got ''"),
    (lambda: BatchRequest("1", [], anything), TypeError, "question must be a str, got float"),
    (lambda: BatchRequest("1", [], tenant=anything), TypeError, "tenant must be a str or None, got float"),
    (lambda: as_requests(anything), TypeError, "requests must be BatchRequests, or contexts by id, got one float"),
    (lambda: as_requests([anything]), TypeError, "requests[0] must be a BatchRequest, got float"),
    (
        lambda: as_requests([BatchRequest("a", []), BatchRequest("a", [])]),
        ValueError,
        "requests must have distinct ids, got these repeated, with their places: 'a' (0, 1)",
    ),
    (lambda: planners_for(anything, 1, None, "cpu"), TypeError, "planner must be a name or a BatchPlanner, got float"),
    (
        lambda: planners_for("best", 1, None, "cpu"),
        ValueError,
        "planner must be one of auto, context-index, frequency, merge, relevance, window, got 'best'",
    ),
    (
        lambda: planners_for("auto", 1, -1, "cpu"),
        ValueError,
        "time_budget must be 0 seconds or more, or None, got -1",
    ),
    (lambda: device_for("auto", 1, anything), ValueError, "device must be one of auto, cpu, cuda, got 7.5"),
    (lambda: use_cuda(anything, 1, 1), ValueError, "device must be one of auto, cpu, cuda, got 7.5"),
    (lambda: ContextIndexPlanner(alpha=0), ValueError, "alpha must be in [0.001, 0.01], got 0"),
    (
        lambda: ContextIndexPlanner(linkage=anything),
        ValueError,
        "linkage must be one of average, complete, single, got 7.5",
    ),
    (lambda: ContextIndexPlanner(device=anything), ValueError, "device must be one of auto, cpu, cuda, got 7.5"),
    (
        lambda: planned(Placed(0, (0, 1))),
        ValueError,
        "Fixed must place each of 2 contexts once, got 1 places, 1 distinct",
    ),
    (
        lambda: planned(Placed(0, (0, 1)), Placed(0, (0, 1))),
        ValueError,
        "Fixed must place each of 2 contexts once, got 2 places, 1 distinct",
    ),
    (
        lambda: planned(Placed(0, (0, 0)), Placed(1, (2,))),
        ValueError,
        "Fixed must place all of a context's blocks, each once, got (0, 0) for [0, 1]",
    ),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refusal_names_argument_value_and_allowed_values(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
