# kvservice with Ray and vLLM for CPUs, from the lock. Build it in the repository's root:
#   docker build --file docker/cpu.Dockerfile --tag kvservice:0.1.0-cpu .
# The base is pinned by its tag only: its digest was not known where this was written. To build the same image twice, look
# it up (docker buildx imagetools inspect) and pass --build-arg PYTHON_IMAGE=python@sha256:…, and a date to Debian's
# snapshot with --build-arg SNAPSHOT=20261115T000000Z.
ARG PYTHON_IMAGE=python:3.11.14-slim-bookworm

FROM ${PYTHON_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /src
COPY requirements/cpu-py311.lock docker/dev-only.txt scripts/vllm_alias.py ./
# torch's CPU build has a version of its own, which PyPI does not take: it comes from the project's index, by hash as well.
RUN python3.11 -m venv /opt/kvservice \
 && sed 's/$/==/; s/^/^/' dev-only.txt > dev-only.patterns \
 && grep '^torch==' cpu-py311.lock > torch.lock \
 && grep -v -f dev-only.patterns cpu-py311.lock | grep -v '^torch==' > runtime.lock \
 && /opt/kvservice/bin/pip install --no-deps --require-hashes --index-url https://download.pytorch.org/whl/cpu -r torch.lock \
 && /opt/kvservice/bin/pip install --no-deps --require-hashes -r runtime.lock \
 && /opt/kvservice/bin/python vllm_alias.py
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
# g++ for kernels that torch compiles on the node, libnuma for vLLM's threads.
# hadolint ignore=DL3008
RUN if [ -n "$SNAPSHOT" ]; then \
      rm -f /etc/apt/sources.list.d/* \
      && echo "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian/$SNAPSHOT bookworm main" > /etc/apt/sources.list; \
    fi \
 && apt-get update \
 && apt-get install --yes --no-install-recommends g++ libnuma1 \
 && rm -rf /var/lib/apt/lists/* \
 && groupadd --gid 1000 kvservice \
 && useradd --uid 1000 --gid 1000 --home-dir /home/kvservice --create-home --shell /bin/bash kvservice
COPY --from=build /opt/kvservice /opt/kvservice
COPY docker/link-commands.sh /usr/local/libexec/link-commands.sh
RUN /usr/local/libexec/link-commands.sh /opt/kvservice kvservice ray serve vllm
ENV PATH=/opt/kvservice/bin:$PATH HOME=/home/kvservice PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/kvservice
CMD ["kvservice", "--help"]
