"""Who runs which point: claims, attempts and leases, on the journal that a sweep keeps by default."""

import collections
import concurrent.futures
import signal
import subprocess
import sys
import time

import pytest

from flaxformer_lite.sweep import study as study_lib
from flaxformer_lite.sweep.study import JOURNAL, Study, importances

POINTS = [{"model.num_heads": heads} for heads in (1, 2, 4)]


@pytest.fixture
def open_study(tmp_path):
    opened = []

    def open_one(**options):
        options = {"name": "s", "points": len(POINTS), **options}
        opened.append(Study(tmp_path, **options))
        return opened[-1]

    yield open_one
    for study in opened:
        study.close()


def states(study):
    return {number: state for number, (state, _) in study.states().items()}


def test_each_point_is_handed_out_once_and_its_end_is_known_to_all(open_study):
    first, second = open_study(), open_study()
    first.add(POINTS)
    second.add(POINTS)  # as every worker does that starts
    one, two, three = first.claim(), second.claim(), first.claim()
    assert [each.point for each in (one, two, three)] == [0, 1, 2]
    assert second.claim() is None and first.claim() is None
    first.finish(one, "complete", 3.0)
    second.finish(two, "failed", reason="no memory")
    assert first.states() == second.states() == {0: ("complete", ""), 1: ("failed", "no memory"), 2: ("running", "")}
    assert not first.ended()
    first.finish(three, "pruned")
    assert second.ended()


def test_what_was_asked_for_beyond_the_last_point_is_no_point_of_a_larger_sweep(open_study, monkeypatch):
    def claimed(study):
        claims = []
        while (claim := study.claim()) is not None:
            claim.trial.suggest_float("rate", 0.0, 1.0)
            study.keep_params(claim)
            claims.append(claim.point)
            study.finish(claim, "complete", 1.0)
        return claims

    random = {"sampler": "random", "points": 2}
    study, late = open_study(**random), open_study(**random)
    assert claimed(study) == [0, 1] and study.ended()
    looks, now = [[]], late._trials  # another worker had looked before that, and asks only now
    monkeypatch.setattr(late, "_reclaim", lambda: None)
    monkeypatch.setattr(late, "_trials", lambda: looks.pop() if looks else now())
    assert late.claim() is None and len(now()) == 3 and study.ended()
    assert claimed(open_study(**{**random, "points": 4})) == [2, 3]


def test_a_point_that_is_let_go_is_another_workers_with_its_parameters(open_study):
    first, second = open_study(), open_study()
    first.add(POINTS)
    claims = [first.claim() for _ in POINTS]
    claims[1].trial.suggest_categorical("model.num_heads", [1, 2, 4])
    first.keep_params(claims[1])
    first.release(claims[1])
    again = second.claim()
    assert again.point == 1 and again.trial.suggest_categorical("model.num_heads", [1, 2, 4]) == 2
    assert not first.ended() and states(first)[1] == "running"


def test_a_worker_whose_process_is_gone_loses_its_point_at_once(open_study, tmp_path):
    script = (
        "import sys, time, pathlib\nfrom flaxformer_lite.sweep.study import Study\n"
        f"study = Study(pathlib.Path({str(tmp_path)!r}), name='s', points=3)\n"
        "study.add([{'model.num_heads': 1}] * 3)\nprint(study.claim().point, flush=True)\ntime.sleep(600)"
    )
    other = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"0\n"
        study = open_study()
        assert [study.claim().point, study.claim().point, study.claim()] == [1, 2, None]
        other.send_signal(signal.SIGKILL)
        other.wait()
        assert study.claim().point == 0
    finally:
        other.kill()
        other.communicate()


