"""
Completions on disk, with all that baselines and progress functions may read: what a new idea for `value` is tried on.

    OMP_NUM_THREADS=1 python -m recipes.studies.progress_pools --task words --prompts 72   # minutes of a core

A pool holds, for each prompt, N completions with ids, rewards, energies, log-probs, the hidden states that `value`
reads, and the products of the gradients of its tokens in the last block, from which the gradient noise of any
advantages follows.
"""

import argparse
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path

import torch

from recipes.studies import language
from recipes.studies.tasks import trainer_of
from trl_otb.comparison.pools import at_rest, sample, training_examples
from trl_otb.seam.forwards import policy_of


N = 8


def details(trainer, row: dict) -> dict:
    """
    Of one completion of T tokens: ids `(T,)`, and the products of its tokens' scores in the last block's output
    projection and MLP `(T, T)`.
    """
    policy = policy_of(trainer.model)
    ids = torch.cat([row["prompt_ids"], row["completion_ids"]], dim=1)
    start, length = row["prompt_ids"].size(1), row["completion_ids"].size(1)
    mask, at = torch.cat([row["prompt_mask"], row["completion_mask"]], dim=1), slice(start - 1, start + length - 1)
    kept, seen = {}, {}
    last = policy.get_decoder().layers[-1]
    linears = [last.self_attn.o_proj, last.mlp.gate_proj, last.mlp.up_proj, last.mlp.down_proj]
    linears = [getattr(linear, "base_layer", linear) for linear in linears]

    def keep(linear, inputs, output):
        seen[linear] = inputs[0].detach()
        if not output.requires_grad:
            output.requires_grad_()
        output.register_hook(lambda gradient: kept.__setitem__(linear, gradient.detach()))

    hooks = [linear.register_forward_hook(keep) for linear in linears]
    with torch.enable_grad():  # the graph begins in the last block: nothing before it has a gradient
        logits = policy(input_ids=ids, attention_mask=mask).logits[0, at].float()
        logits.log_softmax(-1).gather(1, row["completion_ids"][0].unsqueeze(1)).sum().backward()
    for hook in hooks:
        hook.remove()
    policy.zero_grad(set_to_none=True)
    with torch.autocast(ids.device.type, enabled=False):
        gram = sum(
            (seen[of][0, at].float() @ seen[of][0, at].float().T)
            * (kept[of][0, at].float() @ kept[of][0, at].float().T)
            for of in linears
        )
    return {"ids": row["completion_ids"][0].clone().cpu(), "gram": gram.cpu()}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="progress_pools", description=__doc__.splitlines()[1])
    parser.add_argument("--task", required=True)
    parser.add_argument("--prompts", type=int, default=72)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output_dir", type=Path, default=Path("runs/progress/pools"))
    args = parser.parse_args(argv)
    path = args.output_dir / f"{args.task}-seed{args.seed}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    begin = time.time()
    sizes = {"num_generations": N, "per_device_train_batch_size": 6 * N}
    trainer = trainer_of(language.any_task(args.task), adapter=False, seed=args.seed, baseline="value", **sizes)
    examples = list(training_examples(trainer))
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(args.seed)).tolist()
    policy_of(trainer.model).requires_grad_(False)
    found, of_time = [], {"sampling": 0.0, "details": 0.0}
    with at_rest(trainer, frozenset({"energy", "logps", "states"})):
        for first in range(0, args.prompts, 6):
            asked = [examples[i] for i in order[first : first + 6]]
            start = time.time()
            sampled = sample(trainer, asked, N, 1000 * args.seed + first)
            of_time["sampling"] += time.time() - start
            for example, (pool, rows) in zip(asked, sampled, strict=True):
                each = [details(trainer, row) for row in rows]
                columns = {key: value for key, value in example.items() if key != "prompt"}
                found.append(
                    {
                        "pool": replace(pool, num_generations=N),
                        "rows": each,
                        "columns": columns,
                        "prompt": example["prompt"],
                    }
                )
            rewards = torch.cat([of["pool"].whole_returns for of in found])
            lengths = torch.cat([of["pool"].lengths for of in found])
            print(
                f"{args.task}: {len(found)} prompts, reward {rewards.mean():.3f}, "
                f"{lengths.mean():.0f} tokens, {time.time() - begin:.0f} s "
                f"({of_time['sampling']:.0f} s sampling)",
                flush=True,
            )
            torch.save({"task": args.task, "pools": found}, path.with_suffix(".unfinished"))
    path.with_suffix(".unfinished").rename(path)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
