"""
What does `value` explain on a task of a language model, batch by batch? Nothing is trained and no gradient is computed.

    OMP_NUM_THREADS=1 python -m recipes.studies.explained gemma_copy   # some 20 minutes on one core; SmolLM2: five
"""

import json
import sys
from pathlib import Path
from statistics import fmean

import torch

from recipes.studies import language
from recipes.studies.tasks import trainer_of
from trl_otb.baselines import find_baseline
from trl_otb.comparison import learn_from
from trl_otb.seam.pools import at_rest, sample


BATCHES, PROMPTS, N = 7, 8, 4


def explained(task: str, folder: Path) -> list[dict[str, float]]:
    """A row per batch of other prompts: what was explained, c, and the mean reward. Saved in `folder`, too."""
    trainer = trainer_of(language.task_of(task), seed=0, num_generations=N, per_device_train_batch_size=16)
    rule, rows, examples = find_baseline("value").instance(), [], trainer.train_dataset
    order = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0)).tolist()
    with at_rest(trainer, frozenset({"energy"}) | rule.needs):
        for batch in range(BATCHES):
            some = [examples[i] for i in order[batch * PROMPTS : (batch + 1) * PROMPTS]]
            pools = [pool for pool, _ in sample(trainer, some, N, 7919 * (batch + 1))]
            metrics = learn_from(pools, [rule], N)
            reward = fmean(pool.whole_returns.mean().item() for pool in pools)
            rows.append({name: metrics[f"value/{name}"] for name in ("explained", "weight")} | {"reward": reward})
            print(f"batch {batch}: {rows[-1]}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{task}.json").write_text(json.dumps(rows))
    return rows


if __name__ == "__main__":
    explained(sys.argv[1], Path("runs/studies/explained"))
