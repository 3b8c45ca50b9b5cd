"""The same for people's eyes: short tables with rich, in the width of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import chinese
from .classify.pattern import Signature
from .units import gib

_COLOURS = {"HEALTHY": "green", "HELD": "red", "healthy": "green", "held": "red", "died again": "yellow"}


def _console() -> Console:
    # Not a terminal (a pipe, a log): no colours, and lines that aren't cut at 80 columns.
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def print_status(status: dict[str, Any]) -> None:
    console = _console()
    for program in status["programs"]:
        state = program["state"]
        line = Text(program["program"], style="bold").append("  ").append(state, style=_COLOURS.get(state, "cyan"))
        line.append(f"  since {_short_time(program['since'])}")
        if program["pid"]:
            line.append(f"  pid {program['pid']}")
        console.print(line)
        rows = [("", program["reason"])]
        if program["verdict"]:
            rows.append(("last death", f"{program['verdict']['kind']}: {program['verdict']['summary']}"))
        rows += [("changed", change_text(change)) for change in program["changes"]]
        served = program["served"]
        if served:
            rows.append(("serves", f"{served['model']}, max_model_len {served['max_model_len']}"))
        if program["launches_left"] is not None:
            rows.append(("launches left", str(program["launches_left"])))
        console.print(_pairs(rows))


_JUDGEMENTS = {"right": "proved right: ", "wrong": "proved wrong: ", "open": ""}


def print_history(history: dict[str, Any]) -> None:
    console = _console()
    if not history["incidents"]:
        console.print("No incidents: nothing has died since supervisor-vllm looks after it.")
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("#", "time", "program", "what happened", "what was done", "outcome"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("#", "time"))
    for row in history["incidents"]:
        outcome = row["outcome"]
        if row["seconds_to_healthy"] is not None:
            outcome += f" after {row['seconds_to_healthy']:.0f} s"
        if seen_later := row["hindsight"]:
            outcome += f"\nshadow: {_JUDGEMENTS[seen_later['judgement']]}{seen_later['why']}"
        changes = "; ".join(change_text(change) for change in row["plan"]["changes"])
        table.add_row(
            str(row["id"]),
            _short_time(row["time"]),
            row["program"],
            Text(row["verdict"]["kind"], style="bold").append(f"\n{row['verdict']['summary']}", style="not bold"),
            Text(row["plan"]["action"], style="bold").append(
                f"\n{changes or row['plan']['reason']}\n{row['launches']} launch(es)", style="not bold"
            ),
            Text(outcome, style=_COLOURS.get(row["outcome"], "")),
        )
    console.print(table)


def print_explanation(explanation: dict[str, Any], language: str = "en") -> None:
    console = _console()
    words = chinese.LABELS if language == "zh" else {}
    confidence = words.get(explanation["confidence"], explanation["confidence"])
    title = Text(explanation["kind"], style="bold").append(f"  ({confidence})", style="not bold")
    if explanation["phase"]:
        title.append(f"  {words.get('phase', 'phase')}: {explanation['phase']}", style="not bold")
    console.print(title)
    console.print(Text(explanation["summary"]))
    for item in explanation["evidence"]:
        console.print(Text(f"  {_place(item)}  ", style="cyan").append(item["text"].strip(), style="default"))
    for sentence in explanation["ruled_out"]:
        console.print(Text(f"  {sentence}", style="dim"))
    plan = explanation["plan"]
    console.print(Text(plan["action"], style="bold").append(f": {plan['reason']}", style="not bold"))
    for change in plan["changes"]:
        console.print(Text(f"  {change_text(change)}  ({change['why']})"))
    if plan["changes"] and plan["command"]:
        console.print(Text(f"  {words.get('next command', 'next command')}: {plan['command']}"))


def _place(item: dict[str, Any]) -> str:
    """`vllm-log:41`; in a log too large to count its lines, the byte: `tail -c +N` shows it."""
    source = f"{item['source']} ({item['file']})" if item["file"] else str(item["source"])
    if item["line"]:
        return f"{source}:{item['line']}"
    return f"{source} from byte {item['offset'] + 1}" if item["offset"] is not None else source


def print_explanations(rows: list[dict[str, Any]]) -> None:
    """A folder of logs: one row each."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("log", "kind", "confidence", "phase", "what happened", "action"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "kind")
    for row in rows:
        changes = "; ".join(change_text(change) for change in row["plan"]["changes"])
        table.add_row(
            Text(row["file"]),
            Text(row["kind"], style="red" if row["oom"] else ""),
            row["confidence"],
            row["phase"] or "",
            Text(row["summary"]),
            Text(changes or row["plan"]["action"]),
        )
    _console().print(table)


