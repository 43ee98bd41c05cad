"""What a run's baseline did, in one line at the end of training and in the model card."""

import math
import re

import pytest

from tests.helpers.settings import logged
from trl_otb import compare_baselines
from trl_otb.gain import BATCHES, LITTLE, Gain


def gain_of_value(explained, by_state, left_out=0.0, batches=3):
    gain = Gain()
    for _ in range(batches):
        names = ("value/explained", "value/explained_by_state", "value/luck_left_out")
        learned = dict(zip(names, (explained, by_state, left_out), strict=True))
        gain.add({"power": 1.0, "power_reference": 1.0}, learned)
    return gain


LINES = [
    ((0.31, 0.27), "value removed 31 % of the gradient's power beyond rloo_pooled (mean of the last 3 batches); later "
                   "luck 4 %."),
    ((0.31, 0.31, 1.0), "value removed 31 % of the gradient's power beyond rloo_pooled (mean of the last 3 batches); "
                        "later luck was left out."),
    ((0.01, 0.01), "later luck 0 %. That is next to nothing: what is written so far does not tell the reward here, or "
                   "`value` has seen too few batches. 'rloo_pooled' would do as well. `trl_otb.compare_baselines("),
    ((-0.2, -0.1), "value added 20 % of the gradient's power beyond rloo_pooled"),
    ((math.nan, math.nan), "value had nothing to do: in the last 3 batches no prompt's returns varied."),
]  # fmt: skip


@pytest.mark.parametrize(("values", "says"), LINES)
def test_line_of_value(values, says):
    assert says in gain_of_value(*values).line("value", "rloo_pooled", "rloo")


def test_line_of_value_where_b0_is_the_mean_of_earlier_steps():
    said = gain_of_value(0.01, 0.0).line("value", None, None)
    assert "beyond the mean of earlier steps" in said and "as well" not in said
    assert gain_of_value(LITTLE, 0.0).line("value", "rloo", None).endswith("later luck 5 %.")


def test_line_of_other_baselines():
    gain = Gain()
    assert gain.line("value", "rloo_pooled", "rloo") == gain.line("otb", "rloo_pooled", "group_mean") == ""
    for power, reference in ((1.0, 2.0), (5.0, 6.0)):
        gain.add({"power": power, "power_reference": reference}, {})
    said = "ogb_pooled removed 25 % of the gradient's power under rloo (the last 2 batches)."
    assert gain.line("ogb_pooled", "rloo_pooled", "rloo") == said  # 1 − 6 / 8
    assert gain.line("rloo", "rloo_pooled", None) == ""
    gain.add({"power": math.nan, "power_reference": math.nan}, {})  # a baseline without energies
    assert gain.line("ogb_pooled", "rloo_pooled", "rloo") == ""
    equal = Gain()
    equal.add({"power": 1e-9, "power_reference": 1e-17}, {})  # no return varies: rounding
    assert equal.line("otb", "rloo_pooled", "group_mean") == ""


def test_latest_batches_count_alone():
    gain = gain_of_value(0.9, 0.9, batches=30)
    for _ in range(BATCHES):
        gain.add({"power": 1.0, "power_reference": 1.0}, {"value/explained": 0.1, "value/explained_by_state": 0.1})
    assert "removed 10 %" in gain.line("value", "rloo_pooled", "rloo") and len(gain.batches) == BATCHES


def said(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if re.match(r"\w+ (?:removed|added|had nothing)", line)]


@pytest.mark.parametrize("n", [4, 1])
def test_line_is_what_was_logged(train, capsys, tmp_path, n):
    """The mean of what the log has; a comparison amid training and evaluations are no batches of the training."""
    trainer = train(train=False, baseline="value", num_generations=n, max_steps=4, output_dir=str(tmp_path / "run"))
    small = {"num_prompts": 3, "completions_per_prompt": 16, "group_sizes": [n], "baselines": ["rloo_pooled"]}
    compare_baselines(trainer, **small)
    trainer.train()
    explained = logged(trainer, "otb/value/explained")
    assert len(explained) == 4 and len(trainer._trl_otb.gain.batches) == 4
    (line,) = said(capsys)
    verb, share = re.match(
        r"value (removed|added) (\d+) % .* beyond rloo_pooled \(mean of the last 4 batches\)", line
    ).groups()
    assert (1 if verb == "removed" else -1) * int(share) == pytest.approx(25 * sum(explained), abs=0.51)
    trainer.create_model_card()
    assert (tmp_path / "run" / "README.md").read_text().endswith(f"By the end of training {line}\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "otb"}, "otb (?:removed|added) .* under group_mean"),
        ({"baseline": "ogb_pooled"}, "ogb_pooled (?:removed|added) .* under rloo "),
        ({"baseline": "group_mean"}, None),
        ({"baseline": "rloo"}, None),
        ({"baseline": "rloo_pooled", "num_generations": 1}, None),
        ({"baseline": "value", "reward_funcs": lambda completion_ids, **_: [0.5] * len(completion_ids)},
         "value had nothing to do: in the last 2 batches"),
    ],
)  # fmt: skip
def test_line_of_a_run(train, capsys, options, expected):
    train(scale_rewards="none", **options)
    found = said(capsys)
    assert len(found) == (expected is not None) and all(re.match(expected, line) for line in found)


def test_runs_without_a_step_say_nothing(train, capsys, tmp_path):
    options = {"baseline": "value", "output_dir": str(tmp_path / "run"), "save_strategy": "steps", "save_steps": 2}
    trainer = train(**options)
    assert len(said(capsys)) == 1
    idle = train(num_train_epochs=0, **options | {"max_steps": -1})
    idle.create_model_card()
    assert idle.state.global_step == 0 and said(capsys) == []
    assert "By the end" not in (tmp_path / "run" / "README.md").read_text()
    trainer.args.max_steps = 3
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert len(said(capsys)) == 1 and len(trainer._trl_otb.gain.batches) == 1  # of this training
