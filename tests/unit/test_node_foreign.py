"""Start lines of vLLM, llama.cpp, Ollama and LM Studio, with the program's name replaced: each starts, or says in one
line what to change. The lines are those of the servers' own documentation."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

import pytest

from tokenmill.cli import main as cli
from tokenmill.cli import parser as spelling
from tokenmill.cli.options import engine_options, sampling_overrides
from tokenmill.cli.parser import _Foreign
from tokenmill.core.request import SamplingParams
from tokenmill.core.sampling import CHAT_TOKENS
from tokenmill.node import foreign

VLLM: list[tuple[str, dict[str, Any] | str]] = [
    ("vllm serve facebook/opt-125m", {"model": "facebook/opt-125m", "port": 8000}),
    ("vllm serve meta-llama/Llama-2-7b-hf --port 8100", {"model": "meta-llama/Llama-2-7b-hf", "port": 8100}),
    (
        "vllm serve NousResearch/Meta-Llama-3-8B-Instruct --dtype auto --api-key token-abc123",
        {"model": "NousResearch/Meta-Llama-3-8B-Instruct", "dtype": "auto"},
    ),
    (
        "python -m vllm.entrypoints.openai.api_server --model mistralai/Mistral-7B-Instruct-v0.3 --max_model_len=32K",
        {"model": "mistralai/Mistral-7B-Instruct-v0.3", "max_model_len": 32768},
    ),
    (
        "vllm serve meta-llama/Llama-3.2-1B-Instruct --dtype auto --max-model-len 4096 --trust-remote-code",
        {"max_model_len": 4096},
    ),
    (
        "vllm serve mistralai/Mistral-7B-v0.1 --gpu-memory-utilization 0.95 --max-model-len 8192 -tp 1 --seed 0",
        {"max_model_len": 8192, "threads": None, "seed": 0},
    ),
    ("vllm serve TheBloke/Llama-2-13B-AWQ --quantization awq", {"quantization": None}),
    ("vllm serve nvidia/Llama-3.1-8B-Instruct-FP8 --quantization modelopt", {"quantization": None}),
    ("vllm serve MODEL --quantization fp8", "argument --quantization: invalid choice: 'fp8'"),
    ("vllm serve MODEL -q bitsandbytes --load-format bitsandbytes", "invalid choice: 'bitsandbytes'"),
    ("vllm serve meta-llama/Llama-2-70b-hf --tensor-parallel-size 4", "--tensor-parallel-size 4: one process"),
    (
        "vllm serve NousResearch/Hermes-2-Pro-Llama-3-8B --enable-auto-tool-choice --tool-call-parser hermes",
        {"model": "NousResearch/Hermes-2-Pro-Llama-3-8B"},
    ),
    (
        "vllm serve deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --reasoning-parser deepseek_r1",
        {"reasoning_parser": "deepseek_r1"},
    ),
    (
        "vllm serve Qwen/Qwen3-0.6B --enable-auto-tool-choice --tool-call-parser hermes",
        {"tool_call_parser": "hermes"},
    ),
    (
        "vllm serve meta-llama/Llama-3.2-3B-Instruct --enable-lora --lora-modules sql-lora=/adapters/sql --max-loras 2",
        {"enable_lora": True, "lora_modules": [("sql-lora", "/adapters/sql")], "max_loras": 2},
    ),
    (
        "vllm serve MODEL --kv-transfer-config.kv_connector NixlConnector --kv-transfer-config.kv_role kv_both",
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}',
    ),
    ("vllm serve MODEL --kv-offloading-size 4 --kv-offloading-backend native", {"kv_host": 4 << 30}),
    ("vllm serve intfloat/e5-small --task embed", {"runner": "pooling"}),
    (
        "vllm serve MODEL --generation-config vllm --override-generation-config.top_p 0.5 --scheduling-policy fcfs",
        {"generation_config": "vllm", "override_generation_config": {"top_p": 0.5}, "scheduling_policy": "fcfs"},
    ),
    (
        'vllm serve MODEL --speculative-config \'{"method": "ngram", "num_speculative_tokens": 5}\'',
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
    ),
    (
        "vllm serve MODEL --speculative-config.method suffix --speculative-config.suffix_decoding_min_token_prob 0.2",
        {"speculative_config": {"method": "suffix", "suffix_decoding_min_token_prob": 0.2}},
    ),
    (
        "vllm serve MODEL --speculative-model small --num-speculative-tokens 5",
        {"speculative_config": {"model": "small", "num_speculative_tokens": 5}},
    ),
    (
        'vllm serve MODEL -sc \'{"method": "eagle3", "model": "x"}\'',
        {"speculative_config": {"method": "eagle3", "model": "x"}},
    ),
    ('vllm serve MODEL -sc \'{"method": "dflash", "model": "x"}\'', "Nothing drafts by dflash yet"),
    (
        "vllm serve MODEL --schedule-policy lpm --radix-eviction-policy lfu",
        {"scheduling_policy": "lpm", "eviction_policy": "lfu"},
    ),
]

LLAMA: list[tuple[str, dict[str, Any] | str]] = [
    ("llama-server -m model.gguf --cache-ram 2048", {"kv_host": 2 << 30}),
    ("llama-server -m model.gguf -cram 0", {"kv_host": None}),
    ("llama-server -m model.gguf --cache-ram=-1", {"kv_host": None}),
    (
        "llama-server -m models/7B/ggml-model.gguf -c 2048",
        {"model": "models/7B/ggml-model.gguf", "max_model_len": 2048},
    ),
    ("llama-server -hf ggml-org/gemma-3-1b-it-GGUF", {"model": "ggml-org/gemma-3-1b-it-GGUF"}),
    ("llama-server -m model.gguf --port 8080", {"model": "model.gguf", "port": 8080}),
    ("llama-server -m model.gguf -c 16384 -np 4", {"max_model_len": 16384, "max_num_seqs": 4}),
    (
        "llama-server -m model.gguf -md draft.gguf --spec-type draft-simple --spec-draft-n-max 8",
        {
            "model": "model.gguf",
            "speculative_config": {"method": "draft-simple", "model": "draft.gguf", "num_speculative_tokens": 8},
        },
    ),
    (
        "llama-server -m model.gguf --spec-type ngram-mod,ngram-simple --spec-draft-n-max 8 --draft-min 2 "
        "--spec-draft-p-min 0.5 --spec-ngram-simple-size-n 12 --spec-ngram-mod-n-match 24",
        {
            "speculative_config": {
                "method": "ngram-mod,ngram-simple",
                "num_speculative_tokens": 8,
                "n_min": 2,
                "p_min": 0.5,
                "prompt_lookup_min": 12,
            }
        },
    ),
    ("llama-server -m model.gguf --spec-type none", {"speculative_config": {"method": "none"}}),
    (
        "llama-server -m model.gguf --spec-type draft-mtp,ngram-mod",
        {"speculative_config": {"method": "draft-mtp,ngram-mod"}},
    ),
    (
        "llama-server -m model.gguf --spec-type ngram-mod --draft-max 1000",
        "num_speculative_tokens of speculative_config must be an integer",
    ),
    (
        "llama-server -m model.gguf --embedding --pooling cls -ub 8192",
        {"runner": "pooling", "pooling": "cls", "max_num_batched_tokens": 8192},
    ),
    ("llama-server -m model.gguf --reranking", {"runner": "pooling"}),
    ("llama-server -m model.gguf --grp-attn-n 1 --grp-attn-w 512", {}),
    ("llama-server -m model.gguf --grp-attn-n 4 --grp-attn-w 2048", "--grp-attn-n 4: a model is computed as its own"),
    ("llama-server -m model.gguf --grammar-file grammar.gbnf", "--grammar-file grammar.gbnf: each request says it"),
    (
        "llama-server -m models/7B/ggml-model.gguf -c 512 --host 0.0.0.0 --port 8080 --n-gpu-layers 99",
        {"host": "0.0.0.0", "port": 8080},
    ),
    (
        "llama-server -hf bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M --jinja -fa",
        {"model": "bartowski/Qwen2.5-7B-Instruct-GGUF:Q4_K_M"},
    ),
    (
        "llama-server -fa on -m model.gguf -ctk q8_0 -ctv q8_0 -t -1 -c 0 --temp 0.7 --top-k 20 -n -1 --mirostat 0",
        {
            "kv_cache_dtype": "q8_0",
            "override_generation_config": {"temperature": 0.7, "top_k": 20, "max_tokens": -1},
            "threads": None,
        },
    ),
    (
        "llama-server -m model.gguf --metrics --slots -cb --log-disable -t4 -to 600",
        {"log_level": "error", "threads": 4},
    ),
    (
        "llama-server -m model.gguf --typical 0.9 --top-nsigma 1 --xtc-probability 0.5 --xtc-threshold 0.2 "
        "--dry-multiplier 0.8 --dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n 64 "
        "--dry-sequence-breaker , --dry-sequence-breaker '\\n' --dry-sequence-breaker 7",
        {
            "override_generation_config": {
                "typical_p": 0.9,
                "top_n_sigma": 1,
                "xtc_probability": 0.5,
                "xtc_threshold": 0.2,
                "dry_multiplier": 0.8,
                "dry_base": 2,
                "dry_allowed_length": 3,
                "dry_penalty_last_n": 64,
                "dry_sequence_breakers": [",", "\n", "7"],
            }
        },
    ),
    (
        "llama-server -m model.gguf --top-n-sigma -1 --dry-sequence-breaker none",
        {"override_generation_config": {"top_n_sigma": -1, "dry_sequence_breakers": []}},
    ),
    ("llama-server -m model.gguf --typical 2", "typical_p must be in (0, 1]"),
    ("llama-server -m model.gguf --mirostat 2", "--mirostat 2: there is no such sampler"),
]

OTHERS: list[tuple[str, dict[str, Any] | str]] = [
    ("ollama run llama3.2", {"model": "llama3.2", "prompt": []}),
    ('ollama run llama3.2 "Why is the sky blue?"', {"model": "llama3.2", "prompt": ["Why is the sky blue?"]}),
    ("ollama run llama3.2 --verbose Why not", {"verbose": True, "prompt": ["Why", "not"]}),
    ("ollama run gemma3 --keepalive 1h30m --format json", {"keepalive": 5400, "format": "json"}),
    ('ollama run qwen3 --think "Is it?"', {"think": "true", "prompt": ["Is it?"]}),
    ("ollama run qwen3 --think=false --hidethinking", {"think": "false", "hidethinking": True}),
    ("ollama run qwen3 --keepalive -1", {"keepalive": 0}),
    ("ollama run qwen3 --keepalive soon", "must be a duration such as 5m"),
    ("ollama serve", {"port": 8000}),
    ("ollama pull llama3.2", {"model": "llama3.2"}),
    ("ollama list", {}),
    ("ollama rm llama3.2", {"model": "llama3.2"}),
    ("ollama ps", {"json": False}),
    ("ollama stop llama3.2", {"server": "llama3.2"}),
    ("ollama show llama3.2 --template", {"model": "llama3.2", "template": True}),
    ("ollama create mario -f ./Modelfile", ".gguf file"),
    ("ollama cp llama3.2 my-model", "--served-model-name"),
    ("ollama push me/mario", "not uploaded"),
    ("ollama launch", "tokenmill serve"),
    ("lms server start --port 1234", "tokenmill serve MODEL"),
    ("lms load llama-3.2-1b-instruct --ttl 300", "tokenmill run MODEL"),
    ("lms unload --all", "tokenmill stop"),
    ("lms status", "tokenmill ps"),
    ("lms get qwen3-4b", "tokenmill pull"),
    ("lms ls", "tokenmill list"),
    ("lms ps", {"json": False}),
    ("lms chat", {"url": None}),
    ("vllm chat --url http://localhost:8000/v1 --model-name m", {"url": "http://localhost:8000/v1", "model": "m"}),
    ("vllm chat --quick hi", "tokenmill run MODEL PROMPT"),
    ("vllm complete --quick hi", "tokenmill generate"),
    ("vllm collect-env", "tokenmill doctor"),
    ("llama-cli -m model.gguf", "after `tokenmill chat`"),
    ("llama-server -m model.gguf --port 8080 -c 4096 -ngl 99", "after `tokenmill serve`"),
]
"""With nothing replaced but the program's name."""


