"""Computes advantages and statistics from a rollout's energies; the functions are in the order of use."""

from typing import Any

import torch
from accelerate import Accelerator

from .baselines import Baseline, Tokens, assign_credit, find_baseline
from .baselines.advantages import (
    advantages_on_top,
    assign_credit_by_totals,
    compared_by,
    rows_compared,
    totals_of_tokens,
)
from .baselines.groups import completion_returns, scorable_rows, turns_of
from .baselines.tokens import FINER
from .blocks import by_blocks
from .energy import check_energies, importance_weighted
from .metrics import completion_statistics
from .rollout import EVERY_ROW, Rollout, Rows, store


def set_energies(
    rollout: Rollout,
    energy: torch.Tensor,
    logps: torch.Tensor | None = None,
    rows: Rows = EVERY_ROW,
    states: torch.Tensor | None = None,
    importance_weights: torch.Tensor | None = None,
) -> None:
    """
    Store the results of a forward over `rows`: `energy`, w_t, and `logps`, log π(y_t), each `(b, T)`; hidden `states`,
    `(b, T, k)`; and importance ratios ρ, `(b, T)` or `(b, 1)`.

    Raises:
        ValueError: An energy is not finite.
    """
    weighted = importance_weighted(energy, importance_weights)
    check_energies(weighted, rollout.mask[rows], torch.arange(len(rollout), device=energy.device)[rows])
    store(rollout, "energy", weighted, rows)
    if importance_weights is not None:
        store(rollout, "unweighted_energy", energy, rows)
    if logps is not None:
        store(rollout, "logps", logps.detach(), rows)
    if states is not None:
        store(rollout, "states", states, rows)


def credit(rollout: Rollout, rows: Rows = EVERY_ROW, accelerator: Accelerator | None = None, **options: Any) -> None:
    """
    Compute baselines and advantages, and those of the group mean for comparison.

    Args:
        rollout ([`Rollout`]):
            With the energies of `rows`, if the baseline reads energies.
        rows (`Rows`, *optional*):
            Whole groups; all rows if the baseline compares prompts; any rows if it is on top of another, after
            [`credit_base`]. By default all rows.
        accelerator (`Accelerator`, *optional*):
            Needed if compared rows lie on several processes; all processes must call. It sends only what the baseline
            needs: three numbers per completion if it reads totals only; else the tokens of groups that span processes
            or, if it compares prompts, all tokens.
        options:
            `baseline`, `alignment`, `zero_tail` and `leave_one_out`, as in [`~trl_otb.baselines.compute_advantages`].
    """
    rule, n = find_baseline(options["baseline"]), rollout.num_generations
    scale = _scale(rollout, rows)
    if rule.on_top_of is not None:
        tokens = tokens_of(rollout, rule, rows)

        def of_block(block: slice) -> tuple[torch.Tensor, ...]:
            some = tokens.rows(block)
            advantages = advantages_on_top(rule, some)
            return advantages / scale[block], some.returns - advantages

        of_tokens = by_blocks(of_block, rollout.mask[rows], finer=FINER)
        for name, values in zip(("advantages", "baselines"), of_tokens, strict=True):
            store(rollout, name, values, rows)
        return
    totals = _totals(rollout, rows, of_tokens=rule.totals_only)
    every = totals if accelerator is None else accelerator.gather(totals)
    own = slice(None) if accelerator is None else own_rows(accelerator, len(rollout))

    returns, energies, lengths = every.unbind(dim=1)
    of_group_mean = assign_credit_by_totals(returns, energies, lengths, n, baseline="group_mean")
    store(rollout, "group_mean_advantages", of_group_mean.advantages[own] / scale, rows)
    if rule.totals_only:
        beside = _beside(rollout, rule, rows)
        if accelerator is not None:
            beside = {name: accelerator.gather(values) for name, values in beside.items()}
        found = assign_credit_by_totals(
            returns, energies, lengths, n, baseline=rule, leave_one_out=options["leave_one_out"], beside=beside
        )
        rollout.compared = found.group if rule.remembers else None
        baselines = (found.returns - found.advantages)[own]
        _store_credit(rollout, (found.advantages[own] / scale, baselines, found.lone_tail_tokens[own]), rows)
        return
    if accelerator is not None:
        shared = shared_rows(len(rollout), n, accelerator.num_processes, whole_batch=rule.across_prompts)
        _credit_shared_rows(rollout, shared, accelerator, options)
        rows = _stretch(~shared[own])
        if rows.start == rows.stop:
            return
    energy = None if rollout.energy is None else rollout.energy[rows]
    inputs = (rollout.rewards[rows], energy, rollout.mask[rows], _beside(rollout, rule, rows))
    _store_credit(rollout, _credit_tokens(rollout, *inputs, _scale(rollout, rows), options), rows)


