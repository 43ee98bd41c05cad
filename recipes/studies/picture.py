"""
The README's picture: how hard training pushes each token of some attempts at one problem, under GRPO and `value`.

    make picture

A token's colour is √w A, its advantage times the norm of the score of its logits. The problem is the one, of
those tried, where the mistakes of three failed attempts of sixteen stand out most: a picture, not a measurement.
Under `value` the mistake is not the darkest token: its baseline is low where failures have most energy. How often
it is the darkest, also without the weights, is printed for value.md.
"""

import re
from pathlib import Path
from statistics import fmean

from recipes.studies.tasks import task_of, trainer_of
from trl_otb.rollout.text import Group, ShownCompletion, Token, new_figure, read_group


TASK, SIZE, ROWS, BATCHES, PROMPTS = "scratchpad_30", 16, 6, 20, 64
PANELS = {
    "group_mean_advantage": "GRPO pushes against all of a failed attempt, also after its mistake (framed)",
    "advantage": "value pushes against it up to the mistake, and little after it",
}


def sample(baseline: str, problems: int = 60) -> list[Group]:
    """`SIZE` attempts at each problem. Nothing is trained but the baseline: the learning rate is 0."""
    task = task_of(TASK)
    asked = task.train.select(range(problems))
    sizes = {"max_steps": BATCHES, "num_generations_eval": SIZE, "per_device_eval_batch_size": SIZE * problems}
    trainer = trainer_of(
        task,
        eval_dataset=asked,
        baseline=baseline,
        learning_rate=0.0,
        seed=3,
        per_device_train_batch_size=4 * PROMPTS,
        **sizes,
    )
    trainer.train()
    trainer.evaluate()
    return [read_group(trainer.rollouts["eval"], number, 1000) for number in range(problems)]


def answers(completion: ShownCompletion) -> list[tuple[int, int]]:
    """Places and values of the digits that follow from the ones before; a token is a letter."""
    text = "".join(token.text for token in completion.tokens)
    return [(step.start(1), int(step[1])) for step in re.finditer(r"[a-h]\d\d(\d)", text)]


def mistake(question: str, completion: ShownCompletion) -> int | None:
    """The place of the first digit that is wrong."""
    digit, by = int(question[0]), int(question[2])
    for at, answer in answers(completion):
        if answer != (digit + by) % 10:
            return at
        digit = answer
    return None


def push(token: Token, name: str) -> float:
    return token.values[name] * token.values["energy"] ** 0.5


def clearness(question: str, completion: ShownCompletion) -> float:
    """How much harder the mistake of a failed attempt is pushed than any other of its tokens."""
    at = mistake(question, completion)
    if completion.reward == 1 or at is None or not 8 <= at <= 20:  # somewhere in the middle
        return -9.0
    pushes = [push(token, "advantage") for token in completion.tokens]
    return min(x for i, x in enumerate(pushes) if i != at) - pushes[at]


def blame(groups: list[Group]) -> str:
    """How often the mistake of a failed attempt is pushed against hardest, and what the baseline is there, and why."""
    all_of = [(group.prompt, completion) for group in groups for completion in group.completions]
    failed = [(row, at) for prompt, row in all_of if row.reward == 0 and (at := mistake(prompt, row)) is not None]
    hardest = [min(range(len(row.tokens)), key=lambda i: push(row.tokens[i], "advantage")) for row, _ in failed]
    before = fmean(-row.tokens[at].values["advantage"] for row, at in failed)  # their return is 0
    energy = {0.0: 0.0, 1.0: 0.0}
    for _, row in all_of:
        energy[row.reward] += sum(row.tokens[at].values["energy"] for at, _ in answers(row))
    return (
        f"{sum(i == at for i, (_, at) in zip(hardest, failed, strict=True))} of {len(failed)}, baseline {before:.2f}; "
        f"failed attempts have {energy[0.0] / sum(energy.values()):.0%} of the energy of answers"
    )


def chosen(group: Group) -> list[ShownCompletion]:
    """Its first right attempts, and the failed ones whose mistakes stand out most."""
    right = [completion for completion in group.completions if completion.reward == 1]
    by_clearness = sorted(group.completions, key=lambda completion: -clearness(group.prompt, completion))
    return [*right[: ROWS // 2], *by_clearness[: ROWS // 2]]


def draw(group: Group, path: Path) -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.patches import Rectangle

    rows = chosen(group)
    width = max(len(row.tokens) for row in rows)
    figure = new_figure(figsize=(10, 0.62 * len(rows) + 1.3), layout="constrained")
    colours = ScalarMappable(Normalize(-1, 1), "RdBu")
    axes = figure.subplots(2, 1)
    for axis, (name, title) in zip(axes, PANELS.items(), strict=True):
        for y, row in enumerate(rows):
            at = mistake(group.prompt, row)
            for x, token in enumerate(row.tokens):
                face = colours.to_rgba(push(token, name))
                axis.add_patch(Rectangle((x, y), 1, 0.9, facecolor=face, linewidth=0))
                dark = 0.3 * face[0] + 0.59 * face[1] + 0.11 * face[2] < 0.5
                text = token.text.replace("<eos>", "■")
                axis.text(x + 0.5, y + 0.47, text, ha="center", va="center", color="white" if dark else "black")
            if at is not None:
                frame = Rectangle((at, y), 1, 0.9, fill=False, edgecolor="black", linewidth=2.5, zorder=3)
                axis.add_patch(frame)
        labels = [f"{'right' if row.reward else 'wrong'}" for row in rows]
        axis.set_yticks([y + 0.45 for y in range(len(rows))], labels)
        axis.set(xlim=(0, width), ylim=(len(rows), 0), xticks=[])
        axis.set_title(title, loc="left", fontsize=11)
        axis.tick_params(length=0)
        axis.spines[:].set_visible(False)
    bar = figure.colorbar(colours, ax=axes, shrink=0.8, ticks=[-1, 0, 1])
    bar.ax.set_yticklabels(["less of this", "0", "more of this"], fontsize=8)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    import recipes.studies.value  # noqa: F401 - registers the parts of `value` as baselines

    print(f"All tokens weighing alike, the mistake is the darkest in {blame(sample('value_weights_one'))}.")
    groups = sample("value")
    print(f"Under `value` in {blame(groups)}.")
    best = max(groups, key=lambda group: sum(clearness(group.prompt, row) for row in chosen(group)[ROWS // 2 :]))
    draw(best, Path(__file__).parents[1] / "group.png")
