"""
A repair of TRL: a rollout worker that stops although its child has died.

It can be removed once the test `test_worker_stops_with_its_child` passes without it.
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