def credit_base(rollout: Rollout, accelerator: Accelerator | None = None, **options: Any) -> None:
    """
    Compute the baseline below the one in `options` from the returns of all rows, and the group mean's advantages; the
    arguments are those of [`credit`].
    """
    below = compared_by(find_baseline(options["baseline"]), rollout.rewards)
    credit(rollout, EVERY_ROW, accelerator, **options | {"baseline": below, "leave_one_out": False})
    rollout.base, rollout.baselines, rollout.advantages = rollout.baselines, None, None


def tokens_of(rollout: Rollout, rule: Baseline, rows: Rows = EVERY_ROW, **gather: Any) -> Tokens:
    """The argument of a baseline on top of another, for `rows`, after [`credit_base`]."""
    if rollout.base is None:
        raise ValueError("The rollout has no base yet: call `credit_base` first.")
    energy = torch.zeros_like(rollout.mask, dtype=torch.float32) if rollout.energy is None else rollout.energy
    weights = None
    if rollout.unweighted_energy is not None:
        energy, weights = rollout.unweighted_energy, energy[rows]
    row = torch.arange(rollout.first_row, rollout.first_row + len(rollout), device=energy.device)
    return Tokens(
        rollout.rewards[rows],
        rollout.base[rows],
        rule.declared(energy[rows]),
        rollout.mask[rows],
        (row // rollout.num_generations)[rows],
        _beside(rollout, rule, rows),
        weights=None if weights is None else rule.declared(weights),
        **gather,
    )


def measure(rollout: Rollout, rows: Rows = EVERY_ROW) -> None:
    """Record the statistics of `rows`, which have energies and advantages."""
    names = ("energy", "mask", "advantages", "group_mean_advantages", "baselines", "lone_tail_tokens")
    inputs = {name: getattr(rollout, name)[rows] for name in names}
    statistics = completion_statistics(**inputs, scorable=scorable_rows(rollout.rewards[rows]))
    store(rollout, "statistics", statistics, rows)
    rollout.measured[rows.cpu() if isinstance(rows, torch.Tensor) else rows] = True


def advantages_of(rollout: Rollout, rows: Rows = EVERY_ROW) -> torch.Tensor:
    """`(b, T)` advantages, or `(b,)` under a baseline per completion, as in GRPOTrainer."""
    if rollout.advantages is None:
        raise ValueError("The rollout has no advantages yet: call `credit` first.")
    advantages = rollout.advantages[rows]
    return advantages.squeeze(1) if advantages.size(1) == 1 else advantages


def own_rows(accelerator: Accelerator, rows: int) -> slice:
    """The place of this process's `rows` rows among those of all processes."""
    return slice(accelerator.process_index * rows, (accelerator.process_index + 1) * rows)


def shared_rows(rows: int, num_generations: int, processes: int, whole_batch: bool = False) -> torch.Tensor:
    """`(processes × rows,)` bool, True for rows whose group spans processes; with `whole_batch`, for all rows."""
    if whole_batch:
        return torch.ones(processes * rows, dtype=torch.bool)
    process = torch.arange(processes * rows).view(-1, num_generations) // rows
    return (process[:, :1] != process[:, -1:]).repeat_interleave(num_generations)


def _credit_shared_rows(
    rollout: Rollout, shared: torch.Tensor, accelerator: Accelerator, options: dict[str, Any]
) -> None:
    """Credit the rows of groups that span processes: each process sends its own rows and credits their groups."""
    n, rows, device = rollout.num_generations, len(rollout), rollout.mask.device
    by_process = shared.view(-1, rows)
    most = int(by_process.sum(dim=1).max())  # rows that each process sends
    if most == 0:
        return
    mine = torch.zeros_like(by_process)
    mine[accelerator.process_index] = by_process[accelerator.process_index]
    # The groups of this process's rows; all groups if prompts are compared
    whole_batch = bool(shared.all())
    needed = shared & (mine.view(-1, n).any(dim=1).repeat_interleave(n) | whole_batch)
    process = torch.arange(len(shared)) // rows
    place = (process * most + by_process.long().cumsum(dim=1).flatten() - 1)[needed].to(device)
    sent = mine[accelerator.process_index].nonzero().squeeze(1).to(device)

    def exchange(values: torch.Tensor, padding: float) -> torch.Tensor:
        values = torch.nn.functional.pad(
            values[sent], (0, 0) * (values.dim() - 1) + (0, most - len(sent)), value=padding
        )
        if values.dim() > 1:
            values = accelerator.pad_across_processes(values, dim=1, pad_index=padding)
        return accelerator.gather(values)[place]

    # Energies are not negative, so one tensor can hold energies and mask
    energy = torch.zeros_like(rollout.mask, dtype=torch.float32) if rollout.energy is None else rollout.energy
    energy = exchange(energy.masked_fill(rollout.mask == 0, -1.0), -1.0)
    rewards = exchange(rollout.rewards.float(), 0.0)
    rule = find_baseline(options["baseline"])
    beside = {name: exchange(values, 0) for name, values in _beside(rollout, rule).items()}
    if len(sent) == 0:
        return
    scale = torch.ones(len(energy), 1, device=device)
    own = mine.flatten()[needed].to(device)
    scale[own] = _scale(rollout, sent)
    found = _credit_tokens(rollout, rewards, energy.clamp(min=0), (energy >= 0).long(), beside, scale, options)
    _store_credit(rollout, tuple(values[own][:, : rollout.mask.size(1)] for values in found), sent)


def _credit_tokens(
    rollout: Rollout,
    rewards: torch.Tensor,
    energy: torch.Tensor | None,
    mask: torch.Tensor,
    beside: dict[str, torch.Tensor],
    scale: torch.Tensor,
    options: dict[str, Any],
) -> tuple[torch.Tensor, ...]:
    """Scaled advantages, baselines, and the number of tokens on the lone tail, for whole groups."""
    rule, n = find_baseline(options["baseline"]), rollout.num_generations

    def of_block(block: slice) -> tuple[torch.Tensor, ...]:
        w = torch.zeros_like(mask[block], dtype=torch.float32) if energy is None else energy[block]
        also = {name: values[block] for name, values in beside.items()}
        found = assign_credit(rewards[block], w, mask[block], n, **options, beside=also)
        rollout.compared = found.group if rule.remembers else None  # then all rows are one block
        return found.advantages / scale[block], found.returns - found.advantages, found.lone_tail_tokens

    return by_blocks(of_block, mask, rows_compared(rule, len(mask), n))


def _beside(rollout: Rollout, rule: Baseline, rows: Rows = EVERY_ROW) -> dict[str, torch.Tensor]:
    """What the baseline reads in addition to returns, energies and lengths."""
    found = {}
    for name in rule.reads:
        values = turns_of(rollout.mask) if name == "turn" else getattr(rollout, name)
        if values is None:
            raise ValueError(f"The baseline {rule.name!r} reads `{name}`, which this rollout does not have.")
        found[name] = values[rows]
    return found


def _totals(rollout: Rollout, rows: Rows, of_tokens: bool) -> torch.Tensor:
    """`(b, 3)` return, W_T and length of each completion; without `of_tokens` the last two are 0."""
    if not of_tokens:
        return torch.nn.functional.pad(completion_returns(rollout.rewards[rows]).unsqueeze(1), (0, 2))
    mask = rollout.mask[rows]
    energy = None if rollout.energy is None else rollout.energy[rows]
    totals = by_blocks(lambda block: totals_of_tokens(None if energy is None else energy[block], mask[block]), mask)
    return torch.stack([completion_returns(rollout.rewards[rows]), *totals], dim=1)


def _scale(rollout: Rollout, rows: Rows) -> torch.Tensor:
    """`(b, 1)` scale; infinite if there is no usable standard deviation, so that A = 0, as in TRL."""
    return rollout.scale[rows].nan_to_num(nan=torch.inf).unsqueeze(1)


def _store_credit(rollout: Rollout, found: tuple[torch.Tensor, ...], rows: Rows) -> None:
    for name, values in zip(("advantages", "baselines", "lone_tail_tokens"), found, strict=True):
        store(rollout, name, values, rows)


def _stretch(chosen: torch.Tensor) -> slice:
    """The slice from the first to the last True, between which all are True."""
    at = chosen.nonzero().flatten().tolist()
    return slice(at[0], at[-1] + 1) if at else slice(0, 0)
