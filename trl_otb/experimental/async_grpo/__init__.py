"""
Baselines per token in TRL's AsyncGRPOTrainer: `trainer`; `worker`, what samples carry to it; and `contract`, the
private parts of TRL that both rely on.
"""
