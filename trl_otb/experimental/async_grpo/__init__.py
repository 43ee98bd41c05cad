"""Baselines per token in TRL's AsyncGRPOTrainer: `worker` is what samples carry to `trainer`."""
