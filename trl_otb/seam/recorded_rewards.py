"""Records the rewards that GRPOTrainer uses, per function, turn and token."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from trl import GRPOTrainer

from ..rewards import RewardRecorder
from .contract import trl_utils


@contextmanager
def recorded_rewards(trainer: GRPOTrainer) -> Iterator[list[RewardRecorder]]:
    """
    Context in which a recorder of the rewards that `trainer` uses is appended to the yielded list: those that
    `_calculate_rewards` returns, even if a subclass overrides it.
    """
    recorders: list[RewardRecorder] = []
    calculate = trainer._calculate_rewards
    # Set on this trainer by a user; usually the method belongs to the class
    before = {key: value for key, value in vars(trainer).items() if key == "_calculate_rewards"}

    def recorded(
        inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        functions = trainer.reward_funcs
        # Copies, as a function may change the lists that it gets
        recorder = RewardRecorder([torch.tensor(ids, dtype=torch.long) for ids in completion_ids_list])
        trainer.reward_funcs = [
            function
            if isinstance(function, torch.nn.Module)
            else recorder.wrap(i, trainer.reward_func_names[i], function, trl_utils.is_async_callable(function))
            for i, function in enumerate(functions)
        ]
        try:
            recorder.rewards_per_func = calculate(inputs, prompts, completions, completion_ids_list, *args, **kwargs)
        finally:
            trainer.reward_funcs = functions
        recorders.append(recorder)
        return recorder.rewards_per_func

    trainer._calculate_rewards = recorded
    try:
        yield recorders
    finally:
        del trainer._calculate_rewards
        vars(trainer).update(before)
