"""The `tokenmill` command: one sub-command each for serving, talking, models, measuring and looking at the machine.

Commands are imported when they run, so that `--help` and a mistyped flag answer at once. An expected failure is exit
code 2 and one line on standard error; a bug is a traceback.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..control.audit.options import AuditOptions
from ..control.tenants.settings import TenantSettings
from ..core.errors import TokenmillError
from ..core.options import options_of
from ..core.sampling import CHAT_TOKENS
from ..core.units import visible
from ..kv.store.options import TierOptions
from ..node.foreign import COMMANDS
from ..node.options import TIERS, EngineOptions, TextOptions
from ..plugins.load import VARIABLE as PLUGINS
from ..server.config import AUDIT, KEPT, KEYS, LOAD, LOGS, ServerConfig
from .keys import duration, keep_alive
from .kv_events_options import KVEventsOptions
from .launchers.ray_options import RayOptions
from .options import SHAPE, SamplingOptions, add_options, argument_type
from .parser import LEVELS, Parser, add_foreign_flags, add_model, add_plugins
from .serve_options import HttpOptions, ServeOptions, port_number
from .upstream_options import UPSTREAMS, UpstreamOptions
from .worker_options import LinkOptions, ListenOptions, WorkerOptions

_Commands = argparse._SubParsersAction

HEADINGS = {
    "Serve": ("serve", "worker", "ps", "stop", "keys", "tenants"),
    "Ask": ("run", "chat", "generate"),
    "Models": ("pull", "list", "search", "rm", "show", "inspect", "draft"),
    "Measure": ("bench", "calibrate"),
    "Plan": ("simulate",),
    "Operate": ("doctor", "top", "usage", "flight", "kv", "state", "audit", "verify-response"),
}
"""Of `tokenmill --help`, and the commands below each."""


SYSTEM = ("--system", "--system-prompt", "-sys")


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else list(argv)
    if not argv:
        _parser(argv).print_help(sys.stderr)
        return 2
    if argv[0] in COMMANDS:
        print(f"tokenmill: there is no command {argv[0]}: {COMMANDS[argv[0]]}.", file=sys.stderr)
        return 2
    if argv[0].startswith("-") and argv[0] not in ("-h", "--help", "--version"):
        print(
            "tokenmill: name a command first: flags of a server go after `tokenmill serve`, those of llama-cli after "
            "`tokenmill chat` or `tokenmill generate`.",
            file=sys.stderr,
        )
        return 2
    try:
        args = _parser(argv).parse_args(argv)  # a flag may name a file that cannot be read
        if getattr(args, "plugins", None) is not None:
            os.environ[PLUGINS] = args.plugins
        return args.run(args)
    except TokenmillError as error:
        print(f"tokenmill: {visible(error.message)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output is gone (`tokenmill list | head`); nothing more can be said to it.
        sys.stdout = None
        return 141


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """Flags of commands that need further modules to be named are there only where `argv` begins with the command."""
    parser = Parser(prog="tokenmill", description="Serves large language models: exact, fast on CPUs.")
    parser.add_argument("--version", action="version", version=f"tokenmill {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, help="one of those below; COMMAND --help tells its flags"
    )
    _add_serving(commands)
    _add_talking(commands)
    _add_models(commands)
    _add_draft(commands, argv)
    _add_keys(commands)
    _add_flight(commands)
    fitting = _command(commands, "calibrate", "learn what steps take, from step logs", "calibrate.command", "calibrate")
    _add_arguments(argv, "calibrate", "cli.calibrate.command", fitting)
    _add_bench(commands, argv)
    simulated = _command(commands, "simulate", "a load on machines that are not here", "simulate.command", "simulate")
    _add_arguments(argv, "simulate", "cli.simulate.command", simulated)
    top = _command(commands, "top", "watch a running server: workers, queues, KV, streams, moves", "top", "top")
    _add_arguments(argv, "top", "cli.top", top)
    usage = _command(commands, "usage", "what was handed to whom, in tokens", "usage", "show")
    _add_arguments(argv, "usage", "cli.usage", usage)
    _add_audit(commands, argv)
    _add_state(commands, argv)
    _add_kv(commands, argv)
    _add_doctor(commands)
    _put_under_headings(parser, commands)
    return parser


def _put_under_headings(parser: Parser, commands: _Commands) -> None:
    """In the help alone, where argparse lists all commands as one group."""
    listed = {action.dest: action for action in commands._choices_actions}
    for title, names in HEADINGS.items():
        parser.add_argument_group(title)._group_actions = [listed.pop(name) for name in names]
    assert not listed, f"commands without a heading: {list(listed)}"
    commands._choices_actions.clear()


def _add_arguments(argv: Sequence[str], command: str, module: str, *parsers: Parser) -> None:
    """Have the module add flags to the parsers, if it is this command that is given."""
    if argv[:1] == [command]:
        importlib.import_module(f"tokenmill.{module}").add_arguments(*parsers)


def _add_serving(commands: _Commands) -> None:
    serve = _command(commands, "serve", "serve a model over HTTP, by the APIs of OpenAI and others", "serve", "serve")
    add_model(serve)
    _groups(
        serve,
        text=(TextOptions,),
        HTTP=(HttpOptions, ServerConfig),
        **{KEYS: (), LOAD: (), KEPT: (), LOGS: (), AUDIT: (AuditOptions,)},
        **{UPSTREAMS: (UpstreamOptions,)},
        server=(ServeOptions,),
        workers=(ListenOptions, LinkOptions, RayOptions),
        engine=(EngineOptions, KVEventsOptions),
        **{TIERS: (TierOptions,)},
    )
    serve.add_argument("--disable-log-requests", action="store_false", dest="log_requests", help=argparse.SUPPRESS)
    add_foreign_flags(serve)

    worker = _command(commands, "worker", "compute for a front end on another machine", "worker", "worker")
    add_model(worker)
    _groups(
        worker, link=(WorkerOptions, LinkOptions), engine=(EngineOptions, KVEventsOptions), **{TIERS: (TierOptions,)}
    )
    add_options(
        worker, ServeOptions, ("engine_timeout_s", "journal", "flight_recorder", "step_log", "log_level", "log_format")
    )

    listed = _command(commands, "ps", "list your running servers of this machine", "servers", "ps")
    listed.add_argument("--json", action="store_true", help="print JSON")
    stop = _command(commands, "stop", "end a running server, when its calls have ended", "servers", "stop")
    stop.add_argument(
        "server", nargs="?", default="", metavar="MODEL|URL",
        help="the model that it has, its address, port or process id (default: the only one)",
    )  # fmt: skip
    stop.add_argument("--all", action="store_true", help="all of them")


def _add_talking(commands: _Commands) -> None:
    about = "talk with a model by its name; a server of it is found, or started in the background"
    run = _command(commands, "run", about, "run", "run")
    add_model(run)
    run.rest = "prompt"
    run.add_argument("prompt", nargs="*", metavar="PROMPT", help="answer this, after what is piped, and end")
    run.add_argument(*SYSTEM, metavar="TEXT", help="system message to start with")
    run.add_argument("--api-key", metavar="KEY", help="for a server that asks for one (default: from the environment)")
    run.add_argument(
        "--keepalive", type=argument_type(keep_alive), default="5m", metavar="TIME",
        help="a server that is started ends when unused so long; -1: never (default: 5m)",
    )  # fmt: skip
    run.add_argument("--format", metavar="json|SCHEMA", help="the answer is JSON, or fits this JSON schema")
    run.add_argument(
        "--think", choices=LEVELS,
        help="whether, and how much, a model that reasons does (default: as it does by itself)",
    )  # fmt: skip
    run.add_argument("--hidethinking", action="store_true", help="do not show reasoning")
    run.add_argument("--verbose", action="store_true", help="tell tokens and speed after the answer")
    _groups(run, sampling=(SamplingOptions,))
    run.set_defaults(max_tokens=CHAT_TOKENS, loop_guard=True)
    for flag in ("--nowordwrap", "--insecure"):
        run.add_argument(flag, action="store_true", help=argparse.SUPPRESS)

    chat = _command(commands, "chat", "talk with a model loaded here, or with any server", "chat", "chat")
    add_model(chat, takes_url=True)
    chat.add_argument(*SYSTEM, metavar="TEXT", help="system message to start with")
    chat.add_argument(
        "--url", metavar="URL",
        help="talk to a running server with OpenAI's API, such as http://127.0.0.1:8000/v1, about --model or its first",
    )  # fmt: skip
    chat.add_argument("--api-key", metavar="KEY", help="for --url (default: from the environment)")
    chat.add_argument("--stats", action="store_true", help="tell tokens, speed and accepted drafts after each answer")
    _groups(chat, text=(TextOptions,), sampling=(SamplingOptions,), engine=(EngineOptions,), **{TIERS: (TierOptions,)})
    chat.set_defaults(max_tokens=CHAT_TOKENS, loop_guard=True)
    add_foreign_flags(chat)

    generate = _command(commands, "generate", "continue a prompt and print the result", "generate", "generate")
    add_model(generate)
    generate.add_argument("--prompt", "-p", metavar="TEXT", help="text to continue (default: standard input)")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user message for the chat template")
    generate.add_argument("--lora", metavar="PATH", help="LoRA adapter to use: a folder in PEFT format")
    _groups(
        generate, text=(TextOptions,), sampling=(SamplingOptions,), engine=(EngineOptions,), **{TIERS: (TierOptions,)}
    )
    generate.set_defaults(max_tokens=256)
    add_foreign_flags(generate)


def _add_models(commands: _Commands) -> None:
    pull = _command(commands, "pull", "fetch a model into the cache and print its path", "models", "pull")
    add_model(pull)
    pull.add_argument("--verify", action="store_true", help="read all of it again and compare its checksums")
    pull.add_argument("--quiet", "-q", action="store_true", help="no progress bar")
    listed = _command(commands, "list", "list cached models", "models", "list_models")
    listed.add_argument("--available", action="store_true", help="those known by name, and which fit this machine")
    searched = _command(commands, "search", "find models of the hub that have GGUF files", "models", "search")
    searched.add_argument("words", nargs="+", metavar="WORD", help="of the model's name")
    searched.add_argument("--limit", type=int, default=20, metavar="N", help="at most so many (20)")
    remove = _command(commands, "rm", "remove a cached model", "models", "remove")
    remove.add_argument("model", metavar="MODEL")

    show = _command(commands, "show", "what a model is and can do, in short", "show", "show")
    add_model(show)
    only = show.add_mutually_exclusive_group()
    for part in ("license", "template", "parameters"):
        only.add_argument(f"--{part}", action="store_true", help=f"its {part} alone")

    inspect = _command(
        commands, "inspect", "what a model is, what it takes and what will compute it", "inspect", "inspect"
    )
    add_model(inspect)
    add_options(inspect, EngineOptions, SHAPE)
    inspect.add_argument("--json", action="store_true", help="one JSON object about the model, sizes in bytes")
    inspect.add_argument(
        "--expert-load", metavar="FILE", help="draw what a server wrote by its --expert-load, instead of a model"
    )


def _add_draft(commands: _Commands, argv: Sequence[str]) -> None:
    about = "make what drafts for a model"
    draft = commands.add_parser("draft", help=about, description=f"{about.capitalize()}.")
    kinds = draft.add_subparsers(title="commands", metavar="WHAT", required=True)
    index = _command(kinds, "index", "index a corpus, so that its texts are drafted", "draft.index", "index")
    add_model(index)
    _add_arguments(argv, "draft", "cli.draft.index", index)
    record = _command(kinds, "acceptance", "record what came of drafts", "draft.acceptance", "acceptance")
    _add_arguments(argv, "draft", "cli.draft.acceptance", record)
    train = _command(kinds, "train", "train an EAGLE-3 head on what the model answers", "draft.train", "train")
    add_model(train)
    _add_arguments(argv, "draft", "cli.draft.train", train)
    add_options(train.add_argument_group("engine"), EngineOptions)


def _add_keys(commands: _Commands) -> None:
    """Commands for who may call a server."""
    keys = commands.add_parser("keys", help="who may call a server", description="Who may call a server.")
    of_keys = keys.add_subparsers(title="commands", metavar="COMMAND", required=True)
    create = _command(of_keys, "create", "make an API key and print it as the last word", "keys", "create")
    create.add_argument("key_name", metavar="NAME", help="what people call the key")
    create.add_argument("--tenant", metavar="T", help="the tenant whose it is, made if it is not there (default: NAME)")
    create.add_argument("--admin", action="store_true", help="it manages tenants, keys and the server too")
    create.add_argument(
        "--expires-in", type=argument_type(duration), default=0, metavar="TIME", help="such as 30d (default: never)"
    )
    _tenant_settings(create, "settings of a tenant that is made")
    listed = _command(of_keys, "list", "list API keys", "keys", "list_keys")
    listed.add_argument("--tenant", metavar="T", help="of this one only")
    listed.add_argument("--all", action="store_true", help="those that are revoked or expired too")
    rotate = _command(of_keys, "rotate", "replace an API key and print the new one as the last word", "keys", "rotate")
    rotate.add_argument("key", metavar="KEY", help="its id or name")
    rotate.add_argument(
        "--overlap", type=argument_type(duration), default=0, metavar="TIME",
        help="let the old one be used so long, such as 15m (default: not at all)",
    )  # fmt: skip
    revoke = _command(of_keys, "revoke", "end an API key", "keys", "revoke")
    revoke.add_argument("key", metavar="KEY", help="its id, or the name of all that have it")

    tenants = commands.add_parser("tenants", help="what each tenant may use", description="What each tenant may use.")
    of_tenants = tenants.add_subparsers(title="commands", metavar="COMMAND", required=True)
    made = _command(of_tenants, "create", "make a tenant", "keys", "create_tenant")
    changed = _command(of_tenants, "set", "change what a tenant may use", "keys", "set_tenant")
    shown = _command(of_tenants, "show", "show a tenant", "keys", "show_tenant")
    deleted = _command(of_tenants, "delete", "delete a tenant and revoke its keys", "keys", "delete_tenant")
    for parser in (made, changed, shown, deleted):
        parser.add_argument("tenant", metavar="TENANT", help="its id")
    for parser in (made, changed):
        _tenant_settings(parser, "settings")
    all_tenants = _command(of_tenants, "list", "list tenants", "keys", "list_tenants")
    for parser in (create, listed, rotate, revoke, made, changed, shown, deleted, all_tenants):
        parser.add_argument("--json", action="store_true", help="print JSON")
        parser.add_argument(
            "--tenants",
            metavar="FILE",
            help="that serve --tenants has (default: control.db in the user's state folder)",
        )


def _tenant_settings(parser: Parser, title: str) -> None:
    """What is not given is not in the namespace."""
    group = parser.add_argument_group(title)
    add_options(group, TenantSettings)
    for action in group._group_actions:
        action.default = argparse.SUPPRESS


def _add_flight(commands: _Commands) -> None:
    flight = _command(commands, "flight", "show what an engine did last, from its flight recorder", "flight", "flight")
    flight.add_argument("file", metavar="FILE", help="a .flight file")
    flight.add_argument("--output", "-o", metavar="FILE", help="write a trace for ui.perfetto.dev there (JSON)")


def _add_bench(commands: _Commands, argv: Sequence[str]) -> None:
    bench = commands.add_parser("bench", help="measure", description="Measure.")
    benches = bench.add_subparsers(title="benchmarks", metavar="WHAT", required=True)
    engine = _command(benches, "engine", "prefill and decode speed, by number of streams", "bench.engine", "engine")
    add_model(engine)
    engine.add_argument("--expert-load", metavar="FILE", help="write what each expert computed (see serve)")
    kernels = _command(benches, "kernels", "each operation against the machine's limits", "bench.kernels", "kernels")
    add_model(kernels)
    scaling = _command(
        benches, "scaling", "what more threads would gain, by a simulated schedule", "bench.scaling", "scaling"
    )
    add_model(scaling)
    core = _command(benches, "core", "what a step costs outside of computing", "bench.core", "core")
    profile = _command(benches, "profile", "where the time of steps and requests goes", "bench.profile", "profile")
    add_model(profile)
    quality = _command(benches, "quality", "what a model gets right, with stated errors", "bench.commands", "quality")
    add_model(quality)
    tools = _command(benches, "tools", "whether calls of tools parse, fit and are right", "bench.commands", "tools")
    structured = _command(
        benches, "structured", "JSON schemas: taken, enforced, answered", "bench.commands", "structured"
    )
    add_model(structured)
    serve_load = _command(benches, "serve", "what clients of a server see under a load", "bench.commands", "serve")
    goodput = _command(benches, "goodput", "the highest load that meets objectives", "bench.commands", "goodput")
    overload = _command(
        benches, "overload", "what servers do with more than they can serve", "bench.commands", "overload"
    )
    fairness = _command(benches, "fairness", "what a tenant feels of a greedy one", "bench.commands", "fairness")
    compare = _command(benches, "compare", "several servers under equal loads, in turns", "bench.commands", "compare")
    on_demand = _command(
        benches, "on-demand", "what calls wait for where models are loaded on demand", "bench.commands", "on_demand"
    )
    drafts = _command(benches, "speculation", "what drafts gain on given prompts", "bench.engine", "speculation")
    add_model(drafts)
    rows = _command(benches, "rows", "what a step takes by its rows of one sequence", "bench.engine", "rows")
    add_model(rows)
    report = _command(benches, "report", "draw results measured earlier", "bench.commands", "report")
    if argv[:1] == ["bench"]:
        importlib.import_module("tokenmill.bench.engine").add_arguments(engine)
        importlib.import_module("tokenmill.bench.kernels").add_arguments(kernels)
        importlib.import_module("tokenmill.bench.scaling").add_arguments(scaling)
        importlib.import_module("tokenmill.bench.core").add_arguments(core)
        importlib.import_module("tokenmill.bench.profile").add_arguments(profile)
        importlib.import_module("tokenmill.bench.quality.command").add_arguments(quality)
        importlib.import_module("tokenmill.bench.tools").add_arguments(tools)
        importlib.import_module("tokenmill.bench.structured.command").add_arguments(structured)
        importlib.import_module("tokenmill.bench.on_demand").add_arguments(on_demand)
        importlib.import_module("tokenmill.bench.speculation").add_arguments(drafts)
        importlib.import_module("tokenmill.bench.rows").add_arguments(rows)
        importlib.import_module("tokenmill.cli.bench.commands").add_arguments(report)
        load = importlib.import_module("tokenmill.bench.load.options")
        load.add_serve_arguments(serve_load)
        load.add_goodput_arguments(goodput)
        importlib.import_module("tokenmill.bench.load.overload_command").add_arguments(overload)
        load.add_compare_arguments(compare)
        importlib.import_module("tokenmill.bench.load.fairness").add_arguments(fairness)
    for command in (engine, kernels, scaling, profile, quality, drafts, rows):
        add_options(command.add_argument_group("engine"), EngineOptions)


def _add_audit(commands: _Commands, argv: Sequence[str]) -> None:
    audit = commands.add_parser("audit", help="keys and checks of audit logs", description="Keys and checks.")
    audits = audit.add_subparsers(title="commands", metavar="WHAT", required=True)
    keygen = _command(audits, "keygen", "make the key that signs a log's head, or responses", "audit", "keygen")
    verify = _command(audits, "verify", "whether a log is what was written", "audit", "verify")
    _add_arguments(argv, "audit", "cli.audit", keygen, verify)
    signed = _command(
        commands, "verify-response", "whether a server signed an answer", "verify_response", "verify_response"
    )
    _add_arguments(argv, "verify-response", "cli.verify_response", signed)


def _add_state(commands: _Commands, argv: Sequence[str]) -> None:
    state = commands.add_parser(
        "state", help="check, repair and back up what a server keeps", description="What is kept."
    )
    states = state.add_subparsers(title="commands", metavar="WHAT", required=True)
    looks = [
        _command(states, "check", "whether the files can be trusted", "state_files", "check"),
        _command(states, "repair", "set what is damaged aside, and restore the last backup", "state_files", "repair"),
        _command(states, "backup", "back up tenants, keys and usage, beside the files", "state_files", "backup"),
    ]
    _add_arguments(argv, "state", "cli.state_files", *looks)


def _add_kv(commands: _Commands, argv: Sequence[str]) -> None:
    kv = commands.add_parser("kv", help="KV stores: fill, look, check", description="KV stores: fill, look, check.")
    kinds = kv.add_subparsers(title="commands", metavar="WHAT", required=True)
    keeping = _command(kinds, "serve", "keep KV for several servers of this machine", "kv.serve", "serve")
    _add_arguments(argv, "kv", "cli.kv.serve", keeping)
    if argv[:1] == ["kv"]:
        importlib.import_module("tokenmill.cli.kv.parser").add_commands(kinds, _command)


def _add_doctor(commands: _Commands) -> None:
    doctor = _command(commands, "doctor", "what this machine offers and what will be used", "doctor", "doctor")
    doctor.add_argument("--port", type=argument_type(port_number), default=8000, help="port to try (default: 8000)")
    add_plugins(doctor)
    forms = doctor.add_mutually_exclusive_group()
    forms.add_argument(
        "--measure", action="store_true", help="also probe memory, arithmetic and the way from phase to phase"
    )
    forms.add_argument("--brief", action="store_true", help="one line: which kernels will be used")
    forms.add_argument(
        "--report", action="store_true", help="Markdown for an issue: more facts, without names, folders and secrets"
    )


def _groups(parser: Parser, **groups: Sequence[type]) -> None:
    """Flags for the options of dataclasses, under the titles given, or under those that options have of their own."""
    made = {title: parser.add_argument_group(title) for title in groups}
    for title, kinds in groups.items():
        for kind in kinds:
            for name, (declared, _, _) in options_of(kind).items():
                under = declared.group or title
                if under not in made:
                    made[under] = parser.add_argument_group(under)
                add_options(made[under], kind, (name,))


def _command(commands: _Commands, name: str, about: str, module: str, function: str) -> Parser:
    """A sub-command that runs `cli.<module>.<function>(args) -> exit code`, imported only then."""

    def run(args: argparse.Namespace) -> int:
        target: Callable[[argparse.Namespace], int] = getattr(
            importlib.import_module(f".{module}", __package__), function
        )
        return target(args)

    parser: Parser = commands.add_parser(name, help=about, description=about[0].upper() + about[1:] + ".")
    parser.set_defaults(run=run)
    return parser


if __name__ == "__main__":
    sys.exit(main())
