"""The tasks of `bench quality` as lists of questions: prompts, how an answer is read, what counts as right.

Nothing here talks to a model. Few-shot examples and the choice of questions come from the seed alone, so two runs with
equal settings ask exactly the same, and each result can be paired with another's by question.

    task          file                        asks                                   right if
    gsm8k         gsm8k_test.jsonl            school sums, worked examples first     number after #### equals
    mgsm          mgsm.jsonl.gz               the same in ten languages              number after #### equals
    bbh           bbh.jsonl.gz                27 reasoning tasks, answers only       first line equals the target
    bbh-choice    bbh.jsonl.gz                those with a closed set of answers     target is the likeliest
    choice        any JSONL                   rows of question, choices, answer      answer is the likeliest
    humaneval     humaneval.jsonl.gz          Python functions to complete           the tests pass
    perplexity    wikitext2_valid_unk.txt.gz  nothing; scores a text                 (see run)

GSM8K: Cobbe et al., 2021. MGSM: Shi et al., 2022. BBH: Suzgun et al., 2022. HumanEval: Chen et al., 2021.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError

FILES = {
    "gsm8k": "gsm8k_test.jsonl",
    "mgsm": "mgsm.jsonl.gz",
    "bbh": "bbh.jsonl.gz",
    "bbh-choice": "bbh.jsonl.gz",
    "choice": "choice.jsonl",
    "humaneval": "humaneval.jsonl.gz",
    "perplexity": "wikitext2_valid_unk.txt.gz",
}
EXAMPLES_FILE = "gsm8k_train_sample.jsonl"
"""Worked examples for gsm8k and mgsm, looked for beside the questions."""

SHOTS = {"gsm8k": 5, "mgsm": 5, "bbh": 3, "bbh-choice": 3, "choice": 0, "humaneval": 0}

_NUMBER = r"-?\$?\d[\d,]*(?:\.\d+)?"
_CLOSED = ({"True", "False"}, {"Yes", "No"}, {"yes", "no"}, {"valid", "invalid"})
_OPTION = re.compile(r"^\(([A-Z])\)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Question:
    """`id` is unique in its task and stable over runs. `choices` (likelihood tasks) start with the space that belongs
    to them. `program`: for code, the text an answer is put between."""

    id: str
    group: str
    prompt: str
    target: str
    choices: tuple[str, ...] = ()
    program: tuple[str, str] = ("", "")

    @property
    def digest(self) -> str:
        """Of all that decides what is asked."""
        parts = (self.prompt, self.target, *self.choices, *self.program)
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Task:
    """`kind`: generate (compare text), choose (compare log-likelihoods) or code (run tests). `judges`: metric name ->
    whether an output is right for a target; the first is the one compared and shown."""

    name: str
    kind: str
    questions: tuple[Question, ...]
    prompt_format: str
    num_shots: int
    data: dict[str, Any]
    max_tokens: int = 0
    stop: tuple[str, ...] = ()
    judges: Mapping[str, Callable[[str, str], bool]] = field(default_factory=dict)


def find_file(task: str, folder: Path | None) -> Path:
    """The task's file in `folder` or one level below. Raises ConfigError, saying how to name it."""
    name = FILES[task]
    found = (
        []
        if folder is None
        else [path for path in (folder / name, *sorted(folder.glob(f"*/{name}"))) if path.is_file()]
    )
    if not found:
        where = "no --data folder was given" if folder is None else f"{folder} does not hold {name}"
        raise ConfigError(
            f"There is no data for {task}: {where}. Give --data FOLDER or --task {task}=FILE.", param="data"
        )
    return found[0]


