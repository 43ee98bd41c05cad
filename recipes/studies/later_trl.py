"""
What trl_otb does with a TRL that it was not written for: copies of the installed one, each with an edit of a kind that
a release makes. One step is trained with each, and its gradient compared with that of a plain loop.

    python -m recipes.studies.later_trl                # all edits: 12 minutes on a core, then the page is rendered
    python -m recipes.studies.later_trl --only hook    # those whose name holds it; nothing is published
"""

import argparse
import json
import re
import shutil
import tempfile
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from tests.helpers import edited_trl  # and nothing that imports TRL, as the processes with a copy import this file


GRPO, CONFIG, HEAD = "trainer/grpo_trainer.py", "trainer/grpo_config.py", "kernels/chunked_logprob.py"

VERSION = "1.17.0"  # that the copies say they are

# Places in TRL's files at which text is added
OUTPUT = '        output = {\n            "prompt_ids": prompt_ids,'
MADE = "                generation_batch = split_pixel_values_by_grid(generation_batch)\n"
SHUFFLED = "                generation_batch = shuffle_sequence_dict(generation_batch)\n"
GIVEN = '        advantages = inputs["advantages"]\n'
UNSQUEEZED = "        # When num_iterations == 1 and steps_per_generation <= gradient_accumulation_steps,\n"
MASK = '        mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]\n'
PRODUCT = "per_token_loss1 = coef_1 * advantages\n"
BRANCH = "        if advantages.dim() == 1:\n"
TURN = "_generate_single_turn(self, prompt_ids,"
GROUPS = """            mean_grouped_rewards = torch.nanmean(rewards.view(-1, num_generations), dim=1)
            mean_grouped_rewards = mean_grouped_rewards.repeat_interleave(num_generations, dim=0)
"""
FORMED = "            advantages = rewards - mean_grouped_rewards\n"
GATHERED = "        rewards_per_func = gather(rewards_per_func)\n"
WEIGHTED = """            rewards = (rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)
"""
SCORED = "outputs.log_probs[:, -logits_to_keep:]"
SUM_OF_SQUARES = "log_sum_sq_probs = torch.log(sq_sum_exp) - 2 * torch.log(sum_exp)"
HOOK = "    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):\n"
WHITENED = "(x - x.mean()) / (x.std() + 1e-4)"
BATCH_ADVANTAGES = 'generation_batch["advantages"]'


def hook(value: str) -> str:
    """A method of TRL's pull request 7298 that returns this."""
    return f"    def _transform_advantages(self, x):\n        return {value}\n\n{HOOK}"


def whiten(text: str) -> str:
    return WHITENED.replace("x", text)


class Edit(NamedTuple):
    """What a later version might have in the place of a text of TRL's, and what is trained with it."""

    runs: str  # what is trained, see `tests/helpers/edited_run.py`
    changes: tuple[
        tuple[str, str], ...
    ]  # text before and after; text that ends with `->` is replaced all over the file
    file: str = GRPO
    loop: str = ""  # how the plain loop differs, see `tests/helpers/edited_run.py`


