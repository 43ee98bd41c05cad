"""
Progress: numbers that the user's own functions give the text so far, which `value` reads.

A progress function is called like a reward function of TRL, on unfinished completions. What it returns at some place of
a completion holds for the tokens after that place, up to the next one. So it depends on what precedes a token alone,
and a baseline that reads it stays unbiased.
"""

import asyncio
import copy
import functools
import inspect
import math
import random
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from accelerate.logging import get_logger
from torch import Tensor

from .baselines.registry import imported


logger = get_logger(__name__)

# Of a completion, at which progress functions are called: all tokens of a short answer, every fourth of 256. On stories
# every fourth token costs 0.02 of the noise, every eighth 0.05 (recipes/studies/progress.md)
PROGRESS_PLACES = 64
REWARDS = "rewards"  # in the place of a function: all reward functions of the run
SLOW = 0.05  # of the time between two generation batches: with more a warning says so
TIMED = 3  # batches, whose median that is: a single one may be slow by chance
# Texts of a batch for which a function must return the same number, to the precision of float32: what is always random
# shows in the first batch, what seldom is within a few
ASKED_AGAIN, ROUNDING = 4, 1e-5
# The probability of the likeliest token above which nothing is tried in its place: the variance of such a draw is at
# most a fifth of an even one's. SmolLM2 is that sure of 5 % of the tokens of stories, and of 94 % of sums by column
SURE = 0.95
# Of a completion's places, for what is longer than completions usually are. Their intervals grow by a factor, which is
# raised in such steps until the last of them reaches the longest
LATE_PLACES, FACTOR_STEP = 8, 0.05


# A text: of a row, up to so many generated tokens, and perhaps a further one
Place = tuple[int, ...]


@dataclass(frozen=True)
class Given:
    """What reward functions were given for B completions: lists of B, by the names of their arguments."""

    prompts: list[Any]
    completions: list[Any]  # text, or a conversation's messages
    completion_ids: list[list[int]]  # including tool output
    columns: dict[str, list[Any]]  # of the data set, and fields of a `rollout_func`

    @classmethod
    def of(cls, inputs: list[dict[str, Any]], prompts: list[Any], completions: list[Any], ids: list[Any]) -> "Given":
        """Copies, as reward functions may change what they are given."""
        left_out = ("prompt", "completion", "completion_ids")
        columns = {key: [_copied(row[key]) for row in inputs] for key in inputs[0] if key not in left_out}
        return cls([*map(_copied, prompts)], [*map(_copied, completions)], [[*of_row] for of_row in ids], columns)


def _copied(value: Any) -> Any:
    """A copy of what a function may change in its place; images and the like are shared."""
    return copy.deepcopy(value) if isinstance(value, list | dict | set) else value


# The functions


def named(functions: Any) -> list[Any]:
    """One function or several, as a list; [`REWARDS`] and `"module:function"` stay text."""
    if functions is None:
        return []
    return [*functions] if isinstance(functions, list | tuple) else [functions]


def check_names(functions: Any) -> None:
    """Raise a `ValueError` unless `functions`, of a config, is text that names functions."""
    for name in named(functions):
        if not isinstance(name, str) or not (name == REWARDS or ":" in name):
            raise ValueError(
                f"`progress_funcs` holds {name!r}: a config holds text, {REWARDS!r} for the run's reward functions or "
                "'module:function'. Give functions themselves to the trainer: `OTBGRPOTrainer(progress_funcs=[...])`."
            )


def functions_by_name(functions: Any, reward_funcs: Sequence[Any], reward_names: Sequence[str]) -> dict[str, Callable]:
    """
    The functions by name. A `ValueError` or `TypeError` if one cannot be imported or called on unfinished text: reward
    models, an environment's `get_reward`, and functions that ask for `environments`.
    """
    result: dict[str, Callable] = {}
    for given in named(functions):
        several = [(f"reward {name}", of) for name, of in zip(reward_names, reward_funcs, strict=True)]
        for name, function in several if given == REWARDS else [_imported(given)]:
            _check(name, function)
            number = sum(1 for known in result if known.partition("#")[0] == name)
            result[f"{name}#{number + 1}" if number else name] = function
    return result


