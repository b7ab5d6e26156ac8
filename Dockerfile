# Two images out of one file:
#
#     router   the front door and the command line, without torch
#     engine   the three stages: torch for CPUs, or with VARIANT=cuda for NVIDIA GPUs
#
# `make image` builds both. Versions are those of constraints.txt. Each target's dependencies are a layer of their own that
# stays as it is while only our code changes.
ARG BASE_IMAGE=debian:bookworm-20251103-slim

FROM ${BASE_IMAGE} AS python
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 \
    && rm -rf /var/lib/apt/lists/*
# Writable folders are mounted; nothing else is written, bytecode neither.
ENV PATH=/opt/triptych/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1 \
    HOME=/tmp \
    HF_HUB_OFFLINE=1

FROM python AS builder
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3 -m venv /opt/triptych
WORKDIR /build
COPY pyproject.toml constraints.txt ./
# What pyproject.toml asks for, as requirements: of the router, and of the engine besides.
RUN python3 -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
open('router.txt', 'w').write('\n'.join(p['dependencies'])); \
open('engine.txt', 'w').write('\n'.join(p['optional-dependencies']['engine']))"
# Where pip looks besides its index, and whether it asks the index at all: see k8s/tools/image.sh.
ARG PIP_FIND_LINKS=
ARG PIP_NO_INDEX=
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN pip install -c constraints.txt -r router.txt "setuptools>=77"

FROM builder AS router-packages
COPY LICENSE README.md ./
COPY protos protos
COPY core core
COPY router router
COPY cli cli
RUN pip install --no-deps --no-build-isolation . && pip uninstall -y pip

FROM builder AS engine-packages
ARG PIP_FIND_LINKS=
ARG PIP_NO_INDEX=
# cpu: from the index of torch's CPU builds where one is given, else from the usual one. cuda: from the usual one, whose
# builds for Linux bring NVIDIA's libraries.
ARG VARIANT=cpu
ARG TORCH_CPU_INDEX=
RUN case "$VARIANT" in \
      cpu) pip install -c constraints.txt ${TORCH_CPU_INDEX:+--index-url "$TORCH_CPU_INDEX"} torch ;; \
      cuda) pip install -c constraints.txt torch ;; \
      *) echo "VARIANT=$VARIANT: neither cpu nor cuda" >&2; exit 1 ;; \
    esac
RUN pip install -c constraints.txt -r engine.txt
COPY LICENSE README.md ./
COPY protos protos
COPY core core
COPY kernels kernels
COPY connectors connectors
COPY engine engine
COPY services services
COPY router router
COPY cli cli
COPY demo demo
RUN pip install --no-deps --no-build-isolation . && pip uninstall -y pip

FROM python AS router
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="triptych-router" \
      org.opencontainers.image.description="The front door of Triptych, and its command line" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=router-packages /opt/triptych /opt/triptych
USER 10001:10001
WORKDIR /tmp
EXPOSE 50060 8000
CMD ["python", "-m", "router", "serve", "--help"]

FROM python AS engine
ARG VARIANT=cpu
# On a GPU, Triton compiles its way to the driver when it is first used: with a C compiler and Python's headers.
RUN if [ "$VARIANT" = cuda ]; then \
      apt-get update \
      && apt-get install -y --no-install-recommends gcc libc6-dev python3-dev \
      && rm -rf /var/lib/apt/lists/*; \
    fi
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="triptych-engine" \
      org.opencontainers.image.description="Triptych's three stages: encode, prefill, decode" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
COPY --from=engine-packages /opt/triptych /opt/triptych
USER 10001:10001
WORKDIR /tmp
EXPOSE 50061 50062 50063 9101 9102 9103
CMD ["python", "-m", "services.prefill", "serve", "--help"]
