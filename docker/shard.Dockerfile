# kvservice alone, for the cache shards and lookup partitions of the chart's mode `standalone`: no vLLM, no Ray. Build it in
# the repository's root:
#   docker build --file docker/shard.Dockerfile --tag kvservice:0.1.0 .
# docker/rootfs.sh runs the same steps without Docker.
# The base is pinned by its tag only: its digest was not known where this was written. To build the same image twice, look
# it up (docker buildx imagetools inspect) and pass --build-arg DEBIAN_IMAGE=debian@sha256:….
ARG DEBIAN_IMAGE=debian:12.12-slim

FROM ${DEBIAN_IMAGE} AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONDONTWRITEBYTECODE=1 DEBIAN_FRONTEND=noninteractive
WORKDIR /src
COPY docker docker
COPY requirements/cpu-py311.lock ./
RUN docker/steps.sh packages build \
 && docker/steps.sh python cpu-py311.lock docker/shard-python.txt
COPY pyproject.toml README.md LICENSE ./
COPY kvservice kvservice
COPY actors actors
RUN /opt/kvservice/bin/pip wheel --no-deps --no-build-isolation --wheel-dir /wheels . \
 && docker/steps.sh kvservice /wheels/*.whl

FROM ${DEBIAN_IMAGE} AS runtime
COPY docker /usr/local/share/kvservice
RUN /usr/local/share/kvservice/steps.sh packages shard
COPY --from=build /opt/kvservice /opt/kvservice
RUN /usr/local/share/kvservice/steps.sh finish kvservice
ENV PATH=/opt/kvservice/bin:$PATH HOME=/home/kvservice PYTHONUNBUFFERED=1
USER 60900:60900
WORKDIR /home/kvservice
CMD ["kvservice", "--help"]
