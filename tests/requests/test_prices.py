"""Prices of models, from a table like LiteLLM's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from warmprefix.cache_profiles import as_profile
from warmprefix_requests.prices import PricesError, with_prices

TABLE = {
    "all": {
        "input_cost_per_token": 4e-06,
        "cache_read_input_token_cost": 4e-07,
        "cache_creation_input_token_cost": 5e-06,
        "cache_creation_input_token_cost_above_1hr": 8e-06,
    },
    "plain": {"input_cost_per_token": 1e-06},
    "zeros": {"input_cost_per_token": 1e-06, "cache_creation_input_token_cost": 0.0},
    "free": {"input_cost_per_token": 0.0},
    "pictures": {"input_cost_per_image": 0.1},
}


@pytest.fixture
def litellm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the table of an installed package that fails when it is imported."""
    package = tmp_path / "litellm"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    table = package / "model_prices_and_context_window_backup.json"
    table.write_text(json.dumps(TABLE))
    monkeypatch.syspath_prepend(tmp_path)
    return table


@pytest.mark.parametrize(
    ("model", "expected"),
    [("all", [4e-06, 0.1, 1.25, 2.0]), ("plain", [1e-06, 0.1, 1.25, 2.0]), ("zeros", [1e-06, 0.1, 1.25, 2.0])],
)
def test_prices_of_a_model_are_relative_to_an_uncached_token(model: str, expected: list[float]) -> None:
    profile = with_prices("anthropic", model, TABLE)
    found = [profile.token_price, profile.read_price, *profile.write_prices]
    assert found == pytest.approx(expected)
    assert profile.marks == as_profile("anthropic").marks


@pytest.mark.parametrize("model", ["free", "pictures", "unknown"])
def test_a_model_without_a_price_is_an_error(model: str) -> None:
    with pytest.raises(PricesError, match=model):
        with_prices("anthropic", model, TABLE)


def test_the_table_of_an_installed_litellm_is_read_without_its_import(litellm: Path) -> None:
    assert with_prices("deepseek", "plain").token_price == 1e-06
    litellm.write_text("{")
    with pytest.raises(PricesError, match="could not be read"):
        with_prices("deepseek", "plain")


def test_without_litellm_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("warmprefix_requests.prices.find_spec", lambda name: None)
    with pytest.raises(PricesError, match="pip install litellm"):
        with_prices("deepseek", "plain")
