"""The page of rollouts, in a real browser."""

import functools
import http.server
import sys
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.agents import AGENT
from tests.helpers.pages import Opened, steps_of, unpacked
from tests.helpers.scripted import TOOLS, script_turns
from tests.trainer.test_display import TWO, changed, credited, energies, rollout_of
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer
from trl_otb.display import page, record
from trl_otb.energy import TokenValues


HOSTILE = ["</script><script>document.title='ran'</script>", "<img src=x onerror=\"document.title='ran'\">"]


def test_numbers_of_a_token_are_the_rollouts(tmp_path, browser):
    rollout = changed(credited(*TWO), baseline_name="otb", step=4)
    rollout.page(tmp_path / "one.html")
    opened = Opened(browser, tmp_path / "one.html")
    assert opened.text("#title") == ["trl_otb · baseline otb"] and opened.text("#which") == ["rollout 4"]
    assert opened.text(".label") == ["GRPO", "otb"] * 2 and opened.text(".prompt") == ["1+1="]
    assert opened.text(".told") == ["reward 1 · 5 tokens", "reward 0 · 2 tokens"]
    assert opened.text(".tokens") == ["abcde", "abcde", "fg", "fg"]
    grpo, own, *_ = opened.of(".tokens")
    tokens = own.find_elements("css selector", "span")
    shades = [token.get_attribute("class").split() for token in tokens]
    assert [{*of} & {"tool", "unlikely"} for of in shades] == [set(), set(), {"tool"}, {"tool"}, {"unlikely"}]
    shown, parts = opened.hover(tokens[1])
    energy, advantage = rollout.energy[0, 1].item(), rollout.advantages[0, 1].item()
    expected = {"push": advantage * energy**0.5, "advantage": advantage, "baseline": rollout.baselines[0, 1].item()}
    expected |= {"energy": energy, "log-probability": rollout.logps[0, 1].item()}
    expected |= {"push under GRPO": 0.5 * energy**0.5, "advantage under GRPO": 0.5}
    assert parts == ["= 1 − 0.071", "= reward − baseline"]
    assert {name: float(text) for name, text in shown.items()} == pytest.approx(expected, abs=2e-3)
    colours = [
        of.find_elements("css selector", "span")[4].value_of_css_property("background-color") for of in (grpo, own)
    ]
    assert colours[1].endswith("0.6)") and colours[0] != colours[1]  # one scale
    assert not opened.errors


def test_steps_colours_and_links(tmp_path, browser):
    path = tmp_path / "_rollouts.html"
    for step, mode in ((1, "train"), (2, "train"), (2, "eval"), (3, "train"), (2, "train")):  # 2 again, after a resume
        rewards = [1.0, 0.0, float(step), 0.0]
        rollout = credited(rewards=rewards) if step < 3 else credited(rewards=rewards, baseline="rloo")
        page.append(path, page.recorded(changed(rollout, step=step, baseline_name="otb"), mode, "run"))
    opened = Opened(browser, path)
    assert opened.text("#which") == ["train 3"] and opened.of("#step")[0].get_attribute("max") == "3"
    assert opened.text("nav button")[1].startswith("prompt 1 · reward 1.5") and opened.text(".prompt") == ["2+2="]
    seen = []
    for _ in range(3):
        opened.press("ARROW_LEFT")
        seen += opened.text("#which")
    assert seen == ["eval 2", "train 2", "train 1"]
    opened.press("ARROW_UP")
    assert opened.text(".prompt") == ["1+1="]
    for kind in ("advantage", "baseline", "energy", "logp"):
        opened.choose(kind)
        assert any("rgba" in of.value_of_css_property("background-color") for of in opened.of(".tokens span"))
    opened.click(".toggle")
    assert len(opened.of(".completion polyline")) == 2
    linked = Opened(browser, path, "#train-2/1/energy")
    assert linked.text("#which") == ["train 2"] and linked.text(".prompt") == ["2+2="]
    assert linked.of("#colour")[0].get_attribute("value") == "energy"
    assert not opened.errors and not linked.errors


