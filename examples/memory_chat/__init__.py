"""A chat in the terminal that remembers its user with Mem0, and keeps its history in the engine's prefix cache."""
