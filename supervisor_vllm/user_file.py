"""The user's own file, looked at once a tick: gone, edited, or of another thing than what was learned."""

from __future__ import annotations

from . import launch, override, remembered
from .context import Context, say
from .errors import UserError


def follow_user_file(context: Context) -> str | None:
    """Once a tick: the override must not outlive the user's section (supervisord would not start any more), and a hand
    edit of the user's command must not be hidden by it. Returns a sentence when the program's section is gone."""
    path = context.program.override_path
    before = override.read_text(path)
    try:
        section = launch.user_section(context)
        launch.adopt_hand_edits(context)
    except UserError as why:
        if before is None:
            return None
        override.remove_file(path)
        say(context.name, f"override removed: {why}")
        return f"its section is gone from the configuration ({why}); the override was removed"
    if before is None:
        return None
    changes = remembered.changes_for_another(context, section)
    if changes is None:
        if not override.has_base(before) or override.is_built_from(before, section.command):
            return None
        changes = launch.learned_changes(context, section.command)
        context.journal.replace_learned(context.name, changes, incident_id=None)
    text = override.render_override(section, changes)
    if text != before:
        override.write_file(path, text, like=section.file)
        say(context.name, "the override was rebuilt from the user's command; `supervisorctl update` applies it")
    return None
