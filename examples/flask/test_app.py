"""pytest examples/flask"""

from app import app
from tidegate import ManualClock

client = app.test_client()


def test_the_sixth_letter_within_an_hour_is_refused(tidegate_clock: ManualClock) -> None:
    answers = [client.post("/password/reset") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert answers[5].headers["Retry-After"] == "3600"
    tidegate_clock.advance(3600)
    assert client.post("/password/reset").status_code == 200


def test_unknown_urls_count_for_the_whole_application() -> None:
    assert [client.get("/nowhere").status_code for _ in range(101)] == [404] * 100 + [429]


def test_the_health_check_is_left_out() -> None:
    answers = [client.get("/health") for _ in range(150)]
    assert {answer.status_code for answer in answers} == {200}
    assert "X-RateLimit-Limit" not in answers[0].headers


def test_where_limits_are_of_no_interest_they_can_be_switched_off(tidegate_off: None) -> None:
    assert {client.post("/password/reset").status_code for _ in range(50)} == {200}
