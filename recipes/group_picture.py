"""The README's picture: `make picture` writes recipes/group.png. A minute, once, for the toy policy."""

import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

from datasets import Dataset
from transformers import AutoTokenizer

from recipes.tool_math import calculator_tool
from recipes.toy import calculator
from trl_otb import OTBGRPOConfig, OTBGRPOTrainer


def right(completions, **kwargs):
    return [float(completion[-1].get("content") == "=48") for completion in completions]


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    model = str(calculator())
    data = Dataset.from_dict({"prompt": [[{"role": "user", "content": "12+71-35"}]]})
    options = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "bf16": False, "seed": 3}
    with TemporaryDirectory() as folder:
        trainer = OTBGRPOTrainer(
            model=model,
            reward_funcs=right,
            args=OTBGRPOConfig(folder, max_completion_length=72, max_tool_calling_iterations=6, **options),
            train_dataset=data,
            eval_dataset=data,
            processing_class=AutoTokenizer.from_pretrained(model, padding_side="left"),
            tools=[calculator_tool(max_operations=1)],
        )
        trainer.evaluate()
    trainer.rollouts["eval"].plot(Path(__file__).with_name("group.png"))
