"""Plugins that applications load by name: Hermes Agent by an entry point, LiteLLM by a callback."""
