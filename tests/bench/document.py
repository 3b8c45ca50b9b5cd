"""What a bench has measured, into a document: between its mark and the next heading."""

from __future__ import annotations

from pathlib import Path


def write_made(document: Path, mark: str, made: str, *, section: str = "") -> None:
    """`section`: heading and introduction, written where the mark isn't there yet."""
    text = document.read_text()
    if mark not in text:
        text = f"{text.rstrip()}\n\n{section.strip()}\n\n{mark}"
    head, _, tail = text.partition(mark)
    rest = tail[tail.index("\n## ") :] if "\n## " in tail else ""
    document.write_text(f"{head}{mark}{made.rstrip()}\n{rest}")
