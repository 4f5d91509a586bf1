"""pytest examples/fastapi"""

from app import app
from fastapi.testclient import TestClient
from tidegate import ManualClock

client = TestClient(app)


def test_the_sixth_letter_within_an_hour_is_refused(tidegate_clock: ManualClock) -> None:
    answers = [client.post("/password/reset") for _ in range(6)]
    assert [answer.status_code for answer in answers] == [200] * 5 + [429]
    assert answers[5].headers["Retry-After"] == "3600"
    tidegate_clock.advance(3600)
    assert client.post("/password/reset").status_code == 200


def test_the_twenty_first_letter_within_a_day_is_refused(tidegate_clock: ManualClock) -> None:
    for _ in range(4):
        assert [client.post("/password/reset").status_code for _ in range(5)] == [200] * 5
        tidegate_clock.advance(3600)
    assert client.post("/password/reset").status_code == 429


def test_searches_tell_how_many_are_left() -> None:
    assert client.get("/search?q=word").headers["X-RateLimit-Remaining"] == "99"


def test_where_limits_are_of_no_interest_they_can_be_switched_off(tidegate_off: None) -> None:
    assert {client.post("/password/reset").status_code for _ in range(50)} == {200}
