"""The studies of noise: scratchpad, lake, the language model's tasks; their results and the pages made of them."""

import importlib
import json
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

import trl_otb
from recipes import toy
from recipes.common.errors import InputError
from recipes.studies import language, render, runs, tasks
from recipes.toy import lake, scratchpad
from tests.helpers import tiny
from tests.recipes.conftest import shortly_trained
from trl_otb import OTBGRPOConfig
from trl_otb.baselines import BASELINES, Tokens


# The scratchpad


@pytest.mark.parametrize("tokens", scratchpad.STEPS)
def test_demonstrations_are_as_long_and_as_right_as_is_said(tokens):
    shown = scratchpad.demonstrations(800, [tokens])
    answers = {problem["question"]: problem["answer"] for problem in scratchpad.problems(scratchpad.STEPS[tokens])}
    said = [said.removesuffix("<eos>") for (_, _), (said, _) in shown]
    assert sum(map(len, said)) / len(said) == pytest.approx(tokens, rel=0.1)
    right = scratchpad.last_digit(said, [answers[question.removesuffix("=")] for (question, _), _ in shown])
    # Slips cancel now and then; three standard errors are 5 points
    assert sum(right) / len(right) == pytest.approx(scratchpad.RIGHT + 0.02, abs=0.06)
    assert set("".join(said)) <= set(scratchpad.ALPHABET)


def test_short_answers_are_mostly_right_and_long_ones_mostly_wrong_where_lengths_are_mixed():
    shown = scratchpad.demonstrations(900, tasks.MIXED)
    right = {steps: [] for steps in (2, 6, 20)}
    for (question, _), (said, _) in shown:
        steps = int(question[4:6])
        (answer,) = [p["answer"] for p in scratchpad.problems(steps) if p["question"] == question[:-1]]
        right[steps] += scratchpad.last_digit([said.removesuffix("<eos>")], [answer])
    shares = [sum(of) / len(of) for of in right.values()]
    assert all(250 < len(of) < 350 for of in right.values())
    assert shares == pytest.approx([0.84, 0.62, 0.26], abs=0.09)  # slips cancel now and then


def test_rewards_that_no_state_tells_differ_by_prompt():
    rows = scratchpad.lucky_letters([1, 7])
    assert {len(row["answer"]) for row in rows} == {1, 7} and len({row["answer"] for row in rows}) > 10
    said = [[{"role": "assistant", "content": text}] for text in ("b051", "a051", "")]
    assert scratchpad.first_letter(said, ["abc", "bc", "abc"]) == [1, 0, 0]


def test_the_scratchpads_answer_is_the_digit_after_the_counters_end():
    said = ["a017b000", "a017b000!0", "a017b001", "a017", "", [{"role": "assistant", "content": "c000"}]]
    assert scratchpad.last_digit(said, ["0"] * 6) == [1, 1, 0, 0, 0, 1]
    assert scratchpad.last_digit(["a0013b0004", "a1004", "a0014"], ["4"] * 3) == [1, 0, 0]  # three digits count 1,000
    (problem,) = [p for p in scratchpad.problems(2) if p["question"] == "4+3*02"]
    assert problem["answer"] == "0"


# The lake


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


def test_a_move_that_cannot_be_made_is_an_error():
    game = lake.Lake()
    game.reset(lake=" ".join(LAKE))
    with pytest.raises(ValueError, match="'X': use L, D, R or U"):
        game.move("X")
    game.move("D")
    with pytest.raises(ValueError, match="the game is over"):
        game.move("R")
    with pytest.raises(ValueError, match="the game is over"):
        lake.Lake().move("R")


@pytest.mark.parametrize("turns", lake.SIDES)
def test_demonstrated_games_are_the_games_of_the_lake(turns):
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


# Tasks


