"""What was measured, and how: README.md."""