def test_arrow_keys_read_numbers(tmp_path, browser):
    credited(*TWO).page(tmp_path / "one.html")
    opened = Opened(browser, tmp_path / "one.html")
    browser.execute_script("arguments[0].focus()", opened.of(".tokens")[1])
    for token in ("a", "b"):
        opened.press("ARROW_RIGHT")
        assert f'"{token}"' in opened.of("#tip")[0].text and opened.text("#which") == ["rollout 0"]


def test_hostile_text_is_text(tmp_path, browser):
    rollout = rollout_of(HOSTILE, [1.0, 0.0])
    rollout = rollout.with_values(TokenValues(energies(rollout), -energies(rollout), None), None)
    named = {"reward_names": tuple(HOSTILE), "rewards_per_func": torch.ones(2, 2)}
    rollout = changed(
        rollout, baseline_name="<b>", **named, columns=({HOSTILE[0]: HOSTILE[1], "<!--<script>": "&quot;\"'><b>"},) * 2
    )
    rollout.page(tmp_path / "one.html")
    opened = Opened(browser, tmp_path / "one.html")
    assert opened.text(".tokens") == HOSTILE and browser.title == "trl_otb, rollout 0" and not opened.errors
    assert opened.text("dt") == [HOSTILE[0], "<!--<script>"] and opened.text("dd") == [HOSTILE[1], "&quot;\"'><b>"]
    assert HOSTILE[1] in opened.text(".told")[0]
    # A script that got in would be refused
    (tmp_path / "two.html").write_text((tmp_path / "one.html").read_text() + "<script>document.title = 'ran'</script>")
    opened = Opened(browser, tmp_path / "two.html")
    assert browser.title == "trl_otb, rollout 0" and "Content Security Policy" in str(opened.errors)


def test_a_run_of_any_name(tmp_path, browser):
    """Which is a folder's, and stands at the head of each record."""
    name = "a/\"><script>document.title='ran'</script>\n--> %41 é"
    for step in (1, 2):
        page.append(tmp_path / "_rollouts.html", page.recorded(changed(credited(*TWO), step=step), "train", name))
    opened = Opened(browser, tmp_path / "_rollouts.html")
    assert opened.text("#which") == ["train 2"] and browser.title.startswith('a/"><script>') and not opened.errors
    assert page.about_of(page.records_of(tmp_path / "_rollouts.html")[1])[2]["run"] == name


@pytest.mark.parametrize("texts", [["", "fg"], ["", ""]])
def test_a_completion_without_tokens(tmp_path, browser, texts):
    credited(texts, [1.0, 0.0]).page(tmp_path / "one.html")
    opened = Opened(browser, tmp_path / "one.html")
    assert opened.text(".tokens")[2:] == [texts[1]] * 2 and opened.text(".told")[0] == "reward 1 · 0 tokens"
    for selector in (".hardest", ".toggle"):
        opened.click(selector)
    assert not opened.errors


def test_a_batch_without_numbers_is_text(tmp_path, browser):
    rollout_of(*TWO).page(tmp_path / "one.html")
    opened = Opened(browser, tmp_path / "one.html")
    assert opened.text(".tokens") == ["abcde", "fg"] and not opened.errors


def test_a_notebook_shows_it(tmp_path, browser):
    """From a server, as in the frame of a notebook a link would lead to the notebook."""
    shown = credited(*TWO).page()._repr_html_()
    (tmp_path / "cell.html").write_text(f"<!doctype html><meta charset=utf-8><p>notebook</p><div>{shown}</div>")
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser.get(f"http://127.0.0.1:{server.server_port}/cell.html")
        browser.switch_to.frame(browser.find_element("css selector", "iframe"))
        for _ in range(2):
            assert [of.text for of in browser.find_elements("css selector", ".tokens")][:1] == ["abcde"]
            browser.find_element("css selector", "#beside").click()  # draws again
        server.shutdown()


