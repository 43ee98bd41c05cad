import numpy
from torch.profiler import ProfilerActivity, profile


def allocated(function, *args) -> numpy.ndarray:
    """Bytes that torch has allocated on the CPU after each event of a call; the last with its result still kept."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        result = function(*args)
    del result  # after the profile, so that it counts as kept
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    return numpy.cumsum([event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())])
