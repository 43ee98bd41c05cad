"""TRL's AsyncGRPOTrainer without vLLM, HTTP, a child process or flash-attention: what stands beside the trainer."""

import queue
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from trl.experimental.async_grpo import async_grpo_trainer as trl_trainer
from trl.experimental.async_grpo import packing as trl_packing
from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

from trl_otb.seam.asynchronous import stamped


def varlen(q, k, v, cu_q, cu_k, max_q, max_k, softmax_scale=None, **options):
    """flash-attention's: segment s of the queries, `(tokens, heads, d)`, is the end of path s of the keys."""

    def places(cu):
        cu, sizes = cu.long(), cu.long().diff()
        segment = torch.arange(len(sizes)).repeat_interleave(sizes)
        return segment, cu[1:][segment] - torch.arange(int(cu[-1]))  # counted from the end

    (of_q, q_left), (of_k, k_left) = places(cu_q), places(cu_k)
    seen = (of_q[:, None] == of_k) & (k_left >= q_left[:, None])
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(q, k, v, attn_mask=seen, scale=softmax_scale, enable_gqa=True)[0].transpose(0, 1)


@contextmanager
def on_cpu():
    attention = patch.object(trl_packing, "_flash_attn", lambda: SimpleNamespace(flash_attn_varlen_func=varlen))
    with attention, patch.object(trl_trainer, "get_peak_flops_per_device", lambda *args: None):
        yield


class LocalWorker(queue.Queue):
    """
    A rollout worker, its own buffer, and a weight transfer. It samples when the trainer takes from it, so that every
    sample is `lag` weight versions old, and the run is the same every time.

    Args:
        prompts: Token ids, all of one length; groups take them in order.
        reward: A function of the list of completions' ids; `None` for no reward.
        unit: Completions per call of the sampler, a multiple of N.
        lag: Completions kept ready.
        stamps: Whether it says what a baseline must know of a group, as `StampedLoop` does.
    """

    def __init__(self, folder, prompts, reward, n, unit, max_new=12, lag=0, stamps=True):
        super().__init__()
        self.served = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.prompts, self.reward, self.n, self.unit, self.lag = prompts, reward, n, unit, lag
        self.max_new, self.stamps, self.random = max_new, stamps, torch.Generator().manual_seed(0)
        self.version = self.groups = 0
        self.rollout_buffer, self.metrics_queue = self, queue.Queue()
        self.taken = []

    def get(self, block=True, timeout=None):
        while self.qsize() <= self.lag:
            self.produce()
        self.taken.append(super().get(block, timeout))
        return self.taken[-1]

    start = stop = init_weight_transfer = pause = resume = destroy = lambda self: None

    def check_health(self, stale_after_s):
        pass

    def update_model_version(self, model_version):
        self.version = model_version

    @torch.no_grad()
    def send_weights(self, iterator):
        own = dict(self.served.named_parameters())
        for name, tensor in iterator:
            own[name].copy_(tensor)

    @torch.no_grad()
    def produce(self):
        groups = range(self.groups, self.groups + self.unit // self.n)
        asked = [self.prompts[group % len(self.prompts)] for group in groups for _ in range(self.n)]
        ids, logps, length = torch.tensor(asked), [], len(asked[0])
        for _ in range(self.max_new):
            scores = self.served(ids).logits[:, -1].float().log_softmax(-1)
            drawn = torch.multinomial(scores.exp(), 1, generator=self.random)
            ids, logps = torch.cat([ids, drawn], dim=1), [*logps, scores.gather(1, drawn)]
        logps = torch.cat(logps, dim=1)
        sizes = [1 + int(row[-1]) % self.max_new for row in ids]  # of unequal lengths
        for group in groups:
            rows = range((group - self.groups) * self.n, (group - self.groups + 1) * self.n)
            said = [ids[row, length : length + sizes[row]].tolist() for row in rows]
            self.put_group(
                group, [ids[row, : length + sizes[row]] for row in rows], [logps[r] for r in rows], length, said
            )
        self.groups += len(groups)

    def put_group(self, group, ids, logps, length, said):
        """What TRL's `_AsyncRolloutLoop._score_group` makes of a group."""
        rewards = np.array([np.nan if r is None else r for r in self.reward(said)], dtype=float)
        scored = rewards[~np.isnan(rewards)]
        mean, std = (scored.mean(), scored.std()) if len(scored) else (np.nan, np.nan)
        advantages = np.where(np.isnan(rewards), 0.0, (rewards - mean) / (std + 1e-8))
        samples = []
        for row, tokens in enumerate(ids):
            old = np.zeros(len(tokens), dtype=np.float32)
            old[length:] = logps[row][: len(tokens) - length]
            samples.append(
                RolloutSample(
                    prompt=[],
                    completion=[],
                    input_ids=tokens.numpy(),
                    completion_mask=(np.arange(len(tokens)) >= length).astype(np.int64),
                    old_log_probs=old,
                    advantage=float(advantages[row]),
                    model_version=self.version,
                    group_id=group,
                    metrics={"reward": float(rewards[row]), "reward_std": float(std)},
                )
            )
        for sample in stamped(samples, [1] * len(samples)) if self.stamps else samples:
            self.put_nowait(sample)