EDITS = {
    # Rows
    "completions in another order": Edit(
        "otb rloo", ((OUTPUT, f"        completion_ids = completion_ids.flip(0)\n{OUTPUT}"),)
    ),
    "the batch in another order": Edit(
        "otb rloo",
        (
            (
                '            output["tool_mask"] = tool_mask\n        return output\n',
                "            output['tool_mask'] = tool_mask\n"
                "        return {k: v.flip(0) if getattr(v, 'ndim', 0) else v for k, v in output.items()}\n",
            ),
        ),
    ),
    "advantages of the next row": Edit(
        "otb rloo", (("advantages = advantages[process_slice]", "advantages = advantages[process_slice].roll(1, 0)"),)
    ),
    "groups that are not adjacent": Edit(
        "otb rloo",
        (
            (
                GROUPS,
                GROUPS.replace("(-1, num_generations), dim=1", "(num_generations, -1), dim=0").replace(
                    "repeat_interleave(num_generations, dim=0)", "repeat(num_generations)"
                ),
            ),
        ),
    ),
    "rows sorted by length": Edit(
        "otb rloo value",
        (
            (
                SHUFFLED,
                '                order = generation_batch["completion_mask"].sum(dim=1).argsort()\n'
                "                generation_batch = {k: v[order] if getattr(v, 'ndim', 0) else v"
                " for k, v in generation_batch.items()}\n",
            ),
        ),
    ),
    "advantages left out of the shuffle": Edit(
        "otb rloo",
        (
            (
                SHUFFLED,
                f"                kept = {BATCH_ADVANTAGES}\n{SHUFFLED}                {BATCH_ADVANTAGES} = kept\n",
            ),
        ),
    ),
    "completions padded after the rollout": Edit(
        "otb",
        (
            (
                MADE,
                '                for key in ("completion_ids", "completion_mask"):\n'
                "                    generation_batch[key] = torch.nn.functional.pad(generation_batch[key], (0, 2))\n"
                + MADE,
            ),
        ),
    ),
    # Normalisers
    "twice the normaliser": Edit(
        "otb rloo value",
        (('inputs["num_items_in_batch"].clamp(min=1.0) /', '2 * inputs["num_items_in_batch"].clamp(min=1.0) /'),),
        loop="half",
    ),
    "a mean over completions": Edit(
        "otb rloo",
        (
            (
                "            loss = (per_token_loss * mask).sum() / normalizer\n",
                "            loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()\n",
            ),
        ),
        loop="mean",
    ),
    "another name for the number of tokens": Edit("otb", (('"num_items_in_batch" ->', '"tokens_in_batch"'),)),
    # Advantages after the rollout
    "divided by their deviation in the loss": Edit(
        "otb rloo", ((UNSQUEEZED, f"        advantages = advantages / (advantages.std() + 1e-4)\n{UNSQUEEZED}"),)
    ),
    "cut at 1 in the loss": Edit(
        "otb rloo", ((UNSQUEEZED, f"        advantages = advantages.clamp(-1, 1)\n{UNSQUEEZED}"),)
    ),
    "cut at 5 in the loss": Edit(
        "otb rloo", ((UNSQUEEZED, f"        advantages = advantages.clamp(-5, 5)\n{UNSQUEEZED}"),)
    ),
    "positive ones alone": Edit("otb rloo", ((UNSQUEEZED, f"        advantages = advantages.relu()\n{UNSQUEEZED}"),)),
    "divided by their deviation after the rollout": Edit(
        "otb rloo", ((MADE, f"                {BATCH_ADVANTAGES} = {whiten(BATCH_ADVANTAGES)}\n{MADE}"),)
    ),
    "doubled before the loss": Edit(
        "otb rloo",
        (
            (
                "        return self._compute_loss(model, inputs)\n",
                '        return self._compute_loss(model, inputs | {"advantages": 2 * inputs["advantages"]})\n',
            ),
        ),
    ),
    "kept on the trainer": Edit(
        "otb rloo",
        (
            (OUTPUT, f"        self._advantages = advantages\n{OUTPUT}"),
            (GIVEN, "        advantages = self._advantages\n"),
        ),
    ),
    "another key": Edit(
        "otb rloo", (('"advantages": advantages,', '"advantage": advantages,'), (GIVEN, GIVEN.replace('s"]', '"]')))
    ),
    "in half precision": Edit("otb rloo", (('"advantages": advantages,', '"advantages": advantages.half(),'),)),
    "in half precision after the rollout": Edit(
        "otb rloo", ((MADE, f"                {BATCH_ADVANTAGES} = {BATCH_ADVANTAGES}.half()\n{MADE}"),), loop="rounded"
    ),
    "a hook that does nothing": Edit(
        "otb rloo",
        ((OUTPUT, f"        advantages = self._transform_advantages(advantages)\n{OUTPUT}"), (HOOK, hook("x"))),
    ),
    "a hook that whitens": Edit(
        "otb rloo",
        ((OUTPUT, f"        advantages = self._transform_advantages(advantages)\n{OUTPUT}"), (HOOK, hook(WHITENED))),
    ),
    "a hook that whitens after the rollout": Edit(
        "otb rloo",
        (
            (MADE, f"                {BATCH_ADVANTAGES} = self._transform_advantages({BATCH_ADVANTAGES})\n{MADE}"),
            (HOOK, hook(WHITENED)),
        ),
    ),
    "those of the next token": Edit("otb", ((PRODUCT, "per_token_loss1 = coef_1 * advantages.roll(1, -1)\n"),)),
    # One advantage per completion
    "the branch for (B, T) is gone": Edit("otb value reused rloo", ((BRANCH, "        if True:\n"),)),
    "(B, T) is an error": Edit(
        "otb value rloo",
        ((BRANCH, f"        if advantages.dim() != 1:\n            raise ValueError('(B,)')\n{BRANCH}"),),
    ),
    "the mean of (B, T)": Edit(
        "otb value rloo",
        ((BRANCH, f"        if advantages.dim() == 2:\n            advantages = advantages.mean(1)\n{BRANCH}"),),
    ),
    "the first of (B, T)": Edit(
        "otb rloo",
        ((BRANCH, f"        if advantages.dim() == 2:\n            advantages = advantages[:, 0]\n{BRANCH}"),),
    ),
    # Masks
    "the last token left out of the loss": Edit(
        "otb", ((MASK, f"{MASK}        mask = mask * torch.nn.functional.pad(mask, (0, 1))[:, 1:]\n"),)
    ),
    "another name for the tool mask": Edit("tools", (('"tool_mask" ->', '"mask_of_tools"'),)),
    "tool output is trained": Edit("tools", ((MASK, "        mask = completion_mask\n"),)),
    # Log-probs, ratios and energies
    "log-probs of the token before": Edit(
        "otb reused rloo", ((SCORED, "outputs.log_probs[:, -logits_to_keep - 1 : -1]"),)
    ),
    "log-probs at another temperature": Edit("otb reused rloo", ((SCORED, f"1.1 * {SCORED}"),)),
    "Σπ² without logarithm": Edit(
        "otb reused", ((SUM_OF_SQUARES, "log_sum_sq_probs = sq_sum_exp / sum_exp**2"),), file=HEAD
    ),
    "a norm in the place of Σπ²": Edit(
        "otb reused",
        ((SUM_OF_SQUARES, "log_sum_sq_probs = 0.5 * torch.log(sq_sum_exp) - torch.log(sum_exp)"),),
        file=HEAD,
    ),
    "old log-probs are copied": Edit(
        "reused",
        (
            (
                'output["old_per_token_logps"] = old_per_token_logps',
                'output["old_per_token_logps"] = old_per_token_logps.clone()',
            ),
        ),
    ),
    "old log-probs always": Edit(
        "otb value", (("if self.args.gradient_accumulation_steps % generate_every != 0 or (", "if True or ("),)
    ),
    "old log-probs made in the loss": Edit(
        "reused", (('            output["old_per_token_logps"] = old', "            self._old = old"),)
    ),
    "another name for the ratio": Edit("vllm", (('"importance_sampling_ratio" ->', '"is_ratio"'),)),
    "another name for the sampler's log-probs": Edit("vllm", (('"sampling_per_token_logps" ->', '"sampler_logps"'),)),
    "the ratio twice": Edit(
        "vllm",
        (
            (
                'per_token_loss * inputs["importance_sampling_ratio"]',
                'per_token_loss * inputs["importance_sampling_ratio"] ** 2',
            ),
        ),
        loop="twice",
    ),
    "the ratio in the advantages": Edit(
        "vllm",
        (
            (
                OUTPUT,
                "        if self.use_vllm:\n"
                f"            advantages = advantages * vllm_importance_sampling_ratio.mean(dim=1)\n{OUTPUT}",
            ),
        ),
    ),
    # Rewards
    "weighted where they are computed": Edit(
        "weighted",
        (
            (GATHERED, "        rewards_per_func = gather(rewards_per_func) * self.reward_weights\n"),
            (WEIGHTED, "            rewards = rewards_per_func.nansum(dim=1)\n"),
        ),
    ),
    "a penalty after the reward functions": Edit(
        "otb rloo", ((FORMED, f"            rewards = rewards - 0.1 * completion_mask.sum(dim=1)\n{FORMED}"),)
    ),
    "cut where they are computed": Edit(
        "otb rloo", ((GATHERED, GATHERED.replace("func)\n", "func).clamp(max=0.5)\n")),), loop="cut"
    ),
    "the mean of the batch": Edit("otb rloo", ((FORMED, "            advantages = rewards - rewards.nanmean()\n"),)),
    "another small number beside the deviation": Edit(
        "group otb", (("(std_rewards + 1e-4) ->", "(std_rewards + 1e-2)"),)
    ),
    # Generation and its defaults
    "top_p": Edit(
        "otb value",
        (("    top_p: float = field(\n        default=1.0,", "    top_p: float = field(\n        default=0.5,"),),
        file=CONFIG,
    ),
    "top_k": Edit(
        "otb value",
        (("    top_k: int = field(\n        default=0,", "    top_k: int = field(\n        default=9,"),),
        file=CONFIG,
    ),
    "another loss": Edit(
        "otb",
        (
            (
                '    loss_type: str = field(\n        default="dapo",',
                '    loss_type: str = field(\n        default="new",',
            ),
        ),
        file=CONFIG,
    ),
    "ratios per sequence": Edit(
        "otb reused rloo",
        (
            (
                '    importance_sampling_level: str = field(\n        default="token",',
                '    importance_sampling_level: str = field(\n        default="sequence",',
            ),
        ),
        file=CONFIG,
    ),
    "a token cut after rewarding": Edit(
        "otb rloo",
        (
            (
                OUTPUT,
                f"        completion_ids, completion_mask = completion_ids[:, :-1], completion_mask[:, :-1]\n{OUTPUT}",
            ),
        ),
    ),
    # Parts that moved
    "another parameter of generation": Edit("otb rloo", ((f"{TURN} images,", f"{TURN} prompts, images,"),)),
    "a third result of generation": Edit(
        "otb rloo",
        (
            (
                "        return completion_ids, logprobs\n\n    def _get_tool",
                "        return completion_ids, logprobs, None\n\n    def _get_tool",
            ),
        ),
    ),
    "another name for the forward": Edit("otb rloo", (("_get_per_token_logps_and_entropies ->", "_score"),)),
    "entropies before log-probs": Edit(
        "otb reused",
        (
            ("        return logps, entropies, aux_loss\n", "        return entropies, logps, aux_loss\n"),
            ("old_per_token_logps, _, _ = ->", "_, old_per_token_logps, _ ="),
            ("per_token_logps, entropies, aux_loss = self", "entropies, per_token_logps, aux_loss = self"),
        ),
    ),
    "another parameter of the loss": Edit(
        "otb rloo",
        (
            ("def _compute_loss(self, model, inputs):", "def _compute_loss(self, model, inputs, num_items_in_batch):"),
            ("self._compute_loss(model, inputs)\n", "self._compute_loss(model, inputs, num_items_in_batch)\n"),
        ),
    ),
    "another name for the metrics": Edit("otb rloo", (("self._metrics ->", "self._numbers"),)),
    "another name for the file": Edit("otb rloo", (), file="trainer/_grpo_trainer.py"),
    "a comment": Edit("otb value rloo reused vllm tools", (("# Compute the loss\n", "# The loss\n"),)),
}


