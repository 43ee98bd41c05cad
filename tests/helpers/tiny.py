"""Tiny models, tokenizers and datasets, made on the spot: no hub, no download."""

from functools import cache
from pathlib import Path

import torch
import trl
from datasets import Dataset
from packaging.version import Version
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM


TRL = Version(trl.__version__)


def tokenizer(chat_template: str | None = "qwen3") -> PreTrainedTokenizerFast:
    """Byte-level, 256 symbols and Qwen3's special tokens, with one of TRL's own chat templates."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    result = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left"
    )
    result.add_special_tokens({"extra_special_tokens": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]})
    result.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    if chat_template is not None:
        result.chat_template = (Path(trl.__file__).parent / "chat_templates" / f"{chat_template}.jinja").read_text()
    return result


def config(config_class=Qwen3Config, **changes):
    tok = tokenizer(None)
    ends = {"eos_token_id": tok.eos_token_id, "pad_token_id": tok.pad_token_id, "bos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 4096, "vocab_size": len(tok)}
    values = {**sizes, **ends, "tie_word_embeddings": False}
    return config_class(**(values | changes))


def save_model(folder, model_class=Qwen3ForCausalLM, model_config=None, seed=0) -> str:
    torch.manual_seed(seed)
    model = model_class(model_config or config()).float()
    # Sharper than at initialisation, so that energies vary and some completions end early
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=0.5)
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


@cache
def prompts(rows: int = 8) -> Dataset:
    return Dataset.from_dict(
        {"prompt": [f"{i}+{i}=" for i in range(rows)], "answer": [str(2 * i) for i in range(rows)]}
    )


def even_bytes(completion_ids, **kwargs):
    """A reward that a random model varies on: the share of even token ids."""
    return [sum(i % 2 == 0 for i in ids) / max(1, len(ids)) for ids in completion_ids]


SETTINGS = {
    "use_cpu": True, "bf16": False, "gradient_checkpointing": False, "seed": 7, "max_steps": 2,
    "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "logging_steps": 1,
    "per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 8,
    "learning_rate": 1e-2, "lr_scheduler_type": "constant",
}  # fmt: skip
if TRL < Version("1.10"):  # which loads a model with `device_map="auto"` on a CPU, too, where ZeRO-3 refuses it
    SETTINGS["model_init_kwargs"] = {"device_map": None}
