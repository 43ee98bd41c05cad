"""
Training with a class of Unsloth's kind in the place of GRPOTrainer, put there before trl_otb is imported: its scoring
returns log-probs alone, and its loss is `compute_loss`. Prints a line of JSON for each run: `python -m … MODEL RUN …`.
"""

import json
import logging
import sys
from dataclasses import dataclass
from unittest.mock import patch

import torch
import trl
from accelerate.logging import MultiProcessAdapter
from transformers import AutoModelForCausalLM
from trl.trainer import grpo_trainer

from tests.helpers import tiny


SHOWN = ("learning_rate", "eval_accumulation_steps", "baseline", "scale_rewards", "unsloth_num_chunks", "unset")


class _UnslothGRPOTrainer(trl.GRPOTrainer):
    shift = mean = False

    def _logps(self, model, batch):
        ids, mask = (torch.cat([batch[f"prompt_{of}"], batch[f"completion_{of}"]], dim=1) for of in ("ids", "mask"))
        return self._of_ids(model, ids, mask, batch["completion_ids"].size(1))

    def _of_ids(self, model, ids, mask, length):
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -length - 1 : -1] / self.temperature
        return logits.log_softmax(-1).gather(-1, ids[:, -length:, None])[..., 0]

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_efficient=False, **kwargs
    ):
        if compute_efficient:
            return None, None
        assert not torch.is_grad_enabled()
        return self._of_ids(model, input_ids, attention_mask, logits_to_keep) + self.shift, None, None

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        assert self._get_per_token_logps_and_entropies(model, None, None, 0, compute_efficient=True) == (None, None)
        logps, mask = self._logps(model, inputs), inputs["completion_mask"]
        old, advantages = inputs.get("old_per_token_logps", logps.detach()), inputs["advantages"]
        if advantages.dim() == 1 or self.mean:
            advantages = advantages.view(len(mask), -1).mean(dim=1, keepdim=True)
        ratio = torch.exp(logps - old)
        clipped = ratio.clamp(1 - self.epsilon_low, 1 + self.epsilon_high)
        loss = -torch.min(ratio * advantages, clipped * advantages)
        self._metrics["train"]["unsloth"].append(1.0)
        return (loss * mask).sum() / mask.sum().clamp(min=1)  # as `bnpo` in TRL


class UnslothGRPOTrainer(_UnslothGRPOTrainer):
    pass


@dataclass
class UnslothGRPOConfig(trl.GRPOConfig):
    """What is not given is as its `__init__` has it, which takes a name that is no field."""

    unsloth_num_chunks: int = -1

    def __init__(
        self, output_dir=None, learning_rate=5e-5, scale_rewards="group", old_name=7, unsloth_num_chunks=-1, **kwargs
    ):
        assert scale_rewards not in ("group", None)  # of which the real one says that it is overridden
        kwargs |= {"learning_rate": learning_rate, "scale_rewards": scale_rewards, "eval_accumulation_steps": old_name}
        super().__init__(output_dir, **kwargs)
        self.unsloth_num_chunks = unsloth_num_chunks


def _make_silent(model, unread):
    """Decoding calls no layers as modules, as Unsloth's does; or nor does it call the policy with ids by name."""
    layers, forward, generate = model.model.layers, model.model.forward, model.generate

    def without_hooks(*args, **kwargs):
        if not decoding:
            return forward(*args, **kwargs)
        with patch.multiple(torch.nn.Module, __call__=lambda module, *args, **kwargs: module.forward(*args, **kwargs)):
            return forward(*args, **kwargs)

    decoding = []

    def generated(*args, **kwargs):
        decoding.append(1)
        hooks = [*model._forward_hooks.items()]
        if unread:
            model._forward_hooks.clear()
        try:
            return generate(*args, **kwargs)
        finally:
            decoding.clear()
            model._forward_hooks.update(hooks)

    assert len(layers) == 2
    model.model.forward, model.generate = without_hooks, generated


def train(path, cls, options, silent=False, unread=False):
    """Norms, energies' source, and the greatest difference of energies from those of a softmax."""
    from tests.helpers.oracles import energies_by_softmax, mask_of
    from trl_otb import OTBGRPOConfig
    from trl_otb.seam.unsloth import extra_forward

    options = (
        tiny.SETTINGS
        | {"loss_type": "bnpo", "scale_rewards": "none", "temperature": 0.7, "learning_rate": 1e-3}
        | options
    )
    args = OTBGRPOConfig(**options, output_dir="unsloth")
    data = tiny.prompts().map(lambda row, i: {"prompt": row["prompt"] * (1 + i % 3)}, with_indices=True)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    trainer = cls(model, tiny.even_bytes, args=args, train_dataset=data, processing_class=tiny.tokenizer())
    if silent or unread:
        _make_silent(model, unread)
    generate, batches = trainer._generate_and_score_completions, []

    def kept(inputs):
        batch = generate(inputs)
        expected = energies_by_softmax(trainer.model, batch, args.temperature)
        own = trainer.rollouts["train"].energy
        batches.append(None if own is None else (own.double() * mask_of(batch) - expected).abs().max().item())
        return batch

    own = patch.object(trainer, "_generate_and_score_completions", kept if hasattr(trainer, "rollouts") else generate)
    with own, patch("trl_otb.seam.unsloth.extra_forward", wraps=extra_forward) as extra:
        trainer.train()
    history = trainer.state.log_history
    return {
        "norms": [of["grad_norm"] for of in history if "grad_norm" in of],
        "once": [of["unsloth"] for of in history if "unsloth" in of],
        "extra": extra.call_count,
        "off": max((of for of in batches if of is not None), default=None),
        "source": getattr(trainer, "energy_source", None),
    }


def main(path, runs):
    if runs[0] == "late":
        import trl_otb.trainer  # noqa: F401
    trl.GRPOTrainer = grpo_trainer.GRPOTrainer = UnslothGRPOTrainer
    trl.GRPOConfig = UnslothGRPOConfig
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    logging.getLogger("trl_otb").setLevel("INFO")
    for run in [run for run in runs if run != "late"]:
        MultiProcessAdapter.warning_once.cache_clear()
        name, _, options = run.partition(" ")
        options, said = json.loads(options or "{}"), []
        handler = logging.Handler()
        handler.emit = lambda record, to=said: to.append(record.getMessage())
        logging.getLogger("trl_otb").addHandler(handler)
        changes = {of: name == of for of in ("shift", "mean")}
        how = {of: name == of for of in ("silent", "unread")}
        cls = UnslothGRPOTrainer if name == "alone" else OTBGRPOTrainer
        try:
            if name == "config":
                args = OTBGRPOConfig("unsloth", bf16=False, **options)
                print("RUN " + json.dumps({of: getattr(args, of) for of in SHOWN}), flush=True)
                continue
            with patch.multiple(UnslothGRPOTrainer, **changes):
                result = train(path, cls, options, **how)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        logging.getLogger("trl_otb").removeHandler(handler)
        print("RUN " + json.dumps(result | {"said": said}, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
