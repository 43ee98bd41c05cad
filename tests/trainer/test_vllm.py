"""vllm_on_cpu.py beside this file, the only check against a real vLLM: by hand, and what of it can be tested here."""

import inspect
import re

from trl.generation.vllm_client import VLLMClient

from tests.trainer import vllm_on_cpu


def test_vllm_check_names_own_commands():
    commands = re.findall(r"python -m (\S+) (\w+)", vllm_on_cpu.__doc__)
    assert commands == [(vllm_on_cpu.__name__, verb) for verb in ("prepare", "serve", "train", "train_async")]
    assert all(callable(getattr(vllm_on_cpu, verb)) for _, verb in commands)


def test_stubbed_client_takes_same_arguments():
    names = "init_communicator _start_weight_update _finish_weight_update update_named_params".split()
    stubbed = type("Stubbed", (VLLMClient,), {})
    vllm_on_cpu.reload_instead_of_nccl(stubbed)
    for name in names:
        own, original = (list(inspect.signature(getattr(of, name)).parameters) for of in (stubbed, VLLMClient))
        assert own == original and name in vars(stubbed)
