"""
All code that relies on private parts of TRL, except the overrides in `trl_otb.trainer`: `contract` lists and checks
them; `forwards` and `sampled` get energies, log-probs and states; `rollouts` gets returns and checks them;
`extensions` holds a loss for advantages per token and collective tool turns; `pools` samples for the comparison of
baselines.
"""
