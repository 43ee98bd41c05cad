"""What people look for in a page of rollouts, in a real browser: on a desktop and a phone."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.utils import filter_repo_objects
from transformers import trainer as transformers_trainer

from tests.helpers import tiny
from tests.helpers.pages import Opened, steps_of
from tests.maths import test_efficiency as reports
from tests.trainer.test_display import changed, credited, rollout_of
from trl_otb import OTBGRPOTrainer
from trl_otb.display import page, record
from trl_otb.energy import TokenValues


@pytest.fixture
def phone(browser):
    """The browser as wide as a phone."""
    metrics = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    yield browser
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def pushed(texts, rewards, pushes=None, n=2, **fields):
    """Completions whose tokens, characters of `texts`, have energy 1 and these pushes, by row and token; else 0."""
    rollout = rollout_of(texts, rewards, n=n)
    ones, advantages = torch.ones_like(rollout.mask).float(), torch.zeros_like(rollout.mask).float()
    for (row, token), push in (pushes or {}).items():
        advantages[row, token] = push
    rollout = rollout.with_values(TokenValues(ones, -ones, None), None)
    returns = torch.nan_to_num(rollout.rewards).unsqueeze(1)
    of_mean = returns - returns.view(-1, n).mean(1).repeat_interleave(n).unsqueeze(1)
    fields = {"group_mean_advantages": of_mean, "baseline_name": "value"} | fields
    return changed(rollout, **{"advantages": advantages, "baselines": returns - advantages} | fields)


def opened_of(browser, path, *rollouts, mode="train", run="run", link=""):
    for number, rollout in enumerate(rollouts):
        page.append(path, page.recorded(changed(rollout, step=rollout.shown.step or number + 1), mode, run))
    return Opened(browser, path, link)


def wait(browser, condition):
    from selenium.webdriver.support.wait import WebDriverWait

    WebDriverWait(browser, 10, 0.02).until(lambda driver: driver.execute_script(f"return {condition}"))


def test_lines_break_after_their_sign(tmp_path, browser):
    opened = opened_of(browser, tmp_path / "one.html", pushed(["a\nbc\n\nd", "↵"], [1.0, 0.0]))
    box = opened.of(".tokens")[0]
    assert box.text == "a↵\nbc↵\n↵\nd"
    tops = [span.rect["y"] for span in box.find_elements("css selector", "span")]
    assert len(set(tops)) == 4 and tops[0] < tops[2] < tops[5] < tops[6]
    assert box.find_element("css selector", "i").value_of_css_property("opacity") == "0.4"
    assert not opened.of(".tokens")[2].find_elements("css selector", "i")  # the sign itself, which the policy wrote


def test_rewards_of_each_function_and_columns(train, tmp_path, browser):
    """Of a real run: the right answer, and long and odd columns, shortened."""

    def long(completion_ids, **kwargs):
        return [0.25 if i % 2 else None for i in range(len(completion_ids))]

    rows = (
        tiny.prompts().add_column("essay", ["x" * 5000] * 8).add_column("tests", [[{"in": k} for k in range(900)]] * 8)
    )
    rows = rows.add_column("</script><b>", ["<img src=x onerror=\"document.title='ran'\">"] * 8)
    options = {"save_rollouts_steps": 1, "max_steps": 1, "output_dir": str(tmp_path), "baseline": "rloo"}
    train(OTBGRPOTrainer, train_dataset=rows, reward_funcs=[tiny.even_bytes, long], **options)
    (step,) = steps_of(tmp_path / "_rollouts.html")
    assert step["rewards"] == ["even_bytes", "long"]
    for prompt in step["prompts"]:
        assert prompt["columns"]["answer"] == str(2 * int(prompt["prompt"][0]))
        assert len(prompt["columns"]["essay"]) < 1100 and len(prompt["columns"]["tests"]) < 1100
        for completion in prompt["completions"]:
            first, second = completion["rewards"]
            assert completion["reward"] == pytest.approx(first + (second or 0.0)) and second in (0.25, None)
    opened = Opened(browser, tmp_path / "_rollouts.html")
    assert "answer" in opened.text("dt") and "</script><b>" in opened.text("dt") and not opened.errors
    assert "(even_bytes" in opened.text(".told")[0] and "long –)" in opened.text(".told")[0]
    assert browser.title != "ran"


def test_a_phone_labels_each_block(tmp_path, phone):
    path = tmp_path / "one.html"
    opened = opened_of(phone, path, pushed(["word " * 100, "fg"], [1.0, 0.0], {(0, 3): 1.0}))
    assert phone.execute_script("return document.documentElement.scrollWidth") <= 390
    labels, blocks = opened.of(".label"), opened.of(".tokens")
    assert [label.text for label in labels] == ["GRPO", "value"] * 2
    assert all(0 < block.rect["y"] - label.rect["y"] < 60 for label, block in zip(labels, blocks, strict=True))
    assert blocks[1].rect["y"] > blocks[0].rect["y"] + blocks[0].rect["height"]  # one below the other
    opened.click(".hardest")
    wait(phone, "document.querySelector('#tip').style.display === 'block'")
    tip = opened.of("#tip")[0]
    assert tip.is_displayed() and tip.rect["x"] >= 0 and tip.rect["x"] + tip.rect["width"] <= 390
    phone.execute_async_script("scrollBy(0, 60); setTimeout(arguments[0], 100)")
    assert not tip.is_displayed()


def test_prompts_are_searched_filtered_and_sorted(tmp_path, browser):
    pushes = {(1, 0): 0.5, (2, 0): -3.0, (4, 0): 1.0}
    texts = ["aa", "bbb", "cccc", "dd", "needle", "ff"]
    rollout = pushed(texts, [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], pushes)
    ids = torch.tensor(tiny.tokenizer()(["1+1=", "2+2=", "3+3="])["input_ids"]).repeat_interleave(2, dim=0)
    rollout = replace(rollout, prompt_ids=ids, prompt_mask=torch.ones_like(ids))
    opened = opened_of(browser, tmp_path / "one.html", rollout)

    def listed():
        return [int(text.split()[1]) for text in opened.text("#prompts button")]

    orders = {"order": [0, 1, 2], "reward": [2, 1, 0], "spread": [1, 0, 2], "length": [2, 1, 0], "push": [1, 2, 0]}
    for key, order in orders.items():
        opened.choose(key, "sort")
        assert listed() == order, key
    opened.choose("distance", "sort")
    assert listed()[0] == 1 and opened.text("#prompts button")[0].split("\n")[0].endswith("from GRPO")
    opened.choose("order", "sort")
    opened.click("#varied")
    assert listed() == [1] and opened.text("#found") == ["1 of 3 prompts"]
    opened.click("#varied")
    opened.click("#failed")
    assert listed() == [1, 2] and opened.text(".completion b") == ["completion 1"]
    opened.click("#failed")
    opened.press("/")
    opened.press("needle")
    assert listed() == [2] and opened.text(".prompt") == ["3+3="]
    assert [of.text for of in opened.of(".hit")] == [*"needle"] * 2  # beside GRPO's
    assert opened.text("#which") == ["train 1"] and not opened.errors


def test_a_search_goes_on_in_later_steps(tmp_path, browser):
    steps = [pushed([text, "fg"], [1.0, 0.0]) for text in ("ab", "cd", "q" * 4500 + "xyz")]
    opened = opened_of(browser, tmp_path / "one.html", *steps, link="#train-1")
    opened.press("/")
    opened.press("xy")
    assert opened.text("#prompts button") == []
    opened.press("ENTER")
    wait(browser, "document.querySelector('#which').textContent === 'train 3'")
    opened.settle()
    assert [of.text for of in opened.of(".hit")] == [*"xyxy"]  # far below, where it scrolls to
    top = browser.execute_script("return document.querySelector('.at').getBoundingClientRect().top")
    assert 0 < top < browser.execute_script("return innerHeight")


def test_snippets_begin_with_a_word(tmp_path, browser):
    rollout = pushed(["a"] * 4, [0.0, 1.0, 0.0, 1.0])
    ids = tiny.tokenizer()(["How many of 1000 are there?", "How many of 1200 are there?"])["input_ids"]
    ids = torch.tensor(ids).repeat_interleave(2, dim=0)
    rollout = replace(rollout, prompt_ids=ids, prompt_mask=torch.ones_like(ids))
    opened = opened_of(browser, tmp_path / "one.html", rollout)
    assert opened.text("#prompts small") == ["… 1000 are there?", "… 1200 are there?"]


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("مرحبا", [*"مرحبا"]),
        ("a👩‍👩‍👧b", ["a", "👩‍👩‍👧", "b"]),
        ("xe\u0301y", ["x", "e\u0301", "y"]),
        ("漢字", ["漢", "字"]),
        ("🇩🇪🇫🇷", ["🇩🇪", "🇫🇷"]),
    ],
)
def test_a_character_of_several_tokens_is_one_piece(tmp_path, browser, capsys, text, pieces):
    """Whose tokens the tooltip lists; nothing stands between letters, in a terminal neither."""
    rollout = pushed([text, "fg"], [1.0, 0.0], {(0, 1): 1.0})
    opened = opened_of(browser, tmp_path / "one.html", rollout)
    spans = opened.of(".side:nth-child(2) .tokens")[0].find_elements("css selector", "span")
    assert [span.get_property("textContent") for span in spans] == pieces
    several = next(k for k, piece in enumerate(pieces) if len(piece.encode()) > 1)
    numbers, _ = opened.hover(spans[several])
    count = len(pieces[several].encode())
    assert len(numbers["energy"].split(" · ")) == count
    assert f"tokens {several} to {several + count - 1} form" in opened.text("#tip")[0]
    rollout.show()
    assert "·" not in capsys.readouterr().out


def test_one_scale_for_the_step(tmp_path, browser):
    """A push of 0.2 is seen where another prompt has 2, and darkest at the prompt's own scale: a root is drawn."""
    rollout = pushed(["ab", "cd", "ef", "gh"], [1.0, 1.0, 0.0, 0.0], {(0, 0): 0.2, (2, 0): -2.0})
    opened = opened_of(browser, tmp_path / "one.html", rollout, link="#train-1/0/push")

    def shade():
        return opened.of(".side:nth-child(2) .tokens span")[0].value_of_css_property("background-color")

    assert opened.text("#high") == ["2.0 in this step"] and shade().endswith("0.2)")
    opened.choose("prompt", "scale")
    assert opened.text("#high") == ["0.20 in this prompt"] and shade().endswith("0.6)")


