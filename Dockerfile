# syntax=docker/dockerfile:1
# The parts of SparSEEty as images, one target each: vllm, demo, verifier, proxy (the default).
#
#     docker build --target proxy -t sparseety-proxy .
#
# docs/deployment.md tells how they are run, and what of this file was checked and what was not.

ARG PYTHON_IMAGE=python:3.12-slim-bookworm
# A release that the plugin is tested with (sampler_hook/adapters.py): it refuses any other.
ARG VLLM_IMAGE=vllm/vllm-openai:v0.32.0

# ---------------------------------------------------------------------------------------------- what is installed

FROM ${PYTHON_IMAGE} AS wheel
WORKDIR /src
COPY deploy/docker/build.lock ./
RUN pip install --no-cache-dir --require-hashes --only-binary :all: -r build.lock
COPY pyproject.toml README.md LICENSE ./
COPY sparseety sparseety
COPY proxy proxy
COPY sampler_hook sampler_hook
COPY verifier verifier
RUN pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir /wheel .

# An environment without pip in it; the image's own pip fills it. What it needs comes before the project's own code, so
# that a change of the code leaves the large layer alone.
FROM ${PYTHON_IMAGE} AS proxy-packages
COPY deploy/docker/proxy.lock /
RUN python -m venv --without-pip /opt/sparseety \
 && pip --python /opt/sparseety/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r /proxy.lock
COPY --from=wheel /wheel /wheel
RUN pip --python /opt/sparseety/bin/python install --no-cache-dir --no-deps --no-index /wheel/*.whl

FROM ${PYTHON_IMAGE} AS verifier-packages
COPY deploy/docker/verifier.lock /
RUN python -m venv --without-pip /opt/sparseety \
 && pip --python /opt/sparseety/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r /verifier.lock
COPY --from=wheel /wheel /wheel
RUN pip --python /opt/sparseety/bin/python install --no-cache-dir --no-deps --no-index /wheel/*.whl

FROM verifier-packages AS demo-packages
COPY deploy/docker/proxy.lock /
RUN pip --python /opt/sparseety/bin/python install --no-cache-dir --require-hashes --only-binary :all: -r /proxy.lock

# ------------------------------------------------------------------------------------------------ what they run on

FROM ${PYTHON_IMAGE} AS base
# User 2000 of group 0 is the user `vllm` of vLLM's image. Log files are for their owner only (0600), and vLLM, proxy and
# verifier share a folder of them: one user for all three, and nobody needs more rights than that.
RUN useradd --uid 2000 --gid 0 --no-log-init --create-home --shell /usr/sbin/nologin sparseety \
 && install -d -o 2000 -g 0 -m 0700 /logs \
 && install -d -o 2000 -g 0 -m 0755 /run/secrets /cache /cache/huggingface /etc/sparseety
ENV PATH=/opt/sparseety/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HF_HOME=/cache/huggingface
# A volume that is made for /logs takes owner and mode from here.
VOLUME /logs
# Where a sparseety.toml is looked for.
WORKDIR /etc/sparseety
USER 2000:0

# --------------------------------------------------------------------------------------------------- the images

FROM ${VLLM_IMAGE} AS vllm
USER 0
RUN install -d -o 2000 -g 0 -m 0700 /logs \
 && install -d -o 2000 -g 0 -m 0755 /cache /cache/huggingface
COPY --from=wheel /wheel /tmp/wheel
# Only the plugin: what it needs is in vLLM already, and is to stay as it is. vLLM finds it by its entry point.
RUN uv pip install --system --no-deps --no-index /tmp/wheel/*.whl \
 && rm -r /tmp/wheel \
 && python3 -c "from importlib.metadata import entry_points as e; e(group='vllm.general_plugins')['sparseety'].load()"
ENV HF_HOME=/cache/huggingface \
    SPARSEETY_HOOK_DIR=/logs
VOLUME /logs
# Its home is /home/vllm, where vLLM keeps what it compiles.
USER 2000:0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=30m --retries=3 \
    CMD ["python3", "-m", "sparseety.probe", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["vllm", "serve"]

FROM base AS demo
COPY --from=demo-packages /opt/sparseety /opt/sparseety
COPY deploy/demo /opt/demo/deploy/demo
ENV PYTHONPATH=/opt/demo
EXPOSE 8000
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-m", "sparseety.probe", "http://127.0.0.1:8000/health"]
ENTRYPOINT ["python", "-m", "deploy.demo.backend"]
CMD ["--host", "0.0.0.0", "--port", "8000", "--log-dir", "/logs"]

FROM base AS verifier
COPY --from=verifier-packages /opt/sparseety /opt/sparseety
EXPOSE 9102
HEALTHCHECK --interval=10s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-m", "sparseety.probe", "http://127.0.0.1:9102/metrics"]
ENTRYPOINT ["verify-tokens"]
CMD ["--watch", "/logs", "--jobs", "2", "--metrics-host", "0.0.0.0", "--metrics-port", "9102"]

FROM base AS proxy
COPY --from=proxy-packages /opt/sparseety /opt/sparseety
# The admin port stays on the loopback interface of the container, until it is given a token.
ENV SPARSEETY_PROXY_LISTEN=0.0.0.0:9000 \
    SPARSEETY_PROXY_ALLOW_REMOTE=true \
    SPARSEETY_PROXY_LOG_DIR=/logs
EXPOSE 9000 9001
# Alive, not ready: what restarts unhealthy containers must not end one whose upstream is down.
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
    CMD ["python", "-m", "sparseety.probe", "http://127.0.0.1:9001/healthz"]
ENTRYPOINT ["sparseety-proxy"]
