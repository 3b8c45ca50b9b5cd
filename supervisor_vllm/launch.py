"""What the next launch runs: the user's command, the learned changes on it, and the override that carries them."""

from __future__ import annotations

import time

from . import control, override
from .context import Context, say
from .control import ControlError
from .errors import UserError
from .incident import Change
from .policy import limit
from .policy.learned import changes_between
from .supervisord_conf import ProgramSection, program, read_conf


def user_section(context: Context) -> ProgramSection:
    """The program as the user's own files say it, read afresh. Raises UserError where they no longer hold it."""
    conf = read_conf(context.config.supervisord_conf, skip=(context.program.override_path,))
    return program(conf, context.name)


def learned_changes(context: Context, base_command: str) -> tuple[Change, ...]:
    """What was learned, without what the user has changed by hand since."""
    changes = tuple(row.change for row in context.journal.learned(context.name))
    return override.still_valid(base_command, changes)


def adopt_hand_edits(context: Context) -> None:
    """People edit the override, or delete it: what it says now is what was learned. Not where it was built from a
    command that the user has edited since: then it is rebuilt (`follow_user_file`)."""
    section = user_section(context)
    learned = learned_changes(context, section.command)
    text = override.read_text(context.program.override_path)
    command = override.read_command(text) if text else None
    if text and command is not None and not override.is_built_from(text, section.command):
        return
    now = changes_between(section.command, command, learned) if command is not None else ()
    if set(now) != set(learned):
        context.journal.replace_learned(context.name, now, incident_id=None)
        say(context.name, "the override was edited by hand: what it says counts from now on")


def current_command(context: Context) -> str:
    """The raw command of the next launch, as it stands in the files (supervisord's expansions not expanded)."""
    base = user_section(context).command
    return override.apply_changes(base, learned_changes(context, base))


def launches_left(context: Context) -> int | None:
    """What the limit still allows; None: there is none."""
    return limit.launches_left(
        context.journal.own_launch_times(context.name),
        last_healthy_time=context.journal.last_healthy_time(context.name),
        now=time.time(),
        settings=context.settings,
    )


def apply_override(context: Context, *, changed: bool) -> str | None:
    """Write the override and let supervisord take it, both in this moment and only when something changes.

    `changed`: the plan changes something; then it is applied even if the file says so already (a listener that was
    killed between writing and applying). Returns the reason when it can't be applied; then the file is as before.
    """
    try:
        section = user_section(context)
    except UserError as why:
        return str(why)
    context.section = section
    path = context.program.override_path
    before = override.read_text(path)
    text = _render(context, section)
    if text == before and not changed:
        return None
    neighbours = control.running(context.server, section.group_name, section.neighbours)
    if neighbours:
        return (
            f"the change can't be applied without stopping {', '.join(neighbours)} in the group {section.group_name}; "
            f"when they may stop, run: supervisorctl update {section.group_name}"
        )
    override.write_file(path, text, like=section.file)
    try:
        applied = control.apply_config(context.server, section.group_name)
    except ControlError as why:
        _put_back(context, before)
        return f"supervisord doesn't take the override: {why}"
    if applied.problem:
        _put_back(context, before)
        return applied.problem
    return None


def _put_back(context: Context, before: str | None) -> None:
    path = context.program.override_path
    if before is None:
        override.remove_file(path)
    else:
        override.write_file(path, before, like=context.section.file)


def _render(context: Context, section: ProgramSection) -> str:
    changes = learned_changes(context, section.command)
    return override.render_override(section, changes)
