"""A reader behind HTTP that reads some places of its context better than others."""

from __future__ import annotations

import pytest

from reading_order import MODEL, PROFILES, Served, questions, serve
from warmprefix import ContextPlanner

ASKED = questions("made-up", 144)
CACHE = 30_000


def served(profile: str, **options: object) -> Served:
    return serve(ASKED, PROFILES[profile], ContextPlanner(capacity_tokens=CACHE, **options), CACHE)  # type: ignore[arg-type]


@pytest.mark.parametrize("profile", ["u", "mirror"])
def test_answers_come_back_with_a_profile_and_all_of_them_at_the_lowest_price(profile: str) -> None:
    right = PROFILES[profile]
    before, unaware = served(profile, policy="relevance"), served(profile)
    priced = [served(profile, positions={MODEL: right}, points_per_percent=price) for price in (2, 0)]
    assert unaware.right < before.right
    assert unaware.cached_tokens > before.cached_tokens
    assert unaware.right < priced[0].right <= priced[1].right
    assert priced[0].computed_tokens < before.computed_tokens
    assert priced[1].right >= before.right - 0.02 * len(ASKED), "the answer is not always in one of the best passages"


def test_a_flat_profile_changes_no_byte() -> None:
    aware = served("flat", positions={MODEL: PROFILES["flat"]})
    assert aware.prompts == served("flat").prompts
