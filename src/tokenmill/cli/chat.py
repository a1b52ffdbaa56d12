"""`chat`: a conversation in the terminal, with a model loaded here or a server's.

A pasted text of several lines is one message where the terminal can bracket what is pasted; so is what stands between
two lines of three quotes, and a line that ends with a backslash goes on in the next. Files that are attached go with
the next message. What is said so far can be written to a file, and read again.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import difflib
import json
import shlex
import sys
import time
from collections.abc import Callable
from operator import add
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from ..core.errors import ConfigError, ContextTooLong, TokenmillError
from ..core.units import format_bytes, visible
from .generate import speed
from .options import llm_options, sampling_overrides
from .partners import Drafted, LocalPartner, Message, Partner, ServerPartner, api_key, tell_if_small
from .servers import READY, running

HELP = """\
/clear          forget the conversation
/system TEXT    set the system message, and start over
/undo           take back the last exchange
/regen          answer the last message anew
/file FILE      put a text file into the next message
/image FILE     put an image into the next message, where the model reads images
/save FILE      write the conversation: JSON, or Markdown where FILE ends in .md
/load FILE      go on with a conversation that was saved as JSON
/help           this list
/bye            leave (so does Ctrl-D)
Ctrl-C          stop the answer that is being written; what has come is kept
\\               at the end of a line: the message goes on in the next
\"\"\"             before and after a message of several lines"""
ALIASES = {
    "/reset": "/clear",
    "/new": "/clear",
    "/retry": "/regen",
    "/read": "/file",
    "/exit": "/bye",
    "/quit": "/bye",
    "/?": "/help",
}
"""Words of other terminals for the same."""

MAX_TEXT_BYTES = 1 << 20
MAX_IMAGE_BYTES = 20 << 20
_QUOTES = '"""'
_IMAGES = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}
_FULL = "/clear forgets the conversation, /undo its last exchange."


def chat(args: argparse.Namespace) -> int:
    overrides = sampling_overrides(args)
    if args.url:
        model = getattr(args, "model_given", "")
        partner = ServerPartner(
            args.url, api_key(args), overrides, model, guards_loops=args.loop_guard, asks_usage=args.stats
        )
        others = [] if model else partner.models[1:]
        note = f"the first of {1 + len(others)} models; --model NAME takes another" if others else ""
        return Conversation(partner, args.system, stats=args.stats).run(note)
    from ..llm.llm import LLM
    from ..text.calls import require_tokens
    from .models import progress_bar

    has_it = next((each for each in running() if each.has(args.model) and each.state() == READY), None)
    note = f"{has_it.address} serves this model: --url {has_it.address} takes no memory for it again" if has_it else ""
    with progress_bar(f"fetching {args.model}") as progress:
        llm = LLM(args.model, progress=progress, **llm_options(args))
    with llm:
        require_tokens(llm.ready)
        if llm.text.chat is None:
            raise ConfigError(f"The model {llm.ready.model!r} has no chat template; type `tokenmill generate`.")
        return Conversation(LocalPartner(llm, overrides), args.system, stats=args.stats).run(note)


