"""Commands, environment variables and flags of vLLM, llama.cpp, Ollama and LM Studio: what each is here.

Data, and no more than it takes to read it. A start script is kept by changing the program's name to `tokenmill serve`:
each flag of those servers is one of ours under another spelling (cli/parser.py), or has nothing to steer here and is
said to have no effect (a Group), or would change what is served, and is refused in one line that says what to do
instead (a Group with `refused`). A flag that a parser has of its own is never looked up here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

COMMANDS: Mapping[str, str] = {
    "server": "type `tokenmill serve MODEL` to start one, `tokenmill stop` to end it, `tokenmill ps` to see it",
    "help": "type `tokenmill --help`, or `tokenmill COMMAND --help`",
    "start": "type `tokenmill serve MODEL`, or `tokenmill run MODEL` to talk with it",
    "logs": "a server prints its log where it was started; one that `run` started writes servers/MODEL.log in the "
    "state folder",
    "load": "type `tokenmill run MODEL` to talk with it, `tokenmill serve MODEL` to serve it",
    "unload": "type `tokenmill stop MODEL`",
    "status": "type `tokenmill ps`",
    "get": "type `tokenmill pull MODEL`",
    "ls": "type `tokenmill list`",
    "import": "a .gguf file or a folder is taken by its path: `tokenmill run FILE`",
    "create": "serve a .gguf file or a folder by its path; requests bring system messages and settings",
    "push": "models are not uploaded",
    "cp": "give a served model the name you want by --served-model-name",
    "launch": "start the server by `tokenmill serve MODEL`",
    "complete": "type `tokenmill generate MODEL -p TEXT`",
    "collect-env": "type `tokenmill doctor`",
    "run-batch": "upload the file to /v1/files of `tokenmill serve`, and post it to /v1/batches (docs/use/batches.md)",
}

ENVIRONMENT: Mapping[str, str] = {
    "OLLAMA_HOST": "--host and --port",
    "OLLAMA_MODELS": "TOKENMILL_CACHE in the environment",
    "OLLAMA_CONTEXT_LENGTH": "--max-model-len {}",
    "OLLAMA_NUM_PARALLEL": "--max-num-seqs {}",
    "OLLAMA_KV_CACHE_TYPE": "--kv-cache-dtype {}",
    "OLLAMA_ORIGINS": "--cors-origins, once for each",
    "OLLAMA_DEBUG": "--log-level debug",
    "LLAMA_ARG_MODEL": "--model {}",
    "LLAMA_ARG_HF_REPO": "--model {}",
    "LLAMA_ARG_CTX_SIZE": "--ctx-size {}",
    "LLAMA_ARG_N_PARALLEL": "--parallel {}",
    "LLAMA_ARG_THREADS": "--threads {}",
    "LLAMA_ARG_PORT": "--port {}",
    "LLAMA_ARG_HOST": "--host {}",
    "LLAMA_ARG_ALIAS": "--served-model-name {}",
    "LLAMA_ARG_EMBEDDINGS": "--runner pooling",
    "VLLM_CPU_KVCACHE_SPACE": "--kv-cache-memory-bytes {}GiB",
    "VLLM_CPU_OMP_THREADS_BIND": "--threads",
    "VLLM_LOGGING_LEVEL": "--log-level",
}
"""Variables of other servers that are not read here, and what to give instead ({}: the same value)."""


def environment_notes(environ: Mapping[str, str], argv: Sequence[str]) -> Iterator[str]:
    """A sentence for each variable that another server would have read, unless what to give instead is given."""
    for name, instead in ENVIRONMENT.items():
        value = environ.get(name)
        if value and not any(word.split("=")[0] == instead.split(" ")[0] for word in argv):
            yield f"{name} is not read from the environment: give {instead.format(value)}."


@dataclass(frozen=True, slots=True)
class Group:
    """num_values: that each of the flags takes. why: said of each. refused: it ends the start, unless the value is one
    of `neutral`, which ask for nothing and are accepted without a word."""

    num_values: int
    flags: str
    why: str
    refused: bool = False
    neutral: tuple[str, ...] = ()

    def asks_for_nothing(self, values: Sequence[str]) -> bool:
        return len(values) == 1 and any(_same(values[0], word) for word in self.neutral)


_ONE_PROCESS = "one process computes a model, on --threads threads; leave it out"
_STEPS = "prompts are always cut into chunks, and answers do not depend on how"
_GPU = "all of a model is computed on the CPU"
_MEMORY = "--kv-cache-memory-bytes sizes the KV pool, and there is no other memory to share out"
_GRAPHS = "there is nothing to compile or to capture"
_IMAGES = "images, audio and video are not read"
_TOOLS = "it is always so"
_PLUGINS = "name one of the parsers that are here, by --tool-call-parser and --reasoning-parser"
_THOUGHTS = "give --reasoning-parser none to leave thoughts in the text"
_GRAMMARS = "one library follows every grammar, and requests say the rest in structured_outputs"
_DRAFTS = "a draft model runs beside the other one as that does, and answers are the same"
_FILES = "a model is computed as its own files say; leave it out, or change the files"
_PLACES = "threads are placed by core and NUMA node where that matters; taskset bounds them"
_PAGE = "there is no web page here"
_LOADED = "weights are read from their files in one way"
_PER_REQUEST = "each request says it for itself, in the field"

GROUPS: tuple[Group, ...] = (
    # vLLM: where and how a model is computed
    Group(
        1,
        "--tensor-parallel-size -tp --pipeline-parallel-size -pp --data-parallel-size -dp "
        "--data-parallel-size-local -dpl --decode-context-parallel-size -dcp --prefill-context-parallel-size -pcp "
        "--nnodes --api-server-count -asc",
        _ONE_PROCESS,
        refused=True,
        neutral=("1",),
    ),
    Group(
        1,
        "--data-parallel-rank -dpn --data-parallel-start-rank -dpr --data-parallel-address -dpa "
        "--data-parallel-rpc-port -dpp --data-parallel-backend -dpb --node-rank --master-addr --master-port",
        _ONE_PROCESS,
        refused=True,
    ),
    Group(0, "--headless --data-parallel-hybrid-lb -dph --data-parallel-external-lb -dpe", _ONE_PROCESS, refused=True),
    Group(
        1,
        "--distributed-executor-backend --max-parallel-loading-workers --worker-cls --worker-extension-cls "
        "--all2all-backend --eplb-config --num-redundant-experts --expert-placement-strategy "
        "--fault-tolerance-config --dbo-decode-token-threshold --dbo-prefill-token-threshold "
        "--dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size",
        "one process computes a model",
    ),
    Group(
        0,
        "--enable-expert-parallel --no-enable-expert-parallel -ep --enable-eplb --enable-dbo --enable-elastic-ep "
        "--disable-custom-all-reduce --ray-workers-use-nsight --enable-fault-tolerance "
        "--disable-frontend-multiprocessing --disable-nccl-for-dp-synchronization --reuse-port",
        "one process computes a model",
    ),
    Group(
        1,
        "--kv-transfer-config",
        "give --kv-host SIZE, --kv-disk FOLDER:SIZE or --kv-remote URL (docs/operate/kv-tiers.md)",
        refused=True,
    ),
    Group(
        1,
        "--kv-offloading-backend",
        "--kv-offloading-size is host memory, and --kv-disk and --kv-remote name what is below",
    ),
    Group(1, "--ec-transfer-config", "images are not read; leave it out", refused=True),
    Group(
        1,
        "--gpu-memory-utilization --swap-space --cpu-offload-gb "
        "--num-gpu-blocks-override",
        _MEMORY,
    ),
    Group(
        1,
        "--max-seq-len-to-capture --cuda-graph-sizes --compilation-config -cc --optimization-level -O "
        "--performance-mode --attention-backend --attention-config --kernel-config --additional-config "
        "--model-impl",
        _GRAPHS,
    ),
    Group(0, "--enforce-eager --no-enforce-eager --disable-cascade-attn --use-v2-block-manager", _GRAPHS),
    Group(
        1,
        "--load-format --model-loader-extra-config --config-format --safetensors-load-strategy "
        "--tokenizer-pool-size --tokenizer-pool-type --tokenizer-pool-extra-config",
        _LOADED,
    ),
    Group(1, "--download-dir", "TOKENMILL_CACHE names the folder for what is fetched"),
    Group(1, "--hf-token -hft", "HF_TOKEN in the environment is used"),
    Group(0, "--trust-remote-code --no-trust-remote-code", "no code of a model is ever run"),
    Group(0, "--enable-sleep-mode --use-tqdm-on-load --no-use-tqdm-on-load --allow-deprecated-quantization", _LOADED),
    Group(
        1,
        "--revision --code-revision --tokenizer-revision",
        "the hub's main revision is fetched; another is named org/name@REVISION",
        refused=True,
        neutral=("main",),
    ),
    Group(1, "--tokenizer --hf-config-path", "a model's own files are read; put yours into its folder", refused=True),
    Group(1, "--tokenizer-mode", "there is one tokenizer; leave it out", refused=True, neutral=("auto", "slow", "hf")),
    Group(
        1,
        "--hf-overrides --rope-theta --rope-scaling --rope-scale --rope-freq-base --rope-freq-scale "
        "--yarn-orig-ctx --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow --yarn-beta-fast --override-kv",
        _FILES,
        refused=True,
    ),
    Group(1, "--override-pooler-config --pooler-config", "give --pooling last, mean or cls", refused=True),
    Group(0, "--disable-sliding-window", _FILES, refused=True),
    Group(1, "--device -dev", _GPU + "; leave it out", refused=True, neutral=("cpu", "auto", "none")),
    Group(
        1,
        "--cudagraph-capture-sizes --max-cudagraph-capture-size --profiler-config -ac",
        _GRAPHS,
    ),
    Group(1, "--mamba-cache-dtype --mamba-ssm-cache-dtype", "states are float32, and their convolutions' inputs too"),
    Group(1, "-gan --grp-attn-n", _FILES, refused=True, neutral=("1",)),
    Group(1, "-gaw --grp-attn-w", "it belongs to --grp-attn-n, which is refused"),
    Group(0, "--enable-layerwise-nvtx-tracing --cudagraph-metrics", _GRAPHS),
    Group(1, "--ignore-patterns --pt-load-map-location", _LOADED),
    Group(1, "--override-attention-dtype --weight-transfer-config", _FILES, refused=True),
    Group(0, "--tokens-only", "requests bring text or token ids; leave it out", refused=True),
    Group(
        1,
        "--mm-processor-cache-type --mm-shm-cache-max-object-size-mb --mm-encoder-attn-backend --video-pruning-rate",
        _IMAGES,
    ),
    Group(0, "--enable-mm-embeds --interleave-mm-strings", _IMAGES),
    Group(1, "--kv-cache-metrics-sample", "/metrics has the figures"),
    Group(0, "--list-devices", "type `tokenmill doctor`", refused=True),
    Group(0, "-cl --cache-list", "type `tokenmill list`", refused=True),
    Group(1, "-otd --override-tensor-draft", _DRAFTS),
    # vLLM: scheduling
    Group(
        1,
        "--long-prefill-token-threshold --max-num-partial-prefills --max-long-partial-prefills "
        "--num-scheduler-steps --scheduler-delay-factor --num-lookahead-slots --preemption-mode "
        "--prefix-caching-hash-algo",
        _STEPS,
    ),
    Group(
        0,
        "--enable-chunked-prefill --no-enable-chunked-prefill --async-scheduling --no-async-scheduling "
        "--multi-step-stream-outputs --disable-hybrid-kv-cache-manager --no-disable-hybrid-kv-cache-manager "
        "--calculate-kv-scales --kv-sharing-fast-prefill --disable-chunked-mm-input --disable-async-output-proc",
        _STEPS,
    ),
    Group(1, "--max-num-scheduled-tokens", "--max-num-batched-tokens is the size of a step"),
    Group(1, "--scheduler-cls", "there is one scheduler; leave it out", refused=True),
    Group(
        1,
        "--spec-draft-p-split --draft-p-split -ctkd --cache-type-k-draft --spec-draft-type-k -ctvd "
        "--cache-type-v-draft --spec-draft-type-v -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft "
        "--spec-draft-threads-batch -ngld --gpu-layers-draft --n-gpu-layers-draft --spec-draft-ngl -devd "
        "--device-draft --spec-draft-device -cd --ctx-size-draft -lcs --lookup-cache-static -lcd "
        "--lookup-cache-dynamic",
        _DRAFTS,
    ),
    Group(0, "--spec-default", "name who drafts by --spec-type"),
    Group(
        1,
        "--spec-ngram-mod-n-match --spec-ngram-mod-n-min --spec-ngram-simple-min-hits --spec-ngram-min-hits",
        "a match counts by its length and by how often such matches were right",
    ),
    # vLLM: the API
    Group(0, "--enable-auto-tool-choice --exclude-tools-when-tool-choice-none --enable-reasoning", _TOOLS),
    Group(1, "--tool-parser-plugin --reasoning-parser-plugin --tool-server", _PLUGINS, refused=True),
    Group(1, "--structured-outputs-config --guided-decoding-backend", _GRAMMARS),
    Group(
        1,
        "--limit-mm-per-prompt --mm-processor-kwargs --media-io-kwargs --allowed-local-media-path "
        "--allowed-media-domains --mm-encoder-tp-mode --mm-processor-cache-gb --mmproj -mm --mmproj-url -mmu "
        "--mmproj-device -mmdev --image-min-tokens --image-max-tokens --mtmd-batch-max-tokens --video-fps "
        "--video-timestamp-interval --video-ffmpeg-dir --media-path",
        _IMAGES,
    ),
    Group(
        0,
        "--language-model-only --skip-mm-profiling --disable-mm-preprocessor-cache --mmproj-auto --no-mmproj "
        "--no-mmproj-auto --mmproj-offload --no-mmproj-offload",
        _IMAGES,
    ),
    Group(1, "--chat-template-content-format", "the template shows which form of content it reads"),
    Group(1, "--response-role", "answers have the role assistant; leave it out", refused=True, neutral=("assistant",)),
    Group(
        1,
        "--default-chat-template-kwargs --chat-template-kwargs",
        f"{_PER_REQUEST} chat_template_kwargs",
        refused=True,
        neutral=("{}",),
    ),
    Group(0, "--return-tokens-as-token-ids", f"{_PER_REQUEST} return_tokens_as_token_ids", refused=True),
    Group(0, "--enable-force-include-usage", f"{_PER_REQUEST} stream_options", refused=True),
    Group(
        1,
        "--middleware --logits-processors --logits-processor-pattern --io-processor-plugin",
        "no code of others is run here; leave it out",
        refused=True,
    ),
    Group(0, "--skip-tokenizer-init --enable-prompt-embeds", "requests bring text or token ids; leave it out", True),
    Group(1, "--allowed-origins", "give --cors-origins ORIGIN, once for each", refused=True),
    Group(
        1,
        "--allowed-methods --allowed-headers --cors-methods --cors-headers",
        "--cors-origins allows every method and header",
    ),
    Group(0, "--allow-credentials --cors-credentials --no-cors-credentials", "keys come in a header, not in cookies"),
    Group(1, "--max-logprobs", "a request may ask for up to 20 alternatives", neutral=("20",)),
    Group(1, "--logprobs-mode", "logprobs are of the raw logits; leave it out", True, neutral=("raw_logprobs",)),
    Group(1, "--config", "write its options on the command line", refused=True),
    Group(
        0,
        "--enable-prompt-tokens-details --enable-request-id-headers --enable-server-load-tracking --metrics",
        "it is always on",
    ),
    Group(
        0,
        "--disable-log-requests --enable-log-requests --no-enable-log-requests --disable-log-stats "
        "--enable-log-outputs --log-error-stack --disable-uvicorn-access-log --disable-fastapi-docs "
        "--enable-offline-docs --enable-mfu-metrics --kv-cache-metrics "
        "--log-prefix --no-log-prefix --log-timestamps --no-log-timestamps --log-jsonl --no-log-jsonl --log-colors "
        "--perf --no-perf",
        "--log-level says what is written, and /metrics has the figures",
    ),
    Group(
        1,
        "--max-log-len --uvicorn-log-level --log-config-file --h11-max-incomplete-event-size "
        "--h11-max-header-count --collect-detailed-traces "
        "--show-hidden-metrics-for-version --log-file -lv --verbosity --log-verbosity --log-prompts-dir",
        "--log-level says what is written to standard error, and /metrics has the figures",
    ),
    Group(
        1,
        "--max-cpu-loras --lora-dtype --lora-extra-vocab-size --long-lora-scaling-factors --default-mm-loras",
        "adapters are kept as their files have them",
    ),
    Group(0, "--fully-sharded-loras --lora-init-without-apply", "requests name the adapter that they want"),
    Group(1, "--lora --lora-scaled", "give --lora-modules NAME=FOLDER, an adapter in PEFT format", refused=True),
    Group(1, "--control-vector --control-vector-scaled", "control vectors are not supported; leave it out", True),
    # llama-server: the machine
    Group(
        1,
        "-ngl --gpu-layers --n-gpu-layers -sm --split-mode -ts --tensor-split -mg --main-gpu -fitt --fit-target "
        "-fitc --fit-ctx -ot --override-tensor -ncmoe --n-cpu-moe --moe-cache-mib -ncffn --n-cpu-ffn",
        _GPU,
    ),
    Group(
        0,
        "-fit --fit -cmoe --cpu-moe -kvo --kv-offload -nkvo --no-kv-offload --op-offload --no-op-offload "
        "--no-host",
        _GPU,
    ),
    Group(0, "-fa --flash-attn", "attention never holds all scores of a prompt, here as with it"),
    Group(
        1,
        "-C --cpu-mask -Cr --cpu-range --cpu-strict --prio --poll -Cb --cpu-mask-batch -Crb --cpu-range-batch "
        "--numa --cpu-strict-batch --prio-batch --poll-batch",
        _PLACES,
    ),
    Group(1, "-tb --threads-batch --threads-http", "--threads is the number of kernel threads for all work"),
    Group(1, "-lm --load-mode -lzm --lazy-mode", _LOADED),
    Group(
        0,
        "--mlock --mmap --no-mmap -dio --direct-io --repack -nr --no-repack --check-tensors "
        "--warmup --no-warmup --offline",
        "weights are read into the kernels' own layout when the model is loaded",
    ),
    Group(1, "--rpc", _ONE_PROCESS, refused=True),
    # llama-server: KV cache and slots
    Group(1, "-b --batch-size", "--max-num-batched-tokens is the size of a step", neutral=("2048",)),
    Group(
        1,
        "--keep -dt --defrag-thold --kv-unified-per-slot -ctxcp --ctx-checkpoints --swa-checkpoints -cms "
        "--checkpoint-min-step --cache-reuse --slot-save-path -sps --slot-prompt-similarity",
        "KV is kept in blocks that all requests share",
    ),
    Group(
        0,
        "--swa-full -kvu --kv-unified -no-kvu --no-kv-unified --cache-idle-slots --no-cache-idle-slots -cb "
        "--cont-batching -nocb --no-cont-batching --no-context-shift --spm-infill",
        "KV is kept in blocks that all requests share, and requests always run together",
    ),
    Group(0, "--slots --no-slots", "they are always shown"),
    Group(0, "--context-shift", "an answer ends where the context does; leave it out", refused=True),
    # llama-server: models
    Group(1, "-dr --docker-repo", "fetch the file and give its path", refused=True),
    Group(1, "-hff --hf-file", "give quantisation or file with the name: -hf org/name:FILE.gguf", refused=True),
    Group(1, "--models-preset", "--models-dir DIR lists models, and flags of the engine hold for all", refused=True),
    Group(1, "--tags", "models have no tags"),
    Group(
        0,
        "--embd-gemma-default --fim-qwen-1.5b-default --fim-qwen-3b-default --fim-qwen-7b-default "
        "--fim-qwen-7b-spec --fim-qwen-14b-spec --fim-qwen-30b-default --gpt-oss-20b-default "
        "--gpt-oss-120b-default --vision-gemma-4b-default --vision-gemma-12b-default",
        "name the model: -hf org/name:QUANT",
        refused=True,
    ),
    # llama-server: sampling that is not here
    Group(1, "--samplers --sampler-seq --sampling-seq", "docs/use/sampling.md tells the order, which is fixed", True),
    Group(
        1,
        "--dynatemp-range --mirostat --adaptive-target",
        "there is no such sampler here; leave it out",
        refused=True,
        neutral=("0", "-1"),
    ),
    Group(
        1,
        "--dynatemp-exp --mirostat-lr --mirostat-ent --adaptive-decay",
        "it belongs to a sampler that is not here",
    ),
    Group(1, "--repeat-last-n", "penalties cover the whole sequence", neutral=("-1",)),
    Group(1, "--grammar --grammar-file", f"{_PER_REQUEST} grammar", refused=True),
    Group(1, "-j --json-schema -jf --json-schema-file", f"{_PER_REQUEST} json_schema", refused=True),
    Group(1, "-l --logit-bias", f"{_PER_REQUEST} logit_bias", refused=True),
    Group(1, "-r --reverse-prompt", f"{_PER_REQUEST} stop", refused=True),
    Group(0, "--ignore-eos", f"{_PER_REQUEST} ignore_eos", refused=True),
    Group(0, "-sp --special", f"{_PER_REQUEST} skip_special_tokens", refused=True),
    Group(0, "-bs --backend-sampling -e --escape --no-escape", "prompts and draws are taken as they come"),
    # llama-cli, vllm chat
    Group(
        0,
        "-cnv --conversation -no-cnv --no-conversation -st --single-turn -i --interactive -if --interactive-first "
        "--simple-io -co --color --no-display-prompt -mli --multiline-input",
        "`chat` talks, `generate` continues a prompt and `run MODEL PROMPT` answers once",
    ),
    Group(1, "--quick", "type `tokenmill run MODEL PROMPT`, or `tokenmill generate -p TEXT`", refused=True),
    # llama-server: the API
    Group(1, "--embd-normalize", f"{_PER_REQUEST} normalize", refused=True, neutral=("2",)),
    Group(1, "--reasoning-format", _THOUGHTS, refused=True, neutral=("none", "auto")),
    Group(1, "--reasoning -rea", f"{_PER_REQUEST} chat_template_kwargs", refused=True, neutral=("auto",)),
    Group(1, "--reasoning-effort", f"{_PER_REQUEST} reasoning_effort", refused=True, neutral=("default",)),
    Group(1, "--reasoning-budget", f"{_PER_REQUEST} thinking_token_budget", refused=True, neutral=("-1",)),
    Group(1, "--reasoning-budget-message", "thoughts that are too long are ended by the model's own mark"),
    Group(0, "--reasoning-preserve --no-reasoning-preserve --jinja --no-jinja", "the model's template decides"),
    Group(
        0,
        "--skip-chat-parsing --no-skip-chat-parsing --prefill-assistant --no-prefill-assistant",
        "answers are given as they are, and continue_final_message has a message continued",
    ),
    Group(1, "-to --timeout --sse-ping-interval", "a stream stays open while its client reads"),
    Group(1, "--api-prefix", "serve behind a proxy that has the prefix", refused=True),
    Group(0, "--props", "settings are fixed when the server starts"),
    Group(1, "--path --ui-config --webui-config --ui-config-file --webui-config-file", _PAGE),
    Group(1, "--tools --tools-runtime --mcp-servers-config --mcp-servers-json", _PAGE),
    Group(
        0,
        "--ui --webui --no-ui --no-webui --ui-mcp-proxy --webui-mcp-proxy --no-ui-mcp-proxy --no-webui-mcp-proxy "
        "-ag --agent -no-ag --no-agent",
        _PAGE,
    ),
)  # fmt: skip


def flags() -> Iterator[tuple[str, Group]]:
    for group in GROUPS:
        for flag in group.flags.split():
            yield flag, group


def _same(value: str, word: str) -> bool:
    """Equal as text, or as numbers: 0.00 is 0."""
    try:
        return float(value) == float(word)
    except ValueError:
        return value == word
