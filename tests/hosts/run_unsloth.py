"""
Unsloth's own models and trainer, with and without trl_otb, on a tiny model. In an environment with unsloth, TRL 1.15
and triton, whose interpreter runs Unsloth's kernels for GPUs on a CPU:

    PYTHONPATH=. python -m tests.hosts.run_unsloth

Prints the gradient norms of each run. Checked are energies, against a softmax of the policy's logits, and the norm of a
model of transformers, against a plain loop's. On a CPU Unsloth neither replaces GRPOTrainer nor takes its fast forwards
by itself: `on_cpu` makes it believe in a GPU. Where there is one, it is used.
"""

import os
import sys
import tempfile
from types import SimpleNamespace


SETTINGS = {"TRITON_INTERPRET": "1", "UNSLOTH_ALLOW_CPU": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
SETTINGS |= {"TORCHDYNAMO_DISABLE": "1", "UNSLOTH_COMPILE_DISABLE": "1"}
PLAIN, LORA, FULL = "a model of transformers", "LoRA", "full training"  # the last two by FastLanguageModel
VLLM = {"use_vllm": True, "vllm_mode": "server", "temperature": 1.0}  # with a stand-in that samples
RUNS = (  # the model; the baseline, `None` for Unsloth alone; options
    (PLAIN, None, {}), (PLAIN, "group_mean", {}), (PLAIN, "otb", {}), (PLAIN, "value", {}),
    (PLAIN, "value", {"num_iterations": 2}), (PLAIN, None, VLLM), (PLAIN, "otb", VLLM), (PLAIN, "value", VLLM),
    (PLAIN, "otb", VLLM | {"vllm_importance_sampling_correction": True}),
    (LORA, None, {}), (LORA, "otb", {}), (LORA, "value", {}), (LORA, "value", {"num_iterations": 2}),
    (LORA, "group_mean", {}), (FULL, "value", {}),
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


def run(path, kind, baseline, options):
    """
    Norms of two steps and those of a plain loop on the same batches, of a batch's first step; where energies come from,
    and their greatest difference from those of a softmax.
    """
    import torch
    import trl
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from unsloth import FastLanguageModel

    from tests.helpers import tiny
    from tests.helpers.oracles import energies_by_softmax, mask_of
    from trl_otb import OTBGRPOConfig, OTBGRPOTrainer

    class Checked(OTBGRPOTrainer if baseline else trl.GRPOTrainer):
        off, expected = 0.0, ()

        def _generate_and_score_completions(self, inputs):
            batch = super()._generate_and_score_completions(inputs)
            if baseline and (own := self.rollouts["train"].energy) is not None:
                expected = energies_by_softmax(self.model, batch, self.temperature)
                self.off = max(self.off, (own.double() * mask_of(batch) - expected).abs().max().item())
            if kind is PLAIN:
                self.expected += (norm_of_plain_loop(self.model, batch, self.temperature),)
            return batch

    torch.manual_seed(0)
    if kind is PLAIN:
        model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
        model.for_training, model.for_inference = (lambda *_, on=on, **__: model.train(on) for on in (True, False))
    else:
        how = {"max_seq_length": 256, "load_in_4bit": False, "dtype": torch.float32}
        how |= {"use_gradient_checkpointing": False}
        how |= {} if torch.cuda.is_available() else {"device_map": "cpu"}
        model, tokenizer = FastLanguageModel.from_pretrained(path, **how, full_finetuning=kind is FULL)
    if kind is LORA:
        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        adapter = {"r": 4, "lora_alpha": 8, "lora_dropout": 0, "target_modules": layers}
        model = FastLanguageModel.get_peft_model(model, **adapter, use_gradient_checkpointing=False)
    own = {"scale_rewards": "none", "temperature": 0.7, "output_dir": path + "/out", "baseline": baseline or "otb"}
    own |= {"use_cpu": not torch.cuda.is_available(), "optim": "adamw_torch", "gradient_accumulation_steps": 1}
    own |= {} if kind is PLAIN else {"max_completion_length": 4}  # few tokens, as the interpreter is slow
    args = OTBGRPOConfig(**{**tiny.SETTINGS, **own, **options})
    data = {"train_dataset": tiny.prompts(), "processing_class": tokenizer}
    trainer = Checked(model, tiny.even_bytes, args=args, **data)
    trainer.train()
    norms = [of["grad_norm"] for of in trainer.state.log_history if "grad_norm" in of]
    return norms, trainer.expected, getattr(trainer, "energy_source", None), trainer.off


def norm_of_plain_loop(model, batch, temperature):
    """Of the gradient of −Σ A_t log π(y_t) over the tokens of a batch."""
    import torch

    from tests.helpers.oracles import logps_by_softmax, mask_of

    mask, advantages = mask_of(batch), batch["advantages"]
    with torch.enable_grad():
        logps = (
            logps_by_softmax(model, batch, temperature).gather(-1, batch["completion_ids"].unsqueeze(-1)).squeeze(-1)
        )
        loss = -(advantages.view(len(mask), -1) * logps * mask).sum() / mask.sum()
        gradients = torch.autograd.grad(loss, [of for of in model.parameters() if of.requires_grad])
    return torch.stack([of.norm() for of in gradients]).norm().item()


def check_defaults():
    """What is not given is in OTBGRPOConfig as in Unsloth's config."""
    import trl

    from trl_otb import OTBGRPOConfig

    given = {"output_dir": "out", "bf16": False, "num_generations": 4, "report_to": "none"}
    ours, theirs = (vars(cls(**given)) for cls in (OTBGRPOConfig, trl.GRPOConfig))
    differ = {name for name, of in theirs.items() if str(ours[name]) != str(of)}
    assert differ == {"scale_rewards"} and ours["learning_rate"] == theirs["learning_rate"], differ


def main():
    import torch

    sys.path.insert(0, os.getcwd())
    with tempfile.TemporaryDirectory() as folder:  # Unsloth writes what it compiles into the current one
        os.chdir(folder)
        if not torch.cuda.is_available():
            on_cpu()
        import unsloth  # noqa: F401

        check_defaults()
        sample_in_vllms_place()
        train_all(folder)


def sample_in_vllms_place():
    import trl

    from tests.helpers.recording import Sampler

    module = sys.modules[trl.GRPOTrainer.__module__]
    module.VLLMGeneration = lambda *, model, **kwargs: Sampler(model)
    module.is_vllm_available = lambda *args, **kwargs: True


def train_all(folder):
    import torch
    from transformers import Qwen3ForCausalLM

    from tests.helpers import tiny

    path, tokenizer = tiny.save_model(folder + "/model"), tiny.tokenizer()
    model = Qwen3ForCausalLM.from_pretrained(path)
    with torch.no_grad():  # Unsloth takes an id of padding for padding, also where it was sampled
        model.lm_head.weight[tokenizer.pad_token_id] = 0
    model.save_pretrained(path)
    for kind, baseline, options in RUNS:
        if torch.cuda.is_available() and "use_vllm" in options:  # the stand-in samples on the CPU
            continue
        norms, expected, source, off = run(path, kind, baseline, options)
        title = f"{baseline or 'alone'}, {kind} {options or ''}"
        print(f"RUN {title}: {norms}, plain loop {expected}, energies from {source}, off by {off:.1g}", flush=True)
        assert off < 1e-5 and len(norms) == 2
        if kind is PLAIN and "vllm_importance_sampling_correction" not in options:  # Unsloth's loss weights by itself
            firsts = norms[:: options.get("num_iterations", 1)]
            assert all(abs(a / b - 1) < 0.005 for a, b in zip(firsts, expected, strict=True)), (firsts, expected)


if __name__ == "__main__":
    import torch.cuda

    if not torch.cuda.is_available() and not SETTINGS.items() <= os.environ.items():
        command = [sys.executable, "-W", "ignore", "-m", "tests.hosts.run_unsloth"]
        os.execve(sys.executable, command, os.environ | SETTINGS)
    main()