def typed(line: str) -> list[str]:
    """The line as it is typed here."""
    for program in ("vllm serve ", "python -m vllm.entrypoints.openai.api_server ", "llama-server "):
        line = line.replace(program, "tokenmill serve ")
    return shlex.split(line)[1:]


def parse(argv: list[str]) -> argparse.Namespace:
    return cli._parser(argv).parse_args(argv)


@pytest.mark.parametrize(("line", "means"), VLLM + LLAMA, ids=[line for line, _ in VLLM + LLAMA])
def test_a_start_line_of_another_server_starts_or_says_what_to_change(line, means, capsys):
    if isinstance(means, dict):
        args = parse(typed(line))
        assert {name: getattr(args, name) for name in means} == means
        engine_options(args)
        return
    with pytest.raises(SystemExit) as caught:
        parse(typed(line))
    said = capsys.readouterr().err
    assert caught.value.code == 2 and means in said and said.count("\n") == 1


def test_there_are_ten_of_each():
    assert len(VLLM) >= 10 and len(LLAMA) >= 10


@pytest.mark.parametrize(("line", "means"), OTHERS, ids=[line for line, _ in OTHERS])
def test_a_command_of_another_program_runs_or_says_what_to_type(line, means, capsys):
    argv = shlex.split(line)[1:]
    if isinstance(means, dict):
        args = parse(argv)
        assert {name: getattr(args, name) for name in means} == means
        return
    try:
        assert cli.main(argv) == 2
    except SystemExit as ended:
        assert ended.code == 2
    said = capsys.readouterr().err
    assert means in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ('llama-cli -m model.gguf -p "I believe" -n 128', {"prompt": "I believe", "max_tokens": 128}),
        ("llama-cli -hf org/name:Q4_K_M -no-cnv -st -p Hi --temp 0", {"model": "org/name:Q4_K_M", "temperature": 0}),
    ],
)
def test_flags_of_llama_cli_go_after_generate(line, means):
    args = parse(["generate", *shlex.split(line)[1:]])
    assert {name: getattr(args, name) for name in means} == means


