# An image that trains the default config, on a CPU or on NVIDIA GPUs.
#
#   docker build -t flaxformer_lite .
#   docker build -t flaxformer_lite:cuda --build-arg EXTRA=cuda .
#   docker run --rm -v flaxformer_runs:/workspace/runs flaxformer_lite
#
# EXTRA: extras of pyproject.toml, such as `cuda` (NVIDIA driver 580 or newer), `cuda12` or `cuda,gcs`.
ARG PYTHON=3.13
FROM python:${PYTHON}-slim

# Any user may run the image (`docker run --user`), so the folders for output are writable for all.
RUN useradd --create-home --uid 1000 flaxformer && \
    install -d -m 1777 /workspace /workspace/runs /var/cache/flaxformer_lite

ARG EXTRA=""
COPY pyproject.toml README.md LICENSE /src/
COPY configs /src/configs
COPY flaxformer_lite /src/flaxformer_lite
RUN pip install --no-cache-dir "/src${EXTRA:+[${EXTRA}]}" && rm -r /src

ENV JAX_COMPILATION_CACHE_DIR=/var/cache/flaxformer_lite/compiled \
    TFDS_DATA_DIR=/var/cache/flaxformer_lite/tensorflow_datasets \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
WORKDIR /workspace
COPY train.py ./
USER 1000
CMD ["python", "train.py", "--workdir=runs/first"]
