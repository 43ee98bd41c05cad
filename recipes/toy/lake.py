"""
A frozen lake as text: a game of one move per turn, whose number of turns is a dial. The lakes are gymnasium's.

The policy sees how far right and down the goal is, and what lies left, below, right and above: `0503..OX`, `O` a hole,
`X` beyond the shore. It calls `move` with one of L, D, R and U, `[D]`, and sees the same of the place it gets to, or
`*` at the goal and `O` in a hole. Where ice lies both below and to the right, either will do: a free choice. The
pupils they learn from step into holes so often that 60 % of the games are won at every size, and wander without harm.
"""

import random


ALPHABET = "0123456789.O#X*[]{}LDRU>=?"
STEPS = {"L": (0, -1), "D": (1, 0), "R": (0, 1), "U": (-1, 0)}  # in gymnasium's order: rows and columns
WON, LOST = "*", "O"
HOLES = 0.25  # share of the cells
WANDERS = 0.05  # share of the turns
RIGHT = 0.6
# Cells along a side of the lake, for about so many turns of a game that is won
SIDES = {6: 4, 14: 8, 30: 16, 46: 24}


def level(side: int, seed: int) -> list[str]:
    """Rows of a lake, in gymnasium's letters, on which steps right and down never come to a dead end."""
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
    """The cells that moves lead to, but for those beyond the shore."""
    places = {move: (row + STEPS[move][0], column + STEPS[move][1]) for move in moves}
    return {move: lake[r][c] for move, (r, c) in places.items() if 0 <= r < len(lake) and 0 <= c < len(lake)}


def seen(lake: list[str], row: int, column: int) -> str:
    """What the policy is shown there."""
    if lake[row][column] in "GH":
        return WON if lake[row][column] == "G" else LOST
    cells = around(lake, row, column)
    shown = "".join({"H": LOST}.get(cells[move], ".") if move in cells else "X" for move in STEPS)
    return f"{len(lake) - 1 - column:02d}{len(lake) - 1 - row:02d}{shown}"


def problems(side: int, number: int = 200) -> list[dict[str, str]]:
    lakes = enumerate(level(side, seed) for seed in range(number))
    return [{"question": f"lake {i}: {seen(lake, 0, 0)}", "answer": WON, "lake": " ".join(lake)} for i, lake in lakes]


class Lake:
    """The environment, for `environment_factory`; its rows hold the column `lake`."""

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
            raise ValueError(f"the direction is {direction!r}, none of L, D, R and U")
        if self._over:
            raise ValueError("the game is over")
        place, _, self._over, _, _ = self._game.step(list(STEPS).index(direction))
        return seen(self._lake, *divmod(int(place), len(self._lake)))


def won(completions, **kwargs) -> list[float]:
    """The reward at the end: 1 where the goal was reached."""
    return [float(any(message.get("content") == WON for message in turns)) for turns in completions]


def progress(completions, question, **kwargs) -> list[list[float]]:
    """A reward per turn: the share of the way that its move came nearer, in all 1 at the goal; −1 in a hole."""
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
    """How many turns of a game have a hole below or to the right."""
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
