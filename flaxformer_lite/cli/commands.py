"""The commands: `flaxformer-lite COMMAND ...`, or `python -m flaxformer_lite COMMAND ...`."""

import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from flaxformer_lite.cli import run_flags, score_flags, train_flags
from flaxformer_lite.cli.parser import (
    complain,
    complain_of,
    escape_output,
    exit_now,
    fail,
    version,
)
from flaxformer_lite.lines import whole_files
from flaxformer_lite.system.errors import InputError, did_you_mean

USAGE = """usage: flaxformer-lite COMMAND --flag=value ...    (COMMAND --help lists the flags)

  train         train a config, or resume the run in a workdir
  plan          estimate the time and memory of a config on devices that are not here
  evaluate      compute the metrics of a run on a split
  score         score files of translations, or of alignments, against reference files
  rerank        choose from n-best lists by a weighted sum of scores
  translate     translate lines of text
  rescore       score given texts: log-probabilities, perplexity, surprisal
  classify      classify lines of text
  generate      generate texts with a language model
  plot          plot attention, positions, the learning rate, or the metrics of runs
  sweep         train the configs of a sweep file, or resume a sweep
  sweep-report  report the results of a sweep so far
  import        make a run from a Marian model of Hugging Face
  export        write a run for CTranslate2, for Hugging Face, or as named arrays

Commands on a trained run use its best model; with --average or --parameters, another one.
--version prints the version."""


# Each command parses its flags before it imports JAX, so that a wrong flag is reported at once.


def train(arguments: Sequence[str]) -> int:
    """Trains a config, or resumes a run."""
    request = train_flags.parse_train(arguments)
    from flaxformer_lite.system import runtime

    runtime.start()
    import jax

    from flaxformer_lite import train
    from flaxformer_lite.system import memory
    from flaxformer_lite.training import loop, processes

    processes.initialize(*request.processes)
    if request.workdir is None and jax.process_count() > 1:
        raise InputError(
            "--workdir: several processes need one folder that all of them share; name it."
        )
    try:
        return train.fit(request.config, request.workdir or request.new_workdir)
    except (loop.Diverged, memory.OutOfMemory) as error:
        complain(str(error))
        return 1
    except jax.errors.JaxRuntimeError as error:
        if memory.is_lack_of(error):  # before the first step, for example for the state alone
            complain(f"out of memory: {str(error).splitlines()[0]}\n{memory.ADVICE}")
            return 1
        if jax.process_count() == 1:
            raise
        complain(
            f"{str(error).splitlines()[0]}: most likely another process of this run has ended; "
            "see its log. To resume from the newest checkpoint, start all processes again with "
            "the same --workdir."
        )
        return 1


def plan(arguments: Sequence[str]) -> int:
    """Prints the estimated time and memory of a step or of decoding, or how a step scales."""
    request = train_flags.parse_plan(arguments)
    from flaxformer_lite.system import runtime
    from flaxformer_lite.training import topology

    if not topology.prepare(request.accelerator):  # no compiler for it: fake CPU devices
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} "
            f"--xla_force_host_platform_device_count={max(request.devices)}"
        )
    os.environ["JAX_PLATFORMS"] = "cpu"
    runtime.start()
    from flaxformer_lite.training import plan

    config, name, options = request.config, request.accelerator, request.options
    if len(request.devices) > 1:
        print(plan.scaling_table(config, request.devices, name, **options))
        return 0
    target = plan.target(config, name, request.devices[0], decode=request.decode, **options)
    plans = (
        [plan.decoding(config, target)]
        if request.decode
        else plan.plan(config, target, every_shape=request.all)
    )
    print(plan.table(plans, target, decode=request.decode))
    return 0


def evaluate(arguments: Sequence[str]) -> int:
    """Prints and saves all metrics of a run on a split."""
    request = run_flags.parse_evaluate(arguments)
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite.cli import evaluate_command

    evaluate_command.print_metrics(request)
    return 0


def score(arguments: Sequence[str]) -> int:
    """Prints the scores of files of translations."""
    request = score_flags.parse_score(arguments)
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite.cli import score_files

    if isinstance(request, score_flags.AlignmentRequest):
        score_files.print_alignment_scores(request)
    else:
        score_files.print_scores(request)
    return 0


def rerank(arguments: Sequence[str]) -> int:
    """Writes the translation of each line with the highest sum of scores, from n-best lists."""
    from flaxformer_lite.cli import rerank_command

    rerank_command.write_reranked(rerank_command.parse_rerank(arguments))
    return 0


def translate(arguments: Sequence[str]) -> int:
    """Reads lines, writes the translation of each, or its n best."""
    request = run_flags.parse_translate(arguments)
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite.cli import translate_lines

    translate_lines.run(request)
    return 0


def rescore(arguments: Sequence[str]) -> int:
    """Reads texts, writes the score of each."""
    from flaxformer_lite.cli import rescore_flags

    request = rescore_flags.parse_rescore(arguments)
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite.cli import rescore_lines

    rescore_lines.run(request)
    return 0


