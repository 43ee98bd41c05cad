"""
Repairs of TRL: a rollout worker that stops although its child has died, and that says so if the child was killed.

They can be removed once the tests `test_worker_stops_with_its_child` and `test_killed_child_is_named` pass without
them.
"""

from typing import Any


def stop_living(worker: Any) -> None:
    """TRL's `stop`, which never returns if the child has died: `Event.set` waits for each process that waits for it."""
    child = worker._process
    if child is not None and worker._failed_event.is_set():
        child.join(timeout=10)
    if child is not None and not child.is_alive():
        worker._process = None
    type(worker).stop(worker)


def check_living(worker: Any, stale_after_s: float) -> None:
    """TRL's `check_health`, which waits for `stale_after_s` where the child was killed, and calls it hung."""
    child = worker._process
    if child is not None and not child.is_alive() and not worker._failed_event.is_set():
        raise RuntimeError(
            f"The rollout worker's process has died, with exit code {child.exitcode}, and raised no error: it was "
            "killed (-9: often for its memory, see `dmesg`), or a reward function ended the program."
        )
    type(worker).check_health(worker, stale_after_s)
