"""The table of a result shows every number that is known and every reason that is given."""

from launcher.table import result_table

RESULT = {
    "status": "done",
    "steps": 20,
    "step_time_s": {"median": 4.39, "p10": 4.3, "p90": 4.5, "n": 10},
    "tokens_per_s_per_gpu": 3732.0,
    "mfu": 0.4658,
    "loss": {"first": 12.1, "last": 11.9},
    "parameters": {"total": 235_093_634_560, "active": 22_187_000_000},
    "routing": "balanced",
    "notes": {"hfu": "no peak", "mfu_causal": "no peak", "step_time_s": "steps 11 to 20"},
}


def test_numbers_are_shown_with_their_names():
    text = result_table(RESULT)
    for part in ("46.58%", "median 4.39", "3,732", "235,093,634,560", "first 12.1, last 11.9", "balanced"):
        assert part in text


def test_equal_remarks_are_told_once():
    text = result_table(RESULT)
    assert text.count("no peak") == 1 and "hfu, mfu_causal: no peak" in text and "steps 11 to 20" in text


def test_what_is_not_known_is_not_shown():
    assert result_table({"status": "failed", "mfu": None}).splitlines() == ["status                failed"]
    assert "notes" not in result_table({"status": "done", "notes": {}})
