"""The studies of noise: scratchpad, lake, the language model's tasks; their results and the pages made of them."""

import ast
import functools
import importlib
import itertools
import random
import re
import sys
from pathlib import Path

import numpy
import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file
from scipy import stats

import trl_otb
from recipes import toy
from recipes.studies import language, learning_curves, render, runs, tasks
from recipes.toy import lake, scratchpad
from tests.helpers import tiny
from tests.recipes.conftest import shortly_trained
from trl_otb.comparison import moments as moments_module


@pytest.mark.parametrize("tokens", scratchpad.STEPS)
def test_demonstrations_have_stated_length_and_accuracy(tokens):
    shown = scratchpad.demonstrations(800, [tokens])
    answers = {problem["question"]: problem["answer"] for problem in scratchpad.problems(scratchpad.STEPS[tokens])}
    said = [said.removesuffix("<eos>") for (_, _), (said, _) in shown]
    assert sum(map(len, said)) / len(said) == pytest.approx(tokens, rel=0.1)
    right = scratchpad.last_digit(said, [answers[question.removesuffix("=")] for (question, _), _ in shown])
    # Slips cancel now and then; three standard errors are 5 points
    assert sum(right) / len(right) == pytest.approx(scratchpad.RIGHT + 0.02, abs=0.06)
    assert set("".join(said)) <= set(scratchpad.ALPHABET)


def test_scratchpad_answer_follows_counter():
    said = ["a017b000", "a017b000!0", "a017b001", "a017", "", [{"role": "assistant", "content": "c000"}]]
    assert scratchpad.last_digit(said, ["0"] * 6) == [1, 1, 0, 0, 0, 1]
    assert scratchpad.last_digit(["a0013b0004", "a1004", "a0014"], ["4"] * 3) == [1, 0, 0]  # three digits count 1,000
    (problem,) = [p for p in scratchpad.problems(2) if p["question"] == "4+3*02"]
    assert problem["answer"] == "0"


LAKE = ["SFH", "HFF", "FFG"]


def game_of(moves, lake_rows=LAKE):
    """The messages of a game, and the question it answers."""
    game = lake.Lake()
    game.reset(lake=" ".join(lake_rows))
    messages = []
    for move in moves:
        messages.append({"role": "assistant", "tool_calls": [{"function": {"name": "move"}}]})
        messages.append({"role": "tool", "content": game.move(move)})
    return [*messages, {"role": "assistant", "content": "="}], f"lake 1: {lake.seen(lake_rows, 0, 0)}"


def test_what_is_seen_on_the_lake():
    assert lake.seen(LAKE, 0, 0) == "0202XO.X"  # left the shore, below a hole, right ice, above the shore
    assert lake.seen(LAKE, 1, 1) == "0101O..."
    assert (lake.seen(LAKE, 2, 2), lake.seen(LAKE, 0, 2)) == ("*", "O")


def test_games_and_their_rewards():
    won, asked = game_of("RDRD")
    told = [message["content"] for message in won if message["role"] == "tool"]
    assert told == ["0102..OX", "0101O...", "0001..XO", "*"]
    games = [won, game_of("RR")[0], game_of("RDUL")[0]]
    assert lake.won(games) == [1, 0, 0]
    of_turns = [[0.25, 0.25, 0.25, 0.25, 0], [0.25, -1, 0], [0.25, 0.25, -0.25, -0.25, 0]]
    assert lake.progress(games, [asked] * 3) == of_turns


@pytest.mark.parametrize("turns", lake.SIDES)
def test_demonstrated_games_match_the_lake(turns):
    """What the pupil is shown is what gymnasium's lake does, and it wins as often, in as many turns, as is said."""
    levels, shown = {}, lake.demonstrations(300, turns)
    for side, seed in ((lake.SIDES[turns], seed) for seed in range(20)):
        rows = levels[seed] = lake.level(side, seed)
        assert rows[0][0] == "S" and rows[-1][-1] == "G" and len(rows) == side
    rng = random.Random(1)
    for rows in levels.values():
        segments = lake._demonstration(rows, 0.1, 2 * turns, rng)
        moves = [said[1] for said, by_policy in segments if by_policy and said[0] == "["]
        messages, _ = game_of(moves, rows)
        told = [m["content"] for m in messages if m["role"] == "tool"]
        written = [text[1:-2] for text, by_policy in segments[1:] if not by_policy]
        assert told[: len(written)] == written
    games = ["".join(text for text, _ in segments) for segments in shown]
    won = [text for text in games if "{*}" in text]
    assert len(won) / len(games) == pytest.approx(lake.RIGHT, abs=0.09)
    assert sum(text.count("[") for text in won) / len(won) == pytest.approx(turns, rel=0.2)
    assert set("".join(games).replace("<eos>", "")) <= set(lake.ALPHABET)


