"""
Does the policy know more if the right answer stands in its prompt? One more forward of each completion, with that hint.

    OMP_NUM_THREADS=1 python -m recipes.studies.progress_pools --task copy --prompts 18     # first, once
    OMP_NUM_THREADS=1 python -m recipes.studies.hint --pools runs/progress/pools/*.pt       # minutes; --publish

π is the policy, π' the same with the column `answer` in its prompt. Power over that of `value` with progress, by
replay as in progress.py. For V: KL(π, π'), and sums of log π' / π and of log π' over the tokens before. Draws, which
have mean 0: log π' / π, π', 1 for the likeliest token of π', and log π', of the token less their mean under π. And the
hidden states of the forward with the hint, for V.
"""

import argparse
import math
import sys
import warnings
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from recipes.studies import language, render
from recipes.studies.progress import Pools, padded, replay, rows_of_power, so_far, together, told
from recipes.studies.tasks import HAS_BFLOAT16, ON_GPU
from recipes.studies.value import TASKS as TITLES
from trl_otb.baselines import Value
from trl_otb.baselines.prefix import LAYER_DEPTH, before, projection


RATIO, LEAST = 3.0, -8.0  # limits of log π' / π, on both sides, and of log π', below
HINT = "{question}\n\nThe right answer is:\n{answer}"


def prompt_ids(tokenizer, prompt: str | list[dict], answer: str | None = None) -> list[int]:
    """Of a prompt, with the answer in its last message if there is one."""
    text = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    text = text if answer is None else HINT.format(question=text, answer=answer)
    if isinstance(prompt, str):
        return tokenizer(text)["input_ids"]
    messages = [*prompt[:-1], prompt[-1] | {"content": text}]
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]


@torch.no_grad()
def forward(policy, prompt: list[int], rows: list[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each completion of a prompt, `(T, V)` log-probs, and hidden states two thirds of the way up, `(T, d)`."""
    found = []
    layer = math.ceil(LAYER_DEPTH * policy.config.get_text_config().num_hidden_layers)  # as the recorder's
    for ids in rows:
        whole = torch.tensor([prompt + ids.tolist()], device=policy.device)
        outputs = policy(input_ids=whole, output_hidden_states=True)
        at = slice(len(prompt) - 1, whole.size(1) - 1)
        states = outputs.hidden_states[layer][0, at]
        found.append((outputs.logits[0, at].float().log_softmax(-1).cpu(), states.float().cpu()))
    return found


def hinted(logp: torch.Tensor, logp_hinted: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers for V, `(T, 3)`, and draws, `(T, 4)`, of one completion, from `(T, V)` log-probs."""
    p, log_ratio = logp.exp(), logp_hinted - logp

    def of(table: torch.Tensor) -> torch.Tensor:
        return table.gather(1, ids.unsqueeze(1))[:, 0]

    sums = torch.stack([of(log_ratio.clamp(-RATIO, RATIO)), of(logp_hinted.clamp(min=LEAST))])
    numbers = torch.cat([-(p * log_ratio).sum(1).unsqueeze(0), before(sums)])
    likeliest = torch.zeros_like(p).scatter_(1, logp_hinted.argmax(1, keepdim=True), 1.0)
    tables = (log_ratio.clamp(-RATIO, RATIO), logp_hinted.exp(), likeliest, logp_hinted.clamp(min=LEAST))
    return numbers.T, torch.stack([of(table) - (p * table).sum(1) for table in tables], dim=1)


def read(pools: Pools, policy) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Numbers, draws and projected states of the hint, by prompt `(C, T, …)`."""
    by_prompt = []
    for prompt in pools.pools:
        answer, ids = prompt["columns"]["answer"], [row["ids"] for row in prompt["rows"]]
        directions = projection(prompt["rows"][0]["states"].size(-1))
        plain, told_of = (
            forward(policy, prompt_ids(pools.tokenizer, prompt["prompt"], hint), ids) for hint in (None, answer)
        )
        each = [
            (*hinted(logp, logp_hinted, of_row), states @ directions)
            for (logp, _), (logp_hinted, states), of_row in zip(plain, told_of, ids, strict=True)
        ]
        by_prompt.append([padded(prompt, [*of]) for of in zip(*each, strict=True)])
    numbers, draws, states = map(list, zip(*by_prompt, strict=True))
    return numbers, draws, states


def measured(pools: Pools, policy) -> list[dict]:
    """The cells of a task: power over that of `value` with progress."""
    numbers, draws, states = read(pools, policy)
    s = so_far(pools)
    with_numbers = together(s, numbers)
    all_states = together([prompt["pool"].states for prompt in pools.pools], states)
    control = replay(pools, Value, progress=s)
    found = {
        "numbers of the hint": replay(pools, Value, progress=with_numbers),
        "draws of the hint": replay(pools, Value, progress=s, draws=draws),
        "numbers and draws": replay(pools, Value, progress=with_numbers, draws=draws),
        "and hinted states": replay(pools, Value, progress=with_numbers, draws=draws, states=all_states),
    }
    return rows_of_power(pools, [told(name, of, control) for name, of in found.items()])


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="hint", description=__doc__.splitlines()[1])
    parser.add_argument("--pools", nargs="+", type=Path, required=True)
    parser.add_argument("--publish", action="store_true", help="put the table into the results and the page")
    args = parser.parse_args(argv)
    tables: render.Tables = {}
    for path in args.pools:
        pools = Pools(path)
        print(f"{pools.name}: {len(pools.pools)} prompts", flush=True)
        dtype = torch.bfloat16 if HAS_BFLOAT16 else torch.float32
        policy = AutoModelForCausalLM.from_pretrained(language.any_task(pools.name).policy, dtype=dtype)
        tables[f"{TITLES[pools.name]}, with a hint"] = measured(pools, policy.to("cuda" if ON_GPU else "cpu").eval())
    if args.publish:
        render.publish("progress", tables)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main(sys.argv[1:])
