"""
All code that relies on private parts of TRL, beside the overrides in `trl_otb.trainer`.

- `contract`: a list of these parts, checked when a trainer is constructed;
- `forwards`: energies, log-probs and hidden states from TRL's forwards, or from one more; `sampled`: from `generate`;
- `rollouts`: the rewards and returns behind GRPOTrainer's advantages, recorded and checked;
- `loss`: the loss under advantages per token; `tool_loop`: turns that all processes take together;
- `overrides`: checks of a user's own subclass;
- `pools`: completions from a trainer whose state is restored, for the comparison of baselines.
"""