def print_signatures(signatures: Sequence[Signature]) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "kind", "phase", "versions", "example"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("name", "kind"))
    for row in signatures:
        table.add_row(row.name, row.kind, row.phase or "", row.versions, Text(row.examples[0]))
    _console().print(table)


def signatures_markdown(signatures: Sequence[Signature]) -> str:
    """The table of docs/signatures.md."""
    lines = ["| name | kind | phase | vLLM | says, for example | numbers | source |", "|---|---|---|---|---|---|---|"]
    for row in signatures:
        cells = (row.name, row.kind, row.phase or "", row.versions, row.examples[0], ", ".join(row.numbers), row.source)
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines)


#: The parts of a device's memory, with what they are called, and their colour and cell in the bar.
_PARTS = (
    ("others", "taken by others", "grey50", "░"),
    ("weights", "weights", "blue", "█"),
    ("non_torch", "CUDA, NCCL", "magenta", "▓"),
    ("activations", "activations", "yellow", "▒"),
    ("graphs", "CUDA graphs", "cyan", "▚"),
    ("kv_cache", "KV cache", "green", "▆"),
    ("free", "free", "default", "·"),
)
_BAR_CELLS = 64


def print_forecast(forecast: dict[str, Any]) -> None:
    """`plan` for people: a bar of the device's memory, what fits, and what would be changed."""
    console = _console()
    memory = forecast["memory"]
    title = "it fits" if forecast["fits"] else f"it does not fit: {forecast['problem']}"
    console.print(Text(title, style="bold green" if forecast["fits"] else "bold red"))
    bar, legend = Text(), []
    for name, words, colour, cell in _PARTS:
        bar.append(cell * round(_BAR_CELLS * memory[name] / memory["total"]), style=colour)
        if memory[name]:
            legend.append((f"{cell * 2} {words}", gib(memory[name])))
    console.print(bar)
    console.print(_pairs([*legend, ("   the device", gib(memory["total"]))]))
    if forecast["kv_tokens"]:
        console.print(
            f"KV cache for {forecast['kv_tokens']:,} tokens: the longest request has "
            f"{forecast['longest_max_model_len']:,}, {forecast['concurrency']:g} of the length asked for run at once"
        )
    plan = forecast["plan"]
    if plan["action"] != "none":
        console.print(Text(plan["action"], style="bold").append(f": {plan['reason']}", style="not bold"))
    for change in plan["changes"]:
        console.print(Text(f"  {change_text(change)}  ({change['why']})"))
    if plan["changes"]:
        console.print(Text(f"  next command: {plan['command']}"), soft_wrap=True)


def print_findings(findings: list[tuple[str, str]]) -> None:
    """(level, text) each; the level is a word, so that it is readable without colours."""
    console = _console()
    colours = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "red"}
    for level, text in findings:
        console.print(Text(f"{level:<8}", style=colours.get(level, "")).append(text, style="default"), soft_wrap=True)


def change_text(change: dict[str, Any]) -> str:
    """`--max-model-len 131072 → 104000`"""
    before = "(default)" if change["from"] is None else change["from"]
    after = "(removed)" if change["to"] is None else change["to"]
    return f"{change['flag']} {before} → {after}"


def _pairs(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(f"  {name}", Text(text))
    return table


def _short_time(text: str) -> str:
    return text[:19].replace("T", " ")
