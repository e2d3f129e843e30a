"""Plugins that applications load by name: Hermes Agent by an entry point, LiteLLM a callback, Open WebUI a function."""
