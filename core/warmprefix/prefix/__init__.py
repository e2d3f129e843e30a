"""The prefix tree: the planner's picture of the engine's prefix cache."""
