"""What a run's baseline did, in one line at the end of training and in the model card."""

import math
import re

import pytest
import torch

from tests.helpers.settings import logged
from trl_otb import compare_baselines
from trl_otb.baselines import BASELINES, compute_advantages
from trl_otb.run.gain import LATEST_BATCHES, LITTLE, SUBTRACT_NOTHING_IN_TAILS, Gain


def gain_of_value(explained, by_state, left_out=0.0, kept=0.0, batches=3):
    gain = Gain()
    for _ in range(batches):
        names = ("value/explained", "value/explained_by_state", "value/luck_left_out", "value/kept")
        learned = dict(zip(names, (explained, by_state, left_out, kept), strict=True))
        gain.add({"power": 1.0, "power_reference": 1.0}, learned)
    return gain


LINES = [
    ((0.31, 0.27), "value removed 31 % of the gradient's power beyond rloo_pooled (mean of the last 3 batches); later "
                   "luck 4 %."),
    ((0.31, 0.31, 1.0), "value removed 31 % of the gradient's power beyond rloo_pooled (mean of the last 3 batches); "
                        "later luck was left out."),
    ((0.01, 0.01), "later luck 0 %. That is next to nothing: the text so far does not tell the reward here, or "
                   "`value` has seen too few batches. 'rloo_pooled' would do as well. `trl_otb.compare_baselines("),
    ((-0.2, -0.1), "value added 20 % of the gradient's power beyond rloo_pooled (mean of the last 3 batches); later "
                   "luck -10 %. So it made the gradient noisier: it has seen too few prompts, or rewards changed "
                   "suddenly. 'rloo_pooled' would have done better."),
    ((-1.5, -1.5), "value has 2.5 times the gradient's power of rloo_pooled (mean of the last 3 batches); later luck 0 "
                   "%. So it made"),
    ((-1.5, -1.5, 0.0, 0.75), "value's prediction has 2.5 times the gradient's power of rloo_pooled (mean of the last "
                              "3 batches); later luck 0 %. So it would have made the gradient noisier (75 % of "
                              "completions kept rloo_pooled): it has seen too few prompts, or rewards changed "
                              "suddenly. `trl_otb"),
    ((math.nan, math.nan), "value had nothing to do: in the last 3 batches no prompt's returns varied."),
]  # fmt: skip


@pytest.mark.parametrize(("values", "says"), LINES)
def test_line_of_value(values, says):
    gain = gain_of_value(-9.0, -9.0, batches=10)  # in which it knew little, so that they do not count
    for batch in gain_of_value(*values).batches:
        gain.add(batch, batch)
    assert says in gain.line("value", "rloo_pooled", "rloo")


def test_first_batches_do_not_say_that_it_made_the_gradient_noisier():
    said = gain_of_value(-0.2, -0.1, batches=10).line("value", "rloo_pooled", "rloo")
    assert "mean of the last 10 batches); later luck -10 %. In its first batches `value` knows too little" in said
    assert "noisier" in gain_of_value(-0.2, -0.1, batches=40).line("value", "rloo_pooled", "rloo")


def test_line_of_value_says_what_might_help():
    line = gain_of_value(0.01, 0.01).line("value", "rloo_pooled", "rloo", may_ask=True)
    assert "do as well. If your reward can tell how half an answer is doing, try `progress_funcs='rewards'`." in line
    assert "progress" not in gain_of_value(0.31, 0.27).line("value", "rloo_pooled", "rloo", may_ask=True)
    assert "That is nearly all: the first tokens decide" in gain_of_value(0.97, 0.97).line("value", "rloo", "rloo")


@pytest.mark.parametrize(("slopes", "leaks"), [((1.2, 0.3, 0.2), True), ((0.2, 1.2, 0.3), False), ((0.3, 1.2), False)])
def test_a_leak_is_named_after_two_batches_in_a_row(slopes, leaks):
    gain = Gain()
    for slope in slopes:
        learned = {"value/explained": 0.9, "value/explained_by_state": 0.9, "value/slope_at_start": slope}
        gain.add({"power": 1.0, "power_reference": 1.0}, learned)
    line = gain.line("value", "rloo_pooled", "rloo", may_leak=True)
    assert ("knows a completion's reward before its first token" in line) == leaks


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


@pytest.mark.parametrize(
    ("name", "power", "says"),
    [
        ("otb", 67.19, "otb has 67 times the gradient's power of group_mean (the last 2 batches). The usual cause: "
         "where only a group's longest completion still generates, otb subtracts nothing"),
        ("otb_loo", 2.0, "otb_loo has 2.0 times the gradient's power of group_mean (the last 2 batches). The usual"),
        ("ogb", 2345.6, "ogb has 2,346 times the gradient's power of group_mean (the last 2 batches)."),
        ("otb", 1.99, "otb added 99 % of the gradient's power under group_mean (the last 2 batches)."),
    ],
)  # fmt: skip
def test_line_of_a_baseline_that_is_far_worse(name, power, says):
    gain = Gain()
    for of_reference in (0.5, 1.5):
        gain.add({"power": power, "power_reference": of_reference}, {})
    line = gain.line(name, "rloo_pooled", "group_mean")
    assert line.startswith(says) and ("usual cause" in line) == (name != "ogb" and power >= 2)


@pytest.mark.parametrize("name", sorted(name for name, entry in BASELINES.items() if entry.built_in))
def test_which_baselines_subtract_nothing_in_a_lone_tail(name):
    """Of two completions with return 1 the second is longer by two tokens: B of its last one."""
    mask = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]]).repeat(4, 1)
    more = {
        "logps": -mask,
        "states": torch.zeros(8, 4, 32),
        "prompt_key": torch.arange(4).repeat_interleave(2)[:, None],
    }
    needed = {key: value for key, value in more.items() if key in BASELINES[name].needs}
    advantages = compute_advantages(torch.ones(8), 0.5 * mask, mask, num_generations=2, baseline=name, **needed)
    assert (advantages[1, 3].item() == 1) == (name in (*SUBTRACT_NOTHING_IN_TAILS, "none"))


def test_latest_batches_count_alone():
    gain = gain_of_value(0.9, 0.9, batches=30)
    for _ in range(LATEST_BATCHES):
        gain.add({"power": 1.0, "power_reference": 1.0}, {"value/explained": 0.1, "value/explained_by_state": 0.1})
    assert "removed 10 %" in gain.line("value", "rloo_pooled", "rloo") and len(gain.batches) == LATEST_BATCHES


def said(capsys):
    lines = capsys.readouterr().out.splitlines()
    return [line for line in lines if re.match(r"\w+(?:'s prediction)? (?:removed|added|has|had nothing)", line)]


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
        r"value(?:'s prediction)? (removed|added) (\d+) % .* beyond rloo_pooled \(mean of the last 4 batches\)", line
    ).groups()
    assert (1 if verb == "removed" else -1) * int(share) == pytest.approx(25 * sum(explained), abs=0.51)
    trainer.create_model_card()
    assert (tmp_path / "run" / "README.md").read_text().endswith(f"By the end of training {line}\n")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"baseline": "otb"}, "otb (?:removed|added|has) .* (?:under|of) group_mean"),
        ({"baseline": "ogb_pooled"}, "ogb_pooled (?:removed|added|has) .* (?:under|of) rloo "),
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