def test_flags_of_llama_cli_go_after_chat():
    args = parse(["chat", *shlex.split('-m model.gguf -cnv -sys "Be brief." -c 4096 -ngl 99 -t 4')])
    assert (args.model, args.system, args.max_model_len, args.threads) == ("model.gguf", "Be brief.", 4096, 4)


def test_commands_that_are_here_are_not_said_to_be_missing():
    commands = next(each for each in cli._parser([])._actions if isinstance(each, argparse._SubParsersAction))
    assert foreign.COMMANDS.keys().isdisjoint(commands.choices)


def test_variables_of_other_servers_are_named_unless_their_flag_is_given():
    environ = {"OLLAMA_CONTEXT_LENGTH": "8192", "OLLAMA_HOST": "0.0.0.0", "LLAMA_ARG_CTX_SIZE": "4096", "HOME": "/"}
    notes = list(foreign.environment_notes(environ, ["serve", "--host=0.0.0.0"]))
    assert len(notes) == 2
    assert "--max-model-len 8192" in notes[0] and "--ctx-size 4096" in notes[1]


def test_every_flag_is_taken_whole():
    """No flag is read as another with a value behind it, on any command: -tp is not -t p."""
    shorts = {flag for flag, _ in foreign.flags() if not flag.startswith("--")} | set(spelling.SPELLED)
    for command in ("serve", "chat", "generate", "inspect"):
        parser = parse_command(command)
        known = set(parser._option_string_actions)
        for flag in sorted(shorts - known):
            spelled = spelling.spell([flag], known.__contains__)
            assert all(word in known or word == flag or not word.startswith("-") for word in spelled)
            if spelled == [flag]:
                assert parser._get_option_tuples(flag) == [], (command, flag)
        for flag in known:
            if flag[1] != "-":
                assert parser._get_option_tuples(f"{flag}x") == [], (command, flag)


