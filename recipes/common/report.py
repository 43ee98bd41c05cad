"""What a run prints at the end and writes into its folder."""

import json
import math
from pathlib import Path

import pandas
from matplotlib.figure import Figure  # not pyplot, which would choose a backend for whoever imports this
from trl import GRPOTrainer

from .held_out import Accuracy, HeldOut
from .launching import print_once
from .run_folder import RESULT, RunFolder


EXAMPLES = 3  # held-out problems that are printed
PANELS = {
    "reward": "reward, mean of a batch",
    "grad_norm": "gradient norm",
    "otb/energy/token_mean": "energy of a token, mean of $w_t$",
    "turns": "turns per completion",
    "tools/failure_frequency": "share of calls that fail",
}


def report(run: RunFolder, trainer: GRPOTrainer, held_out: HeldOut, name: str) -> None:
    """
    Write result.json, held_out.json and training.png, and print the result. All processes must call it. `name` (the
    model and the data) goes into the picture's title.
    """
    args, before, after = trainer.args, held_out.evaluations[0], held_out.evaluations[-1]
    tokens = held_out.all_tokens_generated()
    log = trainer.state.log_history
    if trainer.accelerator.is_main_process:
        result = {
            "baseline": args.baseline,
            "seed": args.seed,
            "before": vars(before),
            "after": vars(after),
            "evaluations": [vars(e) for e in held_out.evaluations],
            "tokens_generated": tokens,
            "training_seconds": held_out.seconds,
            "steps": trainer.state.global_step,
        }
        title = f"{name}, baseline {args.baseline}, N = {args.num_generations}, seed {args.seed}"
        plot_training(log, held_out.evaluations, run.path / "training.png", title)
        examples = json.dumps(held_out.examples(), indent=2, ensure_ascii=False) + "\n"
        (run.path / "held_out.json").write_text(examples, encoding="utf-8")
        (run.path / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    print_once(f"Held-out accuracy before: {before}\nHeld-out accuracy after:  {after}")
    _print_examples(held_out)
    if trainer.tools:
        _print_calls(log)
    what = "generated or shown by tools" if trainer.tools else "generated"
    took = f"{held_out.seconds:.0f} s with the first evaluation"
    print_once(f"{tokens:,} tokens {what} in {trainer.state.global_step} steps; {took}.")
    files = "result.json, held_out.json, training.png, trainer_state.json (the log)"
    print_once(f"{run.path}: the model, checkpoints, {files}.")


def report_evaluation(run: RunFolder, held_out: HeldOut) -> None:
    """Print the result of `--eval_only`."""
    print_once(f"Held-out accuracy: {held_out.evaluations[-1]}")
    _print_examples(held_out)
    if run.path.is_dir() and not any(run.path.iterdir()):
        run.path.rmdir()  # which the trainer created


def _print_examples(held_out: HeldOut) -> None:
    def short(text: str, most: int = 60) -> str:
        text = " ".join(text.split())
        return text if len(text) <= most else f"{text[: most // 2 - 2]} … {text[-most // 2 + 1 :]}"

    print_once("Some held-out problems, one sample each:")
    for example in held_out.examples()[:EXAMPLES]:
        answers = "; ".join(
            f"{when}: {short(example[when]['said'])!r} {'(right)' if example[when]['score'] == 1 else '(wrong)'}"
            for when in ("before", "after")
            if when in example
        )
        print_once(f"  {short(example['question'])} [{short(example['answer'], 20)}] {answers}")


def _print_calls(log: list[dict]) -> None:
    evaluations = [entry for entry in log if "eval_turns" in entry]
    print_once("Held-out calls per completion, failed calls, turns:")
    for when, entry in (("before:", evaluations[0]), ("after:", evaluations[-1])):
        calls, failed = (entry[f"eval_tools/{name}_frequency"] or 0 for name in ("call", "failure"))
        print_once(f"  {when:8}{calls:.2f}  {100 * failed:.1f} %  {entry['eval_turns']:.2f}")


def plot_training(log: list[dict], evaluations: list[Accuracy], path: Path, title: str) -> None:
    """
    Held-out accuracy and the `PANELS` over the steps of a run: every logged value, and the [`smoothed`] curve in bold.

    Panels without values are omitted, as are turns if every completion has one.
    """
    logged = pandas.DataFrame(log, columns=["step", *PANELS]).groupby("step").first()
    logged = logged.replace([math.inf, -math.inf], math.nan).dropna(how="all")
    if (logged["turns"].dropna() == 1).all():
        del logged["turns"]
    logged = logged.dropna(axis="columns", how="all").rename(columns=PANELS)
    rows = 1 + (len(logged.columns) > 3)
    columns = math.ceil((1 + len(logged.columns)) / rows)
    figure = Figure(figsize=(4.2 * columns, 3.1 * rows + 0.6), layout="constrained")
    accuracy, *axes = figure.subplots(rows, columns, squeeze=False).flat
    held_out = pandas.DataFrame([vars(e) for e in evaluations]).set_index("step").fillna(0.0) * 100
    held_out["mean"].plot(ax=accuracy, yerr=held_out["standard_error"], color="tab:red", marker="o", capsize=3)
    accuracy.set_title("held-out accuracy, % ± standard error", fontsize=10)
    for unused in axes[len(logged.columns) :]:
        unused.remove()
    for axis, name in zip(axes, logged, strict=False):
        logged[name].plot(ax=axis, color="tab:blue", alpha=0.35, linewidth=1, marker="." * (len(logged) < 10))
        smoothed(logged[name]).plot(ax=axis, color="tab:blue", linewidth=2)
        axis.set_title(name, fontsize=10)
    for axis in figure.axes:
        axis.axhline(0, color="0.8", linewidth=0.8)
        axis.grid(alpha=0.3)
    explained = "pale: every logged value; bold: centred mean over a tenth of the run"
    figure.suptitle(f"{title}\n{explained}" if len(logged) else title, fontsize=10)
    figure.savefig(path, dpi=120)


def smoothed(curve: pandas.Series) -> pandas.Series:
    """The centred mean over a tenth of the curve."""
    return curve.dropna().rolling(1 + len(curve) // 10, center=True, min_periods=1).mean()


def markdown(rows: list[list[str]]) -> str:
    """A Markdown table; the first row is the header."""
    head, *body = ("|" + "".join(f" {cell} |" if cell else " |" for cell in row) + "\n" for row in rows)
    return "".join([head, "|---" * len(rows[0]) + "|\n", *body])
