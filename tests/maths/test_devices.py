"""Everything that is formed of a rollout, on the device `meta`: a mix of devices, as it would fail on a GPU, shows."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers.coefficients import give_coefficients
from tests.helpers.oracles import ALIGNED, ESTIMATORS, RandomBatch
from trl_otb.baselines import find_baseline, subtract
from trl_otb.energy import TokenValues
from trl_otb.rollout import Rollout
from trl_otb.run.baseline import RunBaseline
from trl_otb.run.metrics import summarize
from trl_otb.seam.token_rewards import RewardRecorder, TokenRewards


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
    x = RandomBatch()
    for name in ("rewards", "energy", "mask", "ratios"):
        setattr(x, name, getattr(x, name).to("meta"))
    x.more = {
        "logps": x.energy, "states": torch.zeros(*x.mask.shape, 4, device="meta"),
        "prompt_key": torch.zeros(len(x.mask), 1, dtype=torch.long, device="meta"),
    }  # fmt: skip
    return x


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
        return c.mean(read + c.energy + c.loss_energy + c.total_energy + c.lengths + c.scored + c.members)

    x.rewards = x.energy if dense else x.rewards
    mode.decides = tool_output
    completions = x.completions(**x.more)
    mode.decides = False
    assert all(values.is_meta for values in subtract(find_baseline(own), completions))


@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("baseline", [name for name, entry in ESTIMATORS.items() if isinstance(entry, str)])
def test_a_rollout_from_energies_to_metrics(x, baseline, dense):
    run = RunBaseline(find_baseline(baseline))
    rollout = Rollout(*[x.mask] * 5, x.n, x.energy if dense else x.rewards, torch.ones_like(x.rewards).unsqueeze(1))
    rollout = rollout.with_values(TokenValues(x.energy, x.energy, x.more["states"]), x.ratios)
    local = rollout.completions(x.more["states"], x.more["prompt_key"])
    found = run.advantages_of(local, rollout.scale, learn=True)
    rollout = rollout.with_advantages(found)
    assert rollout.advantages.is_meta and rollout.baselines.is_meta and found.statistics.is_meta
    assert "grad_power" in summarize(found.statistics, x.n)
    if baseline == "value":
        assert "value/explained" in found.learned
        value = run.entry.estimator
        give_coefficients(value, local, torch.ones)
        value.weight, value.returns_seen = 0.5, (0.0, 1.0)
        assert run.advantages_of(local, rollout.scale).advantages.is_meta


def test_rewards_of_tokens(x):
    rows, length = x.mask.shape
    recorder = RewardRecorder([[0] * length] * rows, [1.0])
    recorder.wrap(0, "function", lambda: [TokenRewards(torch.zeros(length)) for _ in range(rows)], False)()
    assert recorder.token_rewards(x.mask, x.rewards, torch.ones(rows, 1, device="meta")).is_meta