def test_a_lease_that_is_renewed_holds_and_one_that_is_not_runs_out(open_study, monkeypatch):
    """The clock is the observer's own, so that hosts may disagree about the time."""
    monkeypatch.setattr(study_lib, "LEASE", 1.0)
    monkeypatch.setattr(study_lib, "RENEWAL", 0.2)
    first, second = open_study(), open_study()
    first.add(POINTS[:1])
    held = first.claim()
    end = time.monotonic() + 2.5
    while time.monotonic() < end:
        assert first.renew(held) and second.claim() is None
        time.sleep(0.05)
    deadline = time.monotonic() + 10
    while (taken := second.claim()) is None:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert taken.point == 0
    assert not first.renew(held), "the first worker does not learn that its point is another's"
    first.finish(held, "complete", 1.0)  # too late, and ignored
    assert states(second) == {0: "running"}


def test_of_two_workers_that_take_up_the_same_point_one_gets_it(open_study):
    first, second, third = open_study(), open_study(), open_study()
    first.add(POINTS[:1])
    held = first.claim()
    stale = third._latest()[0]
    second._retry(stale)
    third._retry(stale)  # has not seen what the second did
    assert second.claim().point == held.point == 0
    assert third.claim() is None
    assert states(first) == {0: "running"}


def test_a_point_whose_claim_was_cut_short_is_not_lost(open_study, monkeypatch):
    study = open_study()
    study.add(POINTS)
    with monkeypatch.context() as cut:
        cut.setattr(study, "_is_taken", lambda *_: (_ for _ in ()).throw(OSError("the storage is away")))
        with pytest.raises(OSError):
            study.claim()
    assert sorted([study.claim().point, study.claim().point, study.claim().point]) == [0, 1, 2]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_point_that_was_let_go_before_it_was_asked_for_all_gets_what_it_would_have_had(tmp_path, sampler):
    def run(folder, *, cut_short):
        folder.mkdir()
        study, found = Study(folder, name="s", points=14, sampler=sampler), []
        while claimed := study.claim():
            rate = claimed.trial.suggest_float("rate", 0, 1)
            if claimed.point in cut_short:
                cut_short.remove(claimed.point)
                study.release(claimed)  # before the second question
                continue
            found.append((claimed.point, rate, claimed.trial.suggest_float("drop", 0, 1)))
            study.keep_params(claimed)
            study.finish(claimed, "complete", rate)
        study.close()
        return sorted(found)

    assert run(tmp_path / "b", cut_short=[0, 3, 12]) == run(tmp_path / "a", cut_short=[])


def test_what_is_told_of_a_point_that_has_become_anothers_is_ignored(open_study):
    first, second = open_study(), open_study()
    first.add(POINTS[:1])
    held = first.claim()
    second._retry(second._latest()[0])  # as if the lease had run out
    taken = second.claim()
    assert not first.report(held, 10, 1.0)
    first.finish(held, "failed", reason="late")
    held.renewed = -study_lib.RENEWAL
    assert not first.renew(held)
    second.finish(taken, "complete", 2.0)
    assert first.states() == {0: ("complete", "")}


def test_a_study_of_the_same_name_that_belongs_to_another_sweep_is_refused(open_study):
    open_study(sweep="one").add(POINTS)
    open_study(sweep="one")
    with pytest.raises(ValueError, match=r"--study=s: in .* it belongs to another sweep; choose another name"):
        open_study(sweep="two")


def test_a_lock_of_another_machine_says_nothing(open_study, monkeypatch):
    """Its files may be seen here, and its locks not."""
    first, second = open_study(), open_study()
    first.add(POINTS[:1])
    monkeypatch.setattr(study_lib, "MACHINE", "elsewhere")
    first.claim()
    first.close()
    monkeypatch.setattr(study_lib, "MACHINE", "here")
    second._lock_file(first._owner).touch()
    assert second.claim() is None
    monkeypatch.setattr(study_lib, "MACHINE", "elsewhere")
    assert second.claim().point == 0


