"""What a step costs. Here: a table on the screen, printed row by row as they come, and kept."""

import json
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Table:
    """Prints its head and every row that is added; `rows` has them all as text, the head first."""

    def __init__(self, *head: object, width: int = 14, first: int = 26):
        self.width, self.first = width, first
        self.rows: list[list[str]] = []
        self.add(*head)

    def add(self, *cells: object) -> None:
        head, *others = row = [str(cell) for cell in cells]
        self.rows.append(row)
        print(head.ljust(self.first) + "".join(cell.rjust(self.width) for cell in others), flush=True)

    def save(self, path: str, note: str, **more: object) -> None:
        """As JSON, beside a note and whatever else a report may want."""
        content = {"note": note, "table": self.rows, **more}
        Path(path).write_text(json.dumps(content, indent=2, ensure_ascii=False))


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peak_and_kept(function, *inputs) -> tuple[int, int]:
    """Bytes that `function` allocates at most at a time, and those that are left while its result is kept."""
    if any(values.is_cuda for values in inputs):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = function(*inputs)
        kept = torch.cuda.memory_allocated() - before
        del result
        return torch.cuda.max_memory_allocated() - before, kept
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = function(*inputs)
    del result  # after the profile, in which it counts as kept
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak, live
