"""Progress functions in the trainer: what they are given, what `value` makes of it, and what goes wrong with them."""

import asyncio
import random

import pytest
import torch

from tests.helpers import tiny
from tests.helpers.agents import CHAT
from tests.helpers.recording import Recording
from tests.helpers.settings import logged
from trl_otb import OTBGRPOConfig
from trl_otb.trainer import collect


VALUE = {"baseline": "value", "max_steps": 3}


def even(completions, **kwargs):
    """The number of even characters, which the text tells alone."""
    return [float(sum(ord(letter) % 2 == 0 for letter in of)) for of in texts_of(completions)]


def texts_of(completions):
    return [of if isinstance(of, str) else "".join(m["content"] for m in of) for of in completions]


class Keeping(Recording):
    """Keeps the completions that the baseline gets."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)
        step = self.baseline.step
        self.baseline.step = lambda local, *args, **kw: (self.seen.append(local), step(local, *args, **kw))[1]


@pytest.fixture
def train_with(train):
    def run(*functions, **options):
        return train(**{"cls": Keeping, **VALUE, "progress_funcs": [*functions], **options})

    return run


@pytest.mark.parametrize("data", ["text", "conversation"])
def test_a_number_is_of_the_text_before_the_token(train_with, data):
    trainer = train_with(even, **({"train_dataset": CHAT} if data == "conversation" else {}))
    seen, rollout = trainer.seen[-1], trainer.rollouts["train"]
    decode = trainer.processing_class.decode
    for row, ids in enumerate(rollout.completion_ids.tolist()):
        for t in range(int(rollout.mask[row].sum())):
            (expected,) = even([decode(ids[:t], skip_special_tokens=True)])
            assert seen.progress[row, t, 0] == expected
    assert logged(trainer, "otb/value/r2_at_end")
