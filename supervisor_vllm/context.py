"""What the steps of one program's recovery share. Plain data: `recovery` decides, the other modules act."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from datetime import datetime

from .classify.pattern import Signature
from .classify.signatures import SIGNATURES
from .config_file import Config, ProgramConfig
from .control import Supervisord
from .evidence.life import Life
from .evidence.roots import ROOTS, Roots
from .evidence.vllm_log import LogPosition
from .inbox import Inbox
from .incident import ProcessRef
from .journal import Journal, State
from .settings import Settings
from .supervisord_conf import ProgramSection


@dataclass
class Context:
    """One program's. `life` is None while no process of it is known to run."""

    config: Config
    program: ProgramConfig
    section: ProgramSection
    journal: Journal
    server: Supervisord
    inbox: Inbox
    roots: Roots = ROOTS
    signatures: tuple[Signature, ...] = SIGNATURES
    started_time: float = field(default_factory=time.time)
    life: Life | None = None
    pidfd: int | None = None
    #: the launch that is under way and has no process yet
    launch_id: int | None = None
    #: where the next life's log begins
    log_marks: tuple[LogPosition, ...] = ()
    #: processes of a life that another one has taken the place of unseen (supervisord was killed: they live on)
    leftovers: tuple[ProcessRef, ...] = ()
    #: a start of ours whose STARTING event is still to come
    own_start: bool = False
    #: supervisord's number of the event of the program's last end, until its output has been waited for
    end_serial: int | None = None

    @property
    def name(self) -> str:
        return self.program.program

    @property
    def full_name(self) -> str:
        """group:process, as supervisord's XML-RPC wants it."""
        return self.section.full_names[0]

    @property
    def settings(self) -> Settings:
        return self.program.settings


class Stopping(Exception):
    """The listener is going: the state stays in the journal as it stands."""


def enter(context: Context, state: State, reason: str, *, incident_id: int | None = None) -> State:
    """Write down the step that is about to be taken, and say it in the listener's log (stderr)."""
    context.journal.enter(context.name, state, reason, incident_id=incident_id)
    say(context.name, f"{state}: {reason}")
    return state


def say(program: str, text: str) -> None:
    """A line in the listener's own log. stdout belongs to supervisord's event protocol."""
    when = datetime.now().astimezone().isoformat(timespec="milliseconds")
    print(f"{when} {program}: {text}", file=sys.stderr, flush=True)