def edited(folder: Path, edit: Edit, version: str = "") -> Path:
    """A copy of the installed TRL in `folder`, with this edit, that says it is of this version."""
    source, installed = Path(str(find_spec("trl").origin)).parent, version_of("trl")
    shutil.copytree(source, folder / "trl", ignore=shutil.ignore_patterns("__pycache__"))
    if not (file := folder / "trl" / edit.file).exists():  # its name is new
        before = file.name.removeprefix("_")
        file.with_name(before).rename(file)
        for path in (folder / "trl").rglob("*.py"):
            path.write_text(path.read_text().replace(before[:-3], file.stem))
    text = file.read_text()
    for before, after in edit.changes:
        found, everywhere = before.removesuffix(" ->"), before.endswith(" ->")
        if text.count(found) < 1 or (text.count(found) > 1 and not everywhere):
            raise ValueError(f"{edit.file} has {text.count(found)} times {found!r}")
        text = text.replace(found, after)
    file.write_text(text)
    info = folder / f"trl-{version or installed}.dist-info"  # which `trl.__version__` reads
    shutil.copytree(next(source.parent.glob("trl-*.dist-info")), info)
    metadata = (info / "METADATA").read_text()
    (info / "METADATA").write_text(metadata.replace(f"Version: {installed}", f"Version: {version or installed}"))
    return folder


