"""What is said of a run that SLURM has: its files first, then squeue, then sacct; each asked once for a whole sweep."""

from __future__ import annotations

import json
import time

import pytest

from launcher import slurm, status, watch


@pytest.fixture
def on_slurm(make_run, fake_slurm):
    """`on_slurm(job_id, **status)`: the directory of a run that was submitted."""

    def make(job_id: str = "12", **state):
        path = make_run("fine", name="slurm").path
        log = {"log": str(path / "logs" / "slurm_12.log")}
        status.write_json(path / "job.json", {"cluster": "slurm", "job_id": job_id, "host": "login"} | log)
        status.write_json(path / "status.json", {"state": "queued", "step": 0, "steps": 2} | state)
        return path

    return make


@pytest.mark.parametrize(
    ("file", "says", "state", "more"),
    [
        ("queued", "PENDING|Priority|2026-12-02T08:00:00", "queued", {"waits": "Priority"}),
        ("queued", "PENDING|None|N/A", "queued", {"waits": "not looked at yet"}),
        ("queued", "CONFIGURING|None|N/A", "starting", {}),
        ("running", "RUNNING|None|2026-12-02T08:00:00", "running", {}),
        ("running", "COMPLETING|None|N/A", "running", {}),
        ("running", "NODE_FAIL|None|N/A", "failed", {"reason": "SLURM says NODE_FAIL"}),
        ("running", "TIMEOUT|TimeLimit|N/A", "failed", {"reason": "SLURM says TIMEOUT TimeLimit"}),
        ("running", "OUT_OF_MEMORY|OutOfMemory|N/A", "failed", {"reason": "SLURM says OUT_OF_MEMORY OutOfMemory"}),
        ("queued", "CANCELLED|None|N/A", "cancelled", {"reason": "cancelled by scancel"}),
        ("running", "PREEMPTED|None|N/A", "preempted", {"reason": "SLURM says PREEMPTED"}),
        ("running", "COMPLETED|None|N/A", "lost", {}),
        ("cancelled", "PENDING|BeginTime|N/A", "preempted", {"waits": "BeginTime"}),
        ("running", "PENDING|BeginTime|N/A", "preempted", {"waits": "BeginTime"}),  # its node has failed
        ("preempted", "RUNNING|None|N/A", "starting", {}),
        ("preempted", "COMPLETING|None|N/A", "preempted", {}),
        ("cancelled", "CANCELLED|None|N/A", "cancelled", {"reason": "as written"}),
        ("done", "RUNNING|None|N/A", "done", {}),
        ("failed", "PENDING|Priority|N/A", "failed", {"reason": "as written"}),
    ],
)
def test_state_from_file_and_queue(on_slurm, fake_slurm, file, says, state, more):
    final = {"error": "as written"} if file in ("cancelled", "failed") else {}
    run = on_slurm(state=file, **final)
    fake_slurm.says(f"12|{says}")
    now = status.describe(run)
    assert now["state"] == state and now.items() >= more.items()
    assert status.has_ended(now) == (state in status.FINAL and "waits" not in more)
    assert now.get("expected_start") == ("2026-12-02T08:00:00" if "Priority|2026" in says else None)
    if file in ("done", "failed"):
        assert not fake_slurm.calls("squeue")  # the files said it


@pytest.mark.parametrize(
    ("says", "state", "ended"),
    [
        ("RUNNING", "starting", False),
        ("COMPLETING", "preempted", False),
        ("PENDING", "preempted", False),
        ("CANCELLED", "cancelled", True),
        ("GONE", "preempted", True),
    ],
)
def test_a_run_that_asked_to_be_started_again_has_not_ended(on_slurm, fake_slurm, says, state, ended):
    run = on_slurm(state="preempted", error="as written", requeued=True)
    fake_slurm.says(*[] if says == "GONE" else [f"12|{says}|None|N/A"])
    now = status.describe(run)
    assert (now["state"], status.has_ended(now)) == (state, ended)
    assert not ended or ("before SLURM had started it again" in now["reason"]) == (says == "CANCELLED")


def test_a_run_that_slurm_has_forgotten_is_lost_unless_the_database_knows(on_slurm, fake_slurm):
    run = on_slurm("12_3", state="running", heartbeat=time.time() - 900)
    fake_slurm.says("99|RUNNING|None|N/A")
    now = status.describe(run)
    assert now["state"] == "lost" and "last heartbeat 900 s ago" in now["reason"]
    (fake_slurm.path / "accounting").write_text("12_3|CANCELLED by 0\n")
    assert status.describe(run)["state"] == "cancelled"
    (fake_slurm.path / "accounting").write_text("12_3|NODE_FAIL\n")
    assert status.describe(run)["reason"] == "SLURM says NODE_FAIL"


