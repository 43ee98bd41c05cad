"""What builds on experimental parts of TRL."""
