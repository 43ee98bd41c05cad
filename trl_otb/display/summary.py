"""The repr of a rollout."""

from typing import TYPE_CHECKING

from ..baselines.groups import completion_returns, scorable_rows
from .group import places


if TYPE_CHECKING:
    from ..rollout import Rollout


def summary(rollout: "Rollout") -> str:
    """A few lines on sizes, rewards, and which values are available."""
    prompts, completions, n = int(places(rollout)[0][-1]) + 1, len(rollout), rollout.num_generations
    generated, shown = int(rollout.mask.sum()), int(rollout.completion_mask.sum())
    tools = f", and {shown - generated:,} of tools" if shown > generated else ""
    lines = [
        f"Rollout of {prompts} prompt{_s(prompts)}, N = {n}: {completions} completions, {generated:,} tokens{tools}"
    ]

    scorable = scorable_rows(rollout.rewards).cpu()
    returns = completion_returns(rollout.rewards).cpu()[scorable]
    kind = "one per completion" if rollout.rewards.dim() == 1 else "one per token"
    mean = f"mean {returns.mean():.4g}" if len(returns) > 0 else "none"
    missing = completions - len(returns)
    without = f"; {missing} completion{_s(missing)} without" if missing > 0 else ""
    lines.append(f"rewards: {mean}, {kind}{without}")

    if rollout.energy is None:
        energies = "not yet"
    else:
        energies = _of_all(int((~rollout.energy.isnan().any(dim=1)).sum()), completions)
    lines.append(f"energies: {energies}")

    if rollout.advantages is None:
        advantages = "not yet"
    else:
        known = _of_all(int((~rollout.advantages.isnan().any(dim=1)).sum()), completions)
        advantages = f"{'per completion' if rollout.advantages.size(1) == 1 else 'per token'}, {known}"
    lines.append(f"advantages: {advantages}")
    return "\n".join([*lines, "see show(prompt=0), plot(path), to_pandas()"])


def _of_all(known: int, completions: int) -> str:
    return "of all completions" if known == completions else f"of {known} of {completions} completions so far"


def _s(count: int) -> str:
    return "" if count == 1 else "s"
