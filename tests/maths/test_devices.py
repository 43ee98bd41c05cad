"""Everything that is formed of a rollout, on the device `meta`: a mix of devices, as it would fail on a GPU, shows."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from tests.helpers.oracles import OPTIONS, Rollouts
from trl_otb.baselines import BASELINES, Tokens, assign_credit, compute_advantages
from trl_otb.credit import advantages_of, credit, credit_base, measure, tokens_of
from trl_otb.metrics import completion_statistics, summarize
from trl_otb.rewards import RewardRecorder, TokenRewards
from trl_otb.rollout import Rollout


READ = [getattr(torch.Tensor, name) for name in ("item", "tolist", "cpu", "__int__", "__float__")]


class ReadAsOnes(TorchFunctionMode):
    """What Python reads of a tensor without values is 1, or False where it decides."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) and args[0].is_meta else None
        if tensor is not None and function is torch.Tensor.__bool__:
            return False
        if tensor is not None and function in READ:
            ones = torch.ones(tensor.shape, dtype=tensor.dtype)
            return ones if function is torch.Tensor.cpu else getattr(ones, function.__name__)()
        return function(*args, **kwargs or {})


@pytest.fixture(autouse=True)
def read_as_ones():
    with ReadAsOnes():
        yield


@pytest.fixture
def x():
    x = Rollouts()
    for name in ("rewards", "energy", "mask", "ratios"):
        setattr(x, name, getattr(x, name).to("meta"))
    return x


def beside_of(x, names):
    all_of = {
        "logps": x.energy,
        "states": torch.zeros(*x.mask.shape, 4, device="meta"),
        "completion_ids": x.mask,
        "prompt_key": torch.zeros(len(x.mask), dtype=torch.long, device="meta"),
        "turn": x.mask,
    }
    return {name: all_of[name] for name in names}


def test_a_mix_of_devices_shows():
    with pytest.raises(RuntimeError, match="device"):
        torch.zeros(3, device="meta") + torch.zeros(3)


@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_advantages(x, options, dense):
    rewards = x.energy if dense else x.rewards
    beside = beside_of(x, BASELINES[options["baseline"]].reads)
    for ratios in (None, x.ratios):
        found = compute_advantages(rewards, x.energy, x.mask, x.n, importance_weights=ratios, **options, **beside)
        assert found.is_meta and found.shape == x.mask.shape


@pytest.mark.parametrize("alignment", ["generated", "position"])
def test_all_that_a_baseline_can_ask_for(x, alignment):
    def own(group):
        read = group.logps + group.turn + group.completion_ids + group.states.sum(-1) + group.prompt_key
        return group.mean(read + group.energy + group.total_energy + group.lengths + group.lone_tail + group.alone)

    names = ("logps", "states", "completion_ids", "prompt_key", "turn")
    credit = assign_credit(
        x.rewards, x.energy, x.mask, x.n, baseline=own, alignment=alignment, beside=beside_of(x, names)
    )
    assert all(values.is_meta for values in (credit.advantages, credit.returns, credit.lone_tail_tokens))


def test_value_learns_and_predicts(x):
    rule = BASELINES["value"].instance()
    prompt = torch.arange(len(x.mask), device="meta") // x.n
    tokens = Tokens(x.rewards, x.rewards.unsqueeze(1), x.energy, x.mask, prompt, beside_of(x, rule.reads))
    assert {"explained", "weight"} == set(rule.function.update(tokens))
    rule.function.theta, rule.function.weight = torch.ones(9 + 2 * 4), 0.5
    assert rule.function(tokens).is_meta


@pytest.mark.parametrize("dense", [False, True], ids=["terminal", "dense"])
@pytest.mark.parametrize("baseline", BASELINES)
def test_a_rollout_from_energies_to_metrics(x, baseline, dense):
    rule = BASELINES[baseline]
    rollout = Rollout(
        x.mask, x.mask, x.mask, x.mask, x.mask, x.n, x.energy if dense else x.rewards, torch.ones_like(x.rewards)
    )
    rollout.energy, rollout.logps = x.energy, x.energy
    rollout.states, rollout.prompt_key = beside_of(x, ("states", "prompt_key")).values()
    options = {"baseline": rule.instance(), "alignment": "generated", "zero_tail": True, "leave_one_out": False}
    if rule.on_top_of is not None:
        credit_base(rollout, **options)
        assert tokens_of(rollout, options["baseline"]).returns.is_meta
    credit(rollout, **options)
    measure(rollout)
    assert advantages_of(rollout).is_meta and rollout.statistics.is_meta and rollout.unmeasured == 0
    assert "grad_power" in summarize(rollout.statistics, x.n)


def test_statistics_of_scorable_completions(x):
    of_tokens, of_rows = x.energy, x.rewards.unsqueeze(1)
    found = completion_statistics(
        x.energy, x.mask, of_tokens, of_rows, of_tokens, of_rows.long(), scorable=of_rows.squeeze(1) > 0
    )
    assert found.is_meta


def test_rewards_of_tokens(x):
    rows, length = x.mask.shape
    recorder = RewardRecorder([[0] * length] * rows)
    recorder.wrap(0, "function", lambda: [TokenRewards(torch.zeros(length)) for _ in range(rows)], False)()
    assert recorder.token_rewards(x.mask, x.rewards, torch.ones(rows, 1, device="meta")).is_meta