def test_a_click_jumps_to_the_largest_push(tmp_path, browser):
    """Also to one that is not drawn yet; the strip shows where it is."""
    rollout = pushed(["a" * 6000, "b"], [1.0, 0.0], {(0, 100): 0.5, (0, 5000): -1.0})
    opened = opened_of(browser, tmp_path / "one.html", rollout)
    opened.choose("", "beside")
    assert len(opened.of(".tokens")[0].find_elements("css selector", "span")) == 2000
    opened.click(".hardest")
    wait(browser, "document.querySelector('#tip').textContent.startsWith('token 5000')")
    (at,) = opened.of(".tokens .at")
    place = browser.execute_script("return [arguments[0].from, arguments[0].getBoundingClientRect().top]", at)
    assert place[0] == 5000 and 0 < place[1] < browser.execute_script("return innerHeight")
    read = "const c = arguments[0]; return [...c.getContext('2d').getImageData(0, 0, c.width, 1).data]"
    strip = browser.execute_script(read, opened.of(".strip")[0])[3::4]
    assert {k for k, alpha in enumerate(strip) if alpha} == {5, 250} and strip[250] == 255 > strip[5]
    top = opened.of(".strip")[0].rect["y"] - browser.execute_script("return document.querySelector('main').offsetTop")
    assert 0 <= top < 80  # it stays in view
    click = "new MouseEvent('click', {clientX: s.getBoundingClientRect().left + s.clientWidth * 101 / 6000})"
    browser.execute_script(f"const s = arguments[0]; s.dispatchEvent({click})", opened.of(".strip")[0])
    assert browser.execute_script("return document.querySelector('.tokens .at').from") in (100, 101)