class Conversation:
    """system: "": there is none. turns: messages of user and assistant in turn. attached: parts of the next message.
    stats: tell tokens, speed and drafts of each answer, also where there is no terminal."""

    def __init__(self, partner: Partner, system: str | None = None, *, stats: bool = False) -> None:
        self.partner = partner
        self._figures = True if stats else None
        self.system = system or ""
        self.turns: list[Message] = []
        self.attached: list[dict[str, Any]] = []
        self._written: set[Path] = set()
        self._console = Console(highlight=False, soft_wrap=True)
        self._commands: dict[str, Callable[[str], None]] = {
            "/clear": self._clear,
            "/system": self._set_system,
            "/set": self._set,
            "/show": lambda rest: self._tell(f"In another terminal: tokenmill show {self.partner.name}"),
            "/undo": self._undo,
            "/regen": self._regenerate,
            "/file": self._attach_text,
            "/image": self._attach_image,
            "/save": self._save,
            "/load": self._load,
            "/help": lambda rest: self._console.print(HELP, style="dim", markup=False),
        }

    def run(self, note: str = "") -> int:
        """Reads messages and commands until /bye or the end of input. note: to be told first."""
        # Importing it gives input() its line editing and history.
        with contextlib.suppress(ImportError):
            import readline

            readline.parse_and_bind("set enable-bracketed-paste on")
        self._console.print(f"[bold]{escape(self.partner.name)}[/]  [dim]/help lists commands, Ctrl-D leaves[/]")
        tell_if_small(self.partner.num_parameters)
        if note:
            self._tell(note)
        while True:
            line = ask()
            command, _, rest = (line or "").partition(" ")
            command = ALIASES.get(command, command)
            if line is None or command == "/bye":
                return 0
            if command in self._commands:
                try:
                    self._commands[command](rest.strip())
                except TokenmillError as error:
                    self._console.print(error.message, style="red", markup=False)
            elif command.startswith("/") and "/" not in command[1:]:
                near = difflib.get_close_matches(command, [*self._commands, *ALIASES], n=1)
                hint = f"; did you mean {near[0]}?" if near else "; /help lists them."
                self._console.print(f"There is no command {command}{hint}", style="red", markup=False)
            elif line:
                self._say(self._with_attached(line))

    def messages(self) -> list[Message]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def _tell(self, text: str) -> None:
        self._console.print(text, style="dim", markup=False)

    def _say(self, content: Any) -> bool:
        """Ask, and keep question and answer, or neither of them: whether there is an answer."""
        self.turns.append({"role": "user", "content": content})
        answer = ""
        try:
            answer = show(self.partner, self.messages(), self._console, figures=self._figures)
        except TokenmillError as error:
            self._console.print(error.message, style="red", markup=False)
            if isinstance(error, ContextTooLong):
                self._tell(_FULL)
        if not answer:
            self.turns.pop()
            return False
        self.turns.append({"role": "assistant", "content": answer})
        self.attached = []
        return True

    # ---- commands ----

    def _clear(self, rest: str) -> None:
        self.turns, self.attached = [], []

    def _set_system(self, text: str) -> None:
        self.system = text
        self._clear("")

    def _set(self, rest: str) -> None:
        """Ollama's, of which the system message alone is kept by a conversation."""
        name, _, value = rest.partition(" ")
        if name != "system":
            raise ConfigError(
                "/set system TEXT sets the system message; all else is a flag, such as --temperature 0.5."
            )
        self._set_system(value.strip().strip('"'))

    def _undo(self, rest: str) -> None:
        if not self.turns:
            raise ConfigError("There is nothing to take back.")
        del self.turns[-2:]

    def _regenerate(self, rest: str) -> None:
        if not self.turns:
            raise ConfigError("There is no answer yet.")
        kept = self.turns[-2:]
        del self.turns[-2:]
        if not self._say(kept[0]["content"]):
            self.turns += kept

    def _attach_text(self, rest: str) -> None:
        path, data = _read_file(rest, MAX_TEXT_BYTES)
        try:
            text = data.decode("utf8")
        except UnicodeDecodeError:
            raise ConfigError(f"{path} is not a text file in UTF-8.") from None
        fence = "```"
        while fence in text:
            fence += "`"
        self.attached.append({"type": "text", "text": f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"})
        self._tell(f"{path.name} ({len(text):,} characters) goes with the next message.")

    def _attach_image(self, rest: str) -> None:
        if self.partner.reads_images is False:
            raise ConfigError(f"{self.partner.name} reads no images; a vision model behind --url URL may.")
        path, data = _read_file(rest, MAX_IMAGE_BYTES)
        kind = next((kind for head, kind in _IMAGES.items() if data.startswith(head)), None)
        if kind is None:
            raise ConfigError(f"{path} is not an image that servers read: PNG, JPEG, GIF or WebP.")
        url = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
        self.attached.append({"type": "image_url", "image_url": {"url": url}})
        self._tell(f"{path.name} ({format_bytes(len(data))}) goes with the next message.")

    def _with_attached(self, line: str) -> Any:
        """A text where there are only texts: not every template reads parts."""
        parts = [*self.attached, {"type": "text", "text": line}]
        if any(part["type"] != "text" for part in parts):
            return parts
        return "\n\n".join(part["text"] for part in parts)

    def _save(self, rest: str) -> None:
        path = _path(rest)
        if path.suffix.lower() in (".md", ".markdown"):
            text = (
                "\n\n".join(f"## {each['role']}\n\n{_as_markdown(each['content'])}" for each in self.messages()) + "\n"
            )
        else:
            said = {"model": self.partner.name, "messages": self.messages()}
            text = json.dumps(said, indent=1, ensure_ascii=False) + "\n"
        try:
            with open(path, "w" if path in self._written else "x", encoding="utf8") as file:
                file.write(text)
        except FileExistsError:
            raise ConfigError(f"There is a file {path} already; name another.") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be written ({error.strerror}).") from error
        self._written.add(path)
        self._tell(f"written to {path}")

    def _load(self, rest: str) -> None:
        path, data = _read_file(rest, MAX_IMAGE_BYTES)
        try:
            messages = [{"role": each["role"], "content": each["content"]} for each in json.loads(data)["messages"]]
        except (ValueError, LookupError, TypeError):
            raise ConfigError(f"{path} is not a conversation that /save has written as JSON.") from None
        system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else ""
        if [each["role"] for each in messages] != ["user", "assistant"] * (len(messages) // 2):
            raise ConfigError(f"{path} is no conversation: user and assistant do not take turns.")
        self.system, self.turns, self.attached = system, messages, []
        self._tell(f"read {path}: the conversation goes on after {len(messages)} messages")


def _path(text: str) -> Path:
    """A name that may be quoted, or have its spaces escaped, as terminals give what is dropped on them."""
    with contextlib.suppress(ValueError):
        words = shlex.split(text)
        text = words[0] if len(words) == 1 else text
    if not text:
        raise ConfigError("Name a file.")
    return Path(text).expanduser()


def _read_file(text: str, max_bytes: int) -> tuple[Path, bytes]:
    path = _path(text)
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    if len(data) > max_bytes:
        raise ConfigError(f"{path} is larger than {format_bytes(max_bytes)}.")
    return path, data


def _as_markdown(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "\n\n".join(f"![]({each['image_url']['url']})" if "image_url" in each else each["text"] for each in content)


def ask() -> str | None:
    """The next message; "" after Ctrl-C, None at the end of input."""
    first, more = ("> ", ". ") if sys.stdin.isatty() else ("", "")
    try:
        text = input(first)
        if text.lstrip().startswith(_QUOTES):
            text = text.lstrip().removeprefix(_QUOTES)
            while not text.rstrip().endswith(_QUOTES):
                text += "\n" + input(more)
            return text.rstrip().removesuffix(_QUOTES).strip()
        while text.endswith("\\"):
            text = text[:-1] + "\n" + input(more)
        return text.strip()
    except EOFError:
        return None
    except KeyboardInterrupt:
        print()
        return ""


def accepted(drafts: Drafted) -> str:
    """'; 12 of 30 drafts accepted, 1.2 a step'."""
    if not drafts.num_steps:
        return ""
    each = drafts.num_accepted / drafts.num_steps
    return f"; {drafts.num_accepted} of {drafts.num_drafts} drafts accepted, {each:.1f} a step"


def _shown(text: str, console: Console) -> str:
    """What a model writes may be told to it by others: a terminal shows its control characters and obeys none."""
    return visible(text) if console.is_terminal else text


def show(
    partner: Partner, messages: list[Message], console: Console, *, thoughts: bool = True, figures: bool | None = None
) -> str:
    """Writes the answer as it comes, reasoning dimmed before it; what has come when Ctrl-C is pressed is the answer.
    figures: tell tokens, speed and what came of drafts; None: on a terminal."""
    start_s = time.monotonic()
    first_s, num_tokens, has_thought, finish, warning = start_s, 0, False, "", ""
    parts: list[str] = []
    drafts = Drafted()
    try:
        with contextlib.closing(partner.answer(messages)) as pieces:  # type: ignore[type-var]
            for said in pieces:
                if num_tokens == 0 and said.num_tokens:
                    first_s = time.monotonic()
                num_tokens = said.num_in_all or num_tokens + said.num_tokens
                drafts = Drafted(*map(add, drafts, said.drafted))
                finish, warning = said.finish or finish, said.warning or warning
                if thoughts and said.thought:
                    console.out(_shown(said.thought, console), style="dim", end="")
                    has_thought = True
                if has_thought and said.text and not parts:
                    console.out("\n")
                if said.text:
                    parts.append(said.text)
                console.file.write(_shown(said.text, console))  # rich would turn tabs into spaces
                console.file.flush()
    except KeyboardInterrupt:
        console.out(" [stopped]", end="")
    finally:
        console.out("")
    if warning:
        Console(stderr=figures is not None, highlight=False).print(warning, style="dim", markup=False)
    if console.is_terminal if figures is None else figures:
        cut = "; cut off by its limit of tokens (-n)" if finish == "length" and not warning else ""
        told = speed(num_tokens, first_s - start_s, time.monotonic() - first_s) + accepted(drafts)
        Console(stderr=figures is not None, highlight=False, soft_wrap=True).print(f"[dim]{told}{cut}[/]")
    return "".join(parts)
