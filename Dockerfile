# docker build -t scu-trainer .
# docker run --rm -v "$PWD/runs:/home/user/scu-trainer/runs" scu-trainer make train
#
# Without a GPU, --build-arg INDEX=ADDRESS saves gigabytes: the index of torch's builds for CPUs, which torch's site names.
# For GPUs, with a CUDA image as base (docker run --gpus all):
# docker build -t scu-trainer --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 .
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# Versions are the distribution's here; those of Python's packages are in constraints.txt.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ git make \
    && { command -v python3 || apt-get install -y --no-install-recommends python3-dev python3-venv; } \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 user
USER 10001
WORKDIR /home/user/scu-trainer
RUN mkdir runs

# Packages first: a change of the code alone leaves this layer as it is.
ARG INDEX=
COPY --chown=10001 Makefile setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY --chown=10001 scu_trainer/__init__.py scu_trainer/__init__.py
RUN PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="${INDEX}" make .venv/.main

COPY --chown=10001 . .
CMD ["make", "train"]
