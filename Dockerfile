# A server of reward models, or a place to train them.
#
#   docker build --tag treeward .
#   docker run --rm --publish 8000:8000 --volume $PWD:/work treeward serve results/rm/final --host 0.0.0.0
#
# On a machine without a GPU: --build-arg TORCH_INDEX=URL, the index of PyTorch's wheels for CPUs (pytorch.org, "Get
# started", names it). Without it pip takes the default build of PyTorch, which brings CUDA. EXTRAS: those of
# pyproject.toml, as "serve,lora,math". docs/serving.md has more commands.
FROM python:3.11-slim

ARG TORCH_INDEX=""
ARG EXTRAS="serve,lora,tensorboard"

WORKDIR /treeward
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY src ./src
# A build for an index has a longer version (2.13.0+cpu), which pip prefers; all else comes from PyPI.
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} ".[$EXTRAS]"

# Anybody may write to the two volumes, so that `docker run --user` works: what a run needs, and what the hub gave.
RUN useradd treeward && mkdir --mode 1777 /work /cache
USER treeward
ENV HOME=/cache HF_HOME=/cache/huggingface
VOLUME /cache
WORKDIR /work

ENTRYPOINT ["treeward"]
CMD ["--help"]