def _imported(given: Any) -> tuple[str, Any]:
    if not isinstance(given, str):
        at = given if hasattr(given, "__qualname__") else type(given)
        return f"{getattr(at, '__module__', '')}:{at.__qualname__}", given
    check_names(given)
    return given, imported(given, f"`progress_funcs` holds {given!r}")


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


# Where they are called


def schedule(places: int, usual: int, longest: int) -> list[int]:
    """
    The first tokens of at most so many intervals, each with one place: as many tokens in each up to the `usual` length,
    and more and more in the last ones, up to the `longest`. It depends on no completion of the batch.
    """
    usual = max(min(usual, longest), 1)
    regular = places if usual == longest else max(places - LATE_PLACES, 1)
    step = math.ceil(usual / regular)
    starts = [*range(0, usual, step)]
    late = places - len(starts)
    rest = longest - usual
    if late > 0 and rest > 0:
        growth = 1.0
        while step * sum(growth**i for i in range(1, late + 1)) < rest:
            growth += FACTOR_STEP
        at = float(usual)
        for i in range(1, late + 1):
            if at >= longest:
                break
            starts.append(math.ceil(at))
            at += step * growth**i
    return sorted({*starts})


def places_of(starts: list[int], longest: int, tokens: Sequence[int], ends_line: Callable[[int], bool]) -> list[int]:
    """
    One place in each interval that begins at `starts`, as numbers of tokens before it: after the first token that ends
    a line, if there is one in time, else the last of the interval. Whether t is a place depends on tokens before t.
    """
    result = []
    for start, end in pairwise([*starts, max(longest, starts[-1] + 1)]):
        inside = range(start, min(end, len(tokens)))
        line_ends = (t for t in inside if t > 0 and ends_line(tokens[t - 1]))
        # An interval that the completion leaves unfinished has its place where a longer completion would have it
        place = next(line_ends, end - 1)
        if place < len(tokens):
            result.append(place)
    return result


# What a completion was before a token


class Prefixes:
    """The completions of [`Given`] as they were at each of their places, as a reward function would get them."""

    def __init__(self, given: Given, mask: Tensor, processing_class: Any) -> None:
        self.given = given
        self.decode = functools.partial(processing_class.batch_decode, skip_special_tokens=True)
        self.generated = [row.nonzero().flatten().tolist() for row in mask.cpu()]  # columns of generated tokens
        self._turns = [_turns(*of) for of in zip(given.completions, self.generated, strict=True)]
        self._ends: dict[int, bool] = {}

    def ends_line(self, token: int) -> bool:
        if token not in self._ends:
            self._ends[token] = "\n" in self.decode([[token]])[0]
        return self._ends[token]

    def places(self, starts: list[int], longest: int) -> list[Place]:
        """Row, and number of generated tokens before, of each place."""
        result: list[Place] = []
        for row, columns in enumerate(self.generated):
            tokens = [self.given.completion_ids[row][column] for column in columns]
            result += [(row, t) for t in places_of(starts, longest, tokens, self.ends_line)]
        return result

    def texts(self, places: list[Place]) -> tuple[list[Any], list[list[int]]]:
        """Completion and ids at each place, as copies."""
        ids = [[*self.given.completion_ids[row][: self.generated[row][t]], *more] for row, t, *more in places]
        whole = [self.given.completions[row] for row, *_ in places]
        turns = [bisect_right(self._turns[row], t) - 1 for row, t, *_ in places]
        starts = [
            self.generated[row][self._turns[row][turn]] if turn > 0 else 0
            for (row, *_), turn in zip(places, turns, strict=True)
        ]
        unfinished = self.decode([of[start:] for of, start in zip(ids, starts, strict=True)])
        completions = []
        for completion, turn, text in zip(whole, turns, unfinished, strict=True):
            if isinstance(completion, str):
                completions.append(text)
                continue
            written = [i for i, message in enumerate(completion) if message["role"] == "assistant"]
            before = completion[: written[turn]] if turn < len(written) else completion
            completions.append([*copy.deepcopy(before), {"role": "assistant", "content": text}])
        return completions, ids


def _turns(completion: Any, columns: list[int]) -> list[int]:
    """
    The first generated token of each of the policy's turns, from the columns of generated tokens. A completion that is
    text, or has a single message of the policy's, is one turn, with the output of tools in it.
    """
    if isinstance(completion, str) or sum(message["role"] == "assistant" for message in completion) < 2:
        return [0]
    return [t for t, column in enumerate(columns) if t == 0 or column != columns[t - 1] + 1]