def test_a_crowd_of_workers_runs_each_suggested_point_once(open_study):
    studies = [open_study(sampler="random", points=40) for _ in range(4)]

    def work(study):
        points = []
        while claimed := study.claim():
            claimed.trial.suggest_float("x", 0, 1)
            points.append(claimed.point)
            study.finish(claimed, "complete", float(claimed.point))
        return points

    with concurrent.futures.ThreadPoolExecutor() as pool:
        done = collections.Counter(point for points in pool.map(work, studies) for point in points)
    assert done == collections.Counter(range(40))
    assert all(study.ended() for study in studies)


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_study_that_is_opened_anew_for_each_point_suggests_what_one_does_that_never_closed(tmp_path, sampler):
    def suggest(study):
        claimed = study.claim()
        x = claimed.trial.suggest_float("x", 0, 1)
        study.finish(claimed, "complete", (x - 0.3) ** 2)
        return x

    def open_one(folder, **options):
        folder.mkdir(exist_ok=True)
        return Study(folder, name="s", points=15, sampler=sampler, **options)

    def all_at_once(folder, **options):
        study = open_one(folder, **options)
        found = [suggest(study) for _ in range(15)]
        study.close()
        return found

    one_by_one = []
    for _ in range(15):
        study = open_one(tmp_path / "b")
        one_by_one.append(suggest(study))
        study.close()
    assert all_at_once(tmp_path / "a") == one_by_one
    assert len(set(one_by_one)) == 15 and all_at_once(tmp_path / "c", seed=1) != one_by_one


def test_a_journal_with_half_a_line_at_its_end_is_mended_by_the_next_worker(open_study, tmp_path):
    first = open_study()
    first.add(POINTS)
    first.finish(first.claim(), "complete", 2.0)
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"op_code": 8, "worker_id": "gone", "tri')  # killed while it wrote
    second = open_study()
    assert second.claim().point == 1
    assert journal.read_bytes().startswith(whole) and b"gone" not in journal.read_bytes()
    assert states(first) == {0: "complete", 1: "running", 2: "waiting"}


def test_points_that_failed_can_be_tried_once_more(open_study):
    study = open_study()
    study.add(POINTS)
    study.finish(study.claim(), "failed", reason="no memory")
    study.finish(study.claim(), "complete", 1.0)
    assert study.failed() == [0]
    study.retry(0)
    assert [study.claim().point, study.claim().point, study.claim()] == [2, 0, None]
    assert study.failed() == []


def test_a_point_that_is_worse_than_half_of_the_others_has_no_hope(open_study):
    study = open_study(pruner="median", points=6, sampler="random")
    for value in (1.0, 2.0, 3.0, 4.0):
        good = study.claim()
        assert not study.report(good, 100, value)
        study.finish(good, "complete", value)
    worse, better = study.claim(), study.claim()
    assert study.report(worse, 100, 3.5) and not study.report(better, 100, 1.5)


def test_halving_lets_go_on_whoever_is_among_the_best_third_of_those_that_have_come_so_far(open_study):
    study = open_study(pruner="halving", points=9, sampler="random", first_step=100)
    claims = [study.claim() for _ in range(9)]
    values = [5.0, 6.0, 4.0, 4.5, 7.0, 4.2, 3.0, 9.0, 8.0]
    pruned = [study.report(each, 100, value) for each, value in zip(claims, values, strict=True)]
    assert pruned == [False, True, False, True, True, False, False, True, True]


def test_a_storage_that_cannot_be_used_is_named(open_study):
    with pytest.raises(ValueError, match="--storage=nosuchdatabase://here: cannot be used: "):
        open_study(storage="nosuchdatabase://here")


def test_the_parameter_that_matters_is_found_to_matter():
    points = [
        ({"heads": heads, "rate": rate, "same": 1}, abs(rate - 1e-3) + heads * 1e-9)
        for heads in (1, 2, 4, 8)
        for rate in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    ]
    shares = importances(points, minimize=True)
    assert shares.keys() == {"heads", "rate"} and shares["rate"] > shares["heads"]
