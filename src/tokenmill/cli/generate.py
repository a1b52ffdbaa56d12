"""`generate`: one prompt in, its continuation out as it is made. Text on standard output, figures on standard error."""

from __future__ import annotations

import argparse
import sys
import time

from ..core.errors import ConfigError
from ..node.model_warnings import NOTE
from .models import progress_bar
from .options import llm_options, sampling_overrides
from .partners import tell_if_small


def generate(args: argparse.Namespace) -> int:
    from ..llm.llm import LLM  # takes longer than all else that `chat --url`, which needs `speed`, imports
    from ..text.calls import require_tokens

    if args.prompt is None and sys.stdin.isatty():
        print("tokenmill: type the text to continue; Ctrl-D on a new line ends it (-p TEXT gives it)", file=sys.stderr)
    prompt = sys.stdin.read() if args.prompt is None else args.prompt
    if not prompt:
        raise ConfigError("There is no prompt: give one with -p or on standard input.", param="prompt")
    with progress_bar(f"fetching {args.model}") as progress:
        llm = LLM(args.model, progress=progress, **llm_options(args))
    with llm:
        require_tokens(llm.ready)
        for name, value in llm.ready.facts:
            if name == NOTE:
                print(f"tokenmill: note: {value}", file=sys.stderr)
        tell_if_small(llm.text.info.num_parameters)
        if args.lora is not None:
            llm.load_adapter("lora", args.lora)
        sampling = llm.default_sampling(**sampling_overrides(args))
        given = [{"role": "user", "content": prompt}] if args.chat else prompt
        start_s, num_tokens = time.monotonic(), 0
        first_s = start_s
        for piece in llm.stream(given, sampling, lora="" if args.lora is None else "lora"):
            print(piece.text, end="", flush=True)
            first_s = time.monotonic() if num_tokens == 0 else first_s
            num_tokens += len(piece.tokens)
    print()
    if sys.stderr.isatty():
        print(speed(num_tokens, first_s - start_s, time.monotonic() - first_s), file=sys.stderr)
    return 0


def speed(num_tokens: int, first_s: float, rest_s: float) -> str:
    """'120 tokens, first after 0.05 s, then 190.2 tokens/s'."""
    rate = f", then {(num_tokens - 1) / rest_s:.1f} tokens/s" if num_tokens > 1 and rest_s > 0 else ""
    return f"{num_tokens} tokens, first after {first_s:.2f} s{rate}"