def test_charts_have_numbers_and_stay_open(tmp_path, browser):
    """With what `value` did at each step."""
    steps = []
    for number in (1, 2, 3):
        rollout = pushed(["ab", "cd", "ef", "gh"], [1.0, 0.0] * 2, {(0, 0): 1.5, (2, 1): -2.0})
        steps.append(changed(rollout, learned={"value/explained": number / 10, "value/kept": 0.0}))
    opened = opened_of(browser, tmp_path / "one.html", *steps, link="#train-3/0/push")
    opened.click(".toggle")
    assert opened.text(".completion .y")[0].split() == ["1.5", "0", "-1.5"]
    assert opened.text(".completion .x")[0].split() == ["0", "token", "1"]
    opened.choose("energy")
    opened.click("#title")  # keys are no longer the list's
    opened.press("ARROW_DOWN")
    opened.press("ARROW_LEFT")
    assert opened.text("#which") == ["train 2"] and len(opened.of(".completion .plot")) == 1
    opened.click("#course summary")
    wait(browser, "document.querySelectorAll('#curves .plot').length === 2")
    assert "explained" in opened.text("#curves .names")[1] and "kept" in opened.text("#curves .names")[1]
    points = opened.of("#curves .plot")[1].find_element("css selector", "polyline").get_attribute("points")
    assert points == "0.0,81.0 500.0,72.0 1000.0,63.0"  # 0.1, 0.2 and 0.3, from 0 to 1
    opened.press("ARROW_LEFT")
    assert opened.text("#which") == ["train 1"] and len(opened.of("#curves .plot")) == 2


