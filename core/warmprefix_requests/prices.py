"""Prices of hosted models, from the table that comes with LiteLLM."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from warmprefix.cache_profiles import CacheProfile, as_profile
from warmprefix.errors import WarmprefixError

__all__ = ["PricesError", "with_prices"]

_TABLE = "model_prices_and_context_window_backup.json"
_WRITE_PRICES = ("cache_creation_input_token_cost", "cache_creation_input_token_cost_above_1hr")


class PricesError(WarmprefixError, ValueError):
    """The prices of a model could not be found; the message has the reason."""


def with_prices(
    profile: CacheProfile | str, model: str, table: Mapping[str, Mapping[str, Any]] | None = None
) -> CacheProfile:
    """Return a profile with the prices of one model.

    Prices that the table lacks stay in proportion to the price of an uncached token. Prices for long prompts, batches
    and priorities are left out.

    >>> table = {"m": {"input_cost_per_token": 4e-06, "cache_read_input_token_cost": 1e-06}}
    >>> profile = with_prices("anthropic", "m", table)
    >>> profile.token_price, profile.read_price, profile.write_prices
    (4e-06, 0.25, (1.25, 2.0))

    Args:
        profile: A profile, or its name.
        model: A name in the table, such as `claude-sonnet-4-5` or `deepseek/deepseek-chat`.
        table: Prices per token by model; None for the file in an installed LiteLLM, which is read but not imported.

    Raises:
        PricesError: LiteLLM is not installed, or the table has no price for this model.
        TypeError: `profile` is neither a CacheProfile nor a str.
        ValueError: No profile has this name.
    """
    before = as_profile(profile)
    prices = (_installed_table() if table is None else table).get(model, {})
    price = _price(prices, "input_cost_per_token")
    if price is None:
        raise PricesError(f"model must be one with a price per token in the table of LiteLLM, got {model!r}")
    read = _price(prices, "cache_read_input_token_cost")
    writes = [_price(prices, name) for name in _WRITE_PRICES]
    pairs = zip(before.write_prices, writes, strict=False)
    return replace(
        before,
        token_price=price,
        read_price=before.read_price if read is None else read / price,
        write_prices=tuple([usual if write is None else write / price for usual, write in pairs]),
    )


def _price(prices: Mapping[str, Any], name: str) -> float | None:
    """Return a price; None for a missing one, and for the zeros that stand for missing ones."""
    value = prices.get(name)
    return float(value) if isinstance(value, int | float) and value > 0 else None


def _installed_table() -> dict[str, dict[str, Any]]:
    package = find_spec("litellm")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        try:
            table: dict[str, dict[str, Any]] = json.loads((Path(folder) / _TABLE).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise PricesError(f"the prices of the installed LiteLLM could not be read: {error}") from error
        return table
    raise PricesError("prices come with LiteLLM, which is not installed: pip install litellm")
