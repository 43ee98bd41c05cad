"""
Progress: numbers that the user's own functions give the text so far, which `value` reads.

A progress function is called like a reward function of TRL: once for each place of a batch, in order of place, before
any reward is computed, with all completions as they were at that place. So its number for a completion depends on the
tokens before the place, on other completions and on earlier batches, whatever the function does or keeps, and a
baseline that reads it stays unbiased. Asynchronous functions are called for many places together, as long as they keep
nothing: what one keeps is looked for in the first batches, and from the next batch on it is called in order, too.
"""

import asyncio
import copy
import functools
import inspect
import logging
import math
import random
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..baselines.registry import imported
from .visible_state import visible_state


logger = logging.getLogger(__name__)

PROGRESS_PLACES = 64  # of a completion of usual length: with more, each costs time; with few, numbers are late
FIRST_LENGTH = 1024  # tokens of a usual completion, before there was a batch, if completions may be that long
LENGTHS_KEPT = 16  # whose median lengths a usual length is the median of: a few batches of long texts do not move it
REWARDS = "rewards"  # in the place of a function: all reward functions of the run that have a weight
LARGEST = 1e18  # of a number, so that its square is finite in float32; more is no number
CHECKED = 3  # first batches, in which it is checked that calls change nothing that rewards depend on
SLOW = 0.05  # of the time between two generation batches: with more a warning says so
TIMED = 3  # batches, whose median that is: a single one may be slow by chance


@dataclass(frozen=True)
class Sampled:
    """What was sampled for a batch of B completions, with their prompts and columns as they were before."""

    prompts: list[Any]
    columns: dict[str, list[Any]]  # of the data set
    completions: list[Any]  # text, or a conversation's messages, as reward functions are to get them
    completion_ids: list[list[int]]  # including tool output
    generated: list[list[int]]  # the places of the tokens that the policy generated among them
    # From (row, first id, end of ids) of unfinished turns: what the policy has written there, text or a message
    written: Callable[[list[tuple[int, int, int]]], list[Any]]

    def at(self, place: int) -> tuple[list[Any], list[list[int]]]:
        """Completions and ids before the generated token number `place`; those that ended earlier as they are."""
        completions, ids = [*self.completions], [*self.completion_ids]
        cuts, turns = [], []
        for row, columns in enumerate(self.generated):
            if place < len(columns):
                starts = _turns(self.completions[row], columns)
                turns.append(bisect_right(starts, place) - 1)
                cuts.append((row, columns[starts[turns[-1]]] if turns[-1] else 0, columns[place]))
        for (row, _, end), turn, text in zip(cuts, turns, self.written(cuts), strict=True):
            ids[row] = ids[row][:end]
            completions[row] = text if isinstance(text, str) else [*_messages_before(completions[row], turn), text]
        return completions, ids


def _turns(completion: Any, columns: list[int]) -> list[int]:
    """
    The first generated token of each of the policy's turns, from the columns of generated tokens. A completion that is
    text, or has a single message of the policy's, is one turn, with the output of tools in it.
    """
    if isinstance(completion, str) or sum(message["role"] == "assistant" for message in completion) < 2:
        return [0]
    return [t for t, column in enumerate(columns) if t == 0 or column != columns[t - 1] + 1]


def _messages_before(completion: list[dict[str, Any]], turn: int) -> list[dict[str, Any]]:
    written = [i for i, message in enumerate(completion) if message["role"] == "assistant"]
    return completion[: written[turn]] if turn < len(written) else completion


def copied(value: Any) -> Any:
    """A copy of lists, dicts, sets, tuples and arrays, at any depth; what else they hold, such as images, is shared."""
    if isinstance(value, np.ndarray | Tensor):
        return copy.deepcopy(value)
    if isinstance(value, dict):
        return {key: copied(of) for key, of in value.items()}
    return type(value)(map(copied, value)) if type(value) in (list, set, tuple) else value


# The functions


def named(functions: Any) -> list[Any]:
    """One function or several, as a list; [`REWARDS`] and `"module:function"` stay text, `"module.function"`, too."""
    if functions is None:
        return []
    return [*functions] if isinstance(functions, list | tuple) else [functions]


