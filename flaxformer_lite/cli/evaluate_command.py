"""The command `evaluate`: prints and saves all metrics of a run on a split."""

from typing import Any

from flaxformer_lite import evaluate, trained
from flaxformer_lite.cli import score_files
from flaxformer_lite.cli.run_flags import EvaluateRequest
from flaxformer_lite.lines import whole_files
from flaxformer_lite.runs import workdir
from flaxformer_lite.system.errors import InputError
from flaxformer_lite.training import run_report, saved_evaluation


def print_metrics(request: EvaluateRequest) -> None:
    """Prints the metrics of a run, and writes its translations with their scores.

    Raises:
      InputError: a flag does not apply to the run, or files cannot be read or written.
    """
    references = {
        str(path): whole_files.read_lines(path, flag="--references") for path in request.references
    }
    groups = score_files.read_groups(request.groups)
    run = trained.load(request.workdir, **request.model)
    if request.decode and run.config.model.architecture != "encoder_decoder":
        raise InputError(
            f"--{next(iter(request.decode))}: applies only to translations, and the model of this "
            "run makes none."
        )
    if request.output and run.config.model.architecture != "encoder_decoder":
        raise InputError(
            "--output: applies only to translations, and the model of this run makes none."
        )
    output = request.output or workdir.Workdir(request.workdir).samples
    run = trained.with_decode(run, request.decode)
    of: Any = dict(run=request.workdir, split=request.split, config=run.config, origin=run.origin)
    if run.config.model.architecture == "encoder_decoder":
        saved_evaluation.check_folder(output)
    if request.output:  # the run's own folder may be a copy, with the results of another workdir
        saved_evaluation.check_unused(output, **of)
    saved_evaluation.check_references(
        output, list(references), split=request.split, config=run.config, origin=run.origin
    )
    measured = evaluate.evaluate_run(
        run,
        request.split,
        references=references,
        files=request.files,
        symbols=request.symbols,
        groups=groups,
        metric_files=output / saved_evaluation.METRIC_FILES,
        **request.program,
        **request.resampling,
    )
    intervals = measured.scores.intervals if measured.scores else None
    print(f"{request.workdir}, {request.split} split, {run.origin}")
    print(run_report.table(measured.values, intervals))
    if measured.groups:
        print(f"\n{run_report.group_table(measured.groups)}\n")
    if measured.note:
        print(measured.note)
    for path in saved_evaluation.save(measured, output, references=list(references), **of):
        print(path)
