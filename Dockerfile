# A server of reward models, or a place to train them.
#
#   docker build --tag treeward --build-arg TORCH_INDEX=URL .
#   docker run --rm --publish 8000:8000 --volume $PWD/results:/results treeward serve /results/rm/final --host 0.0.0.0
#
# TORCH_INDEX is the index of PyTorch's wheels for your hardware, CPU or CUDA (pytorch.org, "Get started", names them).
# Without it pip takes the default build, which brings CUDA.
FROM python:3.11-slim

ARG TORCH_INDEX=""
ARG EXTRAS="serve,lora,tensorboard"

WORKDIR /treeward
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY treeward ./treeward
RUN pip install --no-cache-dir --constraint constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch \
    && pip install --no-cache-dir --constraint constraints.txt ".[$EXTRAS]"

ENTRYPOINT ["treeward"]
CMD ["--help"]