@pytest.mark.slow
def test_long_completions_open_quickly(tmp_path, browser):
    """8 × 32,000 tokens: the first 2,000 of each, and more on a click."""
    ids = torch.randint(97, 123, (8, 32_000), generator=torch.Generator().manual_seed(0))
    ones = torch.ones_like(ids)
    rollout = rollout_of(["a"] * 8, [0.0, 1.0] * 4, n=8)
    rollout = replace(rollout, completion_ids=ids - 32, completion_mask=ones, mask=ones)
    noise = torch.rand(8, 32_000)
    rollout = replace(rollout, advantages=noise, baselines=noise, energy=noise, loss_energy=noise, logps=-noise)
    rollout.page(tmp_path / "long.html")
    start = time.monotonic()
    opened = Opened(browser, tmp_path / "long.html")
    assert len(opened.of(".tokens")[0].find_elements("css selector", "span")) == 2000
    assert time.monotonic() - start < 10
    opened.of(".tokens button")[0].click()
    assert len(opened.of(".tokens")[0].find_elements("css selector", "span")) == 4000 and not opened.errors


@pytest.mark.parametrize("cut", [1, 40, 300])
def test_a_crash_leaves_a_page(tmp_path, browser, cut):
    """That opens, and to which a resumed run appends."""
    path, record = tmp_path / "_rollouts.html", records_until(3)
    page.append(path, record[0])
    page.append(path, record[1])
    path.write_text(path.read_text()[:-cut])
    opened = Opened(browser, path)
    assert opened.text("#which") in (["train 0"], ["train 1"]) and not opened.errors  # 1 lacks its end tag only
    page.append(path, record[2])
    assert [step["step"] for step in steps_of(path)] == [0, 2]


@pytest.mark.parametrize("text", ["", page.HEAD[:-30], "<!doctype html>of another release</script>\n"])
def test_a_file_without_a_head_begins_anew(tmp_path, text):
    path = tmp_path / "_rollouts.html"
    path.write_text(text)
    page.append(path, records_until(1)[0])
    assert path.read_text() == page.HEAD + records_until(1)[0]


def records_until(end, mode="train"):
    return [page.recorded(changed(credited(), step=i), mode, "run") for i in range(end)]


def test_a_file_stays_below_its_limit(tmp_path):
    """Steps go from both modes, and the last of each stay."""
    path, train, evaluated = tmp_path / "_rollouts.html", records_until(9), records_until(9, "eval")
    limit = len(page.HEAD) + 6 * len(train[0])
    asked = [record for of in zip(train, evaluated, strict=True) for record in of]
    thinned = []
    for one in asked:
        thinned.append(page.append(path, one, limit))
        assert page.about_of(one)[:2] in [(step["step"], step["mode"]) for step in steps_of(path)]  # the newest
    assert thinned.index(True) in (5, 6) and path.stat().st_size <= limit + 200  # √ and the like have more bytes
    found = [(step["mode"], step["step"]) for step in steps_of(path)]
    assert {("train", 8), ("eval", 8)} <= {*found} and found == sorted(found, key=lambda of: of[1])
    page.append(path, train[3], max_bytes=10)
    assert len(steps_of(path)) == 2  # a step of each mode stays, however large