def parse_command(command: str) -> argparse.ArgumentParser:
    (choices,) = (action.choices for action in cli._parser([command])._actions if action.choices)
    return choices[command]


def test_serve_has_the_repetition_penalty_by_the_flag_of_others_alone(capsys):
    """`--repeat-penalty` is llama-server's; `--repetition-penalty` belongs to `chat` and `generate`."""
    assert parse(["serve", "--repeat-penalty", "1.1"]).override_generation_config == {"repetition_penalty": 1.1}
    with pytest.raises(SystemExit) as refused:
        parse(["serve", "--repetition-penalty", "1.1"])
    assert refused.value.code == 2 and "--repetition-penalty" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "generate"])
def test_the_table_is_sound(command):
    """Each flag stands once, reasons are phrases, spellings lead to flags that exist, and each flag is accepted or
    refused by name with the values it takes."""
    flags = [flag for flag, _ in foreign.flags()]
    assert len(flags) == len(set(flags)), sorted(flag for flag in flags if flags.count(flag) > 1)
    assert not set(flags) & (set(spelling.SPELLED) | set(spelling.SPELLED_VALUES))
    known = set(parse_command(command)._option_string_actions)
    for flag, group in foreign.flags():
        assert flag in known
        assert group.why and not group.why.endswith(".") and group.num_values in (0, 1)
    if command == "serve":
        later = {"--ssl-keyfile", "--ssl-certfile", "--chat-template"}
        for target, *_ in spelling.SPELLED.values():
            assert target.partition(".")[0] in known | later, target


