# msrun with its runtime and examples, and an SSH server for hosts of a job (compose.yaml).
#
#   docker build -t msrun .                                                        torch for the CPU
#   docker build -t msrun --build-arg TORCH_INDEX= \
#     --build-arg BASE=nvidia/cuda:12.8.1-base-ubuntu24.04 .                       torch with CUDA, from pip's own index
#
# BASE is any Debian or Ubuntu with Python 3.11 or newer; torch's wheels bring their own CUDA libraries.
ARG BASE=debian:bookworm-slim
FROM ${BASE}

# The distribution's current versions, with their security fixes.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client openssh-server python3-venv \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --uid 10001 --create-home --shell /bin/bash msrun \
    && install -d -o msrun -g msrun /keys /opt/msrun /job

USER 10001
ENV PATH=/opt/msrun/bin:$PATH
WORKDIR /job
COPY --chown=msrun . /tmp/msrun/
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/msrun \
    && pip install --no-cache-dir --constraint /tmp/msrun/constraints.txt \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} '/tmp/msrun[runtime,examples]' \
    && install /tmp/msrun/containers/host.sh /opt/msrun/bin/msrun-host \
    && msrun examples copy all /job/examples

CMD ["msrun", "--help"]
