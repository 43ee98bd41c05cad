"""
Train Qwen2.5-1.5B-Instruct on GSM8K with LoRA and vLLM, on one GPU of 24 GB.

    pip install '.[recipes,vllm]'                                   # in a checkout of trl_otb
    accelerate launch recipes/lora_vllm.py                          # baseline `value`: recipes/lora_vllm.yaml
    accelerate launch recipes/lora_vllm.py --baseline group_mean    # the same run with GRPO's own baseline
    accelerate launch recipes/lora_vllm.py --report_to trackio      # or wandb; install the one that you choose
    accelerate launch recipes/lora_vllm.py --dataset_name problems.jsonl    # with the columns question and answer
    accelerate launch recipes/lora_vllm.py --resume_from_checkpoint latest

Not yet run on a GPU: duration, memory and result are unknown. The tests run one step on a CPU, without vLLM.
It needs common.py and lora_vllm.yaml beside it: copy the three anywhere and change what you like.
"""

import os
import sys


HERE = os.path.dirname(os.path.abspath(__file__))
sys.path = [path for path in sys.path if os.path.abspath(path) != HERE] + [HERE]  # last: `import math` is not math.py

from dataclasses import dataclass

from datasets import Dataset, load_dataset
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.rewards import accuracy_reward

from common import option, parse, prepare
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


@dataclass
class Options:
    """Options beside those of OTBGRPOConfig and of TRL's ModelConfig."""

    dataset_name: str = option("openai/gsm8k", "A hub dataset or a .jsonl file.")
    dataset_config: str | None = option(None, "Configuration of the hub dataset.")
    dataset_split: str = option("train", "Split of the hub dataset.")
    num_held_out_problems: int = option(200, "Problems for evaluation, not trained on.")
    instruction: str = option(r"Put your final answer within \boxed{}.", "Ends a question.")


def load_problems(options: Options) -> Dataset:
    """The columns that training needs: `prompt`, and for `accuracy_reward` the `solution`, which follows `####`."""
    if options.dataset_name.endswith(".jsonl"):
        data = load_dataset("json", data_files=options.dataset_name, split="train")
    else:
        data = load_dataset(options.dataset_name, options.dataset_config, split=options.dataset_split)
    if missing := {"question", "answer"} - {*data.column_names}:
        raise ValueError(
            f"{options.dataset_name} has the columns {', '.join(data.column_names)}, and training reads question and "
            f"answer: rename a column to {' and another to '.join(sorted(missing))}."
        )

    def example(row: dict) -> dict:
        prompt = [{"role": "user", "content": f"{row['question']}\n{options.instruction}"}]
        return {"prompt": prompt, "solution": str(row["answer"]).split("####")[-1].strip()}

    return data.map(example, remove_columns=data.column_names)


def main(argv: list[str]) -> OTBGRPOTrainer:
    options, args, model_args, checkpoint = parse(
        argv, (Options, OTBGRPOConfig, ModelConfig), __file__, "lora_vllm.yaml"
    )
    problems = load_problems(options)
    if not 0 < options.num_held_out_problems < len(problems):
        raise ValueError(
            f"--num_held_out_problems is {options.num_held_out_problems}, and {options.dataset_name} has "
            f"{len(problems)} problems: give 1 or more, so that some are left to train on."
        )
    problems = problems.train_test_split(test_size=options.num_held_out_problems, seed=0)
    trainer = OTBGRPOTrainer(
        model=model_args.model_name_or_path,
        reward_funcs=accuracy_reward,
        args=args,
        train_dataset=problems["train"],
        eval_dataset=problems["test"],
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    prepare(trainer)
    trainer.train(resume_from_checkpoint=checkpoint)
    trainer.save_model()
    trainer.save_state()  # trainer_state.json, the log of all metrics
    return trainer


if __name__ == "__main__":
    main(sys.argv[1:])
