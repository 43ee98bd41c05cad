"""
A baseline that remembers each prompt's earlier returns, for N of 2 or 4 and prompts that recur.

    accelerate launch recipes/math.py --baseline recipes.prompt_tracker:PromptTracker --num_generations 2

B_i averages the prompt's other completions, its returns in earlier steps (whose weight halves each time the prompt
recurs), and the mean over all prompts as one observation. None of these depends on completion i, so the gradient is
unbiased. After SPO (arXiv 2509.13232), which tracks prompts and samples one completion for each.
"""

import trl_otb


@trl_otb.register_baseline(
    "prompt_tracker", per_token=False, uses_energy=False, totals_only=True, leaves_one_out=True, unbiased=True,
    reads=("prompt_key",),
)  # fmt: skip
class PromptTracker:
    def __init__(self):
        self.seen = {}  # by prompt: the weighted sum of its returns, and the sum of the weights
        self.all = [0.0, 0.0]

    def __call__(self, group):
        known = [self.seen.get(key, (0.0, 0.0)) for key in group.prompt_key.flatten().tolist()]
        total, count = group.returns.new_tensor(known).view(-1, 1, 2).split(1, dim=2)
        mean_of_all = self.all[0] / max(self.all[1], 1.0)
        others, size = (values.sum(dim=1, keepdim=True) - values for values in self.evidence(group))
        return (others + total + mean_of_all) / (size + count + 1)

    def evidence(self, group):
        members = group.scorable * (group.lengths > 0)  # one masked for its length says little about its prompt
        return group.returns * members, members

    def update(self, group):
        totals, sizes = (values.sum(dim=1).flatten().tolist() for values in self.evidence(group))
        for key, total, size in zip(group.prompt_key.flatten().tolist(), totals, sizes, strict=True):
            before = self.seen.get(key, (0.0, 0.0))
            self.seen[key] = (before[0] / 2 + total, before[1] / 2 + size)
        self.all = [0.9 * self.all[0] + sum(totals), 0.9 * self.all[1] + sum(sizes)]
        return {"prompts": len(self.seen)}

    def state_dict(self):
        return {"seen": dict(self.seen), "all": list(self.all)}

    def load_state_dict(self, state):
        self.seen, self.all = dict(state["seen"]), list(state["all"])
