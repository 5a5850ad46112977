"""What one more token in a step costs."""

import pytest

from foreword.telemetry.pace import Pace


def test_nothing_is_known_before_the_first_step() -> None:
    assert Pace().token_s == 0


def test_steps_of_one_size_cost_by_the_token() -> None:
    pace = Pace()
    pace.add(1000, 2.0)
    pace.add(1000, 2.2)
    assert pace.token_s == pytest.approx(0.0021)


def test_a_thousand_warm_requests_do_not_make_tokens_dearer() -> None:
    pace = Pace()
    for _ in range(3):
        pace.add(1000, 0.020 + 1000 * 0.001)
    for _ in range(1000):
        pace.add(1, 0.021)
    assert pace.token_s == pytest.approx(0.001)


def test_noise_never_makes_a_saving_a_loss() -> None:
    pace = Pace()
    pace.add(1, 5.0)
    pace.add(100, 0.1)
    assert pace.token_s == 0
