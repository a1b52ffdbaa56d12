"""The command line answers a wrong word with exit code 2, one line and the nearest right one, and starts quickly."""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill import __version__
from tokenmill.cli import doctor
from tokenmill.cli import main as cli
from tokenmill.cli.options import engine_options
from tokenmill.core.errors import ConfigError
from tokenmill.node.processors import ThreadOptions
from tokenmill.ops.native import available


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    return message


def test_an_unknown_flag_names_the_nearest(capsys):
    assert "--max-model-len" in refused(["serve", "--max-modl-len", "100"], capsys)
    assert "--threads" in refused(["generate", "--thread=2"], capsys)


def test_a_flag_that_would_change_answers_is_unknown(capsys):
    assert "--quantization" in refused(["serve", "--quantization", "fp8"], capsys)


def test_an_unknown_command_and_a_bad_value_are_refused(capsys):
    assert "serve" in refused(["serv"], capsys)
    assert "--kv-cache-memory-bytes" in refused(["serve", "--kv-cache-memory-bytes", "lots"], capsys)
    assert "--max-num-seqs" in refused(["serve", "--max-num-seqs", "many"], capsys)
    refused(["serve", "one", "two"], capsys)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["srve"], "did you mean serve?"),
        (["serve", "--prot", "9000"], "did you mean --port?"),
        (["bench", "engin"], "did you mean engine?"),
        (["serve", "--backend", "nativ"], "did you mean native?"),
        (["zzz"], "`tokenmill run MODEL`"),
        (["serve", "--port", "65536"], "0 to 65535"),
        (["serve", "--port=-1"], "0 to 65535"),
        (["serve", "--port", "http"], "0 to 65535"),
        (["doctor", "--port", "9" * 5000], "0 to 65535"),
        (["serve", "--drain-s", "nan"], "seconds"),
        (["serve", "--drain-s=-1"], "seconds"),
        (["serve", "--drain-s", "soon"], "seconds"),
    ],
)
def test_a_wrong_word_is_told_what_would_be_right(argv, says, capsys):
    assert says in refused(argv, capsys)


def test_help_lists_each_command_once_under_a_heading(capsys):
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    _, *sections = capsys.readouterr().out.partition("commands:")[2].split("\n\n")
    listed = {section.split(":")[0]: re.findall(r"^  ([a-z-]+)", section, re.M) for section in sections}
    assert {title: tuple(names) for title, names in listed.items()} == cli.HEADINGS
    (commands,) = (each for each in cli._parser([])._actions if isinstance(each, argparse._SubParsersAction))
    assert sorted(name for names in listed.values() for name in names) == sorted(commands.choices)


def test_foreign_flags_are_accepted_with_a_warning(capsys):
    argv = ["serve", "--gpu-memory-utilization", "0.9", "--enforce-eager", "some.gguf", "--port", "0"]
    args = cli._parser(argv).parse_args(argv)
    assert (args.model, args.port) == ("some.gguf", 0)
    warnings = capsys.readouterr().err
    assert "--gpu-memory-utilization" in warnings and "--enforce-eager" in warnings


def test_flags_become_engine_options():
    argv = [
        "serve",
        "-c",
        "100",
        "-np",
        "3",
        "-t",
        "2",
        "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes",
        "1GiB",
    ]
    options = engine_options(cli._parser(argv).parse_args(argv))
    assert (options.max_model_len, options.max_num_seqs, options.threads) == (100, 3, 2)
    assert options.kv_cache_memory_bytes == 2**30
    assert not options.enable_prefix_caching


def test_an_expected_failure_is_one_line_and_exit_code_2(capsys, monkeypatch):
    def fail(args):
        raise ConfigError("The model is wrong.")

    monkeypatch.setattr("tokenmill.cli.models.remove", fail)
    assert cli.main(["rm", "some"]) == 2
    assert capsys.readouterr().err == "tokenmill: The model is wrong.\n"


def test_each_flag_of_serve_says_what_it_does_under_a_heading_of_few():
    """No flag without help, none outside of a named group but the model, and no group too long to be read."""
    commands = cli._parser(["serve"])._subparsers._group_actions[0].choices
    for group in commands["serve"]._action_groups:
        shown = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        assert all(action.help and not action.help.startswith("(") for action in shown), group.title
        assert len(shown) <= 20, f"{group.title}: {len(shown)} flags"
        if group.title == "options":
            assert [action.dest for action in shown] == ["help", "model"]


def test_help_loads_neither_arrays_nor_the_server():
    """What makes `--help` quick: none of the slow imports happen."""
    code = (
        "import sys\nfrom tokenmill.cli import main\n"
        "try:\n    main.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "slow = {'numpy', 'starlette', 'uvicorn', 'msgspec', 'rich', 'tokenizers', 'asyncio'}\n"
        "slow &= set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_without_a_command_there_is_help(capsys):
    assert cli.main([]) == 2
    assert "tokenmill COMMAND" in capsys.readouterr().err.replace("[-h] [--version] ", "")


def test_a_model_in_the_place_of_a_command_is_told_what_takes_one(capsys):
    assert "`tokenmill run MODEL`" in refused(["smollm2"], capsys)
    assert cli.main(["help"]) == 2 and "`tokenmill --help`" in capsys.readouterr().err


def test_python_runs_it_as_a_module():
    done = subprocess.run([sys.executable, "-m", "tokenmill", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"tokenmill {__version__}\n"


def test_doctor_says_which_threads_and_measures_them(capsys, monkeypatch):
    """With one and with as many as there may be; where there are no native kernels, nothing can be measured."""
    monkeypatch.setattr(doctor, "READ_PER_PROBE", 1 << 20)
    monkeypatch.setattr(doctor, "READ_BYTES", (1 << 16,))
    monkeypatch.setattr(doctor, "PROBE_TURNS", 2)
    monkeypatch.setattr(doctor, "thread_options", lambda *given: ThreadOptions((3,), 3, (), "3 cores"))
    status = cli.main(["doctor", "--measure"])
    said = capsys.readouterr().out
    assert "threads    3, one for each core: 3 cores" in said
    if available() is not None:
        assert status == 1
        return
    header, one, three = said[said.index("\n\nthreads") :].split("\n")[2:5]
    assert (status, one.split()[0], three.split()[0]) == (0, "1", "3")
    assert len(header.split("  ")) == len(three.split()) == 6, three


def test_a_server_starts_its_engine_before_it_loads_what_only_it_needs():
    """These take longer to import than all else; the engine loads weights meanwhile."""
    code = (
        "import sys, tokenmill.cli.main, tokenmill.cli.serve, tokenmill.cli.local\n"
        "late = {'numpy', 'starlette', 'jinja2', 'tokenizers', 'prometheus_client', 'tokenmill.models.weights'}\n"
        "sys.exit(f'loaded {sorted(late & set(sys.modules))}' if late & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_report_has_facts_and_neither_folders_nor_secrets(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("TOKENMILL_API_KEY", "a-key-that-nobody-may-see")
    monkeypatch.setenv("TOKENMILL_STATE", str(tmp_path))
    (tmp_path / "control.db").write_bytes(bytes(2048))
    assert cli.main(["doctor", "--report"]) == 0
    said = capsys.readouterr().out
    assert f"tokenmill  {__version__}" in said and "control.db 2.0 KiB" in said and "TOKENMILL_API_KEY (set)" in said
    for hidden in ("a-key-that-nobody-may-see", str(tmp_path), sys.executable, str(Path.home()), socket.gethostname()):
        assert hidden not in said
