"""
Unsloth's own models and trainer, with and without trl_otb, on a tiny model. In an environment with unsloth, TRL 1.15
and triton, whose interpreter runs Unsloth's kernels for GPUs on a CPU:

    PYTHONPATH=. python -m tests.hosts.run_unsloth

Prints the gradient norms of each run. On a CPU Unsloth neither replaces GRPOTrainer nor takes its fast forwards by
itself: `on_cpu` makes it believe in a GPU.
"""

import os
import sys
import tempfile
from types import SimpleNamespace


SETTINGS = {"TRITON_INTERPRET": "1", "UNSLOTH_ALLOW_CPU": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SETTINGS |= {"TORCHDYNAMO_DISABLE": "1", "UNSLOTH_COMPILE_DISABLE": "1"}
RUNS = (  # the baseline, `None` for Unsloth alone; whether with LoRA; options
    (None, True, {}), ("otb", True, {}), ("value", True, {}), ("value", True, {"num_iterations": 2}),
    ("group_mean", True, {}), ("value", False, {}),
)  # fmt: skip


def on_cpu():
    """A GPU in name: what is made for it is made on the CPU."""
    import functools

    import torch

    fake = {"name": "CPU", "total_memory": 2**36, "major": 9, "minor": 0, "multi_processor_count": 1, "warp_size": 32}
    answers = {"mem_get_info": (2**36, 2**36), "get_device_capability": (9, 0), "current_device": 0}
    answers |= dict.fromkeys(("memory_allocated", "memory_reserved", "max_memory_reserved", "empty_cache"), 0)
    answers |= {"get_device_properties": SimpleNamespace(**fake), "is_bf16_supported": False, "synchronize": None}
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *args, answer=answer, **kwargs: answer)

    def made(function):
        @functools.wraps(function)
        def on(*args, **kwargs):
            if kwargs.get("device") is not None and str(kwargs["device"]) not in ("cpu", "meta"):
                kwargs["device"] = "cpu"  # which may be 0
            return function(*args, **kwargs)

        return on

    for name in ("empty", "zeros", "ones", "arange", "full", "tensor", "empty_like", "zeros_like", "ones_like"):
        setattr(torch, name, made(getattr(torch, name)))
    to = torch.Tensor.to

    def moved(self, *args, **kwargs):
        args = tuple("cpu" if type(of) is int or str(of).startswith("cuda") else of for of in args)
        return to(self, *args, **kwargs | ({"device": "cpu"} if "device" in kwargs else {}))

    torch.Tensor.to, torch.accelerator.current_accelerator = moved, lambda **kwargs: torch.device("cpu")
    import unsloth  # noqa: F401
    from unsloth.models import llama, rl

    class Place(str):
        index = 0

    def build(self, device_index):
        rows = self._rope_cache_rows()
        self._set_cos_sin_cache(seq_len=rows, device=Place("cpu"), dtype=self._rope_cache_dtype)
        self._rope_cache_versions[device_index] = self._rope_cache_version
        self._mark_rope_build(device_index)

    llama.DEVICE_COUNT, llama._PerDeviceRopeCache._build_rope_cache = 1, build
    rl._patch_trl_rl_trainers_impl("grpo_trainer")  # which Unsloth does by itself where there is a GPU


def run(path, baseline, lora, options):
    """Norms of two steps; where energies come from, and their greatest difference from those of a softmax."""
    import torch
    import trl
    from unsloth import FastLanguageModel

    from tests.helpers import tiny
    from tests.helpers.oracles import energies_by_softmax, mask_of
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    class Checked(OTBGRPOTrainer):
        off = 0.0

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if (own := self.rollouts["train"].energy) is not None:
                expected = energies_by_softmax(self.model, batch, self.temperature)
                self.off = max(self.off, (own.double() * mask_of(batch) - expected).abs().max().item())
            return batch

    torch.manual_seed(0)
    how = {"max_seq_length": 256, "load_in_4bit": False, "dtype": torch.float32, "device_map": "cpu"}
    how |= {"use_gradient_checkpointing": False, "full_finetuning": not lora}
    model, tokenizer = FastLanguageModel.from_pretrained(path, **how)
    if lora:
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        adapter = {"r": 4, "lora_alpha": 8, "lora_dropout": 0, "target_modules": layers}
        model = FastLanguageModel.get_peft_model(model, **adapter, use_gradient_checkpointing=False)
    own = {"scale_rewards": "none", "temperature": 0.7, "max_completion_length": 4}
    own |= {"output_dir": path + "/out", "baseline": baseline or "otb"}  # few tokens, as the interpreter is slow
    args = OTBGRPOConfig(**{**tiny.SETTINGS, **own, **options})
    data = {"train_dataset": tiny.prompts(), "processing_class": tokenizer}
    trainer = (trl.GRPOTrainer if baseline is None else Checked)(model, tiny.even_bytes, args=args, **data)
    trainer.train()
    norms = [of["grad_norm"] for of in trainer.state.log_history if "grad_norm" in of]
    return norms, getattr(trainer, "energy_source", None), getattr(trainer, "off", 0.0)


def main():
    sys.path.insert(0, os.getcwd())
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes what it compiles into the current one
        os.chdir(folder)
        on_cpu()
        train_all(folder)


def train_all(folder):
    import torch
    from transformers import Qwen3ForCausalLM

    from tests.helpers import tiny

    path, tokenizer = tiny.save_model(folder + "/model"), tiny.tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(path)
    with torch.no_grad():  # Unsloth takes an id of padding for padding, also where it was sampled
        model.lm_head.weight[tokenizer.pad_token_id] = 0
    model.save_pretrained(path)
    for baseline, lora, options in RUNS:
        norms, source, off = run(path, baseline, lora, options)
        kind = f"{baseline or 'alone'}{', LoRA' if lora else ''} {options or ''}"
        print(f"RUN {kind}: {norms}, energies from {source}, off by {off:.1g}", flush=True)
        assert off < 1e-5 and len(norms) == 2


if __name__ == "__main__":
    if not SETTINGS.items() <= os.environ.items():
        command = [sys.executable, "-W", "ignore", "-m", "tests.hosts.run_unsloth"]
        os.execve(sys.executable, command, os.environ | SETTINGS)
    main()
