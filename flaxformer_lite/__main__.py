"""`python -m flaxformer_lite COMMAND --workdir=W ...`, also installed as `flaxformer-lite`."""

import os
import sys
import traceback
from collections.abc import Sequence

from flaxformer_lite import command_line, commands
from flaxformer_lite.command_line import complain, exit_now, fail

USAGE = """usage: flaxformer-lite COMMAND --workdir=W ...    (COMMAND --help tells more)

  train      train a config, or go on with the run in a workdir
  plan       tell what training a config would take of devices that are not here
  evaluate   measure the best model of a run on a split
  score      compare files of translations with references
  translate  translate lines of text
  classify   tell the class of lines of text
  generate   let a language model write
  plot       draw attention, positions, the learning rate, or the metrics of runs
  sweep      train many configs, as a sweep's file says, or go on with a sweep
  sweep-report   tell what a sweep has found so far
  import     make a run of a Marian model of Hugging Face
  export     write a run for CTranslate2, Hugging Face, or as named arrays

Evaluate, translate, classify, generate, export, plot attention and plot positions use the best model of the run."""


def train(arguments: Sequence[str]) -> int:
    """flags -> training.loop.fit; returns the exit code."""
    request = commands.parse_train(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    import jax

    from flaxformer_lite.training import loop, memory, parallel

    parallel.initialize(*request.processes)
    if request.workdir is None and jax.process_count() > 1:
        raise ValueError("--workdir: several processes need one folder that all of them see; name it.")
    try:
        return loop.fit(request.config, request.workdir or request.new_workdir)
    except (loop.Diverged, memory.OutOfMemory) as error:
        complain(str(error))
        return 1
    except jax.errors.JaxRuntimeError as error:
        if memory.is_lack_of(error):  # before there was a step, as for the state alone
            complain(f"out of memory: {str(error).splitlines()[0]}\n{memory.ADVICE}")
            return 1
        if jax.process_count() == 1:
            raise
        complain(
            f"{str(error).splitlines()[0]}: most likely another process of this run has ended; its own log says why. "
            "To go on from the newest checkpoint, start all of them again with the same --workdir."
        )
        return 1


def plan(arguments: Sequence[str]) -> int:
    """Prints what a step, or decoding, takes of each device; or how a step grows with the devices."""
    request = commands.parse_plan(arguments)
    from flaxformer_lite import runtime
    from flaxformer_lite.training import topology

    if not topology.prepare(request.accelerator):  # then there are as many fake devices
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={max(request.devices)}"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    runtime.start()
    from flaxformer_lite.training import plan

    config, name, options = request.config, request.accelerator, request.options
    if len(request.devices) > 1:
        print(plan.scaling_table(config, request.devices, name, **options))
        return 0
    target = plan.target(config, name, request.devices[0], decode=request.decode, **options)
    plans = [plan.decoding(config, target)] if request.decode else plan.plan(config, target, every_shape=request.all)
    print(plan.table(plans, target, decode=request.decode))
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Prints all metrics of a split."""
    request = commands.parse_evaluate(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import evaluate, trained, workdir
    from flaxformer_lite.training import report

    references = {str(path): command_line.read_lines(path, flag="--references") for path in request.references}
    run = trained.load(request.workdir, **request.model)
    if request.decode and run.config.model.architecture != "encoder_decoder":
        raise ValueError(
            f"--{next(iter(request.decode))}: goes with translations, and this run's model writes none to be measured."
        )
    if request.output and run.config.model.architecture != "encoder_decoder":
        raise ValueError("--output: goes with translations, and this run's model makes none to be kept.")
    output = request.output or workdir.Workdir(request.workdir).samples
    run = trained.with_decode(run, request.decode)
    what = {"run": request.workdir, "split": request.split, "config": run.config, "origin": run.origin}
    if run.config.model.architecture == "encoder_decoder":
        evaluate.check_folder(output)
    if request.output:  # the run's own may have been copied with it
        evaluate.check_unused(output, **what)
    evaluate.check_references(output, list(references), split=request.split, config=run.config, origin=run.origin)
    measured = evaluate.evaluate_run(run, request.split, references=references, **request.resampling)
    intervals = measured.scores.intervals if measured.scores else None
    print(f"{request.workdir}, {request.split} split, {run.origin}\n{report.table(measured.values, intervals)}")
    if measured.note:
        print(measured.note)
    for path in evaluate.save(measured, output, references=list(references), **what):
        print(path)
    return 0


def score(arguments: Sequence[str]) -> int:
    """Prints the scores of files; needs no run."""
    request = commands.parse_score(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import scoring
    from flaxformer_lite.training import report

    flagged = [("--hypotheses", request.hypotheses), *(("--references", path) for path in request.references)]
    if request.baseline:
        flagged.append(("--baseline", request.baseline))
    texts = {f"{flag}={path}": command_line.read_lines(path, flag=flag) for flag, path in flagged}
    scoring.check_counts({name: len(lines) for name, lines in texts.items()})
    hypotheses, *references = list(texts.values())
    baseline = [references.pop()] if request.baseline else []
    print(f"{request.hypotheses}, {len(hypotheses):,} lines, against {', '.join(map(str, request.references))}")
    if not request.resampling:
        scores = scoring.score(hypotheses, references, tokenized=request.tokenized)
        print(report.table(scores.values))
    else:
        systems, options = [*baseline, hypotheses], {"tokenized": request.tokenized, **request.resampling}
        *others, scores = scoring.resample(systems, references, **options)
        print(report.comparison(*others, scores) if others else report.table(scores.values, scores.intervals))
    print(report.signatures(scores))
    return 0


def translate(arguments: Sequence[str]) -> int:
    """Reads lines, writes as many, or so many for each."""
    request = commands.parse_translate(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import line_job, translate

    translator = translate.load(request.workdir, **request.model, **request.decode)  # before it waits for input
    answer = translate.LineTranslator(translator, **request.lines)
    split = line_job.run(request.job, answer, asked=lambda: {**request.asked, **translator.run.asked()})
    if split:
        told = "lines that were too long for the model and translated in segments"
        print(f"note: {told}: {split:,}", file=sys.stderr)
    return 0


def classify(arguments: Sequence[str]) -> int:
    """Reads lines, writes the class of each."""
    request = commands.parse_classify(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import classify, line_job

    classifier = classify.load(request.workdir, **request.model)
    answer = lambda window: line_job.Answer(classifier(window.lines, name=window.name, numbers=window.numbers))  # noqa: E731
    line_job.run(request.job, answer, asked=lambda: {**request.asked, **classifier.run.asked()})
    return 0


def generate(arguments: Sequence[str]) -> int:
    """Writes texts, one a line."""
    request = commands.parse_generate(arguments)
    command_line.check_output(request.output)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import generate

    writer = generate.load(request.workdir, **request.model, **request.decode)
    command_line.write_lines(request.output, writer([request.prompt] * request.count))
    return 0


def plot(arguments: Sequence[str]) -> int:
    """Draws, and prints what it wrote."""
    request = commands.parse_plot(arguments)
    from flaxformer_lite import runtime

    runtime.start()
    from flaxformer_lite import pictures

    draw = {
        "attention": lambda: pictures.attention(request.workdirs[0], request.text, request.output),
        "positions": lambda: pictures.positions(request.workdirs[0], request.output),
        "schedule": lambda: pictures.schedule(request.workdirs[0], request.output),
        "metrics": lambda: pictures.metrics(request.workdirs, request.output),
    }[request.kind]
    print(*draw(), sep="\n")
    return 0


def sweep(arguments: Sequence[str]) -> int:
    """Trains the points of a sweep, each in a process of its own."""
    from flaxformer_lite.sweep import requests

    request = requests.parse_sweep(arguments)
    _use_cpu()
    from flaxformer_lite.sweep import command

    return command.sweep(request)


def sweep_report(arguments: Sequence[str]) -> int:
    """Prints the table of a sweep, and writes it with pictures."""
    from flaxformer_lite.sweep import requests

    folder = requests.parse_report(arguments)
    _use_cpu()
    from flaxformer_lite.sweep import report, results

    _, paths = report.write(results.SweepFolder(folder), show=print)
    print(*paths, sep="\n")
    return 0


def import_(arguments: Sequence[str]) -> int:
    """Makes a workdir of somebody else's weights."""
    from flaxformer_lite.exchange import requests

    request = requests.parse_import(arguments)
    _use_cpu()
    from flaxformer_lite.exchange import command

    return command.bring_in(request)


def export(arguments: Sequence[str]) -> int:
    """Makes a folder for another engine of a workdir."""
    from flaxformer_lite.exchange import requests

    request = requests.parse_export(arguments)
    _use_cpu()
    from flaxformer_lite.exchange import command

    return command.send_out(request)


def _use_cpu() -> None:
    """For this process alone, not for those that it starts: it computes next to nothing, and they may compute much."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from flaxformer_lite import runtime

    runtime.quiet_libraries()


COMMANDS = {
    "train": train,
    "plan": plan,
    "evaluate": evaluate,
    "score": score,
    "translate": translate,
    "classify": classify,
    "generate": generate,
    "plot": plot,
    "sweep": sweep,
    "sweep-report": sweep_report,
    "import": import_,
    "export": export,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and ends the process with its exit code: 2 for bad input, with one line that says what."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    command, *rest = arguments
    if command not in COMMANDS:
        fail(f"{command!r}: no such command{command_line.did_you_mean(command, COMMANDS)}")
    try:
        code = COMMANDS[command](rest)
    except ValueError as error:
        if not command_line.is_about_input(error):
            traceback.print_exc()
            exit_now(1)
        complain(str(error))
        code = 2
    except BrokenPipeError:
        code = 0
    except OSError as error:
        if not command_line.is_about_input(error):
            raise
        complain(f"{error.filename}: cannot be reached: {error.strerror}.")
        code = 2
    except KeyboardInterrupt:
        code = 130
    exit_now(code)


if __name__ == "__main__":
    main()