def test_the_next_prompt_begins_at_its_top(tmp_path, browser):
    texts = ["word " * 800] * 4
    opened = opened_of(browser, tmp_path / "one.html", pushed(texts, [1.0, 0.0] * 2), link="#train-1/0")
    browser.execute_script("document.querySelector('main').scrollTop = 900")
    opened.press("ARROW_DOWN")
    assert (
        opened.text(".prompt") == ["2+2="]
        and browser.execute_script("return document.querySelector('main').scrollTop") == 0
    )


def test_a_tooltip_tells_what_an_advantage_is_made_of(tmp_path, browser):
    luck = torch.full((2, 6), -0.36)
    rollout = pushed(["abcde", "fg"], [0.0, 1.0])
    baselines = torch.full((2, 6), 0.17)
    parts = {"b0": torch.full((2, 1), 0.42), "later_luck": luck, "baselines": baselines}
    rollout = changed(rollout, advantages=rollout.rewards.unsqueeze(1) - baselines, **parts)
    opened = opened_of(browser, tmp_path / "one.html", rollout)
    numbers, lines = opened.hover(opened.of(".side:nth-child(2) .tokens span")[1])
    assert lines == [
        "= 0 − (0.42 + 0.11 − 0.36)",
        "= reward − (others' mean + what the text so far predicts + luck of later tokens)",
        "= worse than expected here, even without the bad luck of later tokens",
    ]
    assert float(numbers["advantage"]) == pytest.approx(-0.17, abs=1e-3)
    (tmp_path / "one.html").unlink()
    opened = opened_of(browser, tmp_path / "one.html", replace(rollout, scale=torch.full((2, 1), 0.5)))
    numbers, lines = opened.hover(opened.of(".side:nth-child(2) .tokens span")[1])
    assert lines[0] == "= (0 − (0.42 + 0.11 − 0.36)) / 0.5" and float(numbers["advantage"]) == pytest.approx(
        -0.34, abs=2e-3
    )


@pytest.mark.parametrize("two_runs", [True, False])
def test_what_completions_became(tmp_path, browser, two_runs):
    """Two runs, or two steps of one, beside each other where the prompt is the same."""
    before, after = (
        pushed(["ab", "cd"], [1.0, 0.0], {(0, 0): 1.0}),
        pushed(["abc", "xyz"], [1.0, 1.0], baseline_name="otb"),
    )
    if two_runs:
        for name, rollout in (("grpo", before), ("ours", after)):
            (tmp_path / name).mkdir()
            page.append(tmp_path / name / "_rollouts.html", page.recorded(changed(rollout, step=5), "eval", name))
        paths = [tmp_path / name for name in ("ours", "grpo/_rollouts.html", "both.html")]
        command = [sys.executable, "-m", "trl_otb.display", *paths[:2], "--output", paths[2]]
        subprocess.run(command, cwd=Path(__file__).parents[2], check=True)
        opened, other = Opened(browser, tmp_path / "both.html"), "grpo eval 5"  # what both have recorded last
    else:
        opened = opened_of(browser, tmp_path / "both.html", before, after)
        other = "train 1"
        opened.choose(other, "beside")
    assert opened.text(".tokens") == ["ab", "abc", "cd", "xyz"]
    labels = opened.text(".label")
    assert labels[0] == f"{other} · value · reward 1 · 2 tokens" and labels[3].endswith("otb · reward 1 · 3 tokens")
    assert opened.text("#beside option")[0] == "nothing" and opened.text("#high") == ["1.0 in both steps"]
    if two_runs:
        opened.choose("grpo", "run")
        assert opened.text(".tokens")[-1] == "cd" and opened.text("#which") == ["eval 5"]
    assert not opened.errors