def test_refusals_and_notices_are_one_line_each(capsys):
    """Every flag of the table, given to serve."""
    parser = parse_command("serve")
    neutral = []
    for flag, group in foreign.flags():
        if not isinstance(parser._option_string_actions[flag], _Foreign):
            continue
        neutral += [f"{flag}={value}" for value in group.neutral]
        argv = [flag, *(["x"] * group.num_values)]
        if group.refused:
            with pytest.raises(SystemExit):
                parser.parse_args(argv)
        else:
            parser.parse_args(argv)
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and flag in said and group.why in said
    parser.parse_args(neutral)
    assert not capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "kept"),
    [("8192", 8192), ("8k", 8000), ("8K", 8192), ("1.5k", 1500), ("auto", None), ("-1", None), ("0", None)],
)
def test_lengths_are_read_as_vllm_and_llama_cpp_read_them(given, kept):
    assert parse(["serve", "--max-model-len", given]).max_model_len == kept


def test_dotted_flags_make_one_object():
    words = ["--a_b.x", "1", "--a-b.y.z=q", "--a-b.l+", "1,2", "--a-b.on", "--", "--a_b"]
    assert spelling.spell(words, {"--a-b"}.__contains__) == [
        "--a-b", '{"x": 1, "y": {"z": "q"}, "l": [1, 2], "on": true}', "--", "--a_b",
    ]  # fmt: skip


def test_values_of_our_own_flags_stay_as_they_are():
    args = parse(["generate", "-p", "a_b --c_d", "-n", "5", "-s", "-1", "--stop", "a.b"])
    assert (args.prompt, args.max_tokens, args.seed, args.stop) == ("a_b --c_d", 5, None, ["a.b"])
    assert parse(["generate", "-n", "-1"]).max_tokens is None


def test_one_answer_takes_every_sampler_as_a_server_does():
    args = parse(shlex.split(
        r"generate --typical 0.9 --top-n-sigma -1 --xtc-probability 0.5 --xtc-threshold 0.2 --dry-multiplier 0.8 "
        r"--dry-base 2 --dry-allowed-length 3 --dry-penalty-last-n 64 --dry-sequence-breaker '\n' "
        r"--dry-sequence-breaker a,b"
    ))  # fmt: skip
    params = SamplingParams(**sampling_overrides(args))
    assert (params.typical_p, params.top_n_sigma, params.xtc_probability, params.xtc_threshold) == (0.9, -1, 0.5, 0.2)
    assert (params.dry_multiplier, params.dry_base, params.dry_allowed_length) == (0.8, 2, 3)
    assert (params.dry_penalty_last_n, params.dry_sequence_breakers) == (64, ("\n", "a,b"))
    without = sampling_overrides(parse(["chat", "--dry-sequence-breaker", "none"]))
    assert without == {"max_tokens": CHAT_TOKENS, "stop": (), "dry_sequence_breakers": ()}
