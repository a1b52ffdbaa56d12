"""Renders the chart in this folder without Helm.

    python deploy/kubernetes/render.py [--name N] [--values FILE] [--set a.b=c]

The templates are Helm's (Go templates with Sprig's functions); this reads the part of that language that they use, and
refuses the rest by name. Values are checked against values.schema.json, as Helm does. It needs PyYAML and jsonschema.
With Helm at hand, `helm template` and `helm install` take the same folder.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

HERE = Path(__file__).parent
_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|:=|[()|,]|[^\s()|,]+')


class ChartError(Exception):
    """A template that cannot be rendered, or a value that is missing; the message says which."""


class _Block:
    """A list of texts and actions, up to its `end`. `otherwise`: its else branch."""

    def __init__(self, action: str = "") -> None:
        self.action = action
        self.parts: list[str | _Block] = []
        self.otherwise: _Block | None = None


def _parse(text: str) -> _Block:
    stack = [_Block()]
    position, trims = 0, False
    for found in _ACTION.finditer(text):
        before = text[position : found.start()]
        before = before.lstrip() if trims else before
        stack[-1].parts.append(before.rstrip() if found[1] else before)
        position, trims, action = found.end(), bool(found[3]), found[2]
        word = action.split()[0] if action else ""
        if action.startswith("/*"):
            continue
        if word in ("if", "range", "with", "define"):
            block = _Block(action)
            stack[-1].parts.append(block)
            stack.append(block)
        elif word == "else":
            block = _Block(action[4:].strip())
            stack[-1].otherwise = block
            stack[-1] = block
        elif word == "end":
            if len(stack) == 1:
                raise ChartError("`end` without a beginning")
            stack.pop()
        else:
            stack[-1].parts.append(_Block("= " + action))
    if len(stack) > 1:
        raise ChartError(f"no `end` for {{{{ {stack[-1].action} }}}}")
    rest = text[position:]
    stack[0].parts.append(rest.lstrip() if trims else rest)
    return stack[0]


class Chart:
    """The templates of a folder, ready to be rendered with values."""

    def __init__(self, folder: Path = HERE) -> None:
        self.about = yaml.safe_load((folder / "Chart.yaml").read_text())
        self.values: dict[str, Any] = yaml.safe_load((folder / "values.yaml").read_text())
        schema = folder / "values.schema.json"
        self._schema = json.loads(schema.read_text()) if schema.exists() else {}
        self._named: dict[str, _Block] = {}
        self._files = []
        for path in sorted((folder / "templates").iterdir()):
            block = _parse(path.read_text())
            if path.suffix == ".yaml":
                self._files.append(block)
            for part in block.parts:
                if isinstance(part, _Block) and part.action.startswith("define "):
                    self._named[json.loads(part.action.split()[1])] = part

    def render(self, name: str, values: dict[str, Any], namespace: str = "default") -> str:
        """YAML documents of a release. `values` go over those of values.yaml. Raises ChartError."""
        chart = {key[0].upper() + key[1:]: value for key, value in self.about.items()}
        whole = merged(self.values, values)
        try:
            jsonschema.validate(whole, self._schema)
        except jsonschema.ValidationError as error:
            raise ChartError(f"{'.'.join(map(str, error.absolute_path)) or 'values'}: {error.message}") from None
        root = {
            "Values": whole,
            "Release": {"Name": name, "Namespace": namespace, "Service": "render"},
            "Chart": chart,
        }
        texts = (self._run(block, _Scope(root, {"$": root})).strip() for block in self._files)
        return "\n---\n".join(text for text in texts if text) + "\n"

    def manifests(self, name: str, values: dict[str, Any]) -> list[dict[str, Any]]:
        """The same as objects."""
        return [each for each in yaml.safe_load_all(self.render(name, values)) if each]

    def include(self, name: str, dot: Any, root: Any) -> str:
        if name not in self._named:
            raise ChartError(f"no template is called {name!r}")
        return self._run(self._named[name], _Scope(dot, {"$": root}), is_named=True)

    def _run(self, block: _Block, scope: _Scope, *, is_named: bool = False) -> str:
        texts = []
        for part in block.parts:
            if isinstance(part, str):
                texts.append(part)
            elif not part.action.startswith("define "):
                texts.append(self._do(part, scope))
        return "".join(texts).strip() if is_named else "".join(texts)

    def _do(self, block: _Block, scope: _Scope) -> str:
        word, _, rest = block.action.partition(" ")
        if word == "=":
            assigned = re.fullmatch(r"(\$\w+)\s*:=\s*(.*)", rest, re.DOTALL)
            if assigned:
                scope.names[assigned[1]] = _Expression(self, scope, assigned[2]).value()
                return ""
            value = _Expression(self, scope, rest).value()
            return "" if value is None else _text(value)
        if word == "range":
            return "".join(self._run(block, each) for each in self._ranged(rest, scope))
        value = _Expression(self, scope, rest).value() if word else True
        if value:
            return self._run(block, _Scope(value, dict(scope.names)) if word == "with" else scope.inner())
        return "" if block.otherwise is None else self._do_else(block.otherwise, scope)

    def _do_else(self, block: _Block, scope: _Scope) -> str:
        return self._do(block, scope) if block.action else self._run(block, scope.inner())

    def _ranged(self, rest: str, scope: _Scope) -> Iterator[_Scope]:
        named = re.fullmatch(r"(\$\w+)\s*(?:,\s*(\$\w+))?\s*:=\s*(.*)", rest, re.DOTALL)
        value = _Expression(self, scope, named[3] if named else rest).value() or []
        pairs = sorted(value.items()) if isinstance(value, dict) else list(enumerate(value))
        for key, each in pairs:
            inner = _Scope(each, dict(scope.names))
            if named:
                inner.names |= {named[1]: key, named[2]: each} if named[2] else {named[1]: each}
            yield inner


class _Scope:
    def __init__(self, dot: Any, names: dict[str, Any]) -> None:
        self.dot = dot
        self.names = names

    def inner(self) -> _Scope:
        return _Scope(self.dot, dict(self.names))


class _Expression:
    """A pipeline: `f a (g b) | h`."""

    def __init__(self, chart: Chart, scope: _Scope, text: str) -> None:
        self._chart = chart
        self._scope = scope
        self._tokens = _TOKEN.findall(text)
        self._text = text

    def value(self) -> Any:
        value = self._pipeline()
        if self._tokens:
            raise ChartError(f"cannot read {{{{ {self._text} }}}}")
        return value

    def _pipeline(self) -> Any:
        value = self._call([])
        while self._tokens and self._tokens[0] == "|":
            self._tokens.pop(0)
            value = self._call([value])
        return value

    def _call(self, last: list[Any]) -> Any:
        if self._tokens and self._tokens[0].isidentifier() and self._tokens[0] not in ("true", "false", "nil"):
            name = self._tokens.pop(0)
            given = [*self._operands(), *last]
            if name == "include":
                return self._chart.include(given[0], given[1], self._scope.names["$"])
            if name not in _FUNCTIONS:
                raise ChartError(f"the function {name!r} is not one of those that are known here")
            return _FUNCTIONS[name](*given)
        values = self._operands()
        if len(values) != 1:
            raise ChartError(f"cannot read {{{{ {self._text} }}}}")
        return values[0]

    def _operands(self) -> list[Any]:
        values = []
        while self._tokens and self._tokens[0] not in ("|", ")"):
            token = self._tokens.pop(0)
            if token == "(":
                values.append(self._pipeline())
                if not self._tokens or self._tokens.pop(0) != ")":
                    raise ChartError(f"a bracket is open in {{{{ {self._text} }}}}")
            else:
                values.append(self._operand(token))
        return values

    def _operand(self, token: str) -> Any:
        if token[0] == '"':
            return json.loads(token)
        if token in ("true", "false", "nil"):
            return {"true": True, "false": False, "nil": None}[token]
        if re.fullmatch(r"-?\d+", token):
            return int(token)
        if token[0] == "$":
            name, _, path = token.partition(".")
            if name not in self._scope.names:
                raise ChartError(f"{name} has no value")
            return _walk(self._scope.names[name], path)
        if token[0] == ".":
            return _walk(self._scope.dot, token[1:])
        raise ChartError(f"cannot read {token!r} in {{{{ {self._text} }}}}")


def _walk(value: Any, path: str) -> Any:
    for name in filter(None, path.split(".")):
        value = value.get(name) if isinstance(value, dict) else None
    return value


def _text(value: Any) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _required(message: str, value: Any) -> Any:
    if value in (None, ""):
        raise ChartError(message)
    return value


def _indent(width: int, text: str) -> str:
    return "\n".join(" " * width + line if line else line for line in text.split("\n"))


def _fail(message: str) -> Any:
    raise ChartError(message)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "default": lambda other, value=None: value or other,
    "required": _required,
    "fail": _fail,
    "quote": lambda value: json.dumps("" if value is None else _text(value)),
    "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False, sort_keys=False).rstrip("\n"),
    "indent": _indent,
    "nindent": lambda width, text: "\n" + _indent(width, text),
    "int": lambda value: int(value or 0),
    "until": lambda count: list(range(count)),
    "printf": lambda pattern, *values: pattern.replace("%v", "%s") % values,
    "not": lambda value: not value,
    "and": lambda *values: next((value for value in values if not value), values[-1]),
    "or": lambda *values: next((value for value in values if value), values[-1]),
    "eq": lambda value, *others: value in others,
    "ne": lambda value, other: value != other,
    "gt": lambda value, other: value > other,
    "add": lambda *values: sum(values),
    "trunc": lambda width, text: text[:width],
    "trimSuffix": lambda end, text: text.removesuffix(end),
    "list": lambda *values: list(values),
    "dict": lambda *given: dict(zip(given[::2], given[1::2], strict=True)),
}


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mapping by mapping."""
    both = dict(below)
    for key, value in above.items():
        before = both.get(key)
        both[key] = merged(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return both


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Render the chart to standard output.")
    parser.add_argument("--name", default="tokenmill", help="name of the release (default: tokenmill)")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--values", action="append", default=[], metavar="FILE", help="YAML over values.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="one value, such as a.b=3")
    options = parser.parse_args(arguments)
    values: dict[str, Any] = {}
    for path in options.values:
        try:
            values = merged(values, yaml.safe_load(Path(path).read_text()) or {})
        except (OSError, yaml.YAMLError) as error:
            print(f"render.py: {path}: {error}", file=sys.stderr)
            return 1
    for each in options.set:
        path, _, value = each.partition("=")
        leaf: Any = yaml.safe_load(value)
        for name in reversed(path.split(".")):
            leaf = {name: leaf}
        values = merged(values, leaf)
    try:
        sys.stdout.write(Chart().render(options.name, values, options.namespace))
    except ChartError as error:
        print(f"render.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
