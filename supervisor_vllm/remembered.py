"""What was learned is kept with what it was learned of, and comes back when the same thing is launched again.

Another model, vLLM, device or deciding flag doesn't get it: it starts with the user's own arguments, or with what was
learned of *it* before (or imported, as a hint).
"""

from __future__ import annotations

import hashlib
import os
import shlex
import time

from . import launch, override
from .context import Context, say
from .evidence import processes
from .evidence.installed_vllm import installed_version
from .evidence.model_config import model_directory, weights_on_disk
from .incident import Change
from .policy.fingerprint import Fingerprint, deciding_flags, difference
from .policy.launch_command import parse_launch
from .supervisord_conf import ProgramSection
from .target import effective_environment


def fingerprint_of(context: Context, section: ProgramSection) -> Fingerprint:
    parsed = parse_launch(section.command)
    environment = effective_environment(section, section.command)
    folder = model_directory(parsed, environment, section.options.get("directory") or "/")
    devices = context.life.devices if context.life else ()
    return Fingerprint(
        model=parsed.model or "",
        flags=deciding_flags(parsed),
        model_digest=_digest(os.path.join(folder, "config.json")) if folder else None,
        weights_bytes=weights_on_disk(folder) if folder else None,
        vllm_version=installed_version(parsed, environment),
        # a memory node's total may change while it runs (virtual machines)
        driver=next((gpu.driver for gpu in devices), ""),
        devices=tuple(f"{gpu.name} {gpu.total_bytes}" for gpu in devices if not gpu.uuid.startswith("node")),
    )


def _digest(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read(2**24)).hexdigest()[:16]
    except OSError:
        return None


def remember(context: Context) -> None:
    """It serves: what was learned holds for this very thing."""
    section = launch.user_section(context)
    if not _runs(context, section):
        return
    learned = launch.learned_changes(context, section.command)
    fingerprint = fingerprint_of(context, section)
    context.journal.set_learned_of(context.name, fingerprint)
    known = any(row.fingerprint == fingerprint for row in context.journal.remembered())
    if learned or known:
        context.journal.remember(fingerprint, learned, when=time.time())


def _runs(context: Context, section: ProgramSection) -> bool:
    """Is it what the file says now, and not what it said before somebody edited it?"""
    wanted = parse_launch(section.command)
    arguments = processes.command_line(context.life.leader) if context.life else ()
    running = parse_launch(shlex.join(arguments).replace("%", "%%"))
    return wanted.is_vllm and running.model == wanted.model and deciding_flags(running) == deciding_flags(wanted)


def changes_for_another(context: Context, section: ProgramSection) -> tuple[Change, ...] | None:
    """What is known of the thing that would be launched now, and noted as learned; None: it's the same as before."""
    before = context.journal.learned_of(context.name)
    rows = context.journal.remembered()
    if before is None and (not rows or context.life is not None):
        return None
    now = fingerprint_of(context, section)
    why = difference(before, now) if before else "not launched before"
    if why is None:
        return None
    found = next((row for row in rows if difference(row.fingerprint, now) is None), None)
    changes = override.still_valid(section.command, found.changes) if found else ()
    if before is None and not changes:
        return None
    context.journal.replace_learned(context.name, changes, incident_id=None)
    context.journal.set_learned_of(context.name, now)
    known = f"what was {found.origin} of it before counts" if found else "it starts with the user's own arguments"
    say(context.name, f"{why}: {known}")
    return changes
