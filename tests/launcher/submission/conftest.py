"""Runs with a fake trainer."""

from tests.fake_runs import make_run

__all__ = ["make_run"]
