"""Small character-level policies, warm-started on a careless pupil's work."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from . import QUIET, cached, dialogues, lake, scratchpad, worked_sums


# Arguments of Qwen3Config
MODEL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
MODEL |= {"num_key_value_heads": 4, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": True}


@dataclass(frozen=True)
class WarmStart:
    """Supervised training on demonstrations."""

    alphabet: str  # the policy's tokens, in addition to padding and `<eos>`
    demonstrations: Callable[[int], list[list[tuple[str, bool]]]]  # n -> n lists of (text, is it the policy's)
    chat_template: str
    learning_rate: float = 4e-3
    response_template: dict | None = None  # by which transformers parses an answer into a message
    steps: int = 2000
    batch_size: int = 32
    model: tuple[tuple[str, int], ...] = tuple(MODEL.items())

    def key(self) -> str:
        """A hash of everything that determines the weights; changes of wording or layout do not affect it."""
        import torch

        values = {**vars(self), "demonstrations": self.demonstrations(500), "torch": torch.__version__}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def _template(said: str, alphabet: str, tool: str = "", argument: str = "") -> str:
    """
    The chat template from prompt.jinja and `said`. It writes `State the final answer to the following arithmetic
    problem: 3 + 4 =` as `3+4`. It checks only prompts to be answered: TRL probes templates with other conversations.
    """
    folder = Path(__file__).parent
    text = (folder / "prompt.jinja").read_text() + (folder / said).read_text().rstrip("\n")
    return text.replace("ALPHABET", repr(alphabet)).replace("TOOL", tool).replace("ARGUMENT", argument)


def _answers(task, demonstrations, **training) -> WarmStart:
    return WarmStart(task.ALPHABET, demonstrations, _template("answer.jinja", task.ALPHABET), **training)


def _calls(task, demonstrations, tool: str, argument: str, **training) -> WarmStart:
    """Calls of the tool are written `[…]`, its results `{…}`, and errors `{?}`."""
    template = _template("calls.jinja", task.ALPHABET, tool, argument)
    call = {"type": "function", "function": {"name": tool, "arguments": {argument: "{content}"}}}
    calls = {"open": "[", "close": "]", "repeats": True, "content": "text", "transform": call}
    fields = {"tool_calls": calls, "content": {"close": "<eos>", "content": "text"}}
    response = {"defaults": {"role": "assistant"}, "start_anchor": ">", "fields": fields}
    return WarmStart(task.ALPHABET, demonstrations, template, response_template=response, **training)


def _up_to(tokens: int) -> tuple[tuple[str, int], ...]:
    """The model for conversations of at most this length."""
    return tuple(dict(WarmStart.model, max_position_embeddings=tokens).items())


WARM_STARTS = {
    "sums": _answers(worked_sums, worked_sums.demonstrations, learning_rate=6e-3),
    "calculator": _calls(dialogues, dialogues.demonstrations, "calculator", "expression"),
}
for _name, _tokens, _steps, _batch in (
    ("10", [10], 2000, 32),
    ("30", [30], 2000, 32),
    ("100", [100], 1200, 32),
    ("300", [300], 3000, 16),
    ("1000", [1000], 3000, 16),
    ("mixed", [10, 30, 100], 2000, 32),
):
    _training = {"steps": _steps, "batch_size": _batch, "model": _up_to(2048 if _name == "1000" else 1024)}
    _demonstrations = partial(scratchpad.demonstrations, tokens=_tokens)
    WARM_STARTS[f"scratchpad_{_name}"] = _answers(scratchpad, _demonstrations, **_training)
for _turns, _steps, _batch in ((6, 1500, 32), (14, 1000, 32), (30, 800, 16), (46, 1000, 16)):
    _training = {"steps": _steps, "batch_size": _batch, "model": _up_to(1024 if _turns < 46 else 2048)}
    _demonstrations = partial(lake.demonstrations, turns=_turns)
    WARM_STARTS[f"lake_{_turns}"] = _calls(lake, _demonstrations, "move", "direction", **_training)


def policy(kind: str, steps: int | None = None, seed: int = 0) -> Path:
    """The cached folder of the policy `WARM_STARTS[kind]`, trained for `steps` steps if that is given, from `seed`."""
    start = replace(WARM_STARTS[kind], steps=steps or WARM_STARTS[kind].steps)

    def make(folder: Path) -> None:
        takes = "a minute or less" if start.model == WarmStart.model else "minutes, for long games an hour"
        print(f"Warm-starting the toy policy {kind}: {takes}, once; it is cached.", flush=True)
        # A separate process, outside the launched job: a trainer here would wait for the other processes, which wait
        # for this one. A separate session, so that Ctrl-C reaches only this process, which then ends the other.
        command = [sys.executable, "-m", __name__, kind, str(folder), str(start.steps), str(seed)]
        where = {"cwd": Path(__file__).parents[2], "env": _alone(), "start_new_session": True}
        done = subprocess.run(command, **where, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        if done.returncode != 0:
            raise RuntimeError(f"the warm start failed: {done.stderr.decode()[-2000:]}")

    return cached(f"{kind}-{start.key()}{f'-{seed}' if seed else ''}", make)


def _alone() -> dict[str, str]:
    """The environment without the launcher's variables about other processes."""
    launched = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "MASTER_", "GROUP_", "ROLE_", "LOCAL_", "RANK", "WORLD_SIZE")
    alone = {key: value for key, value in os.environ.items() if not key.startswith(launched)}
    # One thread is fastest for such a small model, and gives the same weights on all CPUs with the same instructions
    return {**alone, "OMP_NUM_THREADS": "1"}


def character_tokenizer(start: WarmStart):
    """A tokenizer with one token per character of the alphabet."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = ["<pad>", "<eos>", *start.alphabet]
    backend = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocabulary)}, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    tokens = {"eos_token": "<eos>", "pad_token": "<pad>", "padding_side": "left"}
    inputs = ["input_ids", "attention_mask"]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=inputs, **tokens)
    tokenizer.chat_template = start.chat_template
    tokenizer.response_template = start.response_template
    return tokenizer


def train(start: WarmStart, folder: Path, seed: int = 0) -> None:
    """Train the policy and save it, with its tokenizer, in `folder`."""
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import SFTConfig, SFTTrainer

    tokenizer = character_tokenizer(start)
    ids, said = [], []
    for segments in start.demonstrations(start.steps * start.batch_size):
        tokens = [(token, by_policy) for text, by_policy in segments for token in tokenizer(text)["input_ids"]]
        ids.append([token for token, _ in tokens])
        said.append([int(by_policy) for _, by_policy in tokens])
    special = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), **special, **dict(start.model)))
    sizes = {"max_steps": start.steps, "per_device_train_batch_size": start.batch_size, "max_length": None}
    rates = {"learning_rate": start.learning_rate, "lr_scheduler_type": "cosine", "warmup_steps": 20}
    settings = SFTConfig(str(folder), logging_strategy="no", adam_beta2=0.98, **sizes, **rates, **QUIET)
    data = Dataset.from_dict({"input_ids": ids, "completion_mask": said})
    SFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    kind, to, *numbers = sys.argv[1:]
    train(replace(WARM_STARTS[kind], steps=int(numbers[0])), Path(to), int(numbers[1]))