@pytest.mark.parametrize(
    ("name", "length", "calls", "right"),
    [
        ("sums", 24, None, "{}"), ("calculator", 72, 6, "={}"), ("scratchpad_10", 20, None, "a00{}"),
        ("lake_6_turns", 192, 12, None), ("scratchpad_mixed", 200, None, "a00{}"), ("lucky", 60, None, "{}"),
    ],
)  # fmt: skip
def test_trainer_samples_its_task(name, length, calls, right, tmp_path, monkeypatch):
    """A policy, problems of which none is held out and trained on, and a reward that knows a right answer."""
    kind = {"lucky": "scratchpad_30"}.get(name, name.removesuffix("_turns"))
    monkeypatch.setattr(toy, kind, lambda: shortly_trained(kind, 1, tmp_path / "policy"))
    task = tasks.task_of(name)
    assert not {*task.train["question"]} & {*task.held_out["question"]} and len(task.train) > 70
    trainer = tasks.trainer_of(task, seed=3)
    assert (trainer.args.max_completion_length, trainer.args.max_tool_calling_iterations) == (length, calls)
    assert (trainer.args.num_generations, trainer.args.generation_batch_size, trainer.args.seed) == (4, 64, 3)
    row = task.held_out[0]
    said = [{"role": "assistant", "content": right.format(row["answer"]) if right else ""}]
    said += [] if right else [{"role": "tool", "content": "*"}]
    (earned,) = task.reward(completions=[said], **{key: [value] for key, value in row.items()})
    assert earned == (1.0 if right else [1.0])


def test_rewards_of_the_language_model():
    said = ["A Silver fish.", [{"role": "assistant", "content": "nothing"}]]
    assert language.has_word(said, ["silver", "silver"]) == [1, 0]
    # Of three and four words two are shared in order: 2 · 2 / 7
    assert language.likeness(["one two three", "a b"], ["one two four five", "a b"]) == [pytest.approx(4 / 7), 1]


