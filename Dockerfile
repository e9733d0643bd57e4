# Penstock on CPUs: for tests, and for the demo model. Dockerfile.cuda is for GPUs.
#   docker build --tag penstock:cpu .
FROM python:3.12-slim-bookworm AS build
# of the CPU build of torch; the build on PyPI has several gigabytes more, with CUDA
ARG TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
WORKDIR /src
COPY . .
RUN python -m venv /opt/penstock \
    && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt \
        --no-deps --index-url "${TORCH_CPU_INDEX}" torch \
    && /opt/penstock/bin/pip install --no-cache-dir --constraint constraints.txt '.[cpu]'

FROM python:3.12-slim-bookworm
RUN useradd --create-home --uid 1000 penstock
COPY --from=build /opt/penstock /opt/penstock
ENV PATH=/opt/penstock/bin:$PATH
USER 1000
EXPOSE 5555 8000
HEALTHCHECK --start-period=2m --interval=10s --timeout=5s CMD \
    ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
ENTRYPOINT ["launch"]
# needs a key in PENSTOCK_API_KEY, since other machines can connect
CMD ["all", "--http-host", "0.0.0.0"]
