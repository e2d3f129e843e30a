"""Bad arguments of policies, prefix trees and windows are refused with a complete message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from warmprefix.ordering import CoAccessPolicy
from warmprefix.ordering.coaccess import AccessWindow
from warmprefix.prefix import PrefixTree
from warmprefix_baselines.context_index import ContextIndex, ContextIndexPolicy
from warmprefix_baselines.policies import FrequencyPolicy, RecencyPolicy

text: Any = "many"

REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: PrefixTree[str](capacity_tokens=0), ValueError, "capacity_tokens must be 1 or more, or None, got 0"),
    (lambda: PrefixTree[str](capacity_tokens=text), TypeError, "capacity_tokens must be an int or None, got str"),
    (lambda: PrefixTree[str](max_nodes=-1), ValueError, "max_nodes must be 1 or more, got -1"),
    (
        lambda: PrefixTree[str]().insert("AAB", [1, 1, 1]),
        ValueError,
        "keys must be distinct and have one length each in tokens, got 3 keys (2 distinct) and 3 lengths",
    ),
    (
        lambda: PrefixTree[str]().insert("AB", [1]),
        ValueError,
        "keys must be distinct and have one length each in tokens, got 2 keys (2 distinct) and 1 lengths",
    ),
    (lambda: AccessWindow[str](0), ValueError, "size must be 1 or more, got 0"),
    (lambda: AccessWindow[str](text), TypeError, "size must be an int, got str"),
    (lambda: RecencyPolicy(0), ValueError, "max_blocks must be 1 or more, got 0"),
    (lambda: FrequencyPolicy(window=0), ValueError, "window must be 1 or more, got 0"),
    (lambda: FrequencyPolicy(promotion_threshold=0), ValueError, "promotion_threshold must be 1 or more, got 0"),
    (lambda: FrequencyPolicy(max_nodes=0), ValueError, "max_nodes must be 1 or more, got 0"),
    (lambda: CoAccessPolicy(window=0), ValueError, "window must be 1 or more, got 0"),
    (lambda: CoAccessPolicy(window=text), TypeError, "window must be an int, got str"),
    (lambda: CoAccessPolicy(trust=0), ValueError, "trust must be above 0, got 0"),
    (lambda: CoAccessPolicy(trust=float("nan")), ValueError, "trust must be above 0, got nan"),
    (lambda: ContextIndexPolicy(alpha=0.1), ValueError, "alpha must be in [0.001, 0.01], got 0.1"),
    (lambda: ContextIndexPolicy(max_nodes=0), ValueError, "max_nodes must be 1 or more, got 0"),
    (lambda: ContextIndex[str](alpha=float("nan")), ValueError, "alpha must be in [0.001, 0.01], got nan"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_refusal_names_argument_value_and_allowed_values(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
