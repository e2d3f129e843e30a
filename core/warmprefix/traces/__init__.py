"""Retrieval traces: what a retriever returned, request by request, with lengths instead of text."""
