"""
Train a policy on problems with verifiable answers, with a baseline for every token.

    accelerate launch recipes/math.py                                       # no hub, no GPU: recipes/math_cpu.yaml
    accelerate launch recipes/math.py --baseline group_mean                 # the same run with GRPO's own baseline
    accelerate launch recipes/math.py --config recipes/math_smollm2.yaml    # a real pretrained model, with LoRA
    accelerate launch recipes/math.py --model_name_or_path FOLDER --dataset_name problems.jsonl
    accelerate launch recipes/math.py --resume_from_checkpoint latest

Two x86-64 cores, 2026-11-25, seed 1: 1 min 23 s, plus 40 s of warm start on first use; held-out accuracy
37.6 % ± 2.5 before and 72.9 % ± 2.7 after (avg@4, 176 problems). More runs: recipes/README.md.

The file needs nothing else of this folder: copy it anywhere and change what you like. To train on data of your own,
replace `load_problems`, which returns problems to train on, held-out problems, and their reward.
"""

import os
import sys


if __name__ == "__main__":  # while this folder comes first, `import math` finds this file
    sys.path += [os.path.dirname(os.path.abspath(sys.path.pop(0))), os.getcwd()]

from trl import get_peft_config, get_quantization_config

from trl_otb import OTBGRPOTrainer
from trl_otb.scripts.problems import ProblemOptions, load_problems
from trl_otb.scripts.run import HeldOut, load_object, model_of, parse, quieten, run


def main(argv: list[str]) -> None:
    options, args, model_args, checkpoint = parse(argv, ProblemOptions, __file__)
    train, held_out, accuracy = load_problems(options, args.seed)
    measure = HeldOut(accuracy, held_out)
    trainer = OTBGRPOTrainer(
        model=model_of(model_args.model_name_or_path),
        reward_funcs=[measure.reward, *map(load_object, options.reward_funcs or [])],
        args=args,
        train_dataset=train,
        eval_dataset=measure.problems,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    run(trainer, measure, checkpoint)


if __name__ == "__main__":
    quieten()
    main(sys.argv[1:])
