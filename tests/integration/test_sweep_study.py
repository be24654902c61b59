"""The assignment of points to workers: claims, attempts and leases, on a journal file."""

import collections
import concurrent.futures
import signal
import subprocess
import sys
import types

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from flaxformer_lite.sweep import attempts, study_storage
from flaxformer_lite.sweep import study as study_lib
from flaxformer_lite.sweep.importance import importances
from flaxformer_lite.sweep.study import Study, StudyOptions
from flaxformer_lite.sweep.study_storage import JOURNAL, JournalLock

POINTS = [{"model.num_heads": heads} for heads in (1, 2, 4)]


@pytest.fixture
def open_study(tmp_path):
    opened = []

    def open_one(**options):
        options = {"name": "s", "points": len(POINTS), **options}
        opened.append(Study(tmp_path, StudyOptions(**options)))
        return opened[-1]

    yield open_one
    for study in opened:
        study.close()


@pytest.fixture
def clock(monkeypatch):
    """The time that studies see, in a list."""
    now = [1000.0]
    monkeypatch.setattr(study_lib, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    return now


def optuna_study(folder):
    """The study in a folder's journal, as Optuna's own object."""
    journal = folder / JOURNAL
    storage = JournalStorage(JournalFileBackend(str(journal), JournalLock(journal)))
    return optuna.load_study(study_name="s", storage=storage)


def states(study):
    return {number: state for number, (state, _) in study.states().items()}


def test_each_point_is_claimed_once_and_all_workers_see_its_final_state(open_study):
    first, second = open_study(), open_study()
    first.add(POINTS)
    second.add(POINTS)  # as every worker does at its start
    one, two, three = first.claim(), second.claim(), first.claim()
    assert [each.point for each in (one, two, three)] == [0, 1, 2]
    assert second.claim() is None and first.claim() is None
    first.finish(one, "complete", 3.0)
    second.finish(two, "failed", reason="no memory")
    assert (
        first.states()
        == second.states()
        == {0: ("complete", ""), 1: ("failed", "no memory"), 2: ("running", "")}
    )
    assert not first.ended()
    first.finish(three, "pruned")
    assert second.ended()


def test_a_surplus_trial_is_no_point_of_a_larger_sweep(open_study, monkeypatch, tmp_path):
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
    # Another worker read the trials before that, and requests a trial only now.
    outdated, get_trials = [[], []], optuna.Study.get_trials
    monkeypatch.setattr(
        optuna.Study,
        "get_trials",
        lambda *args, **options: outdated.pop() if outdated else get_trials(*args, **options),
    )
    assert late.claim() is None and study.ended()
    assert len(optuna_study(tmp_path).trials) == 3
    assert claimed(open_study(**{**random, "points": 4})) == [2, 3]


def test_a_released_point_goes_to_another_worker_with_its_parameters(open_study):
    first, second = open_study(), open_study()
    first.add(POINTS)
    claims = [first.claim() for _ in POINTS]
    claims[1].trial.suggest_categorical("model.num_heads", [1, 2, 4])
    first.keep_params(claims[1])
    first.release(claims[1])
    again = second.claim()
    assert again.point == 1 and again.trial.suggest_categorical("model.num_heads", [1, 2, 4]) == 2
    assert not first.ended() and states(first)[1] == "running"


def test_a_worker_whose_process_died_loses_its_point_at_once(open_study, tmp_path):
    script = (
        "import sys, time, pathlib\nfrom flaxformer_lite.sweep.study import Study, StudyOptions\n"
        f"study = Study(pathlib.Path({str(tmp_path)!r}), StudyOptions('s', points=3))\n"
        "study.add([{'model.num_heads': 1}] * 3)\nprint(study.claim().point, "
        "flush=True)\ntime.sleep(600)"
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


def test_a_renewed_lease_holds_and_another_one_expires(open_study, clock):
    """Each observer uses its own clock, as hosts may disagree about the time."""
    first, second = open_study(), open_study()
    first.add(POINTS[:1])
    held = first.claim()
    for _ in range(20):
        clock[0] += 0.4 * study_lib.LEASE
        assert first.renew(held) and second.claim() is None
    clock[0] += 0.9 * study_lib.LEASE
    assert second.claim() is None
    clock[0] += 0.2 * study_lib.LEASE
    assert second.claim().point == 0
    assert not first.renew(held), "the first worker still believes that it holds the point"
    first.finish(held, "complete", 1.0)  # too late, and ignored
    assert states(second) == {0: "running"}


def test_a_lease_is_written_only_when_its_renewal_is_due(open_study, clock, tmp_path):
    study = open_study()
    study.add(POINTS[:1])
    held = study.claim()
    sizes = []
    for _ in range(3):
        clock[0] += 0.6 * study_lib.RENEWAL
        assert study.renew(held)
        sizes.append((tmp_path / JOURNAL).stat().st_size)
    assert sizes[0] < sizes[1] == sizes[2]


def test_of_two_workers_that_enqueue_the_same_attempt_one_gets_it(open_study, tmp_path):
    first, second, third = open_study(), open_study(), open_study()
    first.add(POINTS[:1])
    held = first.claim()
    shared = optuna_study(tmp_path)
    outdated = attempts.latest(shared.get_trials(), len(POINTS))[0]
    second.retry(0)
    attempts.enqueue_next(shared, outdated)  # by a worker that has not seen that
    assert second.claim().point == held.point == 0
    assert third.claim() is None
    assert states(first) == {0: "running"}


def test_an_error_during_a_claim_loses_no_point(open_study, monkeypatch):
    study = open_study()
    study.add(POINTS)
    with monkeypatch.context() as cut:
        error = OSError("the storage is unavailable")
        cut.setattr(attempts, "is_duplicate", lambda *_: (_ for _ in ()).throw(error))
        with pytest.raises(OSError):
            study.claim()
    assert sorted([study.claim().point, study.claim().point, study.claim().point]) == [0, 1, 2]


@pytest.mark.parametrize("sampler", ["random", "tpe"])
def test_a_point_released_before_all_parameters_were_sampled_gets_the_same_ones(tmp_path, sampler):
    def run(folder, *, interrupted):
        folder.mkdir()
        study, found = Study(folder, StudyOptions("s", points=14, sampler=sampler)), []
        while claimed := study.claim():
            rate = claimed.trial.suggest_float("rate", 0, 1)
            if claimed.point in interrupted:
                interrupted.remove(claimed.point)
                study.release(claimed)  # before the second parameter
                continue
            found.append((claimed.point, rate, claimed.trial.suggest_float("drop", 0, 1)))
            study.keep_params(claimed)
            study.finish(claimed, "complete", rate)
        study.close()
        return sorted(found)

    assert run(tmp_path / "b", interrupted=[0, 3, 12]) == run(tmp_path / "a", interrupted=[])


def test_reports_on_a_point_that_another_worker_holds_are_ignored(open_study):
    first, second = open_study(), open_study()
    first.add(POINTS[:1])
    held = first.claim()
    second.retry(0)  # as if the lease had expired
    taken = second.claim()
    assert not first.report(held, 10, 1.0)
    first.finish(held, "failed", reason="late")
    held.renewed = -study_lib.RENEWAL
    assert not first.renew(held)
    second.finish(taken, "complete", 2.0)
    assert first.states() == {0: ("complete", "")}


def test_a_study_of_the_same_name_from_another_sweep_is_refused(open_study):
    open_study(sweep="one").add(POINTS)
    open_study(sweep="one")
    with pytest.raises(
        ValueError,
        match=r"--study=s: the study in .* belongs to another sweep; choose another name",
    ):
        open_study(sweep="two")


def test_an_unlocked_file_of_another_machine_proves_nothing(open_study, monkeypatch, tmp_path):
    """The files of another machine may be visible here, but not its locks."""
    first = open_study()
    (lock,) = (tmp_path / "workers").iterdir()
    second = open_study()
    first.add(POINTS[:1])
    monkeypatch.setattr(study_lib, "MACHINE", "elsewhere")
    first.claim()
    first.close()
    monkeypatch.setattr(study_lib, "MACHINE", "here")
    lock.touch()
    assert second.claim() is None
    monkeypatch.setattr(study_lib, "MACHINE", "elsewhere")
    assert second.claim().point == 0


def test_concurrent_workers_run_each_sampled_point_once(open_study):
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
def test_a_study_reopened_for_each_point_samples_the_same_points(tmp_path, sampler):
    def suggest(study):
        claimed = study.claim()
        x = claimed.trial.suggest_float("x", 0, 1)
        study.finish(claimed, "complete", (x - 0.3) ** 2)
        return x

    def open_one(folder, **options):
        folder.mkdir(exist_ok=True)
        return Study(folder, StudyOptions("s", points=15, sampler=sampler, **options))

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


def test_the_next_worker_removes_an_incomplete_last_line_of_the_journal(open_study, tmp_path):
    first = open_study()
    first.add(POINTS)
    first.finish(first.claim(), "complete", 2.0)
    journal = tmp_path / JOURNAL
    whole = journal.read_bytes()
    with journal.open("ab") as file:
        file.write(b'{"op_code": 8, "worker_id": "gone", "tri')  # killed during a write
    second = open_study()
    assert second.claim().point == 1
    assert journal.read_bytes().startswith(whole) and b"gone" not in journal.read_bytes()
    assert states(first) == {0: "complete", 1: "running", 2: "waiting"}


def test_a_failed_point_can_be_retried(open_study):
    study = open_study()
    study.add(POINTS)
    study.finish(study.claim(), "failed", reason="no memory")
    study.finish(study.claim(), "complete", 1.0)
    assert study.failed() == [0]
    study.retry(0)
    assert [study.claim().point, study.claim().point, study.claim()] == [2, 0, None]
    assert study.failed() == []


def test_median_prunes_a_point_worse_than_half_of_the_others(open_study):
    study = open_study(pruner="median", points=6, sampler="random")
    for value in (1.0, 2.0, 3.0, 4.0):
        good = study.claim()
        assert not study.report(good, 100, value)
        study.finish(good, "complete", value)
    worse, better = study.claim(), study.claim()
    assert study.report(worse, 100, 3.5) and not study.report(better, 100, 1.5)


def test_halving_keeps_a_point_in_the_best_third_of_those_reported_so_far(open_study):
    study = open_study(pruner="halving", points=9, sampler="random", first_step=100)
    claims = [study.claim() for _ in range(9)]
    values = [5.0, 6.0, 4.0, 4.5, 7.0, 4.2, 3.0, 9.0, 8.0]
    pruned = [study.report(each, 100, value) for each, value in zip(claims, values, strict=True)]
    assert pruned == [False, True, False, True, True, False, False, True, True]


def test_a_storage_that_cannot_be_used_is_named(open_study, monkeypatch):
    monkeypatch.setattr(study_storage, "RETRY_SECONDS", 0.0)
    with pytest.raises(ValueError, match="--storage=nosuchdatabase://here: cannot be used: "):
        open_study(storage="nosuchdatabase://here")


def test_the_password_of_a_database_is_not_in_the_message(open_study, monkeypatch):
    monkeypatch.setattr(study_storage, "RETRY_SECONDS", 0.0)
    url = "postgresql+nosuchdriver://me:s3cret@here/sweeps"
    with pytest.raises(ValueError, match=r"nosuchdriver://me:\*\*\*@here/sweeps: ") as caught:
        open_study(storage=url)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", "sqlite:///:memory:"])
def test_a_database_that_ends_with_the_process_is_refused(open_study, url):
    with pytest.raises(ValueError, match=f"^--storage={url}: .* a database in memory ends with"):
        open_study(storage=url)


def test_the_parameter_with_an_effect_has_the_largest_importance():
    points = [
        ({"heads": heads, "rate": rate, "same": 1}, abs(rate - 1e-3) + heads * 1e-9)
        for heads in (1, 2, 4, 8)
        for rate in (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
    ]
    shares = importances(points, minimize=True)
    assert shares.keys() == {"heads", "rate"} and shares["rate"] > shares["heads"]