def _with_colon(name: str) -> str:
    """`"module:function"`, also of `"module.function"`, as TRL has reward functions."""
    return name if ":" in name or "." not in name else ":".join(name.rsplit(".", 1))


def check_function_names(functions: Any) -> None:
    """Raise a `ValueError` unless `functions`, of a config, is text that names functions."""
    for name in named(functions):
        if not isinstance(name, str) or not (name == REWARDS or ":" in _with_colon(name)):
            raise ValueError(
                f"`progress_funcs` holds {name!r}: a config holds text, {REWARDS!r} for the run's reward functions or "
                "'module:function'. Give functions themselves to the trainer: `OTBGRPOTrainer(progress_funcs=[...])`."
            )


def functions_by_name(functions: Any, rewards: Sequence[tuple[str, Any, float]]) -> dict[str, Callable]:
    """
    The functions by name; `rewards` are names, functions and weights of the run's rewards. A `ValueError` or
    `TypeError` if one cannot be imported or called on unfinished text: reward models, an environment's `get_reward`,
    and functions that ask for `environments`.
    """
    result: dict[str, Callable] = {}
    for given in named(functions):
        weighted = [(f"reward {name}", function) for name, function, weight in rewards if weight != 0]
        for name, function in weighted if given == REWARDS else [_imported(given)]:
            _check(name, function)
            result[unique_name(name, result)] = function
    if functions and not result:
        raise ValueError(
            f"`progress_funcs` is {functions!r}, and no reward function has a weight: name functions that read the "
            "text, or set `reward_weights`."
        )
    return result


def unique_name(name: str, known: Collection[str]) -> str:
    """The name, with `#2` and so on where others have it."""
    number = sum(1 for of in known if of.partition("#")[0] == name)
    return f"{name}#{number + 1}" if number else name


def _imported(given: Any) -> tuple[str, Any]:
    if not isinstance(given, str):
        at = given if hasattr(given, "__qualname__") else type(given)
        return f"{getattr(at, '__module__', '')}:{at.__qualname__}", given
    check_function_names(given)
    return _with_colon(given), imported(_with_colon(given), f"`progress_funcs` holds {given!r}")


def _check(name: str, function: Any) -> None:
    if isinstance(function, torch.nn.Module):
        raise ValueError(
            f"`progress_funcs` holds {name!r}, a reward model: called on the text so far it would run for dozens of "
            "texts per completion, many times the cost of its rewards. Name functions that cost little, by "
            "'module:function' or as the trainer's `progress_funcs`."
        )
    if not callable(function):
        raise TypeError(f"`progress_funcs` holds {name!r}, a {type(function).__name__}: it must be a function.")
    try:
        asked = [*inspect.signature(function).parameters]
    except (TypeError, ValueError):  # of some built-in functions
        asked = []
    if "environments" in asked:
        raise ValueError(
            f"`progress_funcs` holds {name!r}, which reads `environments`: they are as the whole completion left them, "
            "which is not known at an earlier token. Name functions that read the text."
        )


