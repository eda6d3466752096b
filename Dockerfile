# The service with a real model on the CPU: server, backend and proxy in one container, the default model inside.
#
#   docker build --tag inference-api --build-arg PIP_EXTRA_INDEX_URL=$TORCH_CPU_INDEX .
#   docker run -e JWT_SECRET=$(openssl rand -hex 32) -p 1223:1223 inference-api
#
# TORCH_CPU_INDEX is the index that PyTorch's install page gives for CPU; without it pip takes the far larger CUDA build.
# A pip configuration of your own goes in as a build secret and stays out of every layer: --secret id=pip_conf,src=FILE

FROM debian:bookworm-slim AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends python3 \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
ENV PATH=/opt/venv/bin:$PATH

FROM base AS packages
RUN apt-get update && apt-get install --yes --no-install-recommends python3-venv && python3 -m venv /opt/venv
WORKDIR /build
COPY pyproject.toml scripts/constraints.txt ./
ARG PIP_EXTRA_INDEX_URL=
# Tests and what only a compiler needs are a fifth of the packages' size; torch asks for its torch_shm_manager at import.
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    python3 -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
extras = project["optional-dependencies"]; \
print(*project["dependencies"], *extras["model"], *extras["otel"], sep="\n")' >requirements.txt \
 && pip install --no-cache-dir --constraint constraints.txt --requirement requirements.txt \
 && find /opt/venv -type d -name tests -prune -exec rm -rf {} + \
 && cd /opt/venv/lib/python3*/site-packages/torch && rm -rf include test \
 && find bin -type f ! -name torch_shm_manager -delete

FROM packages AS model
# The engine's library is compiled here, for any x86-64 with AVX2: what runs has no compiler.
RUN apt-get update && apt-get install --yes --no-install-recommends g++
COPY inference_api inference_api
RUN --mount=type=secret,id=pip_conf,target=/etc/pip.conf \
    TQDM_DISABLE=1 python3 -m inference_api.prepare --cache /cache --compile \
 && python3 -c 'import pathlib, inference_api.model_image as m; m.build_mock_image(pathlib.Path("/cache"))' \
 && chmod -R a+rX /cache && chmod 1777 /cache /cache/tvm_cache

FROM base
# Any user may run this image (--user), so the cache is writable for all, as /tmp is, and so is a volume at /cache, which
# takes over the mode of this folder. The secret's folder is not.
RUN useradd --uid 10001 --home-dir /var/lib/inference_api --shell /bin/bash inference_api \
 && install --directory --mode 1777 /var/lib/inference_api /var/lib/inference_api/cache /cache \
 && install --directory --mode 0700 --owner 10001 --group 10001 /var/lib/inference_api/secret
COPY --from=packages /opt/venv /opt/venv
COPY --from=model /cache /var/lib/inference_api/cache
WORKDIR /app
COPY LICENSE pyproject.toml ./
COPY proxy proxy
COPY scripts/container scripts/jwt_util.py scripts/
COPY inference_api inference_api
RUN python3 -m compileall -q .
# The cache's name of lowest precedence, so that any of its names on the command line wins over the image's.
ENV HOME=/var/lib/inference_api \
    USER=inference_api \
    MODEL_WEKA_DIR=/var/lib/inference_api/cache \
    CONTAINER_MODEL_IMAGES=/var/lib/inference_api/cache \
    PROXY_BIND=0.0.0.0 \
    PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 1223
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=3s --start-period=180s --retries=3 CMD ["/app/scripts/container", "health"]
ENTRYPOINT ["/app/scripts/container"]
