"""What a run says at its end and leaves in its folder."""

import json

from trl import GRPOTrainer

from .held_out import HeldOut
from .launching import command, say, without_flags
from .pictures import plot_training
from .run_folder import RESULT, RunFolder


EXAMPLES = 3  # held-out problems that are printed


def report(run: RunFolder, trainer: GRPOTrainer, measure: HeldOut, name: str, seconds: float) -> None:
    """
    Write result.json, held_out.json and training.png, and print the result. All processes must call it.

    Args:
        name (`str`):
            The model and the data, for the picture's title.
        seconds (`float`):
            How long training took.
    """
    args, before, after = trainer.args, measure.evaluations[0], measure.evaluations[-1]
    tokens = measure.all_tokens_generated()
    log = trainer.state.log_history
    if trainer.accelerator.is_main_process:
        result = {
            "baseline": args.baseline,
            "seed": args.seed,
            "before": vars(before),
            "after": vars(after),
            "evaluations": [vars(e) for e in measure.evaluations],
            "tokens_generated": tokens,
            "training_seconds": seconds,
            "steps": trainer.state.global_step,
        }
        title = f"{name}, baseline {args.baseline}, N = {args.num_generations}, seed {args.seed}"
        plot_training(log, measure.evaluations, run.path / "training.png", title)
        (run.path / "held_out.json").write_text(json.dumps(measure.examples(), indent=2, ensure_ascii=False) + "\n")
        (run.path / RESULT).write_text(json.dumps(result, indent=2) + "\n")
    say(f"Held-out accuracy before: {before}")
    say(f"Held-out accuracy after:  {after}")
    _say_examples(measure)
    if trainer.tools:
        _say_calls(log)
    what = "generated or shown by tools" if trainer.tools else "generated"
    since = "since the checkpoint" if run.checkpoint else "with the first evaluation"
    say(f"{tokens:,} tokens {what} in {trainer.state.global_step} steps; {seconds:.0f} s {since}.")
    say(f"{run.path}: the model, checkpoints, result.json, held_out.json, training.png, trainer_state.json (the log).")


def report_evaluation(run: RunFolder, measure: HeldOut) -> None:
    """Print what `--eval_only` measured."""
    say(f"Held-out accuracy: {measure.evaluations[-1]}")
    _say_examples(measure)
    if run.path.is_dir() and not any(run.path.iterdir()):
        run.path.rmdir()  # the trainer made it


def how_to_go_on(run: RunFolder, step: int) -> str:
    return f"Stopped after step {step}; the checkpoint is in {run.path}. To go on:\n  {run.resume_command()}"


def how_to_evaluate(run: RunFolder) -> str:
    """The command for the evaluation that a stopped run lacks."""
    kept = without_flags(run.argv, "resume_from_checkpoint", "model_name_or_path", "overwrite")
    again = command([*kept, "--eval_only", "--model_name_or_path", str(run.path)])
    return f"The model is in {run.path}. To measure it:\n  {again}"


def _say_examples(measure: HeldOut) -> None:
    def short(text: str, most: int = 60) -> str:
        text = " ".join(text.split())
        return text if len(text) <= most else f"{text[: most // 2 - 2]} … {text[-most // 2 + 1 :]}"

    say("Some held-out problems, one sample each:")
    for example in measure.examples()[:EXAMPLES]:
        said = "; ".join(
            f"{when}: {short(example[when]['said'])!r} {'(right)' if example[when]['score'] == 1 else '(wrong)'}"
            for when in ("before", "after")
            if when in example
        )
        say(f"  {short(example['question'])} [{short(example['answer'], 20)}] {said}")


def _say_calls(log: list[dict]) -> None:
    entries = [entry for entry in log if "eval_turns" in entry]
    say("Held-out calls per completion, failed calls, turns:")
    for when, entry in zip(("before", "after"), (entries[0], entries[-1]), strict=True):
        say(
            f"  {when + ':':8}{entry['eval_tools/call_frequency'] or 0:.2f}  "
            f"{100 * (entry['eval_tools/failure_frequency'] or 0):.1f} %  {entry['eval_turns']:.2f}"
        )
