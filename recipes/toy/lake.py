"""
Gymnasium's frozen lake as text: a game with one move per turn and a chosen number of turns.

The policy sees how far the goal is to the right and down, and the cells left, below, right and above: in `0503..OX`,
`O` is a hole and `X` is off the lake. It calls `move` with L, D, R or U, as in `[D]`, and sees its new place, `*` at
the goal or `O` in a hole. If the cells below and to the right are both ice, the choice is free. The demonstrations win
60 % of the games at every size, and sometimes wander, which does no harm.
"""

import random


ALPHABET = "0123456789.O#X*[]{}LDRU>=?"
STEPS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}  # rows and columns, in gymnasium's order
WON, LOST = "*", "O"
HOLES = 0.25  # share of the cells
WANDERS = 0.05  # share of the turns
RIGHT = 0.6
# By the approximate number of turns of a won game: the cells along a side of the lake
SIDES = {6: 4, 14: 8, 30: 16, 46: 24}


def level(side: int, seed: int) -> list[str]:
    """The rows of a lake, in gymnasium's letters, where steps right and down never reach a dead end."""
    rng = random.Random(f"{side} {seed}")
    lake = [["H" if rng.random() < HOLES else "F" for _ in range(side)] for _ in range(side)]
    lake[0][0], lake[-1][-1] = "S", "G"
    for row in reversed(range(side)):
        for column in reversed(range(side)):
            ahead = around(lake, row, column, "DR")
            if ahead and set(ahead.values()) == {"H"}:
                rows, columns = STEPS[rng.choice(list(ahead))]
                lake[row + rows][column + columns] = "F"
    return ["".join(row) for row in lake]


def around(lake: list[str] | list[list[str]], row: int, column: int, moves: str = "LDRU") -> dict[str, str]:
    """The cells that moves lead to, without those off the lake."""
    places = {move: (row + STEPS[move][0], column + STEPS[move][1]) for move in moves}
    return {move: lake[r][c] for move, (r, c) in places.items() if 0 <= r < len(lake) and 0 <= c < len(lake)}


def seen(lake: list[str], row: int, column: int) -> str:
    """What the policy sees at this place."""
    if lake[row][column] in "GH":
        return WON if lake[row][column] == "G" else LOST
    cells = around(lake, row, column)
    shown = "".join({"H": LOST}.get(cells[move], ".") if move in cells else "X" for move in STEPS)
    return f"{len(lake) - 1 - column:02d}{len(lake) - 1 - row:02d}{shown}"


def problems(side: int, number: int = 200) -> list[dict[str, str]]:
    lakes = enumerate(level(side, seed) for seed in range(number))
    return [{"question": f"lake {i}: {seen(lake, 0, 0)}", "answer": WON, "lake": " ".join(lake)} for i, lake in lakes]


class Lake:
    """The environment for `environment_factory`; `reset` reads the column `lake` of a row."""

    def __init__(self):
        self._lake, self._game, self._over = [], None, True

    def reset(self, lake: str = "", **row) -> None:
        import gymnasium

        self._lake = lake.split()
        self._over = not self._lake
        if self._lake:
            self._game = gymnasium.make("FrozenLake-v1", desc=self._lake, is_slippery=False, max_episode_steps=10_000)
            self._game.reset(seed=0)

    def move(self, direction: str) -> str:
        """
        Moves by one cell.

        Args:
            direction: L, D, R or U.

        Returns:
            What lies around the new place.
        """
        if direction not in tuple(STEPS):
            raise ValueError(f"the direction is {direction!r}: use L, D, R or U")
        if self._over:
            raise ValueError("the game is over")
        place, _, self._over, _, _ = self._game.step(list(STEPS).index(direction))
        return seen(self._lake, *divmod(int(place), len(self._lake)))


def won(completions, **kwargs) -> list[float]:
    """One reward at the end: 1 if the goal was reached."""
    return [float(any(message.get("content") == WON for message in turns)) for turns in completions]


def progress(completions, question, **kwargs) -> list[list[float]]:
    """A reward per turn: the share of the way that its move gained (1 in total at the goal), or −1 for a hole."""
    return [_progress(turns, asked.split(": ")[-1]) for turns, asked in zip(completions, question, strict=True)]


def _progress(messages: list[dict], first: str) -> list[float]:
    way = left = _distance(first)
    rewards = []
    for message in messages:
        if message["role"] == "assistant":
            rewards.append(0.0)
        elif message["content"] == LOST:
            rewards[-1] -= 1
        elif message["content"] == WON or message["content"][:4].isdigit():
            now = 0 if message["content"] == WON else _distance(message["content"])
            rewards[-1] += (left - now) / way
            left = now
    return rewards


def _distance(shown: str) -> int:
    return int(shown[:2]) + int(shown[2:4])


def demonstrations(size: int, turns: int) -> list[list[tuple[str, bool]]]:
    rng, side = random.Random(0), SIDES[turns]
    tempting = sum(_tempting(level(side, seed), rng) for seed in range(200)) / 200
    slip = 1 - RIGHT ** (1 / tempting)
    return [_demonstration(level(side, rng.randrange(10**6)), slip, 2 * turns, rng) for _ in range(size)]


def _tempting(lake: list[str], rng: random.Random) -> int:
    """The number of turns of a game with a hole below or to the right."""
    row = column = found = 0
    while lake[row][column] != "G":
        ahead = around(lake, row, column, "DR")
        found += "H" in ahead.values()
        rows, columns = STEPS[rng.choice([move for move, cell in ahead.items() if cell != "H"])]
        row, column = row + rows, column + columns
    return found


def _demonstration(lake: list[str], slip: float, limit: int, rng: random.Random) -> list[tuple[str, bool]]:
    row = column = 0
    segments = [(seen(lake, 0, 0) + ">", False)]
    for _ in range(limit):
        if lake[row][column] in "GH":
            return [*segments, ("=<eos>", True)]
        ahead = around(lake, row, column, "DR")
        holes, ice = ([move for move, cell in ahead.items() if (cell == "H") == hole] for hole in (True, False))
        back = [move for move, cell in around(lake, row, column, "LU").items() if cell != "H"]
        move = rng.choice(ice)
        if holes and rng.random() < slip:
            move = rng.choice(holes)
        elif back and rng.random() < WANDERS:
            move = rng.choice(back)
        row, column = row + STEPS[move][0], column + STEPS[move][1]
        segments += [(f"[{move}]<eos>", True), (f"{{{seen(lake, row, column)}}}>", False)]
    return segments[:-1]
