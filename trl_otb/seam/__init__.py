"""What relies on private parts of GRPOTrainer, beside the overrides in `trl_otb.trainer` and `trl_otb.state`."""
