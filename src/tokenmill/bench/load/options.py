"""Flags of the load benchmarks, and what they mean as plans, schedules and targets.

Names are those of `vllm bench serve` where the meaning is the same.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError
from ..report import without_secrets
from . import datasets, traces
from .body import APIS, POOLING_APIS, BodyFormat
from .context import Window
from .datasets import sharegpt
from .goodput import Search, parse_goals
from .histogram import QUANTILES
from .http import Address, make_tls, parse_url
from .load_file import LoadFile, settle
from .material import Material, Vocabulary, token_material, word_material
from .plan import Plan
from .retries import EarlyStop, RetryPolicy
from .run import Load, run_async
from .schedule import Ramp, Schedule, diurnal_plan, num_in_diurnal_plan, read_duration
from .show import METRIC_NAMES
from .target import Target, find_model, takes_tokens


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def numbers(text: str) -> list[float]:
    numbers = [float(part) for part in text.split(",") if part]
    if not numbers or any(number <= 0 for number in numbers):
        raise argparse.ArgumentTypeError(f"must be numbers above 0, got {text}")
    return numbers


def counts(text: str) -> list[float]:
    found = numbers(text)
    if not all(number.is_integer() for number in found):
        raise argparse.ArgumentTypeError(f"must be whole numbers above 0, got {text}")
    return found


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def duration(text: str) -> float:
    try:
        return read_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def metrics(text: str) -> tuple[str, ...]:
    return known(text, METRIC_NAMES, "metrics")


def percentiles(text: str) -> tuple[str, ...]:
    try:
        percents = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        percents = []
    if not percents or not all(0 < percent <= 100 for percent in percents):
        raise argparse.ArgumentTypeError(f"percentiles are above 0 and at most 100, got {text}")
    return tuple(f"{percent:g}" for percent in percents)


def known(text: str, names: dict[str, Any], what: str) -> tuple[str, ...]:
    wanted = tuple(part.strip() for part in text.split(",") if part.strip())
    if not wanted or any(name not in names for name in wanted):
        raise argparse.ArgumentTypeError(f"{what} are among {', '.join(names)}; got {text}")
    return wanted


def add_search_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("search")
    group.add_argument("--attainment", type=float, default=0.9, metavar="X", help="share to meet --goodput (0.9)")
    group.add_argument("--start-rate", type=float, default=1.0, metavar="R", help="first rate tried (default: 1)")
    group.add_argument("--min-rate", type=float, default=0.01, metavar="R")
    group.add_argument("--max-rate", type=float, default=10_000.0, metavar="R")
    group.add_argument(
        "--tolerance", type=float, default=0.05, metavar="X", help="stop sooner if the interval is so narrow (0.05)"
    )
    group.add_argument("--max-probes", type=int, default=20, metavar="N", help="of one search (default: 20)")
    group.add_argument("--probe-s", type=float, default=60.0, metavar="S", help="length of a probe (default: 60)")
    group.add_argument("--min-requests", type=int, default=50, metavar="N", help="of a probe (default: 50)")
    group.add_argument("--num-cores", type=int, metavar="N", help="of the server (default: ours, if it is local)")
    group.add_argument("--num-gpus", type=int, metavar="N", help="of the server")
    group.add_argument("--cost-per-hour", type=float, metavar="X", help="dollars, for requests per dollar")


def make_search(args: argparse.Namespace) -> Search:
    """What the flags of a search say. Raises ConfigError."""
    if not 0 < args.attainment <= 1 or args.tolerance <= 0 or args.repeats < 1:
        raise ConfigError("--attainment is from 0 to 1, --tolerance above 0 and --repeats at least 1.")
    return Search(
        start_rate=args.start_rate,
        min_rate=args.min_rate,
        max_rate=args.max_rate,
        tolerance=args.tolerance,
        target_attainment=args.attainment,
        max_probes=args.max_probes,
    )


DEFAULT_NUM_PROMPTS = 100
QUERY_LEN = 16
DATASETS = ("random", "shared-prefix", "multi-turn", "jsonl", "sharegpt", "trace", "servegen")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("endpoint")
    group.add_argument("--model", metavar="NAME", help="model to ask for (default: the first the server lists)")
    group.add_argument(
        "--endpoint", choices=APIS, default="completions", help="API: one of %(choices)s (default: completions)"
    )
    group.add_argument("--api-key", metavar="KEY", help="sent as a bearer token")
    group.add_argument(
        "--ca-file", type=Path, metavar="FILE", help="certificates to trust for https (default: the system's)"
    )
    group.add_argument("--insecure", action="store_true", help="https without checking the certificate")
    group.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="repeatable")
    group.add_argument(
        "--prompt-format",
        choices=("auto", "tokens", "text"),
        default="auto",
        help="token ids give exact lengths (default: ids if the server takes them)",
    )
    group.add_argument("--tokenizer", metavar="MODEL", help="model whose tokenizer makes text of exact length")
    group.add_argument("--vocab-range", default="1000:30000", metavar="LOW:HIGH", help="ids to draw from")
    group.add_argument("--ignore-eos", action="store_true", help="ask for answers of exactly the wanted length")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="further request fields")
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="for one request (default: 600)")
    group.add_argument("--metrics-url", metavar="URL", help="Prometheus page (default: /metrics of the server)")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    _add_schedule(parser)
    _add_data_set(parser)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load")
    group.add_argument("--num-prompts", type=int, metavar="N", help=f"requests (default: {DEFAULT_NUM_PROMPTS})")
    group.add_argument(
        "--duration", type=float, metavar="S", help="nothing becomes due after this; a closed loop lasts until then"
    )
    group.add_argument("--seed", type=int, default=0, metavar="N", help="decides every byte (default: 0)")
    group.add_argument("--num-warmups", type=int, default=1, metavar="N", help="requests before (default: 1)")
    group.add_argument("--request-rate", type=float, metavar="R", help="open loop, requests/s (default: all at once)")
    group.add_argument("--burstiness", type=float, default=1.0, metavar="B", help="1 Poisson, < 1 bursts, inf even")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="cap; without a rate: --concurrency")
    group.add_argument("--concurrency", type=int, metavar="N", help="closed loop: N clients, each waits its answer")
    group.add_argument("--ramp-up-strategy", choices=("linear", "exponential"), help="change the rate over the run")
    group.add_argument("--ramp-up-start-rps", type=float, metavar="R")
    group.add_argument("--ramp-up-end-rps", type=float, metavar="R")
    group.add_argument("--speedup", type=float, default=1.0, metavar="X", help="divide trace and think times by X")
    group.add_argument(
        "--warmup", type=float, default=0.0, metavar="X", help="cut off the begin; below 1 a share, else s"
    )
    group.add_argument(
        "--cooldown", type=float, default=0.0, metavar="X", help="cut off the end; below 1 a share, else s"
    )
    group.add_argument(
        "--max-error-rate", type=float, default=0.9, metavar="X", help="give up if more of the requests fail (0.9)"
    )
    group.add_argument("--max-wait", type=float, metavar="S", help="give up if a first token takes longer (open loops)")
    group.add_argument(
        "--retries", type=int, default=0, metavar="N", help="ask again after 429 or 503, up to N times (default: 0)"
    )
    group.add_argument("--patience", type=float, metavar="S", help="a client leaves if no token comes within S")


def _add_data_set(parser: argparse.ArgumentParser) -> None:
    data = parser.add_argument_group("data set")
    data.add_argument("--dataset-name", choices=DATASETS, default="random", help="(default: random)")
    data.add_argument("--dataset-path", type=Path, metavar="FILE", help="JSONL prompts or a trace, .gz too")
    data.add_argument("--random-input-len", "--input-len", type=int, default=256, metavar="N", help="(default: 256)")
    data.add_argument("--random-output-len", "--output-len", type=int, default=128, metavar="N", help="(default: 128)")
    data.add_argument("--random-range-ratio", type=float, default=0.0, metavar="X", help="lengths vary by +- X of them")
    data.add_argument("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share")
    data.add_argument("--random-batch-size", type=int, default=1, metavar="N", help="texts to embed or rank a request")
    data.add_argument("--num-prefixes", type=int, default=8, metavar="N", help="shared-prefix groups (default: 8)")
    data.add_argument("--prefix-len", type=int, default=256, metavar="N", help="tokens of a group's prefix")
    data.add_argument("--num-turns", type=int, default=4, metavar="N", help="of a conversation (default: 4)")
    data.add_argument("--think-time", type=float, default=1.0, metavar="S", help="mean pause between turns")
    data.add_argument("--system-len", type=int, default=0, metavar="N", help="system prompt all conversations share")
    data.add_argument("--real-replies", action="store_true", help="turns quote what the server really answered")
    data.add_argument("--text-column", metavar="NAME", help="of JSONL rows (default: the first usual name)")
    data.add_argument("--sharegpt-output-len", type=int, metavar="N", help="of all answers (default: the file's own)")
    data.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="of a trace's lengths, up to 1")
    data.add_argument("--max-model-len", type=int, metavar="N", help="cut a trace's requests to this")
    data.add_argument("--trace-spread", type=float, default=0.0, metavar="S", help="spread equal time stamps over S")
    data.add_argument(
        "--trace-sample", action="store_true", help="whole conversations of all the trace, not its first requests"
    )
    data.add_argument(
        "--trace-start",
        type=float,
        default=0.0,
        metavar="S",
        help="ServeGen window to start in; of --day: s after 0:00",
    )
    data.add_argument(
        "--day",
        type=duration,
        metavar="TIME",
        help="24h or less of a day made of an Azure trace: its rate, by the hour",
    )


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("objectives and output")
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="NAME:MS",
        help="objectives, all to be met, such as ttft:500 tpot:50 (also itl, e2el); of a search also ttft_p99:1000",
    )
    group.add_argument(
        "--percentile-metrics",
        type=metrics,
        default=("ttft", "tpot", "itl", "e2el"),
        metavar="A,B",
        help="to print",
    )
    group.add_argument(
        "--metric-percentiles",
        type=percentiles,
        default=("50", "90", "99"),
        metavar="P,P",
        help="any, such as 75,99.5",
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the result; -: to standard output, and only it")
    group.add_argument("--csv", type=Path, metavar="FILE", help="write one line per request")
    group.add_argument("--html", type=Path, metavar="FILE", help="write a report with plots")
    group.add_argument("--no-event-times", action="store_true", help="keep the times of tokens out of the JSON")


def add_failure_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--fail-above", type=float, default=0.0, metavar="X", help="exit code 1 if a greater share fails (default: 0)"
    )


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="server, such as http://127.0.0.1:8000")
    parser.add_argument("--name", metavar="TEXT", help="label of the result (default: the URL)")
    parser.add_argument(
        "--load", action=LoadFile, metavar="FILE", help="flags of the load in TOML; the same file serves simulate"
    )
    add_target_arguments(parser)
    add_load_arguments(parser)
    group = parser.add_argument_group("several runs")
    group.add_argument("--repeats", type=int, default=1, metavar="N", help="with seeds counting up (default: 1)")
    group.add_argument("--sweep-rates", type=numbers, metavar="R,R", help="a run at each request rate")
    group.add_argument("--sweep-concurrency", type=counts, metavar="N,N", help="a run at each concurrency")
    add_output_arguments(parser)
    add_failure_argument(parser)


def add_goodput_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, metavar="URL", help="server, such as http://127.0.0.1:8000")
    parser.add_argument("--name", metavar="TEXT", help="label of the result (default: the URL)")
    parser.add_argument(
        "--repeats", type=int, default=1, metavar="N", help="searches, for a narrower interval (default: 1)"
    )
    add_search_arguments(parser)
    add_target_arguments(parser)
    add_load_arguments(parser)
    add_output_arguments(parser)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("endpoints", nargs="+", metavar="[NAME=]URL[#MODEL]", help="servers; the first is the baseline")
    add_target_arguments(parser)
    add_load_arguments(parser)
    group = parser.add_argument_group("several runs")
    group.add_argument(
        "--repeats", type=int, default=6, metavar="N", help="turns; 6 allow a verdict, 12 find 5 %% (default: 6)"
    )
    group.add_argument(
        "--warm", action="store_true", help="in each turn once more: text that requests share is known, the rest new"
    )
    group.add_argument(
        "--primary-metric",
        metavar="NAME",
        help="what the verdict is on, such as ttft_s.p50 (default: output_tokens_per_s; in an open loop e2el_s.p50)",
    )
    add_output_arguments(parser)
    add_failure_argument(parser)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables of figures and ratios")


def make_schedule(args: argparse.Namespace) -> Schedule:
    """What the load flags say. Raises ConfigError where they contradict one another."""
    concurrency, cap = args.concurrency, args.max_concurrency
    is_open = args.request_rate is not None and not math.isinf(args.request_rate)
    if concurrency is not None and (is_open or args.ramp_up_strategy or cap is not None):
        raise ConfigError("--concurrency is a closed loop: it takes no rate, ramp or --max-concurrency.")
    ramp = None
    if args.ramp_up_strategy is not None:
        if args.ramp_up_start_rps is None or args.ramp_up_end_rps is None:
            raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps.", param="ramp_up")
        ramp = Ramp(args.ramp_up_strategy, args.ramp_up_start_rps, args.ramp_up_end_rps)
    has_times = args.dataset_name in ("trace", "servegen")
    use_times = has_times and concurrency is None and ramp is None
    use_times = use_times and (args.request_rate is None or args.dataset_name == "servegen")
    if concurrency is None and cap is not None and not is_open and ramp is None and not use_times:
        concurrency, cap = cap, None
    return Schedule(
        request_rate=args.request_rate,
        burstiness=args.burstiness,
        ramp=ramp,
        use_trace_times=use_times,
        speedup=args.speedup,
        concurrency=concurrency,
        max_concurrency=cap,
        stop_after_s=args.duration,
    )


def make_plan(
    args: argparse.Namespace, num: int, seed: int, rate: float | None, vocabulary: Vocabulary | None = None
) -> Plan:
    """The data set that the flags name, `num` requests of it."""
    lengths = datasets.Lengths(args.random_input_len, args.random_output_len, args.random_range_ratio)
    match args.dataset_name:
        case "random":
            return datasets.random_prompts(num, seed, lengths, args.random_prefix_len, make_batch(args))
        case "shared-prefix":
            return datasets.shared_prefixes(num, seed, lengths, args.num_prefixes, args.prefix_len)
        case "multi-turn":
            return datasets.conversations(num, seed, lengths, args.num_turns, args.think_time, args.system_len)
        case "jsonl":
            return datasets.prompts_of_file(args.dataset_path, num, seed, args.random_output_len, args.text_column)
        case "sharegpt":
            return sharegpt(args.dataset_path, num, seed, vocabulary, args.sharegpt_output_len)
    fit = traces.Fit(args.length_scale, args.max_model_len)
    if args.dataset_name == "trace":
        if args.day is not None:
            return diurnal_plan(args.dataset_path, num, seed, fit, args.day, args.trace_start)
        return traces.read_trace(args.dataset_path, num, seed, fit, args.trace_spread, args.trace_sample)
    if rate is None or math.isinf(rate):
        raise ConfigError(
            "--dataset-name servegen needs --request-rate: the mix is scaled to it.", param="request_rate"
        )
    return traces.servegen(args.dataset_path, num, seed, fit, rate, args.trace_start, args.duration)


def make_batch(args: argparse.Namespace) -> datasets.Batch:
    """One prompt; --random-batch-size texts to embed; a query and as many documents to rank."""
    if args.random_batch_size < 1 or (args.random_batch_size > 1 and args.endpoint not in POOLING_APIS):
        raise ConfigError(
            "--random-batch-size is at least 1, and above that for --endpoint embeddings or rerank.",
            param="random_batch_size",
        )
    return datasets.Batch(args.random_batch_size, QUERY_LEN if args.endpoint == "rerank" else 0)


def make_load(
    args: argparse.Namespace, argv: Sequence[str], vocabulary: Vocabulary | None, *, is_search: bool = False
) -> Load:
    """The load of the flags. `vocabulary`: of --tokenizer. is_search: for the goodput, which may have goals."""
    settle(args)
    objectives, goals = parse_goals(args.goodput)
    if goals and not is_search:
        raise ConfigError(
            f"{goals[0].name} is a goal of a search: bench goodput, or simulate --find-goodput. --percentile-metrics"
            " and --metric-percentiles print percentiles of a run.",
            param="goodput",
        )
    if args.dataset_name in ("jsonl", "sharegpt", "trace", "servegen") and args.dataset_path is None:
        raise ConfigError(f"--dataset-name {args.dataset_name} needs --dataset-path.", param="dataset_path")
    if args.day is not None and args.dataset_name != "trace":
        raise ConfigError("--day is of --dataset-name trace.", param="day")
    schedule = make_schedule(args)
    num = args.num_prompts
    if num is None and args.day is not None:
        num = num_in_diurnal_plan(args.dataset_path, args.seed, args.day, args.trace_start)
    elif num is None:
        is_timed = args.duration is not None and schedule.request_rate is not None and not schedule.is_closed
        num = DEFAULT_NUM_PROMPTS
        if is_timed and not math.isinf(schedule.request_rate or 0.0):
            num = max(1, math.ceil((schedule.request_rate or 0.0) * args.duration))
    if num < 1 or args.num_warmups < 0:
        raise ConfigError("--num-prompts must be at least 1 and --num-warmups at least 0.", param="num_prompts")
    low, colon, high = args.vocab_range.partition(":")
    if not (colon and low.isdecimal() and high.isdecimal()):
        raise ConfigError(f"--vocab-range must look like 1000:30000, got {args.vocab_range}.", param="vocab_range")

    def material(seed: int, prompt_format: str) -> Material:
        if prompt_format == "tokens":
            return token_material(seed, int(low), int(high))
        return word_material(seed, vocabulary)

    return Load(
        make_plan=lambda num, seed, rate: make_plan(args, num, seed, rate, vocabulary),
        make_material=material,
        schedule=schedule,
        num_prompts=num,
        seed=args.seed,
        objectives=objectives,
        goals=goals,
        num_warmups=args.num_warmups,
        argv=without_secrets(argv),
        # A search judges by them, and its result has no requests.
        keep_event_times=is_search or not args.no_event_times,
        give_up=EarlyStop(args.max_error_rate, args.max_wait),
        retry_policy=RetryPolicy(args.retries, args.patience),
        window=Window(args.warmup, args.cooldown),
        percentiles=tuple(
            float(text) for text in args.metric_percentiles if float(text) / 100 not in QUANTILES.values()
        ),
        vocabulary=vocabulary,
    )


def make_target(args: argparse.Namespace, url: str, name: str | None, model: str | None) -> Target:
    """The endpoint, what it does not say asked of the server. Raises ConfigError, Unavailable."""
    address = parse_url(url, args.api_key, args.header, make_tls(args.ca_file, args.insecure))
    model = model or args.model or find_model(address)
    prompt_format = args.prompt_format
    if prompt_format == "auto":
        prompt_format = _choose_format(args, address, model)
    body = BodyFormat(args.endpoint, prompt_format, model, args.ignore_eos, args.extra_body, not args.real_replies)
    metrics_url = args.metrics_url or f"{address.root_url}/metrics"
    return Target(name or url, address, body, metrics_url, args.timeout)


def _choose_format(args: argparse.Namespace, address: Address, model: str) -> str:
    if (
        args.endpoint != "completions"
        or args.dataset_name in ("jsonl", "sharegpt")
        or args.tokenizer
        or args.real_replies
    ):
        return "text"
    return "tokens" if run_async(takes_tokens(address, model)) else "text"


def parse_endpoint(text: str) -> tuple[str | None, str, str | None]:
    """[NAME=]URL[#MODEL] -> (name, url, model)."""
    name: str | None = None
    head, equals, tail = text.partition("=")
    if equals and "/" not in head and ":" not in head:
        name, text = head, tail
    url, _, model = text.partition("#")
    return name, url, model or None
