"""
The README's picture: eight attempts of a small policy at one problem, under `value` after forty batches of others.

    make picture
"""

from pathlib import Path

from recipes.studies.tasks import task_of, trainer_of
from trl_otb.rollout import Rollout


TASK, PROBLEM, BATCHES = "scratchpad_30", "7+4*06", 40


def sample(size: int) -> Rollout:
    """`size` completions of the problem. Nothing is trained but the baseline: the learning rate is 0."""
    task = task_of(TASK)
    asked = task.train.filter(lambda row: row["question"] == PROBLEM)
    sizes = {"max_steps": BATCHES, "num_generations_eval": size, "per_device_eval_batch_size": size}
    trainer = trainer_of(task, eval_dataset=asked, baseline="value", learning_rate=0.0, seed=3, **sizes)
    trainer.train_dataset = task.train.filter(lambda row: row["question"] != PROBLEM)
    trainer.train()
    trainer.evaluate()
    return trainer.rollouts["eval"]


if __name__ == "__main__":
    sample(8).plot(Path(__file__).parents[1] / "group.png")
