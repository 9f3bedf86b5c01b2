# kvservice with Ray and vLLM for NVIDIA GPUs, from the lock. Build it in the repository's root:
#   docker build --file docker/cuda.Dockerfile --tag kvservice:0.1.0 .
# CUDA's libraries come with the locked wheels, the driver from the node (NVIDIA's container runtime).
# The base is pinned by its tag only: its digest was not known where this was written. To build the same image twice, look
# it up (docker buildx imagetools inspect) and pass --build-arg PYTHON_IMAGE=python@sha256:…, and a date to Debian's
# snapshot with --build-arg SNAPSHOT=20261115T000000Z.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/cuda-py311.lock ./
RUN python3.11 -m venv /opt/kvservice \
 && /opt/kvservice/bin/pip install --no-deps --require-hashes -r cuda-py311.lock
# gcc for the modules in C.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
COPY pyproject.toml README.md LICENSE ./
COPY kvservice kvservice
COPY actors actors
RUN /opt/kvservice/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && /opt/kvservice/bin/pip install --no-deps --no-index --find-links /wheels kvservice \
 && /opt/kvservice/bin/kvservice --help > /dev/null

FROM ${PYTHON_IMAGE} AS runtime
ARG SNAPSHOT=""
# g++ for what Triton and torch compile on the node, libnuma and the RDMA libraries for UCX.
# hadolint ignore=DL3008
RUN if [ -n "$SNAPSHOT" ]; then \
      rm -f /etc/apt/sources.list.d/* \
      && echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian/$SNAPSHOT bookworm main" > /etc/apt/sources.list; \
    fi \
 && apt-get update \
 && apt-get install --yes --no-install-recommends g++ ibverbs-providers libibverbs1 libnuma1 librdmacm1 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1000 kvservice \
 && useradd --uid 1000 --gid 1000 --home-dir /home/kvservice --create-home --shell /bin/bash kvservice
COPY --from=build /opt/kvservice /opt/kvservice
COPY docker/link-commands.sh /usr/local/libexec/link-commands.sh
RUN /usr/local/libexec/link-commands.sh /opt/kvservice kvservice ray serve vllm
ENV PATH=/opt/kvservice/bin:$PATH HOME=/home/kvservice PYTHONUNBUFFERED=1 \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000:1000
WORKDIR /home/kvservice
CMD ["kvservice", "--help"]
