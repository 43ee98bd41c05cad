"""
What relies on private parts of GRPOTrainer, beside the overrides in `trl_otb.trainer` and `trl_otb.state`: `contract`
lists and checks them; `forwards` and `sampled` get energies, log-probs and states; `rollouts` gets returns and checks
them; `loss` takes advantages per token; `tool_turns` repairs tool turns of several processes; `pools` samples for the
comparison of baselines.
"""
