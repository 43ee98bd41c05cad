"""The model a user names: its folder, whether a GRPO trainer can use it, and its tokenizer."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from datasets import Dataset
from jinja2.exceptions import TemplateError
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase
from trl import GRPOConfig, ModelConfig, get_peft_config, get_quantization_config
from trl.chat_template_utils import supports_tool_calling

from trl_otb.imports import import_object

from .arguments import RecipeArguments
from .errors import InputError, constructing, explained, input_errors
from .run_folder import check_safetensors


# A model folder must hold one file of each kind.
MODEL_FILES = {
    "config.json": ["config.json", "adapter_config.json"],
    "weights": ["*.safetensors", "*.bin"],
    "tokenizer": ["tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"],
}
# Endings of the architecture names of generative text models.
GENERATIVE = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
load_object = input_errors(ValueError)(import_object)


def trainer_arguments(
    settings: RecipeArguments,
    args: GRPOConfig,
    model_args: ModelConfig,
    data: list[Dataset],
    tools: list[Callable] | None = None,
) -> tuple[dict[str, Any], list[Dataset]]:
    """The trainer's model, tokenizer and adapter, and `data` with a column `prompt`, all checked."""
    path = model_path(model_args.model_name_or_path)
    tokenizer = load_tokenizer(path, args, model_args)
    data = [with_prompts(some, tokenizer, settings.instruction) for some in data]
    for some in data:
        check_prompts(some, tokenizer, path, args, tools)
    with constructing(model_args.model_name_or_path):
        model, peft_config = with_adapter(path, args, model_args)
    arguments = {"model": model, "processing_class": tokenizer, "peft_config": peft_config}
    return arguments | {"quantization_config": get_quantization_config(model_args)}, data


def own_rewards(settings: RecipeArguments) -> list[Callable[..., list[float]]]:
    """The functions named in `--reward_funcs`."""
    return [load_object(name, "reward_funcs") for name in settings.reward_funcs or []]


def model_path(name: str | None) -> str:
    """The folder or hub id to load, from a call if `name` is `module:function`. Raises an `InputError` if invalid."""
    if not name:
        raise InputError("`model_name_or_path` is empty: name a model folder, a hub id, or module:function.")
    if re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        function = load_object(name, "model_name_or_path")
        with explained(f"`model_name_or_path` is {name!r}: it fails with"):
            path = function()
        if not isinstance(path, str | os.PathLike) or not Path(path).is_dir():
            raise InputError(f"`model_name_or_path` is {name!r}: it returned {path!r}, which is not a folder.")
        name = str(path)
    if os.path.isdir(name):
        _check_folder(Path(name))
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"`model_name_or_path` is {name!r}: there is no such folder.")
    return name


def load_tokenizer(path: str, args: GRPOConfig, model_args: ModelConfig) -> PreTrainedTokenizerBase:
    """The model's tokenizer. Raises an `InputError` if it cannot be loaded or the model cannot write text with it."""
    trust = {"trust_remote_code": args.trust_remote_code, "revision": model_args.model_revision}
    with explained(f"`model_name_or_path` is {path!r}: its tokenizer cannot be loaded:"):
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", truncation_side="left", **trust)
    if (Path(path) / "adapter_config.json").is_file() and not (Path(path) / "config.json").is_file():
        return tokenizer  # the base model's configuration is read on loading
    with explained(f"`model_name_or_path` is {path!r}: its configuration cannot be loaded:"):
        config = AutoConfig.from_pretrained(path, **trust)
    if config.is_encoder_decoder or not all(a.endswith(GENERATIVE) for a in config.architectures or []):
        problem = f"its architecture is {', '.join(config.architectures or ['unknown'])}, and GRPO needs a decoder"
        raise InputError(f"`model_name_or_path` is {path!r}: {problem} that writes text (…ForCausalLM).")
    vocabulary = config.get_text_config().vocab_size
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= vocabulary:
        problem = f"its tokenizer has token ids up to {largest}, and the model only {vocabulary} embeddings"
        raise InputError(f"`model_name_or_path` is {path!r}: {problem}. Save the model's own tokenizer next to it.")
    return tokenizer


def with_adapter(path: str, args: GRPOConfig, model_args: ModelConfig) -> tuple[Any, Any]:
    """The trainer's model and the adapter to add, which is None for the folder of a LoRA run: it has its own."""
    if (Path(path) / "config.json").is_file() or not (Path(path) / "adapter_config.json").is_file():
        return path, get_peft_config(model_args)
    from peft import AutoPeftModelForCausalLM

    args.model_init_kwargs = None  # used here; TRL would warn that it does not use them
    model = AutoPeftModelForCausalLM.from_pretrained(
        path, is_trainable=True, dtype=model_args.dtype or "auto", attn_implementation=model_args.attn_implementation
    )
    return model, None


def with_prompts(data: Dataset, tokenizer: PreTrainedTokenizerBase, instruction: str) -> Dataset:
    """Add a column `prompt`: a conversation if the tokenizer has a chat template, else plain text."""

    def prompt(question: str, before: list[dict[str, str]] | None = None, **columns):
        question = {"role": "user", "content": f"{question}\n{instruction}".strip()}
        messages = [*(before or []), question]
        return messages if tokenizer.chat_template else "\n".join([*(m["content"] for m in messages), ""])

    return data.add_column("prompt", [prompt(**row) for row in data])


def check_prompts(
    data: Dataset, tokenizer: PreTrainedTokenizerBase, path: str, args: GRPOConfig, tools: list | None = None
) -> None:
    """Raise an `InputError` if the chat template rejects a prompt or tools, or a prompt leaves no room to answer."""
    if tools and not supports_tool_calling(tokenizer):
        remedy = "Choose a model trained to call tools, such as Qwen/Qwen3-0.6B"
        problem = "its chat template does not support tools"
        raise InputError(f"`model_name_or_path` is {path!r}: {problem}. {remedy}.")
    texts = prompts = list(data["prompt"])
    if tokenizer.chat_template:
        with input_errors(TemplateError):
            texts = tokenizer.apply_chat_template(prompts, tools=tools, tokenize=False, add_generation_prompt=True)
    longest = max(map(len, tokenizer(sorted(texts, key=len)[-32:])["input_ids"]))
    if not (Path(path) / "config.json").is_file():
        return
    positions = getattr(AutoConfig.from_pretrained(path).get_text_config(), "max_position_embeddings", None)
    if positions is not None and longest + args.max_completion_length > positions:
        both = f"the longest prompt has {longest} tokens and `max_completion_length` is {args.max_completion_length}"
        remedy = "Lower --max_completion_length, drop long problems, or choose another model"
        raise InputError(f"{both}: together more than the model's {positions} positions. {remedy}.")


def _check_folder(folder: Path) -> None:
    for what, patterns in MODEL_FILES.items():
        if not any(any(folder.glob(pattern)) for pattern in patterns):
            owner = "tokenizer" if what == "tokenizer" else "model"
            remedy = f"Save it there with `{owner}.save_pretrained`"
            raise InputError(f"`model_name_or_path` is {str(folder)!r}: the folder has no {what}. {remedy}.")
    check_safetensors(folder)
