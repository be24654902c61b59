"""The command `sweep`: checks the sweep, creates or joins its study, runs points, and reports."""

import dataclasses
import shlex
import sys

from flaxformer_lite.fields import Config
from flaxformer_lite.sweep import check, cluster, space, sweep_report
from flaxformer_lite.sweep.board import Board
from flaxformer_lite.sweep.request import SweepRequest
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.sweep.space import Sweep
from flaxformer_lite.sweep.study import Study, StudyOptions
from flaxformer_lite.sweep.worker import Worker
from flaxformer_lite.system.errors import InputError

# Name of the one study in a folder's journal. It does not depend on the folder's path, which may
# differ between machines.
JOURNAL_STUDY = "sweep"


def sweep(request: SweepRequest) -> int:
    """Returns 0 if no point has failed, 1 if one has, or 143 or 130 for a signal.

    Raises:
      InputError: a point cannot be trained, or the folder or the storage cannot be used; nothing
        was trained.
    """
    folder = SweepFolder(request.workdir)
    swept = each_once(space.load(request.file, request.overrides), folder)
    settings = swept.settings
    check.check_all(swept.checked, settings, str(request.file))
    if request.worker and not folder.record.exists():
        raise InputError(
            f"--worker: there is no sweep in {folder.path} yet; start one worker without --worker."
        )
    sweep_id = folder.create_or_join(swept, database=request.study if request.storage else None)
    if request.submit:
        print(cluster.submit(request))
        return 0
    options = _study_options(request, swept, sweep_id)
    study = Study(folder.path, options)
    try:
        _enqueue(study, swept, folder, retry_failed=request.retry_failed)
        board = Board(options.points)
        runs = "a run" if len(settings.seeds) == 1 else f"{len(settings.seeds)} runs"
        board.print(f"{options.points} points, {runs} each; {len(swept.checked)} configs checked")
        worker = Worker(swept, folder, study, jobs=request.jobs, gpus=request.gpus, board=board)
        code = worker.work()
        failed = study.failed()
    finally:
        study.close()
    if code:
        print(
            "stopped; to resume, run the same command with "
            + shlex.quote(f"--workdir={folder.path}"),
            file=sys.stderr,
        )
        return code
    _, paths = sweep_report.write(folder, show=print)
    print(*paths, sep="\n")
    return int(bool(failed))


def each_once(swept: Sweep, folder: SweepFolder) -> Sweep:
    """Returns the sweep without the points whose config an earlier point has; prints their names.

    A sweep that an older version started keeps all its points.
    """
    recorded = folder.record.exists() and folder.read()["points"]
    if swept.points is None or (recorded and len(recorded) == len(swept.points)):
        return swept
    first: dict[Config, int] = {}
    for number, point in enumerate(swept.points):
        if (same := first.setdefault(point.config, number)) != number:
            print(
                f"note: point {number} ({point.label or 'the base config'}) has the config of "
                f"point {same} ({swept.points[same].label or 'the base config'}); it is trained "
                "once",
                file=sys.stderr,
            )
    once = [swept.points[number] for number in first.values()]
    return dataclasses.replace(swept, points=once, checked=once)


def _study_options(request: SweepRequest, swept: Sweep, sweep_id: str) -> StudyOptions:
    settings = swept.settings
    return StudyOptions(
        name=request.study if request.storage else JOURNAL_STUDY,
        points=(settings.trials or 0) if swept.points is None else len(swept.points),
        sweep=sweep_id,
        storage=request.storage,
        minimize=settings.minimizes,
        sampler=settings.sampler,
        seed=settings.sampler_seed,
        pruner=settings.pruner,
        first_step=swept.base.train.eval_every,
        concurrent=request.jobs > 1,
    )


def _enqueue(study: Study, swept: Sweep, folder: SweepFolder, *, retry_failed: bool) -> None:
    """Adds the listed points to the study, and another attempt at each failed point if asked."""
    if swept.points is not None:
        study.add(
            [
                {name: space.scalar(value) for name, value in point.params.items()}
                for point in swept.points
            ]
        )
    if retry_failed:
        for number in study.failed():
            # Before `retry`: the worker that claims the point must not find a final state.
            folder.point(number).clear_state()
            study.retry(number)
