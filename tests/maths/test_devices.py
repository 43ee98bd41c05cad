"""Everything that is formed of a rollout, on the device `meta`: a mix of devices, as it would fail on a GPU, shows."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers.oracles import ALIGNED, RULES, Rollouts
from trl_otb.baselines import credit, find_baseline
from trl_otb.metrics import completion_statistics, summarize
from trl_otb.rewards import RewardRecorder, TokenRewards
from trl_otb.rollout import Rollout
from trl_otb.seam.sampled import TokenValues


READ = [getattr(torch.Tensor, name) for name in ("item", "tolist", "cpu", "__int__", "__float__")]


class ReadAsOnes(TorchFunctionMode):
    """What Python reads of a tensor without values is 1; what it decides is `self.decides`."""

    decides = False

    def __torch_function__(self, function, types, args=(), kwargs=None):
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].is_meta else None
        if tensor is not None and function is torch.Tensor.__bool__:
            return self.decides
        if tensor is not None and function in READ:
            ones = torch.ones(tensor.shape, dtype=tensor.dtype)
            return ones if function is torch.Tensor.cpu else getattr(ones, function.__name__)()
        return function(*args, **kwargs or {})


@pytest.fixture(autouse=True)
def mode():
    with ReadAsOnes() as mode:
        yield mode


@pytest.fixture
def x():
    x = Rollouts()
    for name in ("rewards", "energy", "mask", "ratios"):
        setattr(x, name, getattr(x, name).to("meta"))
    x.more = {
        "logps": x.energy, "states": torch.zeros(*x.mask.shape, 4, device="meta"),
        "prompt_key": torch.zeros(len(x.mask), 1, dtype=torch.long, device="meta"),
    }  # fmt: skip
    return x


def test_a_mix_of_devices_shows():
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device="meta") + torch.zeros(3)


@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize(("baseline", "alignment"), ALIGNED)
def test_advantages_stay_on_their_device(x, baseline, alignment, dense):
    rewards = x.energy if dense else x.rewards
    for ratios in (None, x.ratios):
        options = {"alignment": alignment, "importance_weights": ratios}
        found = x.advantages(rewards, baseline=baseline, **options, **x.more)
        assert found.is_meta and found.shape == x.mask.shape


@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("tool_output", [False, True])
def test_every_declared_need_arrives(x, mode, tool_output, dense):
    def own(c):
        read = c.logps + c.states.sum(-1) + c.prompt_key + c.prompt.unsqueeze(1)
        return c.mean(read + c.energy + c.weights + c.total_energy + c.lengths + c.scored + c.members)

    x.rewards = x.energy if dense else x.rewards
    mode.decides = tool_output
    completions = x.completions(**x.more)
    mode.decides = False
    assert all(values.is_meta for values in credit(find_baseline(own), completions))


@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("baseline", [name for name, rule in RULES.items() if isinstance(rule, str)])
def test_a_rollout_from_energies_to_metrics(x, baseline, dense):
    rule = find_baseline(baseline).instance()
    rollout = Rollout(*[x.mask] * 5, x.n, x.energy if dense else x.rewards, torch.ones_like(x.rewards).unsqueeze(1))
    values = TokenValues(x.energy, x.energy, x.more["states"])
    own = rollout.completions(values, x.ratios, x.more["prompt_key"])
    found, of_mean = credit(rule, own), credit(find_baseline("group_mean"), own)
    rollout.keep(rule, found, of_mean)
    statistics = completion_statistics(own, found, of_mean, rollout.scale)
    assert rollout.advantages.is_meta and statistics.is_meta
    assert "grad_power" in summarize(statistics, x.n)
    if baseline == "value":
        assert {"value/explained", "value/weight", "value/restarted"} == {
            *rule.learn(own, found.base, lambda values: values)
        }
        rule.rule.theta, rule.rule.weight = torch.ones(9 + 2 * 4), 0.5
        assert all(values.is_meta for values in credit(rule, own))


def test_rewards_of_tokens(x):
    rows, length = x.mask.shape
    recorder = RewardRecorder([[0] * length] * rows, [1.0])
    recorder.wrap(0, "function", lambda: [TokenRewards(torch.zeros(length)) for _ in range(rows)], False)()
    assert recorder.token_rewards(x.mask, x.rewards, torch.ones(rows, 1, device="meta")).is_meta
