"""How fast the engine computes prompts, as its steps say."""

from __future__ import annotations

from kvservice.connector.scheduler.prefill_speed import StepTimes


def test_step_planned_ahead_is_timed_from_the_end_of_the_other() -> None:
    """A prompt that is planned while a token is decoded takes as long as it takes alone."""
    times = StepTimes(ahead=1)
    times.begin(1, 10.0)
    times.begin(2000, 10.25)
    assert times.end(10.5) == (1, 0.5)
    times.begin(1, 10.75)
    assert times.end(12.5) == (2000, 2.0)
    assert times.end(12.75) == (1, 0.25)
    assert times.end(13.0) is None


def test_step_after_a_pause_is_timed_from_its_plan() -> None:
    times = StepTimes()
    times.begin(100, 10.0)
    assert times.end(11.0) == (100, 1.0)
    times.begin(200, 50.0)
    assert times.end(51.5) == (200, 1.5)


def test_step_whose_end_nobody_hears_is_left_out() -> None:
    alone, ahead = StepTimes(), StepTimes(ahead=1)
    for times in (alone, ahead):
        times.begin(0, 10.0)
        times.begin(300, 11.0)
    ahead.begin(1, 11.5)
    assert alone.end(12.0) == ahead.end(12.0) == (300, 1.0)