def test_joined_pages_need_records(tmp_path):
    (tmp_path / "_rollouts.html").write_text("<p>mine")
    with pytest.raises(ValueError, match=r"rollouts\.html holds no recorded step"):
        page.join_pages([tmp_path], tmp_path / "both.html")
    with pytest.raises(ValueError, match="would be overwritten: choose another output"):
        page.join_pages([tmp_path], tmp_path / "_rollouts.html")
    assert (tmp_path / "_rollouts.html").read_text() == "<p>mine"


def test_runs_of_one_name_are_told_apart(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        page.append(tmp_path / name / "_rollouts.html", page.recorded(credited(), "eval", "run"))
    page.join_pages([tmp_path / "a", tmp_path / "b"], tmp_path / "both.html")
    joined = page.records_of(tmp_path / "both.html")
    assert [page.about_of(of)[2]["run"] for of in joined] == ["run", "run (2)"]
    page.join_pages([tmp_path / "both.html", tmp_path / "a", tmp_path / "b"], tmp_path / "all.html")
    runs = [page.about_of(of)[2]["run"] for of in page.records_of(tmp_path / "all.html")]
    assert len(runs) == 4 and runs[-2:] == ["run (2)", "run (3)"]


def test_a_step_takes_few_bytes():
    """Six bytes and a half for each token of `value`, in base64; it was 43."""
    generator = torch.Generator().manual_seed(0)
    rollout = pushed(["some words, and more of them: " * 40] * 8, [0.0, 1.0] * 4, n=8)
    shape = rollout.mask.shape
    energy = torch.rand(shape, generator=generator).square()
    state, luck = (0.02 * torch.randn(shape, generator=generator).cumsum(1) for _ in range(2))
    fields = {"energy": energy, "loss_energy": energy, "logps": -energy, "baselines": state + luck, "later_luck": luck}
    rollout = changed(rollout, b0=torch.zeros(8, 1), **fields)
    assert len(page.recorded(rollout, "train", "run")) < 6.5 * rollout.mask.sum()


def test_a_resumed_run_goes_on_in_its_page(train, tmp_path, monkeypatch):
    """Of whatever release, under its name of then: steps 1 to 4, and no step twice."""
    options = {"save_rollouts_steps": 1, "output_dir": str(tmp_path), "save_steps": 2, "save_strategy": "steps"}
    train(OTBGRPOTrainer, **options, max_steps=3)
    monkeypatch.setattr(page, "HEAD", page.HEAD.replace("Rollouts", "Of another release"))
    path = tmp_path / "_rollouts.html"
    path.rename(tmp_path / "rollouts.html")  # as before release 0.14
    resumed = train(OTBGRPOTrainer, train=False, **options, max_steps=4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert [step["step"] for step in steps_of(path)] == [1, 2, 3, 4] and path.read_text().startswith(page.HEAD)
    assert [*tmp_path.glob("*rollouts*")] == [path]


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("text", ["<h1>My notes", '<script type="application/json" data-step="1">{}</script>\n'])
def test_a_file_of_another_kind_is_set_aside(train, tmp_path, caplog, text, resumed):
    options = {"save_rollouts_steps": 1, "output_dir": str(tmp_path), "save_steps": 1, "save_strategy": "steps"}
    train(OTBGRPOTrainer, **options, max_steps=1)
    path = tmp_path / "_rollouts.html"
    path.write_text(text)
    trainer = train(OTBGRPOTrainer, train=False, **options, max_steps=2)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1") if resumed else None)
    assert (tmp_path / "_rollouts-1.html").read_text() == text and "it is now _rollouts-1.html" in caplog.text
    assert [step["step"] for step in steps_of(path)] == [2] if resumed else [1, 2]


def test_a_new_run_sets_the_old_page_aside(train, tmp_path, caplog):
    """Evaluations before training are of the run that follows."""
    options = {"save_rollouts_steps": 1, "output_dir": str(tmp_path), "max_steps": 1, "eval_dataset": tiny.prompts(4)}
    train(OTBGRPOTrainer, **options)
    old = (tmp_path / "_rollouts.html").read_bytes()
    trainer = train(OTBGRPOTrainer, train=False, **options)
    trainer.evaluate()
    trainer.train()
    assert (tmp_path / "_rollouts-1.html").read_bytes() == old and "is the page of an earlier run" in caplog.text
    assert [(of["mode"], of["step"]) for of in steps_of(tmp_path / "_rollouts.html")] == [("eval", 0), ("train", 1)]
    assert len([*tmp_path.glob("_rollouts*")]) == 2


def test_pages_are_not_pushed(train, tmp_path, monkeypatch):
    """Prompts and answers would be public: whoever wants that uploads the file."""
    asked = []
    monkeypatch.setattr(HfApi, "upload_folder", lambda api, **options: asked.append(options))
    # Older transformers call the function that they have imported
    monkeypatch.setattr(transformers_trainer, "upload_folder", lambda **options: asked.append(options), raising=False)
    trainer = train(OTBGRPOTrainer, save_rollouts_steps=1, max_steps=1, output_dir=str(tmp_path))
    trainer.hub_model_id = "someone/model"
    trainer.push_to_hub()
    trainer.push_in_progress = None
    (tmp_path / "checkpoint-1").mkdir()
    trainer._push_from_checkpoint(str(tmp_path / "checkpoint-1"))
    assert len(asked) == 2
    for options in asked:
        files = ["_rollouts.html", "_rollouts-1.html", "_rollouts.part", "model.safetensors", "checkpoint-2/a"]
        assert [*filter_repo_objects(files, ignore_patterns=options["ignore_patterns"])] == ["model.safetensors"]


def test_columns_are_bounded():
    columns = {
        "a": "x" * 10_000,
        "b": {"deep": [["y" * 10_000] * 1000] * 1000},
        "c": 3,
        "d": None,
        "e": b"\x00" * 10**6,
    }
    columns |= {f"more {k}": k for k in range(100)}
    found = record.columns_of_prompt(changed(credited(), columns=(columns,) * 4), 0)
    assert len(found) == record.MAX_COLUMNS and found["c"] == "3" and found["d"] == "None"
    assert all(len(text) <= record.MAX_CHARACTERS + 2 for text in found.values()) and json.dumps(found)


def test_parts_are_known_of_every_recorded_step(train, tmp_path):
    """Also where a rollout serves several steps, and is sampled in one that is not recorded."""
    options = {"num_iterations": 2, "max_steps": 4, "save_rollouts_steps": 2, "output_dir": str(tmp_path)}
    train(OTBGRPOTrainer, baseline="value", **options)
    steps = steps_of(tmp_path / "_rollouts.html")
    assert [of["step"] for of in steps] == [1, 3] and all({"prefix", "luck"} <= of["values"].keys() for of in steps)


def test_a_report_on_a_phone(tmp_path, phone):
    """Names of baselines stay whole, a user's long one is broken, and nothing is wider than the page."""
    long = "module_of_a_user:" + 40 * "x"
    worth = {"value with progress": 0.3, long: 0.2, "ogb_pooled": 0.1}
    rows = [reports.row(name, of, of - 0.05, of + 0.1) for name, of in worth.items()]
    reports.report_of([reports.CONTROL_ROW, *rows]).save(tmp_path)
    phone.get((tmp_path / "report.html").as_uri())
    assert phone.execute_script("return document.documentElement.scrollWidth") == 390
    lines = "const of = document.createRange(); of.selectNodeContents(arguments[0]); return of.getClientRects().length"
    cells = phone.find_elements("css selector", "td:first-child, th")
    found = {cell.text: phone.execute_script(lines, cell) for cell in cells}
    assert found["ogb_pooled"] == found["group_mean"] == found["baseline"] == 1 < found[long]
