"""The baseline of a run: advantages, scale and metrics of a batch, and the line at the end of a training."""
