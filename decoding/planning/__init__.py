"""The planner: memory requirements, predicted times and strategy selection."""
