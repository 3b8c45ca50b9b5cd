"""What must answer after a launch: read from the launch command and the program's environment."""

from __future__ import annotations

import os
import socket

from supervisor.datatypes import dict_of_key_value_pairs

from .health import Target
from .policy.launch_command import parse_launch
from .settings import Settings
from .supervisord_conf import ProgramSection


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


def program_environment(section: ProgramSection) -> dict[str, str]:
    """The section's own environment= (raw); empty where it can't be read."""
    try:
        return dict(dict_of_key_value_pairs(section.options.get("environment", "")))
    except ValueError:
        return {}
