# kvservice with Ray and vLLM for CPUs, from the lock. Build it in the repository's root:
#   docker build --file docker/cpu.Dockerfile --tag kvservice:0.1.0-cpu .
# The base is pinned by its tag only: its digest was not known where this was written. To build the same image twice, look
# it up (docker buildx imagetools inspect) and pass --build-arg DEBIAN_IMAGE=debian@sha256:….
ARG DEBIAN_IMAGE=debian:12.12-slim

FROM ${DEBIAN_IMAGE} AS build
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 DEBIAN_FRONTEND=noninteractive
WORKDIR /src
COPY docker docker
COPY requirements/cpu-py311.lock scripts/vllm_alias.py ./
RUN docker/steps.sh packages build
# torch's CPU build has a version of its own, which PyPI does not take: it comes from the project's index, by hash as well.
RUN sed 's/$/==/; s/^/^/' docker/dev-only.txt > dev-only.patterns \
 && grep '^torch==' cpu-py311.lock > torch.lock \
 && grep -v -f dev-only.patterns cpu-py311.lock | grep -v '^torch==' > runtime.lock \
 && docker/steps.sh python runtime.lock \
 && /opt/kvservice/bin/pip install --no-deps --require-hashes --index-url https://download.pytorch.org/whl/cpu -r torch.lock \
 && /opt/kvservice/bin/python vllm_alias.py
COPY pyproject.toml README.md LICENSE ./
COPY kvservice kvservice
COPY actors actors
RUN /opt/kvservice/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && docker/steps.sh kvservice /wheels/*.whl

FROM ${DEBIAN_IMAGE} AS runtime
COPY docker /usr/local/share/kvservice
# g++ and Python's headers for kernels that torch compiles on the node, libnuma for vLLM's threads.
RUN /usr/local/share/kvservice/steps.sh packages shard engine
COPY --from=build /opt/kvservice /opt/kvservice
RUN /usr/local/share/kvservice/steps.sh finish kvservice ray serve vllm
ENV PATH=/opt/kvservice/bin:$PATH HOME=/home/kvservice PYTHONUNBUFFERED=1
USER 60900:60900
WORKDIR /home/kvservice
CMD ["kvservice", "--help"]
