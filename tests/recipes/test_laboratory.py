"""The variance laboratory: scores and moments against independent computations."""

import itertools

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from tests.helpers import tiny
from tests.helpers.laboratory import SCORABLE, Pool, moments, sample_pools
from trl_otb.baselines import compute_advantages


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    path = tiny.save_model(tmp_path_factory.mktemp("model"))
    data = Dataset.from_dict({"prompt": ["1+2=", "3+4="]})
    kept = []
    sample_pools(path, tiny.tokenizer(), tiny.even_bytes, data, 12, kept.append, max_completion_length=6)
    return path, kept


def test_scores_are_gradients_of_log_probs(pools):
    """Every entry of the Gram matrix, by one backward a token."""
    path, (pool, _) = pools
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    tokenizer = tiny.tokenizer()
    gradients, nodes = [], []
    for row in (0, 5):
        prompt = tokenizer("1+2=")["input_ids"]
        completion = pool.completions[row]
        assert len(completion) == pool.mask[row].sum()
        ids = torch.tensor([prompt + completion])
        for t, token in enumerate(completion):
            logits = model(input_ids=ids).logits[0, len(prompt) + t - 1]
            model.zero_grad()
            logits.log_softmax(-1)[token].backward()
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
            nodes.append(int(pool.node[row, t]))
            proxy = (torch.nn.functional.one_hot(torch.tensor(token), len(logits)) - logits.softmax(-1)).square().sum()
            torch.testing.assert_close(pool.energy[row, t], proxy, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(pool.head_norms[pool.node[row, t], 1], proxy, atol=1e-5, rtol=1e-5)
    gradients = torch.stack(gradients)
    torch.testing.assert_close(pool.gram[nodes][:, nodes], gradients @ gradients.T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(pool.exact_energy[0, 0], gradients[0].square().sum(), atol=1e-4, rtol=1e-4)


def test_scores_of_an_adapter_are_those_of_its_last_block(tmp_path):
    """With every block's, the scores of a pool of a pretrained model would not fit."""
    base = AutoModelForCausalLM.from_pretrained(tiny.save_model(tmp_path / "base"), **SCORABLE)
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)  # else half of the scores are 0
    model, tokenizer, kept = get_peft_model(base, adapter), tiny.tokenizer(), []
    data = Dataset.from_dict({"prompt": ["1+2="]})
    sample_pools(
        model, tokenizer, tiny.even_bytes, data, 6, kept.append,
        trainable=lambda name: ".layers.1." in name, max_completion_length=6,
    )  # fmt: skip
    (pool,) = kept

    prompt, completion = tokenizer("1+2=")["input_ids"], pool.completions[0]
    logps = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    parameters = [p for name, p in model.named_parameters() if "lora" in name and ".layers.1." in name]
    assert len(parameters) == 2 * 7
    scores = [
        torch.cat([g.flatten() for g in torch.autograd.grad(logps[t, token], parameters, retain_graph=True)])
        for t, token in enumerate(completion)
    ]
    nodes = pool.node[0, : len(completion)]
    scores = torch.stack(scores)
    largest = scores.square().sum(1).max()
    torch.testing.assert_close(pool.gram[nodes][:, nodes] / largest, scores @ scores.T / largest, atol=1e-4, rtol=1e-4)


def test_the_same_history_is_one_node(pools):
    _, kept = pools
    for pool in kept:
        histories = {}
        for row, completion in enumerate(pool.completions):
            for t in range(len(completion)):
                assert histories.setdefault(tuple(completion[: t + 1]), int(pool.node[row, t])) == pool.node[row, t]
        assert len(histories) == len(pool.gram) == len(set(histories.values()))


def group_mean(r, w, m, n):
    return compute_advantages(r, w, m, n, baseline="group_mean")


def otb(r, w, m, n):
    return compute_advantages(r, w, m, n)


def small_pool(size=6):
    g = torch.Generator().manual_seed(0)
    scores = torch.randn(2 * size, 3, generator=g)
    node = torch.arange(2 * size).view(size, 2)
    node[0, 1] = -1
    rewards = torch.randn(size, generator=g)
    return Pool(
        rewards, torch.rand(size, 2, generator=g), node, scores @ scores.T, torch.zeros(2 * size, 2), []
    ), scores


@pytest.mark.slow
def test_moments_are_those_of_all_deals():
    """
    With groups of 2 from 6, every way to deal them can be listed: the average over deals tends to the average over
    them.
    """
    pool, scores = small_pool()

    def gradient(rows, **options):
        rows = list(rows)
        a = compute_advantages(pool.rewards[rows], pool.energy[rows], pool.mask[rows], len(rows), **options)
        return sum(
            a[i, t] * scores[pool.node[r, t]] for i, r in enumerate(rows) for t in range(2) if pool.mask[r, t]
        ) / len(rows)

    def truth(rows):
        return gradient(rows, baseline="ogb", leave_one_out=True)

    seen = []
    for first in itertools.combinations(range(6), 2):  # one half is a group, the other two
        others = [r for r in range(6) if r not in first]
        for partner in others[1:]:
            second = (others[0], partner)
            third = [r for r in others if r not in second]
            a, b, c = (gradient(rows) for rows in (first, second, third))
            seen.append(
                torch.stack(
                    [
                        (a @ a + b @ b + c @ c) / 3,
                        (a @ b + a @ c + b @ c) / 3,
                        (a @ truth(others) + (b + c) / 2 @ truth(first)) / 2,
                        truth(first) @ truth(others),
                    ]
                )
            )
    expected = torch.stack(seen).mean(0)
    actual = moments(pool, {"otb": otb}, 2, deals=4000)["otb"]
    torch.testing.assert_close(torch.tensor(list(vars(actual).values())), expected, rtol=0.05, atol=0.02)


def test_the_group_mean_is_rloo_scaled(pools):
    """Identical up to (n − 1)/n, so the same noise to signal and the same cosine."""
    _, (pool, _) = pools
    seen = moments(
        pool,
        {"group_mean": group_mean, "rloo": lambda r, w, m, n: compute_advantages(r, w, m, n, baseline="rloo")},
        4,
        50,
    )
    a, b = seen["group_mean"], seen["rloo"]
    assert a.square == pytest.approx(b.square * 9 / 16) and a.signal == pytest.approx(b.signal * 9 / 16)
    assert a.with_truth == pytest.approx(b.with_truth * 3 / 4)


def test_pools_survive_the_disk_and_too_small_ones_are_named(pools, tmp_path):
    _, (pool, _) = pools
    pool.save(tmp_path / "0.pt")
    again = Pool.load(tmp_path / "0.pt")
    assert torch.equal(again.gram, pool.gram) and again.completions == pool.completions
    with pytest.raises(ValueError, match="pool of 12 has fewer than two groups of 8"):
        moments(pool, {"otb": otb}, 8, 1)