@pytest.mark.parametrize("task", language.TASKS)
def test_problems_of_the_language_model_differ(task):
    found = language.problems_of(task, 200, seed=1)
    assert len({problem["question"] for problem in found}) == 200
    assert all(problem["answer"] in problem["question"] for problem in found)
    assert found == language.problems_of(task, 200, seed=1) != language.problems_of(task, 200, seed=2)


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A copy of the pages and their results, to publish in."""
    root, of = render.HERE.parents[1], render.HERE.relative_to(render.HERE.parents[1])
    for path in [root / "README.md", *render.HERE.glob("*.md"), *render.HERE.glob("results/*.json")]:
        copy = tmp_path / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(render, "HERE", tmp_path / of)
    return tmp_path / of


@pytest.fixture
def study(registry, monkeypatch):
    """The study of value, imported anew, so that it registers its baselines."""
    monkeypatch.delitem(sys.modules, "recipes.studies.value", raising=False)
    return importlib.import_module("recipes.studies.value")


@pytest.fixture(scope="module")
def scratchpad_10(tmp_path_factory):
    """The folder of a policy after a short warm start."""
    return shortly_trained("scratchpad_10", 150, tmp_path_factory.mktemp("policy") / "scratchpad_10")


@pytest.mark.slow
def test_value_study_end_to_end(study, scratchpad_10, tmp_path, monkeypatch, capsys):
    """What is there is not measured again."""
    task, policy = "scratchpad_10", scratchpad_10
    monkeypatch.setattr(toy, task, lambda: policy)
    monkeypatch.setitem(study.OF_TOYS, "completions_per_prompt", 16)
    monkeypatch.setattr(moments_module, "BATCH_PARTITIONS", 1)  # for speed
    flags = ["--tasks", task, "--output_dir", str(tmp_path), "--num_prompts", "3", "--progress"]
    study.main(flags)
    said = capsys.readouterr().out
    for estimator in ("none", "group_mean", "value_progress", *study.NAMES):
        assert said.count(f"| {task.replace('scratchpad_', 'T = ')} (3) | `{estimator}` |") == 1, estimator
    assert "nan" not in said
    monkeypatch.setattr(study.trl_otb, "compare_baselines", None)
    study.main([*flags, "--plot_only"])
    assert capsys.readouterr().out == said[said.index("| task") :]
    with pytest.raises(SystemExit):  # which nobody measured
        study.main([*flags, "--plot_only", "--seed", "1"])


@pytest.fixture
def tiny_smollm2(tmp_path, monkeypatch):
    """A tiny model in the place of SmolLM2, with a cache of its own."""
    folder = Path(tiny.save_model(tmp_path / "model"))
    monkeypatch.setattr(toy, "smollm2", lambda: folder)
    monkeypatch.setattr(language, "TOKENS", 4)
    monkeypatch.setenv("TRL_OTB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize("name", language.REASONING)
def test_reasoning_tasks_begin_after_supervised_training(name, tiny_smollm2, monkeypatch):
    monkeypatch.setitem(language.REASONING, name, (language.REASONING[name][0], 1, 4))
    task, again = language.task_of(name, seed=1), language.task_of(name, seed=2)
    assert task.policy == again.policy != tiny_smollm2
    start, tuned = (load_file(folder / "model.safetensors") for folder in (tiny_smollm2, task.policy))
    assert any(not torch.equal(start[key].bfloat16(), tuned[key]) for key in start)
    assert {*task.held_out["question"]} == {*again.held_out["question"]}
    assert {*task.train["question"]} != {*again.train["question"]}
    assert not {*task.train["question"]} & {*task.held_out["question"]} and len(task.held_out) == 100
    right = task.train["answer"][:2]
    assert task.reward(completions=right, answer=right) == [1.0, 1.0]


def test_new_column_replaces_published_one(pages):
    """The others stay as they are, to the digit, and what is lost in noise stays lost."""
    before, title = render.load("noise"), "success by luck"
    cells = [dict(cell, prompts=65) for cell in before["tables"][title]]
    at = next(i for i, cell in enumerate(cells) if cell["estimator"] == "value")
    cells[at] |= {"noise": [None, 0.5, None]}
    cells.append(dict(cells[at], estimator="newest"))
    render.publish("noise", {title: cells})
    assert render.load("noise") == before | {"tables": before["tables"] | {title: cells}}
    rows = [line for line in (pages / "value.md").read_text().splitlines() if line.startswith(f"| {title} (65) |")]
    assert any("| `value` | ? (0.50–?) |" in row for row in rows)
    with pytest.raises(ValueError, match=f"has newest for {title}, which was not measured now"):
        render.publish("noise", {title: cells[:-1]})


def report_of(*names):
    """Of a comparison in which all numbers are 1, but for what `value` is worth beside itself without progress."""
    ends = dict.fromkeys(("value", "low", "high"), 1.0)
    figures = ("more_prompts", "over_group_mean", "noise_over_group_mean", "cosine")
    more = {"value_no_progress": {"value": 2.0, "low": -0.5, "high": 3.0}}
    rows = [{"name": name, "n": 4, "more_than": more, **dict.fromkeys(figures, ends)} for name in names]
    learned = {"value/explained": 0.3}
    return {"comparisons": rows, "num_prompts": 3, "group_size": 4, "learned": learned, "release": "1"}


def test_study_cells_from_a_report(study):
    """A baseline beside which the group mean needs twice as many prompts has half its variance."""
    report = report_of("group_mean", "value")
    unknown = {"value": None, "low": None, "high": None}
    report["comparisons"].append(report["comparisons"][0] | {"name": "otb", "more_prompts": unknown})
    mean, value, biased = study.cells_of(report)
    assert (value["estimator"], value["step"], value["explained"], value["release"]) == ("value", [0.5] * 3, 0.3, "1")
    assert biased["step"] == [None] * 3 and "explained" not in mean


def test_what_is_published_of_a_comparison_with_progress(study):
    """`value` needs a third of the prompts of the one without progress, or between a quarter and twice as many."""
    *cells, ratio = study.cells_of(report_of("group_mean", "value", "value_no_progress"))
    assert [cell["estimator"] for cell in cells] == ["group_mean", "value_progress", "value"]
    assert ratio["step"] == pytest.approx([1 / 3, 1 / 4, 2])
    table = render.noise({"task": [*cells, ratio]}, ["value", "new", ratio["estimator"]], "step").splitlines()
    assert table[2] == "| task (3) | 0.50 (0.50–0.50) | – | 0.33 (0.25–2.00) |"


OF_ROUNDING = {"MIN_WEIGHT", "NOT_ZERO", "ROUNDING", "LARGEST_RATIO", "BLOCK"}  # and of memory


def test_each_constant_of_the_maths_has_its_row():
    """By name, with the number that it has."""
    page, found = (render.HERE / "ablations.md").read_text(), {}
    for path in (Path(trl_otb.__file__).parent / "baselines").glob("*.py"):
        tree = ast.parse(path.read_text())
        classes = [of for of in tree.body if isinstance(of, ast.ClassDef)]
        for of in itertools.chain(tree.body, *(of.body for of in classes)):
            if (
                isinstance(of, ast.Assign)
                and isinstance(of.value, ast.Constant)
                and type(of.value.value) in (int, float)
            ):
                found[of.targets[0].id] = of.value.value
    assert found.keys() >= {"RESET_RATIO", "decay_per_batch", "WORSE_RATIO", "PROJECTED_SIZE"}
    for name, number in found.items():
        assert name in OF_ROUNDING or name.startswith("_") or f"`{name}` ({number:g})" in page, name
    for name in (
        "TOO_FAR",
        "NEAR",
        "DECAYS",
        "NUMBERS",
        "PARTS",
        "LAYER_DEPTH",
        "ridge_of_v",
        "ridge",
        "PROGRESS_PLACES",
    ):
        assert f"`{name}`" in page


@pytest.mark.parametrize("page", render.PAGES)
def test_published_tables_match_results(page):
    text = (render.HERE / f"{page}.md").read_text()
    assert render.rendered(text) == text and "<!-- " in text
    number = re.search(r"<!-- .*? -->.*?(\d\.\d\d+|(?<=\| )\d\d)", text, flags=re.DOTALL)
    assert render.rendered(text[: number.start(1)] + "9.99" + text[number.end(1) :]) == text


INTERVAL = r"-?\d+(?:\.\d+)? \(-?\d+(?:\.\d+)?–-?\d+(?:\.\d+)?\)"


def intervals_of(records):
    """All that are in the data, as numbers or in a row of text, in the forms in which pages give them."""
    found = set()
    for record in records:
        values = record.values() if isinstance(record, dict) else record
        texts = [v for v in values if isinstance(v, str) and re.fullmatch(INTERVAL, v)]
        ends = [v for v in values if isinstance(v, list) and len(v) == 3 and not isinstance(v[0], dict)]
        ends += [[float(x) for x in re.findall(r"-?[\d.]+", text)] for text in texts]
        ends += [[100 * x for x in v] for v in ends if None not in v]
        found |= {render.interval(v, form) for v in ends for form in (".2f", ".3f", ".1f", ".0f", ".3g")}
    return found


@functools.cache
def arms_of_all():
    of = {row["task"] for row in render.load("runs")["runs"]}
    return [arm for task in of for arm in runs.arms(render.runs_of(task))]


@pytest.mark.parametrize(
    ("page", "results", "least"),
    [("studies/value", ["noise"], 0), ("studies/progress", ["noise", "oracle"], 0), ("studies/learning", [], 2)],
)
def test_numbers_in_prose_match_results(page, results, least):
    """Every number with an interval, but for rendered tables."""
    text = (render.HERE.parent / f"{page}.md").read_text()
    text = re.sub(r"^<!-- .* -->\n\n(?:\|.*\n)+", "", text, flags=re.MULTILINE)  # which is rendered
    tables = [render.load(name)["tables"] for name in results]
    records = arms_of_all() + [row for of_name in tables for rows in of_name.values() for row in rows]
    found = intervals_of(records)
    numbers = re.findall(INTERVAL, text.replace("−", "-"))
    assert len(numbers) >= least and [number for number in numbers if number not in found] == []


TABLE = r"^<!-- .* -->\n\n(?:\|.*\n)+"
PER_CENT = r"([+−]\d+|never) \(([+−]\d+|never) to ([+−]\d+|never)\)"


@pytest.mark.parametrize("page", ["README.md", "recipes/studies/README.md", "recipes/studies/learning.md"])
def test_tokens_saved_in_prose_stand_in_a_table(page):
    """Every change with an interval."""
    rendered = "".join(re.findall(TABLE, (render.HERE / "learning.md").read_text(), flags=re.MULTILINE))
    text = (render.HERE.parents[1] / page).read_text()
    prose = re.sub(TABLE, "", text, flags=re.MULTILINE)
    assert {*re.findall(PER_CENT, prose)} <= {*re.findall(PER_CENT, rendered)}


def test_what_noise_predicts(monkeypatch):
    """A step with as much noise as signal, of which `value` has half: SGD needs three quarters of the steps."""
    cell = {"estimator": "value", "efficiency": [4 / 3, 1, 2], "noise": [0.5, 0.4, 0.6]}
    saved = {"baseline": "value", "n": 4, "changes": [[-0.1, -0.2, 0.0]] * 3}
    monkeypatch.setattr(render, "load", lambda name: {"tables": {"a": [cell]}})
    monkeypatch.setattr(render, "PREDICTED", {"sums": ("a", 16, 9), "lake_6": ("a", 4, 9), "new": ("b", 4, 9)})
    monkeypatch.setattr(render, "runs_of", lambda task: [])
    monkeypatch.setattr(render, "tokens_saved", lambda rows: [saved, saved | {"n": 1}])
    sums, game = render.of_predicted("all").splitlines()[2:]
    assert sums == "| sums | 144 | 50% | 0.50 | −25 | −13 | −10 (−20 to +0) | −10 (−20 to +0) | −10 (−20 to +0) |"
    assert game.startswith("| game of 6 turns | 36 | 20% | 0.50 | −40 | −23 |")  # (1/4 + 1/2) / (1/4 + 1)


def test_what_is_said_of_predictions():
    """Their rank correlation with what was saved, and what long runs and the others saved."""
    found = render.predictions()
    saved = [row["changes"][1][0] for row in found]
    said = (render.HERE / "learning.md").read_text().replace("\n", " ")
    assert (
        f"have a rank correlation of {stats.spearmanr([row['root'] for row in found], saved).statistic:.2f}. " in said
    )
    kinds = [row["prompts"] >= 240 and not row["task"].startswith("lake") for row in found]
    long, short = (
        [100 * of for of, kind in zip(saved, kinds, strict=True) if kind == is_long] for is_long in (True, False)
    )
    assert f"{-max(long):.0f} to {-min(long):.0f} % are saved" in said
    assert f"with 120 prompts, or in a game, {-max(short):.0f} to {-min(short):.0f} % are. " in said
    assert (
        max(row["prompts"] for row, kind in zip(found, kinds, strict=True) if not kind and "lake" not in row["task"])
        == 120
    )


def test_both_units_of_a_cell():
    """What a variance of 0.4 is worth, and what is lost in noise."""
    of = {"prompts": 3, "estimator": "value", "noise": [0.25, 0.2, 0.5], "step": [0.4, 0.25, 0.8]}
    cells = [of, of | {"estimator": "otb", "step": [None] * 3}, {"prompts": 3, "estimator": "ratio", "step": [1, 1, 1]}]
    table = render.both_units({"task": cells}).splitlines()
    assert table[2] == "| task (3) | `value` | 0.25 (0.20–0.50) | 0.40 (0.25–0.80) | 150 (25–300) |"
    assert table[3:] == ["| task (3) | `otb` | 0.25 (0.20–0.50) | ? (?–?) | ? (?–?) |"]


SINCE = Version("0.12.1")  # release from which on `value` computes the same, to the bit (value.md)


def test_numbers_are_of_releases_that_compute_what_this_one_does():
    """Those of noise and learning; what the best baseline leaves is older, and its page says so."""
    cells = [cell for cells in render.load("noise")["tables"].values() for cell in cells]
    rows = [*cells, *render.load("runs")["runs"], render.load("bias")]
    assert all(Version(row["release"]) >= SINCE for row in rows)
    older = {cell["release"] for cells in render.load("oracle")["tables"].values() for cell in cells}
    assert all(f"release {of}" in (render.HERE / "progress.md").read_text() for of in older)


def test_runs_have_the_prompts_and_steps_that_tables_say():
    for task, (_, prompts, steps) in render.PREDICTED.items():
        schedule = learning_curves.TASKS[task]
        assert (schedule.completions_per_step(4), schedule.steps[4]) == (4 * prompts, steps)


SOON = [  # task, N, rate, prompts per step
    ("blocks_columns_short", 4, 5e-4, 4), ("blocks_columns", 4, 1.25e-3, 8), ("blocks_columns", 1, 1.25e-3, 32),
    ("calculator", 4, 8e-4, 16),
]  # fmt: skip


@pytest.mark.parametrize(("task", "n", "rate", "prompts"), SOON)
def test_when_value_knows_something(task, n, rate, prompts):
    """A row of the method's table, from the runs that keep their steps."""
    found = [row for row in render.runs_of(task) if "explained" in row.get("steps", {}) and row["baseline"] == "value"]
    found = [row["steps"]["explained"] for row in found if (row["n"], row["learning_rate"]) == (n, rate)]
    by_step = numpy.nanmean(numpy.array(found, dtype=float), axis=0)  # NaN: no return varied
    later = numpy.nanmedian(by_step[len(by_step) // 4 : len(by_step) // 2])
    first = int((by_step >= 0.8 * later).argmax())
    page = (render.HERE.parent / "method.md").read_text()
    assert re.search(
        rf"^\| [\w ,]+ \| {n} \| {prompts} \| {later:.2f} \| {first * prompts} \|", page, flags=re.MULTILINE
    )