class Progress:
    """
    The progress functions of a run.

    A function has a number for a completion from a place on, up to the next place. Where it has none (None, NaN,
    infinite, or an error), the number before stays, 0 at first.

    Args:
        functions: By name.
        rewards: The run's reward functions by name, whose visible state calls must not change.
        places: How many places a completion of usual length has: every s-th token is one, to the end of each text.
        longest: Tokens that a completion may have; `None` without a limit.
        tolerant: Whether, in the place of an error, all numbers are 0 from then on, with the reason in `unusable`.
    """

    def __init__(
        self,
        functions: dict[str, Callable],
        rewards: Mapping[str, Callable],
        places: int,
        longest: int | None = None,
        tolerant: bool = False,
    ) -> None:
        self.tolerant, self.unusable, self.sees_evaluations = tolerant, "", False
        self.functions, self.rewards, self.max_places = functions, dict(rewards), places
        self._first_length = min(longest or FIRST_LENGTH, FIRST_LENGTH)
        self.lengths: deque[float] = deque(maxlen=LENGTHS_KEPT)  # medians of earlier batches of all processes
        self.time_share = math.nan  # of the time since the batch before
        self._in_order: set[str] = set()  # asynchronous functions that keep something
        self._failed: dict[str, list[Exception]] = {}  # in this batch, by function
        self._batches = 0  # with places after the first, where no text is written yet
        self._since: float | None = None
        self._shares: deque[float] = deque(maxlen=TIMED)
        self._seconds = dict.fromkeys(functions, 0.0)
        self._warned: set[str] = set()
        self._own_loop: asyncio.AbstractEventLoop | None = None

    @property
    def names(self) -> list[str]:
        return [*self.functions]

    @property
    def interval(self) -> int:
        """Tokens between two places. It depends on earlier batches alone."""
        return math.ceil(median(self.lengths or [self._first_length]) / self.max_places)

    def measure(self, sampled: Sampled, state: Any = None, loop: Any = None) -> Float[Tensor, "B T F"]:
        """
        The numbers before each of the T tokens of completions; 0 at tokens that the policy did not generate.

        Args:
            state: TRL's `trainer_state`, of which functions get a copy.
            loop: The event loop of the run's asynchronous reward functions, if there is one.

        Raises:
            ValueError: A function returned something else than a list with a number or None for each completion; or, in
                the first batch, failed on every text, or changed what reward functions or other functions get.
        """
        start, interval = time.perf_counter(), self.interval
        places = range(0, max(map(len, sampled.generated), default=0), interval)
        shape = len(places), len(sampled.completions), len(self.functions)
        numbers, self._failed = torch.full(shape, torch.nan, dtype=torch.float64), {}
        before = copied((sampled.prompts, sampled.columns))
        try:
            if not self.unusable:
                with _random_state_kept():
                    self._call_all(sampled, places, state, loop, numbers)
                self._check_given(sampled, *before)
                self._check_failed(numbers)
        except ValueError as error:
            if not self.tolerant:
                raise
            self.unusable = str(error)
        if self.unusable:
            numbers.fill_(0.0)
        self._batches += len(places) > 1
        for number in range(len(places)):
            held = numbers[number - 1] if number else torch.zeros_like(numbers[0])
            numbers[number] = numbers[number].where(~numbers[number].isnan(), held)
        result = torch.zeros(len(sampled.completions), max(map(len, sampled.completion_ids), default=0), shape[2])
        for row, columns in enumerate(sampled.generated):
            result[row, columns] = numbers[torch.arange(len(columns)) // interval, row].float()
        self._clock(start)
        return result

    def saw(self, lengths: Sequence[int]) -> None:
        """Keeps the median number of generated tokens of a training batch, of all processes."""
        if present := [length for length in lengths if length > 0]:
            self.lengths.append(float(median(present)))

    def for_comparison(self) -> "Progress":
        """A copy that keeps the lengths of evaluations, too, and leaves those of the run."""
        result = copy.copy(self)
        for name in ("lengths", "_shares", "_seconds", "_warned"):
            setattr(result, name, copy.copy(getattr(result, name)))
        result.sees_evaluations = True
        return result

    def state_dict(self) -> dict[str, Any]:
        return {"progress": self.names, "progress_lengths": [*self.lengths]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lengths = deque(state.get("progress_lengths", ()), maxlen=LENGTHS_KEPT)

    # Calls

    def _call_all(self, sampled: Sampled, places: range, state: Any, loop: Any, numbers: Tensor) -> None:
        """Fills `numbers`, `(P, B, F)`, NaN where there is none."""
        names, functions = self.names, [*self.functions.values()]
        waits = [is_async(function) for function in functions]
        together = [f for f, name in enumerate(names) if waits[f] and name not in self._in_order]
        in_order = [f for f in range(len(names)) if f not in together]

        def given_at(place: int) -> dict[str, Any]:
            completions, ids = sampled.at(place)
            own = {"trainer_state": state, "log_extra": _nothing, "log_metric": _nothing}
            texts = {"prompts": sampled.prompts, "completions": completions, "completion_ids": ids}
            return sampled.columns | own | texts

        async def call(f: int, number: int, given: dict[str, Any]) -> None:
            begin = time.perf_counter()
            found = await self._numbers_of(names[f], functions[f], given)
            numbers[number, :, f] = torch.tensor(found, dtype=torch.float64)
            self._seconds[names[f]] += time.perf_counter() - begin

        async def call_together(each: list[tuple[int, dict[str, Any]]]) -> None:
            await asyncio.gather(*(call(f, *at) for at in each for f in together))

        watched, kept = self.rewards | {names[f]: functions[f] for f in together}, dict[str, bytes]()
        half = (len(places) + 1) // 2  # in which a function may set up what it keeps for later calls
        for part in (range(half), range(half, len(places))):
            for number in part if in_order else ():
                given = given_at(places[number])
                for f in in_order:
                    self._wait_for(call(f, number, given), loop) if waits[f] else _run_now(call(f, number, given))
            if together and part:
                self._wait_for(call_together([(number, given_at(places[number])) for number in part]), loop)
            if part.start == 0 and self._batches < CHECKED:
                kept = _states(watched)
        now = _states(watched) if kept else {}
        changed = {name for name in kept if kept[name] != now[name]}
        # It may read what it was given of later places: from the next batch on its places are awaited in order
        self._in_order |= changed & {names[f] for f in together}
        if changed := changed & self.rewards.keys():
            one = len(changed) == 1
            self._wrong(
                "rewards",
                f"Calls of the progress functions {_listed(self.names)} changed what the reward "
                f"function{'' if one else 's'} {_listed(changed)} keep{'s' if one else ''} (an attribute, a global, or "
                "a variable of an outer function), so that rewards may differ from those without progress functions. "
                "Give a function that keeps nothing as `progress_funcs`. A cache can be one of `functools.lru_cache`.",
            )

    async def _numbers_of(self, name: str, function: Callable, given: dict[str, Any]) -> list[float]:
        """A number for each completion, NaN without one: in one call, or, if that fails, in one for each row."""
        rows = len(given["completions"])
        try:
            return _numbers(name, await _result(function, given), rows)
        except _WrongResult:
            raise
        except Exception:  # of a user's function, of all kinds
            values = []
        for row in range(rows):
            try:
                of_row = {key: [of[row]] if isinstance(of, list) else of for key, of in given.items()}
                values += _numbers(name, await _result(function, of_row), 1)
            except _WrongResult:
                raise
            except Exception as error:
                self._failed.setdefault(name, []).append(error)
                values.append(math.nan)
        return values

    def _wait_for(self, coroutine: Any, loop: Any) -> None:
        """Runs it in the run's loop, TRL's if there is one."""
        if loop is None:
            if self._own_loop is None:
                self._own_loop = asyncio.new_event_loop()
                threading.Thread(target=self._own_loop.run_forever, daemon=True).start()
                weakref.finalize(self, self._own_loop.call_soon_threadsafe, self._own_loop.stop)
            loop = self._own_loop
        asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    # What went wrong

    def _check_given(self, sampled: Sampled, prompts: list[Any], columns: dict[str, list[Any]]) -> None:
        given, before = {"prompts": sampled.prompts} | sampled.columns, {"prompts": prompts} | columns
        if changed := [name for name in given if not _same(given[name], before[name])]:
            self._wrong(
                "given",
                f"One of the progress functions {_listed(self.names)} changed {_listed(changed)} in its place, which "
                "other calls are given, too. Let it change a copy.",
            )

    def _check_failed(self, numbers: Tensor) -> None:
        texts, first = numbers[..., 0].numel(), self._batches == 0 and len(numbers) > 1
        for name, errors in self._failed.items():
            error = f"{type(errors[-1]).__name__}: {errors[-1]}"
            if len(errors) == texts and first:
                raise ValueError(
                    f"The progress function {name!r} failed on all {texts} unfinished texts of a batch ({error}). It "
                    "is called like a reward function, before anything is rewarded: with prompts, completions, "
                    "completion_ids and the columns of the data set. `environments` and the fields of a "
                    "`rollout_func` are not there, as they are known at the end of a completion only. Let it return "
                    "None where it cannot tell, or leave it out of `progress_funcs`."
                ) from errors[-1]
            self._warn_once(
                f"failed {name}",
                f"The progress function {name!r} failed on {len(errors)} of {texts} unfinished texts ({error}). There "
                "the number of the place before is kept, 0 at first. It was called again for each text, which costs "
                "time: let it return None where it cannot tell.",
            )

    def _wrong(self, key: str, message: str) -> None:
        """An error in the first batch; a warning later, when a run would be lost."""
        if self._batches == 0:
            raise ValueError(message)
        self._warn_once(key, message)

    def _clock(self, start: float) -> None:
        now = time.perf_counter()
        if self._since is not None and not self.sees_evaluations:  # a comparison has no steps
            self.time_share = (now - start) / max(now - self._since, 1e-9)
            self._shares.append(self.time_share)
            if len(self._shares) == TIMED and (usual := median(self._shares)) > SLOW:
                slowest = max(self._seconds, key=lambda name: self._seconds[name])
                self._warn_once(
                    "slow",
                    f"Progress functions take {usual:.0%} of a step's time, most of it {slowest!r}. Lower "
                    f"`progress_places` ({self.max_places} per usual completion), or name functions that cost less.",
                )
        self._since = now

    def _warn_once(self, key: str, message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message)


def _states(functions: Mapping[str, Callable]) -> dict[str, bytes]:
    return {name: visible_state(function) for name, function in functions.items()}


def _same(value: Any, before: Any) -> bool:
    if isinstance(value, np.ndarray):
        return isinstance(before, np.ndarray) and value.tobytes() == before.tobytes()
    if isinstance(value, Tensor):
        return isinstance(before, Tensor) and torch.equal(value.nan_to_num(), before.nan_to_num())
    if isinstance(value, dict) and isinstance(before, dict):
        return [*value] == [*before] and all(_same(value[key], before[key]) for key in value)
    if type(value) in (list, tuple) and type(value) is type(before):
        return len(value) == len(before) and all(map(_same, value, before))
    return value is before or bool(value == before)


def _listed(names: Collection[str]) -> str:
    return ", ".join(map(repr, sorted(names)))


# One call


class _WrongResult(ValueError):
    """A function returned something else than numbers."""


async def _result(function: Callable, given: dict[str, Any]) -> Any:
    """What a function returns, on lists of its own and messages of its own."""
    lists = {key: [*of] if isinstance(of, list) else of for key, of in given.items()}
    own = {"completions": copied(given["completions"]), "completion_ids": [[*ids] for ids in given["completion_ids"]]}
    result = function(**lists | own | {"trainer_state": copy.copy(given["trainer_state"])})
    return await result if is_async(function) else result


def _numbers(name: str, values: Any, expected: int) -> list[float]:
    if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
        raise _WrongResult(
            f"The progress function {name!r} returned {short(values)}: it must return a list with one number or None "
            "per completion."
        )
    values = [*values]
    if len(values) != expected:
        raise _WrongResult(
            f"The progress function {name!r} returned {len(values)} numbers for {expected} completions: it must return "
            "one number or None for each, as a reward function does."
        )
    numbers = [math.nan if value is None else _number(name, value) for value in values]
    return [number if abs(number) <= LARGEST else math.nan for number in numbers]


def _number(name: str, value: Any) -> float:
    """A number, or the sum of numbers of turns or tokens."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return math.fsum(_number(name, of) for of in value)
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _WrongResult(
            f"The progress function {name!r} returned {short(value)}: it must return a number or None for each "
            "completion."
        )
    return float(value)


def short(value: Any) -> str:
    """A wrong result, to name it in an error."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of `log_extra` and `log_metric`, as unfinished texts are not to be logged."""


def is_async(function: Callable) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _run_now(coroutine: Any) -> None:
    """Run what waits for nothing, outside of any event loop: the function within may have one of its own."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a progress function that is not asynchronous was awaited")  # which `_result` does not do


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Context in which random numbers that are drawn on the CPU do not change those that training draws."""
    kept = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.random.set_rng_state(kept[2])
