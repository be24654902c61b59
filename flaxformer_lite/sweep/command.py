"""The command `sweep`: reads and checks the sweep, joins or begins the study, works, and reports."""

import sys

from flaxformer_lite.sweep import check, cluster, space, sweep_report
from flaxformer_lite.sweep.board import Board
from flaxformer_lite.sweep.request import SweepRequest
from flaxformer_lite.sweep.results import SweepFolder
from flaxformer_lite.sweep.study import Study
from flaxformer_lite.sweep.worker import Worker
from flaxformer_lite.system.errors import InputError

JOURNAL_STUDY = "sweep"  # the name of the one study in a folder's own journal, whatever the folder is called where


def sweep(request: SweepRequest) -> int:
    """Returns 0 if no point has failed, 1 if one has, or 143 or 130 for a signal.

    Raises:
      InputError: a point cannot be trained, or the folder or the storage cannot be used; nothing was trained.
    """
    swept, folder = space.load(request.file, request.overrides), SweepFolder(request.workdir)
    settings = swept.settings
    check.check_all(swept.checked, settings, str(request.file))
    if request.worker and not folder.record.exists():
        raise InputError(f"--worker: there is no sweep in {folder.path} yet; start one worker without --worker.")
    identity = folder.begin(swept, database=request.study if request.storage else None)
    if request.submit:
        print(cluster.submit(request))
        return 0
    count = settings.trials if swept.points is None else len(swept.points)
    study = Study(
        folder.path,
        name=request.study if request.storage else JOURNAL_STUDY,
        sweep=identity,
        points=count,
        storage=request.storage,
        minimize=settings.minimizes,
        sampler=settings.sampler,
        seed=settings.sampler_seed,
        pruner=settings.pruner,
        first_step=swept.base.train.eval_every,
        together=request.jobs > 1,
    )
    try:
        if swept.points is not None:
            study.add([{name: space.scalar(value) for name, value in p.params.items()} for p in swept.points])
        if request.retry_failed:
            for number in study.failed():
                folder.point(number).forget_end()  # first: whoever takes it up is not to find that it has ended
                study.retry(number)
        board = Board(count)
        seeds = "a run" if len(settings.seeds) == 1 else f"{len(settings.seeds)} runs"
        board.say(f"{count} points, {seeds} each; {len(swept.checked)} configs checked")
        code = Worker(swept, folder, study, jobs=request.jobs, gpus=request.gpus, board=board).work()
        failed = study.failed()
    finally:
        study.close()
    if code:
        print(f"stopped; to go on: the same command with --workdir={folder.path}", file=sys.stderr)
        return code
    _, paths = sweep_report.write(folder, show=print)
    print(*paths, sep="\n")
    return int(bool(failed))