@pytest.mark.parametrize(
    ("name", "length", "calls", "rewards"),
    [
        ("sums", 24, None, 1.0), ("calculator", 72, 6, 1.0), ("scratchpad_10", 20, None, 1.0),
        ("lake_6", 192, 12, 1.0), ("lake_6_turns", 192, 12, list), ("scratchpad_mixed", 200, None, 1.0),
        ("lucky_even", 60, None, 1.0),
    ],
)  # fmt: skip
def test_a_task_is_what_its_trainer_samples(name, length, calls, rewards, tmp_path, monkeypatch):
    """A policy, problems of which none is held out and trained on, and a reward that knows a right answer."""
    kind = {"lucky_even": "scratchpad_30"}.get(name, name.removesuffix("_turns"))
    monkeypatch.setattr(toy, kind, lambda: shortly_trained(kind, 1, tmp_path / "policy"))
    task = tasks.task_of(name)
    assert not {*task.train["question"]} & {*task.held_out["question"]} and len(task.train) > 70
    trainer = tasks.trainer_of(task, seed=3)
    assert (trainer.args.max_completion_length, trainer.args.max_tool_calling_iterations) == (length, calls)
    assert (trainer.args.num_generations, trainer.args.generation_batch_size, trainer.args.seed) == (4, 64, 3)
    row = task.held_out[0]
    right = {
        "sums": f"{row['answer']}", "calculator": [{"role": "assistant", "content": f"={row['answer']}"}],
        "scratchpad_10": f"a00{row['answer']}", "lake_6": [{"role": "tool", "content": "*"}],
        "scratchpad_mixed": f"a00{row['answer']}", "lucky_even": [{"content": row["answer"]}],
    }.get(name)  # fmt: skip
    if name == "lake_6_turns":
        right = [{"role": "assistant", "content": ""}, {"role": "tool", "content": "*"}]
    (earned,) = task.reward(completions=[right], **{key: [value] for key, value in row.items()})
    assert earned == [1.0] if rewards is list else earned == 1.0


# Tasks of the language model


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


def test_a_baseline_that_leaves_one_out_by_itself_takes_no_such_option(registered):
    with pytest.raises(ValueError, match="'damped_return', which always leaves one out"):
        OTBGRPOConfig(baseline="damped_return", leave_one_out=True, use_cpu=True, bf16=False)
    assert OTBGRPOConfig(baseline="damped_return", use_cpu=True, bf16=False).baseline == "damped_return"


# Studies


class Report:
    """In the place of the package's own: what a study asked for, and as many estimators as it publishes."""

    def __init__(self, num_prompts, group_sizes, **asked):
        self.num_prompts, self.group_sizes, self.asked, self.verdict = num_prompts, group_sizes, asked, "Keep it."

    def to_json(self):
        ratio = {"value": 1.23456, "low": 1.1, "high": None}
        estimates = dict.fromkeys(("over_group_mean", "noise_over_group_mean", "cosine"), ratio)
        names = [f"{b}{left}" for b in self.asked["baselines"] for left in ("", ", one left out")]
        sizes = (2, *self.group_sizes)  # the law of the group mean has further ones
        rows = [{"name": name, "n": n, **estimates} for name in ("none", "group_mean", *names) for n in sizes]
        return {"comparisons": rows}

    def plot(self, path):
        Path(path).write_text(f"picture of {self.num_prompts}")


@pytest.fixture
def compare(monkeypatch):
    """Fakes the measurement; what is saved is what was asked for. Returns all that was."""
    calls = []

    def compare_baselines(trainer, baselines, num_prompts, output_dir, **asked):
        asked |= {"baselines": list(baselines), "num_prompts": num_prompts}
        calls.append((trainer, asked))
        Path(output_dir).mkdir(parents=True)
        (Path(output_dir) / "asked.json").write_text(json.dumps(asked))
        return Report(**asked)

    def load(output_dir, prompts_per_batch):
        asked = json.loads((Path(output_dir) / "asked.json").read_text())
        assert prompts_per_batch == asked["prompts_per_batch"]
        return Report(**asked)

    monkeypatch.setattr(trl_otb, "compare_baselines", compare_baselines, raising=False)
    monkeypatch.setattr(trl_otb, "BaselineReport", SimpleNamespace(load=load), raising=False)
    monkeypatch.setattr(toy, "smollm2", lambda: Path("smollm2"))
    return calls


