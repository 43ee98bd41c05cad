import os


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import inspect

import pytest
import torch
from trl import GRPOTrainer

from tests.helpers import tiny
from tests.helpers.recording import Recording
from trl_otb import OTBGRPOConfig


torch.set_num_threads(1)  # the models are too small for more


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(model_path, tmp_path):
    """Trains a tiny model and returns the trainer; keywords that are not the config's go to the trainer."""

    def run(cls=Recording, config=OTBGRPOConfig, train=True, reward_funcs=tiny.even_bytes, model=model_path, **kwargs):
        of_trainer = inspect.signature(GRPOTrainer.__init__).parameters.keys()
        trainer_args = {key: kwargs.pop(key) for key in list(kwargs) if key in of_trainer}
        trainer_args.setdefault("train_dataset", tiny.prompts())
        kwargs.setdefault("output_dir", str(tmp_path / cls.__name__))
        args = config(**{**tiny.SETTINGS, **kwargs})
        trainer = cls(model, reward_funcs, args=args, **trainer_args)
        if train:
            trainer.train()
        return trainer

    return run
