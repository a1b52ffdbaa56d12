"""The page around a report: one HTML file that needs nothing else, with tables, facts, style, and names of quantities.

The page's own policy forbids it to load anything or run scripts, so that it opens from a disk, a mail or a wiki alike.
One style serves a phone, a desk, dark rooms and paper. The series colours are those of Okabe and Ito (2008), chosen to
be told apart by the colour-blind; on dark ground the same hues, lighter.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ..report import without_secrets
from .plot import short

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --rule: #d5dae0; --ground: #fff; --tint: #f5f7f9;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b5528b; --c4: #b07700; --c5: #3aa0dd; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaee; --soft: #9aa6b2; --rule: #363d45; --ground: #14171a;
  --tint: #1c2024; --c0: #56b4e9; --c1: #ff8a4a; --c2: #2cc29a; --c3: #e39ac6; --c4: #f0c040; --c5: #8fb0ff; } }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --rule: #bbb; --ground: #fff; --tint: #fff;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b5528b; --c4: #b07700; --c5: #3aa0dd; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 75rem; background: var(--ground); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.75rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.3rem; line-height: 1.25; margin: 3rem 0 .75rem; padding-top: 1rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1rem; margin: 2rem 0 .5rem; }
p { margin: .5rem 0; max-width: 46rem; }
.lead, .note, .none { color: var(--soft); }
.note { font-size: .8rem; line-height: 1.4; }
pre { background: var(--tint); border: 1px solid var(--rule); border-radius: 4px; padding: .6rem .75rem;
  margin: .75rem 0; font: .85rem/1.5 ui-monospace, "DejaVu Sans Mono", monospace; white-space: pre-wrap; }
pre span { display: inline-block; max-width: 100%; overflow-wrap: anywhere; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(9rem, 1fr)); gap: 1rem; margin: 1.25rem 0; }
.figures div { border-top: 1px solid var(--rule); padding-top: .4rem; }
.figures dt { font-size: .8rem; color: var(--soft); }
.figures dd { margin: 0; font-size: 1.45rem; line-height: 1.25; font-variant-numeric: tabular-nums; }
.figures dd + dd { font-size: .8rem; line-height: 1.35; color: var(--soft); }
.facts { display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .15rem 1rem; margin: .75rem 0;
  font-size: .9rem; }
.facts dt { color: var(--soft); }
.facts dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; margin: .75rem 0; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { padding: .35rem .75rem .35rem 0; text-align: right; vertical-align: top; border-bottom: 1px solid var(--rule);
  white-space: nowrap; }
th { font-weight: 600; }
thead th { border-bottom-color: var(--ink); }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 7.5rem;
  overflow-wrap: anywhere; }
.scroll th:first-child, .scroll td:first-child { position: sticky; left: 0; background: var(--ground); }
td.text { text-align: left; white-space: normal; min-width: 9rem; }
td small { display: block; color: var(--soft); font-size: .8rem; line-height: 1.35; max-width: 26rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr)); gap: 1.75rem 1.5rem;
  margin: 1rem 0; }
figure { margin: 0; break-inside: avoid; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; line-height: 1.3; margin-bottom: .2rem; }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 .9rem; margin: 0; padding: 0; font-size: .8rem;
  color: var(--soft); }
.legend svg { width: 22px; height: 10px; margin-right: .3rem; }
figure > svg { display: block; width: 100%; height: auto; max-width: 34rem; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", "Liberation Sans", sans-serif; fill: var(--soft);
  font-variant-numeric: tabular-nums; }
svg text.row { fill: var(--ink); paint-order: stroke; stroke: var(--ground); stroke-width: 4px; }
.grid { stroke: var(--rule); stroke-width: 1; }
.reference { stroke: var(--ink); stroke-width: 1; stroke-dasharray: 3 3; }
.line { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.bar { stroke: var(--c); stroke-width: 3; }
circle { fill: var(--c); }
circle.small { fill: var(--ground); stroke: var(--c); }
.s0 { --c: var(--c0); } .s1 { --c: var(--c1); } .s2 { --c: var(--c2); }
.s3 { --c: var(--c3); } .s4 { --c: var(--c4); } .s5 { --c: var(--c5); }
.s1 .line { stroke-dasharray: 6 3; } .s2 .line { stroke-dasharray: 2 2.5; } .s3 .line { stroke-dasharray: 9 3 2 3; }
.s4 .line { stroke-dasharray: 12 4; } .s5 .line { stroke-dasharray: 4 2 1 2; }
.warning { border-left: 3px solid var(--c1); padding: .1rem 0 .1rem .75rem; margin: .75rem 0; }
@media (max-width: 30rem) { table { font-size: .8rem; } th, td { padding-right: .5rem; }
  th:first-child, td:first-child { min-width: 6rem; } }
@media (min-width: 48rem) { body { padding: 2.5rem 2rem 5rem; } h1 { font-size: 2.1rem; }
  .single, .pairs { grid-template-columns: 1fr 1fr; } .single svg text, .pairs svg text { font-size: 10px; } }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } h2, h3 { break-after: avoid; }
  .plots { grid-template-columns: repeat(2, 1fr); } .scroll { overflow: visible; } table { font-size: 8pt; }
  th, td { padding-right: .4rem; white-space: normal; } @page { margin: 15mm; } }
"""


