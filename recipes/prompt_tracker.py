"""
A baseline that remembers each prompt's earlier returns, for N of 2 or 4 and prompts that recur.

    accelerate launch recipes/math.py --baseline recipes.prompt_tracker:PromptTracker --num_generations 2

B_i averages the prompt's other completions, its returns in earlier steps (whose weight halves each time the prompt
recurs), and the mean over all prompts as one observation. None of these depends on completion i, so the gradient is
unbiased. After SPO (arXiv 2509.13232), which tracks prompts and samples one completion for each.
"""

import torch

import trl_otb


@trl_otb.register_baseline("prompt_tracker", needs={"prompt_key"}, per_token=False, unbiased=True)
class PromptTracker:
    def __init__(self):
        self.seen = {}  # by prompt: the weighted sum of its returns, and the sum of the weights
        self.all = [0.0, 0.0]

    def __call__(self, x):
        known = [self.seen.get(key, (0.0, 0.0)) for key in x.prompt_key.flatten().tolist()]
        total, count = x.returns.new_tensor(known).split(1, dim=1)
        mean_of_all = self.all[0] / max(self.all[1], 1.0)
        own = x.returns * x.members, x.members  # one masked for its length says little about its prompt
        others, size = ((x.grouped(of).sum(dim=1, keepdim=True) - x.grouped(of)).view(-1, 1) for of in own)
        return (others + total + mean_of_all) / (size + count + 1)

    def update(self, local, b0, gather):
        keys, returns, members = map(gather, (local.prompt_key, local.returns, local.members))
        keys, where = keys.flatten().unique(return_inverse=True)
        sums = torch.zeros(len(keys), 2).index_add_(0, where.cpu(), torch.cat([returns * members, members], 1).cpu())
        for key, (total, size) in zip(keys.tolist(), sums.tolist(), strict=True):
            before = self.seen.get(key, (0.0, 0.0))
            self.seen[key] = (before[0] / 2 + total, before[1] / 2 + size)
        self.all = [0.9 * of + float(new) for of, new in zip(self.all, sums.sum(dim=0), strict=True)]
        return {"prompts": len(self.seen)}

    def state_dict(self):
        return {"seen": dict(self.seen), "all": list(self.all)}

    def load_state_dict(self, state):
        self.seen, self.all = dict(state["seen"]), list(state["all"])
