"""
title: warmprefix
version: 0.1
requirements: warmprefix
description: Sends retrieved sources in an order that the engine's prefix cache may hold already.
"""

from warmprefix_plugins.open_webui import SourceFilter as Filter

__all__ = ["Filter"]
