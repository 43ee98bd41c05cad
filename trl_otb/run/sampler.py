"""Whether tokens come from the distribution that log-probs and energies are of: options and dropout, without TRL."""

from typing import Any

import torch


# With these values, and with what is 0, empty or None, they leave the distribution as it is
_NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,  # as vLLM has it
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "generation_kwargs": {},
    "vllm_structured_outputs_regex": None,
}


def changed_distribution(args: Any) -> str | None:
    """The first option that samples from another distribution than the softmax at the temperature."""
    values = {name: getattr(args, name, None) for name in _NEUTRAL}
    return next((f"`{name}` is {value}" for name, value in values.items() if value and value != _NEUTRAL[name]), None)


def dropout_of(policy: torch.nn.Module) -> str | None:
    """The name of the first dropout, or attention with one, and its rate; None without any."""
    rates = (
        (f"{name or 'the policy'} ({attribute}={rate})", rate)
        for name, module in policy.named_modules()
        for attribute in ("p", "dropout", "attention_dropout")
        if isinstance(rate := getattr(module, attribute, None), float)
    )
    return next((name for name, rate in rates if rate > 0), None)


def warning_of_dropout(dropout: str, host: str = "TRL") -> str:
    return (
        f"The policy has dropout: {dropout}. {host} trains with another dropout mask than tokens are sampled with, so "
        "no baseline is unbiased: with `lora_dropout=0.1` a constant baseline moved the mean of a small model's "
        "gradient by a third, and 'value' by another twentieth. `lora_dropout=0` avoids it."
    )
