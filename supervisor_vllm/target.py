"""What must answer after a launch: read from the launch command and the program's environment."""

from __future__ import annotations

import os
import socket
from string import Template

from supervisor.datatypes import dict_of_key_value_pairs

from .evidence.model_config import launched_shape
from .health import Target
from .policy.launch_command import parse_launch
from .policy.model_shape import ModelShape
from .settings import Settings
from .supervisord_conf import ProgramSection, expanded


def health_target(section: ProgramSection, command: str, settings: Settings) -> Target:
    launched = parse_launch(command)
    environment = {**program_environment(section), **launched.environment}
    key = launched.api_key or environment.get("VLLM_API_KEY")
    if not key and settings.api_key_env:
        key = os.environ.get(settings.api_key_env)
    host = launched.host or ""
    directory = section.options.get("directory")
    return Target(
        host="127.0.0.1" if host in ("", "0.0.0.0", "::", "localhost") else host,
        port=launched.port,
        uds=os.path.join(directory or "/", launched.uds) if launched.uds else None,
        tls=launched.get("--ssl-keyfile") is not None,
        root_path=launched.root_path or "",
        api_key=key or None,
        model=launched.model,
        directory=directory,
        served_names=launched.served_model_names,
        max_model_len=launched.max_model_len,
        prompt=settings.health_prompt,
        max_tokens=settings.health_max_tokens,
        timeout_sec=settings.health_timeout_sec,
    )


def listens(target: Target) -> bool:
    """Does somebody accept connections? vLLM binds its port before it loads and listens only once it can serve."""
    try:
        if target.uds:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(1.0)
                connection.connect(target.uds)
        else:
            socket.create_connection((target.host, target.port), timeout=1.0).close()
    except OSError:
        return False
    return True


def effective_environment(section: ProgramSection, command: str) -> dict[str, str]:
    """What the program finds around it: supervisord's own environment (ours too: we are its child), the section's, and
    what the command sets. Expansions that aren't known here stay as they stand."""
    environment = {**os.environ, **program_environment(section)}
    launched = parse_launch(command)
    for name, raw in launched.environment.items():
        value = expanded(raw, **_known(section))
        environment[name] = Template(value).safe_substitute(environment) if launched.shell else value
    return environment


def shape_of(section: ProgramSection, command: str) -> ModelShape | None:
    """Of the model that the command launches, where it is on this machine."""
    directory = section.options.get("directory") or "/"
    return launched_shape(parse_launch(command), effective_environment(section, command), directory)


def program_environment(section: ProgramSection) -> dict[str, str]:
    """The section's own environment=, expanded before it is split, as supervisord does; empty where it can't be
    read."""
    text = section.options.get("environment", "")
    try:
        return dict(dict_of_key_value_pairs(expanded(text, **_known(section))))
    except ValueError:
        return {}


def _known(section: ProgramSection) -> dict[str, object]:
    """What supervisord puts in for the section's first process."""
    first = section.options.get("numprocs_start", "").strip()
    number = int(first) if first.isdigit() else 0
    return {"program_name": section.name, "group_name": section.group_name, "process_num": number}
