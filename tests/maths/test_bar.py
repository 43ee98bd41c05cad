"""What a comparison says of its duration: before it begins, and while it runs."""

import pytest

from trl_otb.comparison import bar as module
from trl_otb.comparison.bar import Bar, announcement, duration


@pytest.fixture
def clock(monkeypatch):
    """A clock that only the test moves."""

    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

        def wait(self, seconds):
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def test_time_left_knows_that_measuring_is_slower(clock):
    """100 completions are sampled in a second each, and 40 of them measured in 10 s each: 500 s in all."""
    bar = Bar(to_sample=100, to_measure=40, silent=True)
    assert bar.seconds_left is None
    with bar.phase("sample"):
        clock.wait(20)
        bar.advance(20)
        assert bar.seconds_left is None  # how long measuring takes is not known, and nothing is said
        clock.wait(13)
        bar.expect("measure", 11.0)  # from a single one, whose time is no sampling's
        assert bar.seconds_left == pytest.approx(80 * 1.0 + 40 * 11.0)
        clock.wait(40)
        bar.advance(40)
    assert bar.seconds_left == pytest.approx(40 * 1.0 + 40 * 11.0)
    clock.wait(5)  # between phases
    with bar.phase("measure"):
        clock.wait(8)
        bar.advance(1)
        clock.wait(12)
        bar.advance(1)
        assert bar.seconds_left == pytest.approx(40 * 1.0 + 38 * 10.0)
    with bar.phase("sample"):
        clock.wait(40)
        bar.advance(40)
    with bar.phase("measure"):
        clock.wait(380)
        bar.advance(50)  # a spare process repeats prompts
        assert bar.done == {"sample": 100, "measure": 40} and bar.seconds_left == 0


def test_what_will_be_done_is_said_before():
    said = announcement(10, 1152, 1024, 9, 128)
    assert said.startswith(
        "Comparing 10 baselines: samples 1,152 completions for baselines to learn from, and 1,024 to"
    )
    assert "as many as 17 steps of this run sample" in said and "takes 9 backward passes, 9,216 in all" in said
    assert announcement(3, 0, 64, 1, 128).startswith("Comparing 3 baselines: samples 64 to measure")
    assert [duration(x) for x in (40, 660, 9000)] == ["40 s", "11 min", "2.5 h"]
