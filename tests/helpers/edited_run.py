"""
Steps with a TRL that may be edited, and the gradient of each beside that of a plain loop, which takes from the run what
the reward function was given, and from TRL nothing. Prints a line of JSON for each.
"""

import json
import logging
import sys
from unittest.mock import patch

import torch
from accelerate.logging import MultiProcessAdapter
from transformers import AutoModelForCausalLM, TrainerCallback

from tests.helpers import tiny


TEMPERATURE = 0.7
OPTIONS = {
    "reused": {"num_iterations": 2},
    "vllm": {"use_vllm": True, "vllm_mode": "colocate", "vllm_importance_sampling_mode": "token_truncate"},
    "weighted": {"reward_weights": [2.0]},
    "group": {"scale_rewards": "group"},
}
BASELINES = {"rloo": "rloo", "value": "value", "group": "group_mean"}  # by the run's name; else "otb"


class Gradient(TrainerCallback):
    """Keeps the gradient of the first step."""

    of = None

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        if self.of is None:
            self.of = torch.cat([p.grad.flatten().double() for p in model.parameters()])


def loop(path, rewarded, masks, logps_of_sampler, baseline, name, how):
    """The gradient of -Σ ρ A log π / tokens, a completion at a time, from a softmax of the model's own logits."""
    from tests.helpers.oracles import double_loop

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).double()
    tokenizer, logps, energies, ratios = tiny.tokenizer(), [], [], []
    prompts, completions, rewards = rewarded
    order = sorted(range(len(prompts)), key=lambda i: prompts.index(prompts[i]))  # groups together
    prompts, completions, rewards = ([of[i] for i in order] for of in (prompts, completions, rewards))
    masks = [masks[i] for i in order] if masks else [[1] * len(ids) for ids in completions]
    for i, (prompt, ids) in enumerate(zip(prompts, completions, strict=True)):
        before = tokenizer(prompt)["input_ids"]
        logits = model(torch.tensor([[*before, *ids]])).logits[0, len(before) - 1 : -1] / TEMPERATURE
        of_all, mask = logits.log_softmax(-1), torch.tensor(masks[i])
        own = of_all.gather(-1, torch.tensor(ids).unsqueeze(-1)).squeeze(-1)
        probs = of_all.detach().exp()
        energies.append(((1 - 2 * own.detach().exp() + probs.square().sum(-1)) * mask).tolist())
        logps.append(own)
        if logps_of_sampler:
            theirs = [logp if logp is not None else float(own[t]) for t, logp in enumerate(logps_of_sampler[order[i]])]
            ratios.append((own.detach() - torch.tensor(theirs)).exp().clamp(max=3.0).tolist())
    longest = max(map(len, completions))

    def padded(rows):
        return [[*row, *[0] * (longest - len(row))] for row in rows]

    rewards = [{"weighted": 2 * r}.get(name, min(r, 0.5) if how == "cut" else r) for r in rewards]
    n = tiny.SETTINGS["num_generations"]
    given = padded(energies), padded(masks), n
    advantages = double_loop(rewards, *given, baseline=baseline, ratios=padded(ratios) if ratios else None)
    if name == "group":
        deviation = torch.tensor(rewards).view(-1, n).std(1).repeat_interleave(n)
        advantages = advantages / (deviation + 1e-4).unsqueeze(1)
    tokens, total = sum(map(sum, masks)), 0.0
    for i, own in enumerate(logps):
        weights = torch.tensor(masks[i]) * advantages[i, : len(own)]
        if ratios:
            weights = weights * torch.tensor(ratios[i]) ** (2 if how == "twice" else 1)
        normaliser = sum(masks[i]) * len(logps) if how == "mean" else tokens * (2 if how == "half" else 1)
        total = total - (weights * own).sum() / normaliser
    total.backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def main(name, path, folder, how):
    MultiProcessAdapter.warning_once.cache_clear()
    heard, gradient, rewarded, masks, sampler = [], Gradient(), [], [], None
    handler = logging.Handler()
    handler.emit = lambda record: heard.append(record.getMessage())
    logging.getLogger("trl_otb").addHandler(handler)
    result = {"error": "", "warned": False, "off": None}

    def reward(prompts, completion_ids, **kwargs):
        rewards = tiny.even_bytes(completion_ids)
        rewarded[:] = [*prompts], [[*ids] for ids in completion_ids], rewards
        return rewards

    def scripted(prompts, trainer):
        from tests.helpers.settings import scripted_rollout

        made = scripted_rollout(prompts, trainer)
        masks[:] = made["env_mask"]
        return made

    try:
        from trl_otb import OTBGRPOConfig, OTBGRPOTrainer  # isort: skip
        from trl.trainer import grpo_trainer

        from tests.helpers.recording import Sampler

        class Kept(Sampler):
            def __init__(self, *args, **kwargs):
                nonlocal sampler
                super().__init__(*args, **kwargs)
                sampler = self

        baseline = BASELINES.get(name, "otb")
        options = {"scale_rewards": "none", "max_steps": 1, "max_grad_norm": 0.0, "temperature": TEMPERATURE}
        options = tiny.SETTINGS | options | OPTIONS.get(name, {})
        more = {"rollout_func": scripted} if name == "tools" else {}
        with patch.object(grpo_trainer, "VLLMGeneration", Kept):
            args = OTBGRPOConfig(**options, output_dir=folder, baseline=baseline)
            data = {"train_dataset": tiny.prompts(), "callbacks": [gradient]}
            OTBGRPOTrainer(path, reward, args=args, **data, **more).train()
    except Exception as error:
        result["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    else:
        expected = loop(path, rewarded, masks, sampler and sampler.logps, baseline, name, how)
        result["off"] = float(f"{((gradient.of - expected).norm() / expected.norm()).item():.3g}")
    result["warned"] = any("was tested with" in text for text in heard)
    logging.getLogger("trl_otb").removeHandler(handler)
    print(json.dumps({"run": name} | result, ensure_ascii=False))


if __name__ == "__main__":
    for run in sys.argv[1].split():
        main(run, *sys.argv[2:])
