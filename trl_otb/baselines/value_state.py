"""What checkpoints hold of `value`, also those of earlier releases."""

import copy
import logging
from typing import Any

from .least_squares import TARGET, Sums
from .prefix import MEAN_STATE, PROGRESS, STATE
from .value_columns import PHI, PSI


logger = logging.getLogger(__name__)

# The attribute that each entry is
ENTRIES = {name: name for name in ("eta", "theta", "gamma", "weight", "luck_weight")}
ENTRIES |= {f"_{name}": name for name in ("tokens", "prompts", "returns_seen", "doubted")}
# Sums, with the entry that holds the names of their columns
SUMS = {"_value_sums": ("value_sums", "_value_names"), "_sums": ("sums", "_names")}
# The columns of 0.8 to 0.12, which saved no names
NUMBERS_THEN = (
    "1", "B0", "earned", "energy", "surprisal", "count", "root_energy", "root_surprisal", "root_count", "worst", "sure",
)  # fmt: skip
PARTS_THEN = ("1", "√n", "V", "V²", "m", "V m", "V √n")
PHI_THEN = ("1", "B0", *PARTS_THEN[1:], *(f"{power} {part}" for power in ("σ", "σ²") for part in PARTS_THEN), "earned")
PSI_THEN = (*(f"luck {part}" for part in PARTS_THEN), *(f"luck σ {part}" for part in PARTS_THEN))


def saved_state(value: Any) -> dict[str, Any]:
    """Of a `Value`. Also what is measured of luck; sums beside the names of their columns."""
    state = {entry: vars(value)[name] for entry, name in ENTRIES.items()}
    for entry, (name, names) in SUMS.items():
        sums = vars(value)[name]
        state |= {entry: None, names: None} if sums is None else {entry: sums.values, names: [*sums.names]}
    return copy.deepcopy(state | {f"_{name}": of for name, of in vars(value.luck_check).items()})


def load_state(value: Any, state: dict[str, Any]) -> None:
    """Raises a `ValueError` if entries are missing."""
    state = copy.deepcopy(state)
    if not ENTRIES.keys() | SUMS.keys() <= state.keys():
        raise ValueError(
            f"The state of 'value' is damaged, or of a release before 0.8: it holds {[*state]}. "
            "Without the checkpoint's `baseline.pt` it starts empty."
        )
    if "_names" not in state:
        state |= names_before_0_13(state)
    vars(value).update({name: state[entry] for entry, name in ENTRIES.items()})
    for entry, (name, names) in SUMS.items():
        vars(value)[name] = None if state[entry] is None else Sums(tuple(state[names]), state[entry])
    if value.sums is not None and not {*PHI, *PSI} <= {*value.sums.names}:
        logger.warning("The checkpoint's 'value' has features of another release: all but V is fitted anew.")
        value.theta = value.gamma = value.sums = None
        value.weight = value.luck_weight = value.tokens = 0.0
    elif value.sums is not None:
        value.sums = value.sums.of((*PHI, *PSI, TARGET))
    of_luck = {f"_{name}": name for name in vars(value.luck_check)}  # not in checkpoints of releases before 0.10
    vars(value.luck_check).update({of_luck[entry]: state[entry] for entry in of_luck.keys() & state.keys()})
    if "_largest_ratio" in state:  # before 0.11.2
        value.luck_check.largest_ratios.fill_(state["_largest_ratio"])


def names_before_0_13(state: dict[str, Any]) -> dict[str, list[str]]:
    """
    The names of columns in states that do not have them: of V, and of φ and ψ, after which draws of progress functions
    may stand. `progress` names the functions.
    """
    functions, found = state.get("progress", []), {names: list[str]() for _, names in SUMS.values()}
    if state["_value_sums"] is not None:
        states = (len(state["_value_sums"]) - 1 - len(NUMBERS_THEN) - 2 * len(functions)) // 2
        names = [*NUMBERS_THEN, *(f"{of}{i}" for of in (STATE, MEAN_STATE) for i in range(states))]
        names += [f"{PROGRESS}{name}{times}" for times in ("", " √n") for name in functions]
        found["_value_names"] = [*names, TARGET]
    if state["_sums"] is not None:
        draws = state["_sums"].size(-1) - 1 - len(PHI_THEN) - len(PSI_THEN)
        known = draws == state.get("_draw_columns", 0)
        names = (
            [*PHI_THEN, *PSI_THEN, *(f"draw {i}" for i in range(draws))]
            if known
            else ["?"] * (len(state["_sums"][0]) - 1)
        )
        found["_names"] = [*names, TARGET]
    return found
