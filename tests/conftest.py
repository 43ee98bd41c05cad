"""TRL is imported where a test runs: pytest-xdist loads this file once more, in a process that runs none."""

import os
from importlib.metadata import version


os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are too small for more
if version("trl").startswith("1.15."):
    os.environ.setdefault("TRITON_INTERPRET", "1")  # without it the LM head of this version needs a GPU

import inspect

import pytest
from jaxtyping import install_import_hook

from tests.helpers import cheaper


# Beside tests that are marked
QUICK = ("tests/maths", "tests/trainer/test_seam.py", "tests/trainer/test_config.py", "tests/trainer/test_parity.py")

# The shapes in signatures hold in every call
BASELINES = "bound completions least_squares luck means pooled prefix value value_columns value_metrics"
CHECKED = [f"baselines.{name}" for name in BASELINES.split()]
CHECKED += ["energy", "run.baseline", "run.metrics"]
install_import_hook([f"trl_otb.{name}" for name in CHECKED], "tests.helpers.cheaper.checked")


def pytest_collection_modifyitems(items):
    import torch

    seen = set()
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        sweep = item.nodeid.partition("[")[0]
        trains = sweep.startswith("tests/trainer") or {"run", "no_trainer"} & {*item.fixturenames} == {"run"}
        if trains and sweep in seen:
            item.add_marker(pytest.mark.slow)  # `make medium` takes the first case of a sweep
        seen.add(sweep)
        if item.nodeid.startswith(QUICK) and "slow" not in item.keywords:
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish():
    cheaper.package_search()
    cheaper.seeds_of_absent_devices()
    cheaper.search_for_garbage()


def pytest_runtest_logfinish():
    cheaper.search_for_garbage()  # a test imports modules, too


@pytest.fixture
def registry():
    """What a test registers as a baseline is gone after it."""
    from trl_otb.baselines import BASELINES

    before = dict(BASELINES)
    yield
    BASELINES.clear()
    BASELINES.update(before)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    from tests.helpers import tiny

    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def train(model_path, tmp_path):
    """Trains a tiny model and returns the trainer; keywords that are not the config's go to the trainer."""
    from transformers import set_seed
    from trl import GRPOTrainer

    from tests.helpers import tiny
    from tests.helpers.recording import Recording
    from trl_otb import OTBGRPOConfig

    def run(cls=Recording, config=OTBGRPOConfig, train=True, reward_funcs=tiny.even_bytes, model=model_path, **kwargs):
        of_trainer = {*inspect.signature(GRPOTrainer.__init__).parameters, "progress_funcs"}
        trainer_args = {key: kwargs.pop(key) for key in list(kwargs) if key in of_trainer}
        trainer_args.setdefault("train_dataset", tiny.prompts())
        kwargs.setdefault("output_dir", str(tmp_path / cls.__name__))
        args = config(**{**tiny.SETTINGS, **kwargs})
        set_seed(args.seed)  # as TRL does from 1.15 on: adapters are random
        trainer = cls(model, reward_funcs, args=args, **trainer_args)
        if train:
            trainer.train()
        return trainer

    return run