def test_a_run_with_a_large_page_is_recorded_less_often(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(page, "append", lambda path, record: asked.append(record) or len(asked) in (2, 4))
    rollouts, args = {}, SimpleNamespace(output_dir=str(tmp_path), save_rollouts_steps=1, report_to=[])
    pages, steps = page.RolloutPages(rollouts), []
    for step in range(1, 17):
        rollouts["train"] = changed(credited(), step=step)
        pages.on_step_end(args, SimpleNamespace(global_step=step, is_world_process_zero=True), None)
        steps += [step] * (len(asked) - len(steps))
    assert steps == [1, 2, 4, 6, 8, 12, 16]


def test_prompts_beyond_the_limit_are_counted(monkeypatch):
    monkeypatch.setattr(record, "MAX_TOKENS", 1)
    step = unpacked(page.recorded(credited(), "train", "run"))
    assert step["left_out"] == 1 and len(step["prompts"]) == 1 and step["tokens"] == 7


def test_a_run_writes_its_page(train, tmp_path):
    options = {"save_rollouts_steps": 2, "baseline": "value", "max_steps": 4, "output_dir": str(tmp_path)}
    both = {"a": tiny.prompts(), "b": tiny.prompts(4)}
    trainer = train(OTBGRPOTrainer, eval_dataset=both, eval_strategy="steps", eval_steps=4, **options)
    trainer.train()  # a page of its own, as of a notebook's cell
    steps = steps_of(tmp_path / "_rollouts.html")
    assert [(of["mode"], of["step"]) for of in steps] == [("train", 2), ("train", 4), ("eval", 4), ("eval", 4)]
    train(OTBGRPOTrainer, **options | {"max_steps": 2})
    assert [of["step"] for of in steps_of(tmp_path / "_rollouts.html")] == [2]
    assert [len(steps_of(tmp_path / f"_rollouts-{number}.html")) for number in (1, 2)] == [4, 4]
    assert all(of["baseline"] == "value" and of["title"] == tmp_path.name for of in steps)
    rollout, of = trainer.rollouts["train"], steps[1]["values"]
    completions = [of for prompt in steps[1]["prompts"] for of in prompt["completions"]]
    b0 = torch.tensor([of["b0"] for of in completions]).repeat_interleave(8)
    assert b0 + of["prefix"] + of["luck"] == pytest.approx(rollout.baselines.flatten().numpy(), abs=2e-3)
    assert of["energy"] ** 2 == pytest.approx(rollout.energy.flatten().numpy(), abs=4e-3)
    assert -(of["logp"] ** 2) == pytest.approx(rollout.logps.flatten().numpy(), abs=3e-2)
    assert [of["grpo"] for of in completions] == pytest.approx(
        rollout.group_mean_advantages.flatten().tolist(), rel=1e-5
    )
    _, _, about = page.about_of(page.records_of(tmp_path / "_rollouts-1.html")[1])
    assert about["run"] == tmp_path.name and {"explained", "kept", "mean", "lowest", "highest"} <= {*about}


def test_tool_output_is_marked(train, monkeypatch, tmp_path):
    script_turns(monkeypatch)
    options = {"save_rollouts_steps": 1, "output_dir": str(tmp_path), **AGENT}
    train(OTBGRPOTrainer, reward_funcs=tiny.even_bytes, tools=TOOLS, **options)
    (step,) = steps_of(tmp_path / "_rollouts.html")
    text = "".join(of["text"] for prompt in step["prompts"] for of in prompt["completions"])
    ends = step["values"]["length"].astype(int).cumsum()
    parts = [text[end - length : end] for end, length in zip(ends, step["values"]["length"].astype(int), strict=True)]
    of_tools = "".join(part for part, made in zip(parts, step["values"]["generated"], strict=True) if not made)
    assert "<tool_response>" in of_tools and step["values"]["generated"].any()


@pytest.mark.parametrize("library", ["wandb", "trackio"])
def test_trackers_that_take_pages_get_one(train, tmp_path, monkeypatch, library):
    sent = []
    monkeypatch.setitem(sys.modules, library, SimpleNamespace(log=sent.append, Html=lambda text: text, run=1))
    pages = page.RolloutPages(train(max_steps=1).rollouts)
    args = SimpleNamespace(output_dir=str(tmp_path), save_rollouts_steps=1, report_to=[library])
    pages.on_step_end(args, SimpleNamespace(global_step=1, is_world_process_zero=True), None)
    sys.modules[library].run = None  # not begun
    pages.last = {}
    pages.on_step_end(args, SimpleNamespace(global_step=1, is_world_process_zero=True), None)
    assert (
        len(sent) == 1
        and list(sent[0]) == ["train/rollouts"]
        and sent[0]["train/rollouts"].startswith("<!doctype html>")
    )


@pytest.mark.parametrize("steps", [0, -1, True, 0.5])
def test_steps_between_pages(steps, tmp_path):
    with pytest.raises(ValueError, match="`save_rollouts_steps` is .*: give a number of steps from 1 on"):
        OTBGRPOConfig(str(tmp_path), **tiny.SETTINGS, save_rollouts_steps=steps)