def outcomes(folder: Path, edit: Edit, model: str) -> list[dict]:
    """What each of the edit's runs did with the TRL of `folder`, as `tests/helpers/edited_run.py` has it."""
    program, arguments = "tests.helpers.edited_run", (edit.runs, model, str(folder / "run"), edit.loop)
    code, text = edited_trl.ran(folder, folder / "out.txt", program, *arguments)
    found = [json.loads(line) for line in text.splitlines() if line.startswith('{"run"')]
    if len(found) < len(edit.runs.split()):
        raise RuntimeError(f"exit code {code}: {text[-2000:]}")
    for of in found:  # without what every such error says, and without paths
        of["error"] = re.sub(
            r".*relies on parts of TRL that are different in trl [^ ]+: |\. Install a v.*| \(/[^)]*\)", "", of["error"]
        )
    return [{"verdict": verdict(of)} | of for of in found]


def verdict(of: dict) -> str:
    """In a word, what came of a run."""
    if of["error"]:
        return "error"
    right = of["off"] is not None and of["off"] < 1e-3
    return ("right, with a warning" if of["warned"] else "right, without a word") if right else "wrong"


def main() -> None:
    from recipes.studies import render
    from tests.helpers import tiny

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="edits whose name holds this")
    only = parser.parse_args().only
    rows = []
    with tempfile.TemporaryDirectory() as root:
        model = tiny.save_model(Path(root) / "model")
        for i, (name, edit) in enumerate(EDITS.items()):
            if only not in name:
                continue
            folder = edited(Path(root) / str(i), edit, VERSION)
            for found in outcomes(folder, edit, model):
                rows.append({"edit": name} | found)
                print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
            shutil.rmtree(folder)
    if not only:
        render.save("later_trl", render.load("later_trl") | {"trl": version_of("trl"), "edits": rows})
        page = render.HERE / "later_trl.md"
        page.write_text(render.rendered(page.read_text()))


if __name__ == "__main__":
    main()