def read_text(path: Path) -> str:
    """A text file, gzip or plain. Raises ConfigError."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")
    except (OSError, EOFError, gzip.BadGzipFile, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as text: {error}.", param="data") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """JSON objects, one a line. Raises ConfigError naming the line."""
    rows = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path} line {number} is not JSON: {error}.", param="data") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path} line {number} is not a JSON object.", param="data")
        rows.append(row)
    if not rows:
        raise ConfigError(f"{path} holds no rows.", param="data")
    return rows


def describe_file(path: Path) -> dict[str, Any]:
    return {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def load_task(name: str, path: Path, *, num_shots: int | None, limit: int | None, seed: int, chat: bool) -> Task:
    """The questions of a task. `limit`: at most this many, drawn evenly from the groups (languages, sub-tasks)."""
    rows = read_rows(path)
    shots = SHOTS[name] if num_shots is None else num_shots
    make = {
        "gsm8k": _sums,
        "mgsm": _sums,
        "bbh": _bbh,
        "bbh-choice": _bbh_choice,
        "choice": _choice,
        "humaneval": _humaneval,
    }[name]
    try:
        task = make(name, path, rows, shots, seed, chat)
    except KeyError as error:
        raise ConfigError(f"{path} has a row without the field {error}, which {name} needs.", param="data") from None
    if not task.questions:
        raise ConfigError(f"{path} leaves no question for {name} after {shots} examples.", param="data")
    chosen = _choose(task.questions, limit, seed)
    facts = {**describe_file(path), "num_rows": len(rows), "num_asked": len(chosen)}
    fields = {item: getattr(task, item) for item in Task.__slots__}
    return Task(**{**fields, "questions": chosen, "data": facts | task.data})


def _choose(questions: Sequence[Question], limit: int | None, seed: int) -> tuple[Question, ...]:
    """Round and round the groups, each in an order drawn from the seed, until `limit` are taken; then in file order."""
    if limit is None or limit >= len(questions):
        return tuple(questions)
    groups: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        groups.setdefault(question.group, []).append(index)
    for group, members in groups.items():
        random.Random(f"{seed} choose {group}").shuffle(members)
    rounds = max(map(len, groups.values()))
    order = [members[turn] for turn in range(rounds) for members in groups.values() if turn < len(members)]
    return tuple(questions[index] for index in sorted(order[:limit]))


def _hold_out(
    rows: Sequence[dict[str, Any]], group_of: Callable[[dict[str, Any]], str], num: int, seed: int
) -> tuple[dict[str, list[dict[str, Any]]], list[dict[str, Any]]]:
    """(group -> `num` rows to show as examples, the rows that remain to be asked)."""
    members: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        members.setdefault(group_of(row), []).append(index)
    shown: dict[str, list[dict[str, Any]]] = {}
    taken: set[int] = set()
    for group, indices in members.items():
        picks = random.Random(f"{seed} examples {group}").sample(indices, min(num, len(indices)))
        taken.update(picks)
        shown[group] = [rows[index] for index in picks]
    return shown, [row for index, row in enumerate(rows) if index not in taken]


# ---- sums ------------------------------------------------------------------------------------------------------------


def _sums(name: str, path: Path, rows: list[dict[str, Any]], num_shots: int, seed: int, chat: bool) -> Task:
    beside = path.with_name(EXAMPLES_FILE)
    if beside.is_file():
        pool = read_rows(beside)
        examples = random.Random(f"{seed} examples").sample(pool, min(num_shots, len(pool)))
        source = beside.name
    elif name == "gsm8k":
        shown, rows = _hold_out(rows, lambda row: "", num_shots, seed)
        examples, source = shown[""], f"{path.name}, held out"
    elif num_shots:
        raise ConfigError(f"{name} shows examples of {EXAMPLES_FILE}, which is not beside {path}.", param="data")
    else:
        examples, source = [], "none"
    head = "".join(f"Question: {row['question']}\nAnswer: {row['answer']}\n\n" for row in examples)
    hint = ' End with "#### " and the number alone.' if chat else ""
    questions = tuple(
        Question(
            id=f"{row.get('lang', 'en')}/{row['index']}",
            group=row.get("lang", "en"),
            prompt=f"{head}Question: {row['question']}{hint}\nAnswer:",
            target=str(row["answer"]).rpartition("####")[2].strip(),
        )
        for row in rows
    )
    return Task(
        name=name,
        kind="generate",
        questions=questions,
        prompt_format=f"({'Question: ...'}\\nAnswer: worked solution\\n#### number\\n\\n) x {len(examples)} in English,"
        f" then Question: ...{hint}\\nAnswer:",
        num_shots=len(examples),
        data={"examples": source},
        max_tokens=400,
        stop=("Question:",),
        judges={"exact match after ####": _strict_number, "last number equal": _last_number},
    )


def _strict_number(output: str, target: str) -> bool:
    found = re.search(rf"####\s*({_NUMBER})", output)
    return found is not None and _number(found[1]) == _number(target)


def _last_number(output: str, target: str) -> bool:
    found = re.findall(_NUMBER, output)
    return bool(found) and _number(found[-1]) == _number(target)


def _number(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None


# ---- BIG-Bench Hard --------------------------------------------------------------------------------------------------


def _bbh_prompt(shown: Sequence[dict[str, Any]], row: dict[str, Any]) -> str:
    return "".join(f"Q: {each['input']}\nA: {each['target']}\n\n" for each in shown) + f"Q: {row['input']}\nA:"


def _bbh(name: str, path: Path, rows: list[dict[str, Any]], num_shots: int, seed: int, chat: bool) -> Task:
    shown, asked = _hold_out(rows, lambda row: row["task"], num_shots, seed)
    return Task(
        name=name,
        kind="generate",
        questions=tuple(
            Question(f"{row['task']}/{row['index']}", row["task"], _bbh_prompt(shown[row["task"]], row), row["target"])
            for row in asked
        ),
        prompt_format=f"(Q: ...\\nA: target\\n\\n) x {num_shots} of the same sub-task, then Q: ...\\nA:",
        num_shots=num_shots,
        data={"examples": f"{path.name}, held out"},
        max_tokens=64,
        stop=("\n\n", "Q:"),
        judges={"exact match": _first_line, "found in the first line": _in_first_line},
    )


def _first_line(output: str, target: str) -> bool:
    return output.strip().partition("\n")[0].strip() == target.strip()


def _in_first_line(output: str, target: str) -> bool:
    line = output.strip().partition("\n")[0]
    return re.search(rf"(?<!\w){re.escape(target.strip())}(?!\w)", line, re.IGNORECASE) is not None


def _bbh_choice(name: str, path: Path, rows: list[dict[str, Any]], num_shots: int, seed: int, chat: bool) -> Task:
    targets: dict[str, set[str]] = {}
    for row in rows:
        targets.setdefault(row["task"], set()).add(row["target"])
    shown, asked = _hold_out(rows, lambda row: row["task"], num_shots, seed)
    questions = []
    for row in asked:
        options = [f"({letter})" for letter in dict.fromkeys(_OPTION.findall(row["input"]))]
        closed = next((sorted(answers) for answers in _CLOSED if targets[row["task"]] <= answers), None)
        choices = closed or options
        # Sub-tasks with free answers have no options; a few rows name an option that is not listed.
        if row["target"] in choices:
            questions.append(
                Question(
                    id=f"{row['task']}/{row['index']}",
                    group=row["task"],
                    prompt=_bbh_prompt(shown[row["task"]], row),
                    target=row["target"],
                    choices=tuple(f" {choice}" for choice in choices),
                )
            )
    return Task(
        name=name,
        kind="choose",
        questions=tuple(questions),
        prompt_format=f"(Q: ...\\nA: target\\n\\n) x {num_shots} of the same sub-task, then Q: ...\\nA: + option",
        num_shots=num_shots,
        data={"examples": f"{path.name}, held out"},
    )


# ---- any choice ------------------------------------------------------------------------------------------------------


def _choice(name: str, path: Path, rows: list[dict[str, Any]], num_shots: int, seed: int, chat: bool) -> Task:
    """`answer` is the index of the right choice, or its text."""
    shown, asked = _hold_out(rows, lambda row: "", num_shots, seed)
    head = "".join(f"Question: {row['question']}\nAnswer: {_answer_of(row)}\n\n" for row in shown[""])
    return Task(
        name=name,
        kind="choose",
        questions=tuple(
            Question(
                id=str(row.get("id", number)),
                group=str(row.get("group", "")),
                prompt=f"{head}Question: {row['question']}\nAnswer:",
                target=_answer_of(row),
                choices=tuple(f" {choice}" for choice in row["choices"]),
            )
            for number, row in enumerate(asked)
        ),
        prompt_format=f"(Question: ...\\nAnswer: ...\\n\\n) x {num_shots}, then Question: ...\\nAnswer: + choice",
        num_shots=num_shots,
        data={"examples": f"{path.name}, held out"},
    )


def _answer_of(row: dict[str, Any]) -> str:
    choices, answer = row["choices"], row["answer"]
    if isinstance(choices, list) and len(choices) > 1 and all(isinstance(choice, str) for choice in choices):
        if isinstance(answer, int) and 0 <= answer < len(choices):
            return choices[answer]
        if answer in choices:
            return answer
    raise ConfigError(
        f"A row of choice needs two or more texts in choices, and in answer one of them or its index; got {answer!r}.",
        param="data",
    )


# ---- HumanEval -------------------------------------------------------------------------------------------------------


def _humaneval(name: str, path: Path, rows: list[dict[str, Any]], num_shots: int, seed: int, chat: bool) -> Task:
    if num_shots:
        raise ConfigError("humaneval takes no examples; leave --shots at 0.", param="shots")
    ask = "Complete this Python function. Answer with the whole function in one ```python block.\n\n```python\n{}```"
    questions = []
    for row in rows:
        prompt, entry = row["prompt"], row["entry_point"]
        # A chat answer repeats the function: only what stands before it (imports, helpers) is put in front.
        before = prompt.partition(f"def {entry}(")[0] if chat else prompt
        questions.append(
            Question(
                id=row["task_id"],
                group="",
                prompt=ask.format(prompt) if chat else prompt,
                target=entry,
                program=(before, f"\n\n{row['test']}\n\ncheck({entry})\n"),
            )
        )
    return Task(
        name=name,
        kind="code",
        questions=tuple(questions),
        prompt_format=ask.format("prompt").replace("\n", "\\n") if chat else "the prompt as published",
        num_shots=0,
        data={},
        max_tokens=512,
        stop=() if chat else ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint("),
    )


def code_of(output: str, chat: bool) -> str:
    """The code in an answer: the first fenced block of a chat, else the continuation itself."""
    if not chat:
        return output
    block = re.search(r"```(?:python|py)?\s*\n(.*?)(?:```|\Z)", output, re.DOTALL)
    return block[1] if block else output
