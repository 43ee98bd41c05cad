"""
The README's picture: how hard training pushes each token of some attempts at one problem, under GRPO and `value`.

    make picture  # needs Chromium

It is the page that `save_rollouts_steps` writes, of the calculator, at the first prompt whose first attempts hold a
guess and a slip. A token's colour is √w A, its advantage times the norm of the score of its logits. With --blame it
prints instead, for value.md, how often the mistake of a failed attempt on the scratchpad is the token that is pushed
hardest: under `value` not always, since its baseline is low where failures have most energy.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

from recipes.studies.tasks import task_of, trainer_of
from trl_otb.display.page import HEAD, recorded
from trl_otb.display.text import group_data


SIZE = 16  # attempts at each problem, of which it is counted where their mistakes are
WINDOW = "1180,560"


def sample(name: str, baseline: str, problems: int, size: int, batches: int, prompts: int) -> Any:
    """
    A rollout of `size` attempts at each problem, after `batches` of as many `prompts`. Nothing is trained but the
    baseline: the learning rate is 0.
    """
    task = task_of(name)
    asked = task.train.select(range(problems))
    sizes = {"max_steps": batches, "num_generations_eval": size, "per_device_eval_batch_size": size * problems}
    trainer = trainer_of(
        task,
        eval_dataset=asked,
        baseline=baseline,
        learning_rate=0.0,
        seed=3,
        per_device_train_batch_size=4 * prompts,
        **sizes,
    )
    trainer.train()
    trainer.evaluate()
    return trainer.rollouts["eval"]


def answers(completion: dict) -> list[tuple[int, int]]:
    """Places and values of the digits that follow from the ones before; a token is a letter."""
    return [(step.start(1), int(step[1])) for step in re.finditer(r"[a-h]\d\d(\d)", "".join(completion["tokens"]))]


def mistake(question: str, completion: dict) -> int | None:
    """The place of the first digit that is wrong."""
    digit, by = int(question[0]), int(question[2])
    for at, answer in answers(completion):
        if answer != (digit + by) % 10:
            return at
        digit = answer
    return None


def blame(baseline: str) -> str:
    """How often the mistake of a failed attempt is pushed against hardest, and what the baseline is there, and why."""
    rollout = sample("scratchpad_30", baseline, 60, SIZE, batches=20, prompts=64)
    groups = [group_data(rollout, number) for number in range(len(rollout) // SIZE)]
    all_of = [(group["prompt"], completion) for group in groups for completion in group["completions"]]
    failed = [(row, at) for prompt, row in all_of if row["reward"] == 0 and (at := mistake(prompt, row)) is not None]
    hardest = [row["push"].index(min(row["push"])) for row, _ in failed]
    before = fmean(-row["advantage"][at] for row, at in failed)  # their return is 0
    energy = {0.0: 0.0, 1.0: 0.0}
    for _, row in all_of:
        energy[row["reward"]] += sum(row["energy"][at] for at, _ in answers(row))
    return (
        f"{sum(i == at for i, (_, at) in zip(hardest, failed, strict=True))} of {len(failed)}, baseline {before:.2f}; "
        f"failed attempts have {energy[0.0] / sum(energy.values()):.0%} of the energy of answers"
    )


if __name__ == "__main__":
    import recipes.studies.value  # noqa: F401 - registers the parts of `value` as baselines

    if "--blame" in sys.argv:
        print(f"All tokens weighing alike, the mistake is pushed hardest in {blame('value_weights_one')}.")
        print(f"Under `value` in {blame('value')}.")
        sys.exit()
    if not (chromium := shutil.which("chromium") or shutil.which("google-chrome")):
        sys.exit("The picture is a page, which Chromium draws: install it (apt-get install chromium).")
    rollout = sample("calculator", "value", 12, size=8, batches=10, prompts=16)
    page = Path("runs/studies/picture.html")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(HEAD + recorded(rollout, "eval", "calculator"), encoding="utf-8")
    picture = Path(__file__).parents[1] / "group.png"
    options = ["--headless=new", "--no-sandbox", "--force-device-scale-factor=1.5", "--hide-scrollbars"]
    options += [f"--window-size={WINDOW}", f"--screenshot={picture}", "--virtual-time-budget=5000"]  # it is drawn soon
    groups = (group_data(rollout, number)["completions"][:4] for number in range(len(rollout) // 8))
    failed = ([len(of["tokens"]) for of in group if of["reward"] == 0] for group in groups)
    prompt = next(number for number, of in enumerate(failed) if of and min(of) < 10 < max(of))
    subprocess.run([chromium, *options, f"{page.resolve().as_uri()}#eval-10/{prompt}/push/grpo"], check=True)
