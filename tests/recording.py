"""A trainer that keeps what passes through it, and oracles for what it should see."""

import torch

from trl_otb import OTBGRPOTrainer


class Recording(OTBGRPOTrainer):
    """Keeps every micro-batch as the loss left it, and counts the policy's scoring forwards."""

    def __init__(self, *args, **kwargs):
        self.micro_batches, self.forwards = [], {"grad": 0, "no_grad": 0}
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        self.forwards["grad" if torch.is_grad_enabled() else "no_grad"] += 1
        return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.micro_batches.append(dict(inputs))
        return loss


def logged(trainer, key):
    return [h[key] for h in trainer.state.log_history if key in h]


def mask_of(batch):
    return batch["completion_mask"] * batch.get("tool_mask", 1)


def energies_by_softmax(model, batch, temperature=1.0):
    """w_t from a float64 softmax of the model's own, materialised logits."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=attention).logits.double() / temperature
    length = batch["completion_ids"].size(1)
    probs = logits[:, -length - 1 : -1].softmax(-1)
    one_hot = torch.nn.functional.one_hot(batch["completion_ids"], probs.size(-1))
    return (one_hot - probs).square().sum(-1) * mask_of(batch)


def first_rollout(trainer):
    """Rows of the first rollout, in the order in which they were generated."""
    rows, batches = [], trainer.micro_batches
    while sum(len(b["row_of_rollout"]) for b in rows) < 8:
        rows.append(batches[len(rows)])
    order = torch.cat([b["row_of_rollout"] for b in rows]).argsort()
    keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "tool_mask", "advantages")
    return {k: torch.cat([b[k] for b in rows])[order] for k in keys if k in rows[0]}