@pytest.fixture
def pages(tmp_path, monkeypatch):
    """A copy of the pages and their results, to publish in."""
    for path in [*render.HERE.glob("*.md"), *render.HERE.glob("results/*.json")]:
        copy = tmp_path / "pages" / path.relative_to(render.HERE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    monkeypatch.setattr(render, "HERE", tmp_path / "pages")
    return tmp_path / "pages"


@pytest.fixture
def study(registry, monkeypatch):
    """The study of value, imported anew, so that it registers its baselines."""
    monkeypatch.delitem(sys.modules, "recipes.studies.value", raising=False)
    return importlib.import_module("recipes.studies.value")


@pytest.fixture
def asked(study, compare, monkeypatch):
    monkeypatch.setattr(study, "trainer_of", lambda task, **options: (task, options))
    monkeypatch.setattr(study, "task_of", lambda name, seed: (name, seed))
    return compare


def test_the_study_of_value_measures_saves_and_publishes(study, asked, tmp_path, pages, monkeypatch):
    """A column takes the place of the published one, the others stay."""
    flags, before = ["--output_dir", str(tmp_path / "study")], render.load("value")
    study.main([*flags, "--tasks", "sums", "scratchpad_10", "--num_prompts", "33"])
    ((of_sums, options), of_first), ((of_ten, _), _) = asked
    assert (of_ten, of_sums, options) == (("scratchpad_10", 0), ("sums", 0), {"seed": 0, "disable_tqdm": False})
    assert of_first == {
        "baselines": [*study.BESIDE, "value", *study.ABLATIONS], "num_prompts": 33, "completions_per_prompt": 128,
        "prompts_per_batch": 16, "group_sizes": [4, 8, 32], "seed": 0, "projection": 4096,
    }  # fmt: skip
    table = (tmp_path / "study" / "tables.md").read_text()
    assert table.startswith("N = 4:\n\n| estimator | sums (n = 33) | T = 10 (n = 33) |")
    assert table.count("| `ogb_pooled` | 1.23 (1.10–?); 1.23 (1.10–?); 1.235 |") == 3 and "N = 2" not in table
    monkeypatch.setattr(render, "publish", lambda name, columns: published.append((name, [*columns])))
    published = []
    study.main([*flags, "--tasks", "sums", "--plot_only", "--publish"])
    assert len(asked) == 2 and published == [("value", ["sums"])] and render.load("value") == before


def test_the_study_of_value_takes_it_apart_also_where_turns_are_rewarded(study, asked, tmp_path):
    study.main(["--output_dir", str(tmp_path), "--tasks", "lucky_even/4", "lake_6_turns"])
    (_, of_prompts), ((task, _), of_turns) = asked
    assert {*study.ABLATIONS} <= {*of_prompts["baselines"]} & {*BASELINES} and of_prompts["prompts_per_batch"] == 4
    assert task == ("lake_6_turns", 0) and of_turns["baselines"] == of_prompts["baselines"]
    assert (tmp_path / "lucky_even-4").is_dir()


@pytest.mark.parametrize("name", ["no_states", "no_sums", "weights_one", "whole", "one_batch", "three_batches"])
@pytest.mark.usefixtures("study")
def test_value_without_one_of_its_parts_learns(name):
    name = f"value_{name}"
    g, rows, length = torch.Generator().manual_seed(0), 32, 6
    part, whole = (BASELINES[of].instance().function for of in (name, "value"))
    for _ in range(4):
        energy, states = torch.rand(rows, length, generator=g), torch.randn(rows, length, 3, generator=g)
        rewards = (states[..., 0].mean(dim=1) + energy.mean(dim=1) > 0.5).float()
        beside = {"logps": -energy, "states": states}
        mask, prompt = torch.ones(rows, length), torch.arange(rows) // 4
        tokens = Tokens(rewards, rewards.mean().expand(rows, 1), energy, mask, prompt, beside)
        part.update(tokens)
        whole.update(tokens)
    assert len(part.theta) == {"value_no_states": 9, "value_no_sums": 3 + 6}.get(name, 15)
    assert part(tokens).isfinite().all() and not torch.equal(part(tokens), whole(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("task", ["scratchpad_10", "lake_6_turns"])
def test_the_study_of_value_from_end_to_end(task, study, tmp_path, monkeypatch, capsys):
    """With a policy after a short warm start. More prompts add to what is there, and nothing is measured again."""
    name = task.removesuffix("_turns")
    policy = shortly_trained(name, 150, tmp_path / "policy")
    monkeypatch.setattr(toy, name, lambda: policy)
    flags = ["--tasks", task, "--output_dir", str(tmp_path / "study")]
    study.main([*flags, "--num_prompts", "3"])
    said = (tmp_path / "study" / "tables.md").read_text()
    for estimator in ("otb", "otb, one left out", "ogb_pooled", *(["value_one_batch"] if task == name else [])):
        assert said.count(f"| `{estimator}` |") == 3, estimator
    measured = {path: path.stat().st_mtime_ns for path in (tmp_path / "study" / task).glob("prompt-*.pt")}
    assert len(measured) == 3 and "nan" not in said
    study.main([*flags, "--plot_only"])
    assert (tmp_path / "study" / "tables.md").read_text() == said
    study.main([*flags, "--num_prompts", "4"])
    assert "(n = 4)" in (tmp_path / "study" / "tables.md").read_text()
    assert all(path.stat().st_mtime_ns == at for path, at in measured.items())
    with pytest.raises(SystemExit):
        study.main([*flags, "--num_prompts", "4", "--seed", "1"])
    assert "was measured differently" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["copy", "copy_trained"])
def test_the_study_of_value_on_the_language_model(name, study, compare, tmp_path, monkeypatch):
    trained = []
    model = SimpleNamespace(load_adapter=lambda *args, **kwargs: trained.append("loaded"))
    sampler = SimpleNamespace(train=lambda: trained.append("trained"), save_model=lambda path: None, model=model)
    monkeypatch.setattr(language, "trainer_of", lambda task, **options: trained.append((task, options)) or sampler)
    study.main(["--tasks", name, "--output_dir", str(tmp_path / "study"), "--num_prompts", "8"])
    ((trainer, asked),) = compare
    (task, options), *steps = trained
    assert trainer is sampler and steps == ["trained", "loaded"] * name.endswith("trained")
    assert (task.reward, task.max_completion_length, len(task.train)) == (language.likeness, 80, 500)
    assert (options["max_steps"], options["num_generations"]) == (4, 8)
    assert asked == {
        "baselines": [*study.BESIDE, "value", *study.ABLATIONS], "num_prompts": 8, "completions_per_prompt": 16,
        "prompts_per_batch": 16, "group_sizes": [4], "parameters": r"layers\.2[6-9]\.", "seed": 0,
    }  # fmt: skip
    assert (tmp_path / "study" / name / "noise.png").read_text() == "picture of 8"


def test_the_language_model_is_trained_once(tmp_path, monkeypatch):
    """A tiny model in its place: what is measured later has the same adapter, to the bit."""
    monkeypatch.setattr(toy, "smollm2", lambda: Path(tiny.save_model(tmp_path / "model")))
    monkeypatch.setattr(language, "TOKENS", 4)
    monkeypatch.setattr(
        language, "likeness", lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions]
    )
    monkeypatch.setitem(language.TASKS, "copy", (language.copy_problem, language.likeness))

    def adapter(name):
        trainer = language.trainer_at(name, 7, tmp_path)
        named = dict(trainer.model.named_parameters())
        return trainer.state.global_step, {name: p.detach() for name, p in named.items() if p.requires_grad}

    (_, start), (steps, trained), (later, again) = adapter("copy"), adapter("copy_trained"), adapter("copy_trained")
    assert (steps, later) == (4, 0) and len(start) == 2 * 2 * 7
    assert all(torch.equal(trained[name], again[name]) for name in start)
    assert any(not torch.equal(trained[name], start[name]) for name in start)


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


@pytest.fixture
def features(registry, monkeypatch):
    """The study of features, imported anew, so that it registers its baseline."""
    monkeypatch.delitem(sys.modules, "recipes.studies.features", raising=False)
    return importlib.import_module("recipes.studies.features")


def test_features_learn_beside_each_other(features, tiny_smollm2, monkeypatch, capsys):
    said = lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions]  # noqa: E731
    monkeypatch.setitem(language.TASKS, "copy", (language.copy_problem, said))
    features.main(["--task", "copy", "--batches", "2"])
    saved = Path("runs/studies/features/copy-2.json")
    found = json.loads(saved.read_text())
    assert set(found) == set(features.choices()) and len(found) == 32
    assert all(first == 0.0 for first, _ in found.values())  # nothing was learnt before
    said = capsys.readouterr().out
    assert said.count("\n") >= 28 and "2/3, mean, 32" in said
    written = saved.stat().st_mtime_ns
    features.main(["--task", "copy", "--batches", "2"])  # is not repeated
    assert capsys.readouterr().out == said and saved.stat().st_mtime_ns == written


