"""`value` without one of its parts, to see what each is worth."""

import torch

import trl_otb
from trl_otb.baselines import BASELINES, Value


class WeightsOne(Value):
    """Per token: `value`, an ordinary value function, every token counting alike."""

    weights = "one"


class NoStates(Value):
    """Per token: `value`, without hidden states."""

    def _features(self, tokens):
        return super()._features(tokens)[..., :9]


class NoSums(Value):
    """Per token: `value`, without sums over the prefix."""

    def _features(self, tokens):
        return torch.cat([super()._features(tokens)[..., :3], super()._features(tokens)[..., 9:]], dim=-1)


class Whole(Value):
    """Per token: `value`, its predictions taken at their face value."""

    def _fit(self):
        super()._fit()
        self.weight = 1.0


ABLATIONS = {
    "value_weights_one": WeightsOne,
    "value_no_states": NoStates,
    "value_no_sums": NoSums,
    "value_whole": Whole,
}
_flags = {name: getattr(BASELINES["value"], name) for name in ("leaves_one_out", "unbiased", "reads", "on_top_of")}
for _name, _class in ABLATIONS.items():
    trl_otb.register_baseline(_name, **_flags)(_class)
