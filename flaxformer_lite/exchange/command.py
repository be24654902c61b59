"""`import` and `export`: from a request to what the user sees."""

import dataclasses

from flaxformer_lite import command_line, trained
from flaxformer_lite import config as config_lib
from flaxformer_lite.exchange import exports, from_marian
from flaxformer_lite.exchange.requests import ExportRequest, ImportRequest


def bring_in(request: ImportRequest) -> int:
    """Makes a workdir of a folder with a Marian model; returns the exit code."""
    source = from_marian.read(request.folder)
    if any(override.lstrip("-").startswith("config.decode.method=") for override in request.overrides):
        source = dataclasses.replace(source, decode=from_marian.of_any_method(source.decode))
    user_config = command_line.override(from_marian.with_weights(request.config, source), request.overrides)
    config = config_lib.resolve(user_config)
    from_marian.check(config, source)
    from_marian.write(source, request.workdir, config)
    model = source.model
    print(
        f"{request.workdir}: {request.folder}, {model.num_encoder_layers}+{model.num_decoder_layers} layers of "
        f"{model.d_model}, {model.vocab_size:,} tokens, as a run at step 0.\n"
        f"Translate with: flaxformer-lite translate --workdir={request.workdir}\n"
        f"Train it with: flaxformer-lite train --workdir={request.workdir} --config.data.dataset=parallel_text "
        "--config.data.train_files=A,B --config.data.validation_files=C,D --config.data.test_files=E,F"
    )
    return 0


def send_out(request: ExportRequest) -> int:
    """Makes a folder for another engine of the best model of a run; returns the exit code."""
    run = trained.with_decode(trained.load(request.workdir, **request.model), request.decode)
    options = {"kind": request.kind, "quantization": request.quantization, "license": request.license}
    exports.export(run, request.workdir, request.output, **options)
    print(f"{request.output}: {run.origin} of {request.workdir}; its README.md says how to use it")
    return 0