# A run's progress functions


@dataclass
class Calls:
    """What the calls of a batch have found: numbers by function and place, NaN without one; and what went wrong."""

    numbers: Tensor  # (F, P) float64
    failed: dict[str, tuple[int, str]] = field(default_factory=dict)  # by function: how often, and the last error
    not_finite: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)


class Progress:
    """
    The progress functions of a run.

    `measure` returns `(B, T, F)`, and draws, if l of the likeliest tokens are tried: of a token y that the policy was
    not sure of, at a place, D = f(y) − Σ_v π(v) f(v), where f(v) is by how much the number changes if v is written
    there; 0 for all tokens but the l likeliest. So D has mean 0 given what precedes y. A function without a number for
    a text (None, NaN, or an error) keeps the one that it had before, 0 at first. A function that returns two numbers
    for one text, because it is random, has a state, or compares completions, is left out from then on: its numbers are
    0.
    """

    def __init__(self, functions: dict[str, Callable], places: int, longest: int, likeliest: int = 0) -> None:
        self.functions, self.max_places, self.longest = functions, places, longest
        self.likeliest = likeliest  # tokens that are tried in the place of one
        self.usual = longest  # tokens of the longest completion of the batch before
        self.left_out: set[str] = set()
        self.time_share = math.nan  # of the time since the batch before
        self._since: float | None = None
        self._shares: list[float] = []
        self._slowest = ""
        self._warned: set[tuple[str, str]] = set()
        self._again = random.Random(0)

    @property
    def names(self) -> list[str]:
        return [*self.functions]

    def measure(
        self,
        given: Given,
        mask: Tensor,
        processing_class: Any,
        state: Any = None,
        loop: Any = None,
        training: bool = True,
        likely: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """
        The numbers, `(B, T, F)`, of the completions of this process, and draws, the same; 0 where `mask`, `(B, T)`, is
        0. No draws if no tokens are to be tried.

        Args:
            likely: `(B, T, 2 l)` ids of the likeliest tokens before each, and their probabilities; draws are 0 without.
            processing_class: The tokenizer or processor that decodes completions.
            state: TRL's `trainer_state`, of which functions get a copy.
            loop: The event loop of asynchronous reward functions, if there is one.
            training: Whether lengths and times of the batch are kept.

        Raises:
            ValueError: A function returned something else than a list with a number or None for each completion, or
                failed on every text of the batch.
        """
        start = time.perf_counter()
        prefixes = Prefixes(given, mask, processing_class)
        places = prefixes.places(schedule(self.max_places, self.usual, self.longest), self.longest)
        result = torch.zeros(*mask.shape, len(self.functions), dtype=torch.float64)
        draws = torch.zeros_like(result)
        if places:
            tried = self._alternatives(prefixes, places, likely)
            with _random_state_kept():
                calls = self._called(prefixes, [*places, *tried], copy.copy(state), loop)
            self._tell(calls, len(places) + len(tried))
            columns: list[Any] = [[] for _ in prefixes.generated]
            for number, (row, t, *_) in enumerate(places):
                columns[row].append((t, number))
            for row, of_row in enumerate(columns):
                generated = torch.tensor(prefixes.generated[row], dtype=torch.long)
                for f in range(len(self.functions)):
                    result[row, generated, f] = _held(calls.numbers[f], of_row, len(generated))
            for number, (place, weight) in enumerate(tried.items(), start=len(places)):
                row, t, _ = place
                at = row, prefixes.generated[row][t]
                draws[at] += weight * (calls.numbers[:, number] - result[at]).nan_to_num(nan=0.0)
        if training:
            self.usual = max([len(of_row) for of_row in prefixes.generated], default=0) or self.usual
            self._clock(start)
        result, draws = (values.float().to(mask.device) for values in (result, draws))
        return result, draws if self.likeliest else None

    def forget_left_out(self, flags: Tensor) -> Tensor:
        """From `(processes, F)` flags: a function that any process leaves out is left out everywhere; `(F,)` kept."""
        self.left_out |= {name for name, out in zip(self.names, flags.any(dim=0).tolist(), strict=True) if out}
        return self.flags() == 0

    def flags(self) -> Tensor:
        """`(F,)` 1 for each function that is left out."""
        return torch.tensor([float(name in self.left_out) for name in self.names])

    def _alternatives(self, prefixes: Prefixes, places: list[Place], likely: Tensor | None) -> dict[Place, float]:
        """Texts with another token at places where the policy was not sure, each with its weight 1[v = y] − π(v)."""
        if not self.likeliest or likely is None:
            return {}
        tokens, probs = (of.cpu() for of in likely.split(self.likeliest, dim=-1))
        result: dict[Place, float] = {}
        for row, t in places:
            column = prefixes.generated[row][t]
            if probs[row, column, 0] > SURE:
                continue
            y = prefixes.given.completion_ids[row][column]
            of = zip(tokens[row, column], probs[row, column], strict=True)
            result |= {(row, t, int(v)): float(int(v) == y) - p.item() for v, p in of if p > 0}
        return result

    def _called(self, prefixes: Prefixes, places: list[Place], state: Any, loop: Any) -> Calls:
        calls = Calls(torch.full((len(self.functions), len(places)), torch.nan, dtype=torch.float64))
        checked = sorted(self._again.sample(range(len(places)), min(ASKED_AGAIN, len(places))))
        some = [places[i] for i in checked[::-1]]

        async def of_function(index: int, name: str, function: Callable) -> None:
            begin = time.perf_counter()
            values = await self._values(name, function, prefixes, places, state, calls)
            again = await self._values(name, function, prefixes, some, state, None)
            calls.seconds[name] = time.perf_counter() - begin
            self._compare(name, prefixes, [(values[i], x) for i, x in zip(checked[::-1], again, strict=True)], some)
            calls.numbers[index] = torch.tensor(values, dtype=torch.float64)

        kept = [(i, *of) for i, of in enumerate(self.functions.items()) if of[0] not in self.left_out]
        for of in kept:
            if not _is_async(of[2]):
                _run_now(of_function(*of))

        async def together() -> None:
            await asyncio.gather(*(of_function(*of) for of in kept if _is_async(of[2])))

        if any(_is_async(of[2]) for of in kept):
            _run(together(), loop)
        for index, name in enumerate(self.functions):
            if name in self.left_out:
                calls.numbers[index] = torch.nan
        return calls

    async def _values(
        self, name: str, function: Callable, prefixes: Prefixes, places: list, state: Any, calls: Calls | None
    ) -> list[float]:
        """A number for each place, NaN without one: in one call, or, if that fails, in one for each text."""
        try:
            return self._numbers(name, await _call(function, prefixes, places, state), len(places), calls)
        except _WrongResult as wrong:
            raise ValueError(str(wrong)) from None
        except Exception:  # of a user's function, of all kinds
            values, errors = [], []
            for place in places:
                try:
                    values += self._numbers(name, await _call(function, prefixes, [place], state), 1, calls)
                except _WrongResult as wrong:
                    raise ValueError(str(wrong)) from None
                except Exception as error:
                    values.append(math.nan)
                    errors.append(error)
            if calls is not None and errors:
                calls.failed[name] = len(errors), f"{type(errors[-1]).__name__}: {errors[-1]}"
                if len(errors) == len(places):
                    raise ValueError(
                        f"The progress function {name!r} failed on all {len(places)} unfinished texts of a batch "
                        f"({calls.failed[name][1]}). It is called like a reward function, with prompts, completions, "
                        "completion_ids and the columns of the data set; `environments` are not there, as they are at "
                        "the end of the completion. Let it return None where it cannot tell, or leave it out of "
                        "`progress_funcs`."
                    ) from errors[-1]
            return values

    def _numbers(self, name: str, values: Any, expected: int, calls: Calls | None) -> list[float]:
        if isinstance(values, str | bytes | dict) or not hasattr(values, "__iter__") or getattr(values, "ndim", 1) == 0:
            raise _WrongResult(
                f"The progress function {name!r} returned {short(values)}: it must return a list with one number or "
                "None per completion."
            )
        values = [*values]
        if len(values) != expected:
            raise _WrongResult(
                f"The progress function {name!r} returned {len(values)} numbers for {expected} completions: it must "
                "return one number or None for each, as a reward function does."
            )
        result = []
        for value in values:
            number = math.nan if value is None else _number(name, value)
            if value is not None and not math.isfinite(number):
                number = math.nan
                if calls is not None:
                    calls.not_finite[name] = calls.not_finite.get(name, 0) + 1
            result.append(number)
        return result

    def _compare(self, name: str, prefixes: Prefixes, pairs: list[tuple[float, float]], places: list) -> None:
        for (first, again), place in zip(pairs, places, strict=True):
            same = math.isnan(first) and math.isnan(again)
            if same or abs(first - again) <= ROUNDING * (1 + abs(first)):
                continue
            self.left_out.add(name)
            text = prefixes.texts([place])[0][0]
            text = text if isinstance(text, str) else text[-1]["content"]
            logger.warning(
                f"The progress function {name!r} returned {first:g} and then {again:g} for the same text, "
                f"{short(text)}, and is left out from now on: it is random, has a state, or compares completions with "
                "each other. A progress function must depend on one completion's text alone. Rewards are not affected.",
                main_process_only=False,
            )
            return

    def _tell(self, calls: Calls, places: int) -> None:
        for name, (times, error) in calls.failed.items():
            self._warn_once(
                ("failed", name),
                f"The progress function {name!r} failed on {times} of {places} unfinished texts ({error}). There the "
                "number of the place before is kept, 0 at first. It was called again for each text, which costs time: "
                "let it return None where it cannot tell.",
            )
        for name, times in calls.not_finite.items():
            self._warn_once(
                ("finite", name),
                f"The progress function {name!r} returned NaN or infinity for {times} of {places} unfinished texts: "
                "there the number of the place before is kept, 0 at first. Let it return None where it cannot tell.",
            )
        self._slowest = max(calls.seconds, key=lambda of: calls.seconds[of], default="")

    def _clock(self, start: float) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.time_share = (now - start) / max(now - self._since, 1e-9)
            self._shares.append(self.time_share)
            usual = sorted(self._shares[-TIMED:])[len(self._shares[-TIMED:]) // 2]
            if len(self._shares) >= TIMED and usual > SLOW:
                self._warn_once(
                    ("slow", ""),
                    f"Progress functions take {usual:.0%} of a step's time, most of it {self._slowest!r}. Lower "
                    f"`progress_places` ({self.max_places} texts per completion), or name functions that cost less.",
                )
        self._since = now

    def _warn_once(self, key: tuple[str, str], message: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, main_process_only=False)


class _WrongResult(Exception):
    """A function returned something else than numbers."""


async def _call(function: Callable, prefixes: Prefixes, places: list[Place], state: Any) -> Any:
    """A function's result for the texts at some places, as TRL calls reward functions, on copies of all arguments."""
    rows, given = [row for row, *_ in places], prefixes.given
    completions, ids = prefixes.texts(places)
    result = _stateless(function)(
        prompts=[_copied(given.prompts[row]) for row in rows],
        completions=completions,
        completion_ids=ids,
        trainer_state=copy.copy(state),
        log_extra=_nothing,
        log_metric=_nothing,
        **{key: [_copied(values[row]) for row in rows] for key, values in given.columns.items()},
    )
    return await result if _is_async(function) else result


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of `log_extra` and `log_metric`, as unfinished texts are not to be logged."""


def _stateless(function: Callable) -> Callable:
    """A copy of an object that can be called, so that what it counts is not counted twice; functions as they are."""
    if inspect.isroutine(function) or isinstance(function, type | functools.partial):
        return function
    try:
        return copy.deepcopy(function)
    except Exception:  # of a user's class, of all kinds
        return function


def _is_async(function: Callable) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _run_now(coroutine: Any) -> None:
    """Run what waits for nothing, outside of any event loop: the function within may have one of its own."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    raise RuntimeError("a progress function that is not asynchronous was awaited")  # which `_call` does not do


def _run(coroutine: Any, loop: Any) -> None:
    """Run it in TRL's loop, or in a new one if there is none; in a thread if a loop runs here, as in notebooks."""
    if loop is not None:
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Context in which random numbers that are drawn do not change those that training draws."""
    kept = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    try:
        yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])
        torch.random.set_rng_state(kept[2])


def _held(numbers: Tensor, places: list[tuple[int, int]], tokens: int) -> Tensor:
    """`(tokens,)`: the number of the last place before each token that has one; 0 before any."""
    result, last, at = torch.zeros(tokens, dtype=torch.float64), 0.0, 0
    for t, number in places:
        result[at:t] = last
        value = numbers[number].item()
        last, at = last if math.isnan(value) else value, t
    result[at:] = last
    return result


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
