"""A rollout as text in a terminal, and as a page."""