@pytest.mark.usefixtures("pages")
def test_features_are_published_as_they_are_saved(features):
    """In the place of the task's column, whatever its batches, or as a further one."""
    folder, of_task = Path("runs/studies/features"), {name: [0.9, 0.9, 0.5, 0.3] for name in features.choices()}
    folder.mkdir(parents=True)
    for task in ("copy", "sums"):
        (folder / f"{task}-4.json").write_text(json.dumps(of_task | {"no states": [0.9, 0.9, 0.2, 0.1]}))
    before = render.load("features")["tables"]
    for task in ("copy", "sums", "copy"):
        features.main(["--task", task, "--batches", "4", "--publish"])
    after = render.load("features")["tables"]
    (head, first, second, *_), was = after["language"], before["language"]
    assert head == ["features", "copy (4)", *was[0][2:]]
    assert first == ["no states", "0.850", *was[1][2:]] and second[1] == "0.600"
    assert len(after["language"]) == len(was) and len(after["toys"]) == len(before["toys"])
    column = [title.split(" ")[0] for title in after["toys"][0]].index("sums")
    assert after["toys"][0][column] == "sums (4)" and after["toys"][1][column] == "0.850"
    assert "copy (4)" in (render.HERE / "value.md").read_text()


def test_what_a_choice_of_features_looks_at(features):
    """Beside the sums, the first numbers of one layer's projection."""
    width = len(features.DEPTHS) * features.WIDTH
    for name, choice in features.choices().items():
        looks_at = name.removesuffix(", no decay")
        depth, kind, numbers = looks_at.split(", ") if looks_at != "no states" else (None, None, 0)
        assert choice.decay == (1 if name.endswith("no decay") else 0.9)
        columns = torch.tensor(choice.columns)
        assert columns[: features.SUMS].tolist() == list(range(features.SUMS))
        rest = columns[features.SUMS :] - features.SUMS
        assert len(rest) == int(numbers) * (2 if kind == "both" else 1) and bool((rest < 2 * width).all())
        if depth is not None:
            layers = (rest % width) // features.WIDTH
            assert set(layers.tolist()) == {list(features.DEPTHS).index(depth)}
            assert set((rest // width).tolist()) == {"state": {0}, "mean": {1}, "both": {0, 1}}[kind]


def test_nothing_to_plot_is_said(study, tmp_path, capsys):
    with pytest.raises(SystemExit):
        study.main(["--tasks", "sums", "--plot_only", "--output_dir", str(tmp_path)])
    assert "Nothing is saved under" in capsys.readouterr().err


def test_another_seed_is_not_published(study, capsys):
    with pytest.raises(SystemExit):
        study.main(["--publish", "--seed", "1"])
    assert "--publish is for the seed of the page, 0" in capsys.readouterr().err


# Results and pages


def test_a_column_that_is_measured_anew_takes_the_place_of_the_published_one(pages):
    """The others stay as they are, to the digit, and what is lost in noise stays lost."""
    before, page = render.load("turns"), (pages / "turns.md").read_text()
    cells = [dict(cell, prompts=65) for cell in before["tables"]["lake_14"]]
    at = next(i for i, cell in enumerate(cells) if (cell["estimator"], cell["n"]) == ("otb", 4))
    cells[at] |= {"efficiency": [None, 0.5, None], "cosine": None}
    cells.append(dict(cells[at], estimator="newest"))
    render.publish("turns", {"lake_14": cells})
    after = render.load("turns")
    assert after == before | {"tables": before["tables"] | {"lake_14": cells}}
    tables = (pages / "turns.md").read_text()
    assert "| lake_6 (n = 64) | lake_14 (n = 65) | lake_30 (n = 64) |" in tables
    (row,) = [line for line in tables.splitlines() if line.startswith("| `newest` |")]
    first, newest, *others = row.strip("| ").split(" | ")[1:]
    assert newest.startswith("? (0.50–?); ") and newest.endswith("; ?") and {first, *others} == {"–"}
    assert tables.partition("N = 4")[0] == page.partition("N = 4")[0]
    with pytest.raises(InputError, match="has newest for lake_14, which was not measured now"):
        render.publish("turns", {"lake_14": cells[:-1]})
    render.publish("turns", {"lake_14": before["tables"]["lake_14"] + [cells[-1]]})


@pytest.mark.parametrize("page", render.PAGES)
def test_the_published_tables_are_those_of_the_results(page):
    """And a changed digit would be seen."""
    text = (render.HERE / f"{page}.md").read_text()
    assert render.rendered(text) == text and "<!-- " in text
    number = re.search(r"<!-- .*?(\d\.\d\d) \(", text, flags=re.DOTALL)
    assert render.rendered(text[: number.start(1)] + "9.99" + text[number.end(1) :]) == text


def test_results_are_written_as_they_are_read(pages):
    for path in (pages / "results").glob("*.json"):
        before = path.read_text()
        render.save(path.stem, render.load(path.stem))
        assert path.read_text() == before


INTERVAL = r"-?\d+(?:\.\d+)? \(-?\d+(?:\.\d+)?–-?\d+(?:\.\d+)?\)"


def intervals_of(records):
    """All that are in the data, as numbers or in a row of text, in the forms in which pages give them."""
    found = set()
    for record in records:
        values = [*record.values(), *record.get("strata", {}).values()] if isinstance(record, dict) else record
        texts = [v for v in values if isinstance(v, str) and re.fullmatch(INTERVAL, v)]
        ends = [v for v in values if isinstance(v, list) and len(v) == 3 and not isinstance(v[0], dict)]
        ends += [[float(x) for x in re.findall(r"-?[\d.]+", text)] for text in texts]
        ends += [[100 * x for x in v] for v in ends if None not in v]
        found |= {render.interval(v, form) for v in ends for form in (".2f", ".3f", ".1f", ".0f", ".3g")}
    return found


@pytest.mark.parametrize(
    ("page", "results", "least"),
    [
        ("studies/README", ["value", "runs", "turns", "language"], 2),
        ("studies/value", ["value", "runs", "language"], 50),
        ("studies/horizon", ["horizon"], 5),
        ("studies/turns", ["turns"], 15),
        ("studies/learning_curves", ["learning_curves"], 15),
        ("../README", ["value", "language"], 4),
    ],
)
def test_numbers_in_prose_stand_in_the_results(page, results, least):
    """Every number with an interval, but for those of earlier series and those that only prose has, as it says."""
    text = (render.HERE.parent / f"{page}.md").read_text().split("\n## All figures\n")[0]
    paragraphs = re.split(r"\n(?=- |\n|\*\*|\|)", text)
    said = [p for p in paragraphs if not re.search("(first|earlier) series|no results", p, flags=re.IGNORECASE)]
    records = [
        row for name in results if name != "runs" for rows in render.load(name)["tables"].values() for row in rows
    ]
    if "runs" in results:
        pages = "".join((render.HERE / f"{name}.md").read_text() for name in render.PAGES)
        tasks_shown = re.findall("<!-- runs: (.+) -->", pages)
        records += [arm for task in tasks_shown for arm in runs.arms(render.runs_of(task))]
    found = intervals_of(records)
    numbers = re.findall(INTERVAL, "\n".join(said).replace("−", "-"))
    assert len(numbers) >= least and [number for number in numbers if number not in found] == []


@pytest.mark.parametrize("name", render.PICTURES)
def test_pictures_are_drawn_from_the_results(name, tmp_path):
    panels = render.PICTURES[name]
    render.draw(panels, tmp_path / "whole.png")
    render.draw([(*panel[:3], {}) for panel in panels], tmp_path / "empty.png")
    assert (tmp_path / "whole.png").stat().st_size > (tmp_path / "empty.png").stat().st_size + 5_000
