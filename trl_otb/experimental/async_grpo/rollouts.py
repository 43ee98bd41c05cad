"""The completions of a packed row, which TRL's loss does not need: for the page of rollouts."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from ...baselines import Completions, put_back
from ...rollout import Rollout
from ...run_baseline import Step


def rollout_of_row(inputs: dict[str, Any], x: Completions, means: Tensor, step: Step) -> Rollout:
    """
    The samples of TRL's packed `inputs` that have loss terms, in the order of their groups, without what follows the
    last term. `x` and `step` have a row for each; `means`, `(B,)`, are the mean rewards of their groups.
    """
    ids, depth, labels = (inputs[key][0].tolist() for key in ("input_ids", "position_ids", "shift_labels"))
    trained = inputs["token_index"] >= 0
    index, sample_of = inputs["token_index"][trained].tolist(), inputs["segment_id"][trained].tolist()
    parts: dict[str, list[Tensor]] = {"prompt": [], "completion": [], "generated": []}
    for sample in dict.fromkeys(sample_of):
        terms = [at for at, of in zip(index, sample_of, strict=True) if of == sample]
        path = [terms[-1]]
        for at in range(terms[-1] - 1, -1, -1):  # a trie, depth first: the nearest one that is less deep is its parent
            if depth[at] == depth[path[-1]] - 1:
                path.append(at)
        sequence = torch.tensor([*(ids[at] for at in reversed(path)), labels[terms[-1]]])
        generated = torch.zeros_like(sequence).index_fill(0, torch.tensor([depth[at] + 1 for at in terms]), 1)
        begin = depth[terms[0]] + 1
        parts["prompt"].append(sequence[:begin])
        parts["completion"].append(sequence[begin:])
        parts["generated"].append(generated[begin:])
    order = x.prompt.argsort(stable=True).cpu()

    def padded(rows: list[Tensor]) -> Tensor:
        return pad_sequence([rows[row] for row in order.tolist()], batch_first=True)

    mask, prompt, completion = (padded(parts[name]) for name in ("generated", "prompt", "completion"))
    columns: dict[str, Any] = {"energy": x.energy, "loss_energy": x.loss_energy, "logps": x.logps}
    columns |= {"advantages": step.advantages.expand_as(x.mask), "baselines": step.baselines.expand_as(x.mask)}
    wider = mask.size(1) - x.mask.size(1)  # by tool output between loss terms
    of_tokens: Any = {name: put_back(pad(values.cpu()[order], (0, wider)), mask) for name, values in columns.items()}
    returns = x.whole_returns.where(x.scored > 0, torch.nan).flatten()
    return Rollout(
        prompt_ids=prompt,
        prompt_mask=padded([torch.ones_like(row) for row in parts["prompt"]]),
        completion_ids=completion,
        completion_mask=padded([torch.ones_like(row) for row in parts["completion"]]),
        mask=mask,
        num_generations=1,
        rewards=returns[order].cpu(),
        scale=step.scale[order].cpu(),
        group_mean_advantages=((returns - means).unsqueeze(1) / step.scale)[order].float().cpu(),
        groups=x.prompt[order].cpu(),
        **of_tokens,
    )
