# docker build -t jpaged .                          for CPUs: any x86-64 or 64-bit ARM, 700 MB of packages
# docker build -t jpaged --build-arg EXTRAS=cuda .  for NVIDIA GPUs with driver 580 or newer, several GB
# docker run -p 8000:8000 -v jpaged:/cache jpaged   serves SmolLM2; docs/serving.md says how to serve another model
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS packages
ARG EXTRAS=
RUN python -m venv /opt/jpaged
WORKDIR /src
# What the project needs, before its code: that changes more often, and this layer is kept then.
COPY pyproject.toml README.md LICENSE ./
COPY jpaged/__init__.py jpaged/__init__.py
RUN mkdir pallas_kernels \
 && /opt/jpaged/bin/pip install --no-cache-dir --disable-pip-version-check ".${EXTRAS:+[$EXTRAS]}"
COPY jpaged jpaged
COPY pallas_kernels pallas_kernels
RUN /opt/jpaged/bin/pip install --no-cache-dir --disable-pip-version-check --no-deps --force-reinstall .

FROM python:${PYTHON}-slim
# A number, so that Kubernetes can tell that it is not root. The cache is the user's: a volume takes that over.
RUN groupadd --gid 10001 jpaged \
 && useradd --uid 10001 --gid jpaged --no-create-home --home-dir /cache --shell /usr/sbin/nologin jpaged \
 && install -d -o jpaged -g jpaged /cache
COPY --from=packages /opt/jpaged /opt/jpaged
# Models and compiled programs are kept in /cache: with a volume there, later starts take seconds.
ENV PATH=/opt/jpaged/bin:$PATH \
    JPAGED_CACHE=/cache \
    HF_HOME=/cache/huggingface \
    PYTHONUNBUFFERED=1
USER 10001:10001
WORKDIR /cache
VOLUME /cache
EXPOSE 8000
# While the model is loaded and compiled /health is 200, so a first start of minutes is no failure.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60s --retries=3 \
  CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/health', timeout=4)"]
STOPSIGNAL SIGTERM
ENTRYPOINT ["jpaged", "serve", "--host", "0.0.0.0", "--port", "8000", "--exit-on-crash"]