def page(title: str, lead: str, sections: Sequence[str]) -> str:
    """The whole file. `sections` are HTML already; the rest is text."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f'<header><h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p></header>\n'
        + "\n".join(sections)
        + "\n</body>\n</html>\n"
    )


def section(title: str, parts: Sequence[str]) -> str:
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(part for part in parts if part) + "\n</section>"


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def warnings(texts: Sequence[str]) -> str:
    return "".join(f'<p class="warning">{escape(text)}</p>' for text in texts)


def command(words: Sequence[str]) -> str:
    """A command line. A flag and its values stay on one line where there is room."""
    groups: list[str] = []
    for word in words:
        if groups and (word.startswith("-") or not groups[-1].startswith("-")):
            groups.append(word)
        elif groups:
            groups[-1] += " " + word
        else:
            groups.append(word)
    return "<pre>" + " ".join(f"<span>{escape(group)}</span>" for group in groups) + "</pre>"


def headline(figures: Sequence[tuple[str, str, str]]) -> str:
    """Large figures: (name, value, remark)."""
    cells = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd><dd>{escape(remark)}</dd></div>"
        for name, value, remark in figures
    )
    return f'<dl class="figures">{cells}</dl>'


def facts(pairs: Mapping[str, object]) -> str:
    cells = "".join(f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in pairs.items())
    return f'<dl class="facts">{cells}</dl>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]], definitions: Mapping[str, str] | None = None) -> str:
    """The first column holds names, each with its definition below where there is one; the others hold figures."""
    definitions = definitions or {}
    head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in header)
    body = []
    for name, *cells in rows:
        below = f"<small>{escape(definitions[name])}</small>" if name in definitions else ""
        figures = "".join(_cell(cell) for cell in cells)
        body.append(f"<tr><td>{escape(name)}{below}</td>{figures}</tr>")
    whole = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll" tabindex="0">{whole}</div>'


def _cell(text: str) -> str:
    """Words are set as words, figures as figures."""
    return f'<td class="text">{escape(text)}</td>' if len(text) > 32 else f"<td>{escape(text)}</td>"


def plots(figures: Sequence[str]) -> str:
    """Side by side: three in a row on a desk, two where that leaves none alone."""
    columns = {1: " single", 2: " pairs", 4: " pairs"}.get(len(figures), "")
    return f'<div class="plots{columns}">{"".join(figures)}</div>' if figures else ""


LATENCIES = {
    "ttft_s": ("TTFT", "first token event − due"),
    "ttfo_s": ("TTFO", "first event of the answer, after reasoning − due"),
    "ttst_s": ("TTST", "second token event − first"),
    "tpot_s": ("TPOT", "(last token event − first) / (output tokens − 1), per request"),
    "itl_s": ("ITL", "gaps between token events, over all requests"),
    "e2el_s": ("E2EL", "last token event − due"),
    "normalised_latency_s": ("Normalised latency", "E2EL / output tokens, per request"),
    "ttft_from_send_s": ("TTFT from send", "first token event − sent"),
    "e2el_from_send_s": ("E2EL from send", "last token event − sent"),
    "lateness_s": ("Lateness", "sent − due: the client's own delay"),
}


class TimeUnit:
    """A unit of time and what seconds are multiplied with."""

    def __init__(self, name: str, factor: float) -> None:
        self.name = name
        self.factor = factor


PLAIN = TimeUnit("", 1.0)


def time_unit(values_s: Sequence[float | None]) -> TimeUnit:
    known = [abs(value) for value in values_s if value is not None]
    return TimeUnit("s", 1.0) if known and max(known) >= 2.0 else TimeUnit("ms", 1e3)


def show_time(value_s: float | None) -> str:
    if value_s is None:
        return "-"
    unit = time_unit([value_s])
    return f"{short(value_s * unit.factor)} {unit.name}"


def to_ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1e3


def metric_name(metric: str) -> str:
    """'ttft_s.p50' -> 'TTFT p50'; 'output_tokens_per_s' -> 'output tokens/s'."""
    base, _, share = metric.partition(".")
    name = LATENCIES[base][0] if base in LATENCIES else base.replace("_per_s", "/s").replace("_", " ")
    return f"{name} {share.replace('_', '.')}".strip()


def quantity(metric: str, value: float) -> str:
    return show_time(value) if metric.partition(".")[0] in LATENCIES else short(value)


def words(facts: Mapping[str, Any]) -> str:
    """'mode open, request rate 4': what is set, without what is empty."""
    shown = []
    for key, value in facts.items():
        if value is None or value == "" or value == {} or value == []:
            continue
        if isinstance(value, (dict, list, bool)):
            text = json.dumps(value)
        else:
            text = short(value) if isinstance(value, float) else str(value)
        shown.append(f"{key.replace('_', ' ')} {text}")
    return ", ".join(shown)


def repeat_with(argv: Sequence[str]) -> str:
    """The command line as HTML, without secrets."""
    shown = without_secrets(argv)
    if shown and shown[0] != "bench":
        shown = shown[1:]
    return command(["tokenmill", *map(shlex.quote, shown)]) if shown else ""