def test_an_answer_from_before_its_start_does_not_make_a_run_preempted(on_slurm, fake_slurm):
    fake_slurm.says("12|PENDING|None|N/A")
    assert status.describe(on_slurm(state="starting", heartbeat=time.time() - 5))["state"] == "starting"
    assert status.describe(on_slurm(state="running", heartbeat=time.time() - 90))["state"] == "preempted"


def test_without_slurm_the_heartbeat_is_all_there_is(on_slurm, fake_slurm):
    fake_slurm.says()
    now = status.describe(on_slurm(state="running", heartbeat=time.time() - 900))
    assert now["state"] == "running" and "no sign of life; last heartbeat 900 s ago" in now["reason"]
    assert "reason" not in status.describe(on_slurm(state="running", heartbeat=time.time() - 9))


def test_a_failure_file_wins_over_slurms_word_and_names_the_line(on_slurm, fake_slurm):
    run = on_slurm(state="running")
    frames = (
        '  File "/code/abc/trainer/step.py", line 88, in step\n  File "/v/site-packages/torch/x.py", line 3, in y\n'
    )
    failure = {
        "rank": 5,
        "host": "n1",
        "error": "ValueError: boom",
        "traceback": f"Traceback:\n{frames}ValueError: boom",
    }
    (run / "failure-5.json").write_text(json.dumps(failure))
    fake_slurm.says("12|FAILED|NonZeroExitCode|N/A")
    now = status.describe(run)
    assert (now["state"], now["rank"]) == ("failed", 5)
    assert now["reason"] == "rank 5 on n1: ValueError: boom (trainer/step.py:88)"


def test_a_sweep_is_asked_about_once(on_slurm, fake_slurm):
    runs = [on_slurm(f"12_{index}") for index in range(5)] + [on_slurm("13"), on_slurm("14", state="done")]
    fake_slurm.says(*(f"12_{index}|PENDING|Priority|N/A" for index in range(5)), "13|RUNNING|None|N/A")
    states = [now["state"] for now in status.describe_all(runs)]
    assert states == ["queued"] * 5 + ["starting", "done"]
    (call,) = fake_slurm.calls("squeue")
    assert "--jobs=12,13" in call
    fake_slurm.says("12_0|PENDING|Priority|N/A", "12_4|PENDING|Priority|N/A")
    words = status.cancel(runs)
    assert words[0] == words[4] == "scancel 12_0 12_4 sent" and words[6] == "nothing to cancel, it is done"
    assert fake_slurm.read("cancelled") == "12_0 12_4\n"
    fake_slurm.says("12_0|CANCELLED|None|N/A")
    assert status.describe(runs[0])["reason"] == "cancelled on request"
    assert status.describe(runs[4])["state"] == "cancelled"  # SLURM has forgotten it, the marker has not


def test_answers_are_kept_so_that_followers_do_not_load_the_controller(on_slurm, fake_slurm):
    run, queue = on_slurm(), slurm.Queue(every_s=60.0)
    fake_slurm.says("12|PENDING|Priority|N/A")
    for _ in range(5):
        assert status.describe(run, queue)["state"] == "queued"
    assert len(fake_slurm.calls("squeue")) == 1


def test_many_jobs_are_asked_about_in_few_calls(fake_slurm):
    fake_slurm.says("1|RUNNING|None|N/A", "999|RUNNING|None|N/A")
    found = slurm.ask([str(number) for number in range(1, 1000)])
    assert len(fake_slurm.calls("squeue")) == 3 and len(found) == 999
    assert found["999"].state == "RUNNING" and found["500"].state == slurm.GONE


def test_a_line_of_progress_says_why_a_run_waits_and_how_long_the_rest_takes(on_slurm, fake_slurm):
    run = on_slurm()
    fake_slurm.says("12|PENDING|Resources|2026-12-02T08:00:00")
    assert watch.progress(run, status.describe(run)) == "queued (Resources, expected start 2026-12-02 08:00:00)"
    fake_slurm.says("12|RUNNING|None|N/A")
    rows = [{"step": step, "loss": 2.0, "step_time_s": 100.0, "mfu": 0.41} for step in (1, 2)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status.write_json(run / "status.json", {"state": "running", "step": 2, "steps": 50, "mfu": 0.41})
    now = status.describe(run)
    assert now["time_left_s"] == 4800.0
    assert watch.progress(run, now) == "step 2/50  loss 2.000  MFU 41.0 %  1:20:00 left"