def classify(arguments: Sequence[str]) -> int:
    """Reads lines, writes the class of each."""
    request = run_flags.parse_classify(arguments)
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite import classify
    from flaxformer_lite.lines import line_job, line_windows

    classifier = classify.load(request.workdir, **request.model)

    def answer(window: line_windows.Window) -> line_windows.Answer:
        return line_windows.Answer(
            classifier(window.lines, name=window.name, numbers=window.numbers)
        )

    line_job.run(request.job, answer, asked=lambda: {**request.settings, **classifier.run.asked()})
    return 0


def generate(arguments: Sequence[str]) -> int:
    """Writes generated texts, one a line; those of a model of whole files with their lines."""
    request = run_flags.parse_generate(arguments)
    whole_files.check_output(request.output)
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite import generate

    generator = generate.load(request.workdir, **request.model, **request.decode)
    texts = generator([request.prompt] * request.count)
    keep_ends = generator.run.config.data.whole_files
    whole_files.write_lines(request.output, texts, keep_ends=keep_ends)
    return 0


def plot(arguments: Sequence[str]) -> int:
    """Writes figures, and prints their paths."""
    request = run_flags.parse_plot(arguments)
    from flaxformer_lite.system import runtime

    runtime.start()
    from flaxformer_lite.plotting import run_plots

    plots: dict[str, Any] = {
        "attention": lambda: run_plots.attention(request.workdirs[0], request.text, request.output),
        "positions": lambda: run_plots.positions(request.workdirs[0], request.output),
        "schedule": lambda: run_plots.schedule(request.workdirs[0], request.output),
        "metrics": lambda: run_plots.metrics(request.workdirs, request.output),
    }
    print(*plots[request.kind](), sep="\n")
    return 0


def sweep(arguments: Sequence[str]) -> int:
    """Trains the points of a sweep, each in its own process."""
    from flaxformer_lite.cli import sweep_flags

    request = sweep_flags.parse_sweep(arguments)
    _use_cpu()
    from flaxformer_lite.sweep import command

    return command.sweep(request)


def sweep_report(arguments: Sequence[str]) -> int:
    """Prints the table of a sweep, and writes it with figures."""
    from flaxformer_lite.cli import sweep_flags

    folder = sweep_flags.parse_report(arguments)
    _use_cpu()
    from flaxformer_lite.sweep import results, sweep_report

    _, paths = sweep_report.write(results.SweepFolder(folder), show=print)
    print(*paths, sep="\n")
    return 0


def import_(arguments: Sequence[str]) -> int:
    """Makes a run from the weights of another library."""
    from flaxformer_lite.cli import exchange_flags

    request = exchange_flags.parse_import(arguments)
    _use_cpu()
    from flaxformer_lite.exchange import from_marian

    model = from_marian.import_run(
        request.folder, request.workdir, request.config, request.overrides
    )
    workdir = shlex.quote(f"--workdir={request.workdir}")
    print(
        f"{request.workdir}: {request.folder}, "
        f"{model.num_encoder_layers}+{model.num_decoder_layers} layers of width "
        f"{model.d_model}, {model.vocab_size:,} tokens, as a run at step 0.\n"
        f"Translate with: flaxformer-lite translate {workdir}\n"
        f"Train it with: flaxformer-lite train {workdir} "
        "--config.data.dataset=parallel_text "
        "--config.data.train_files=A,B --config.data.validation_files=C,D "
        "--config.data.test_files=E,F"
    )
    return 0


def export(arguments: Sequence[str]) -> int:
    """Writes the model of a run in the format of another library."""
    from flaxformer_lite.cli import exchange_flags

    request = exchange_flags.parse_export(arguments)
    _use_cpu()
    from flaxformer_lite import trained
    from flaxformer_lite.exchange import exports

    run = trained.with_decode(trained.load(request.workdir, **request.model), request.decode)
    exports.export(
        run,
        request.workdir,
        request.output,
        kind=request.kind,
        quantization=request.quantization,
        license=request.license,
    )
    print(f"{request.output}: {run.origin} of {request.workdir}; its README.md shows how to use it")
    return 0


def _use_cpu() -> None:
    """Restricts this process to the CPU, but not the processes that it starts."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from flaxformer_lite.system import runtime

    runtime.quiet_libraries()


COMMANDS = {
    "train": train,
    "plan": plan,
    "evaluate": evaluate,
    "score": score,
    "rerank": rerank,
    "translate": translate,
    "rescore": rescore,
    "classify": classify,
    "generate": generate,
    "plot": plot,
    "sweep": sweep,
    "sweep-report": sweep_report,
    "import": import_,
    "export": export,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command, and ends the process with its exit code.

    The code is 2 for bad input, with one line on standard error, and 1 for other failures.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:  # it is closed; `print` would write to standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
    escape_output()
    if arguments[:1] == ["--version"]:
        print(f"flaxformer-lite {version()}")
        sys.exit(0)
    if not arguments or arguments[0] in ("--help", "-h", "help"):
        print(USAGE)
        sys.exit(0 if arguments else 2)
    command, *rest = arguments
    if command not in COMMANDS:
        fail(f"{command!r}: no such command{did_you_mean(command, COMMANDS)}")
    try:
        code = COMMANDS[command](rest)
    except InputError as error:
        complain(str(error))
        code = 2
    except BrokenPipeError:
        code = 0
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        code = complain_of(error)
    exit_now(code)
