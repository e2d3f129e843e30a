"""The plugin of Hermes Agent, where Hermes has cloned this repository into its folder of plugins."""

import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path += [str(_HERE.parent / "core"), str(_HERE / "plugins")]  # one that pip has installed comes first

from warmprefix_plugins.hermes import register  # noqa: E402 - it is found now

__all__ = ["register"]
