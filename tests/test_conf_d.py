"""The examples in conf.d/: what init and the override really write, and a real supervisord that runs them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from world import GIB, Gpus, Supervisord, free_port, run_cli, wait_until

from supervisor_vllm import config_file, override
from supervisor_vllm.incident import Change
from supervisor_vllm.supervisord_conf import program, read_conf

EXAMPLES = Path(__file__).resolve().parent.parent / "conf.d"
OVERRIDE = "zz-supervisor-vllm-vllm.conf"
CHANGE = Change("--max-model-len", "32768", "20480", "vLLM's own estimate of what fits is 20480")


def example(name: str) -> str:
    return (EXAMPLES / name).read_text()


def section_of(directory: Path) -> object:
    main_file = directory / "supervisord.conf"
    main_file.write_text(f"[supervisord]\n[include]\nfiles={EXAMPLES}/vllm.conf\n")
    return program(read_conf(main_file), "vllm")


def test_the_settings_file_is_what_init_writes() -> None:
    path = Path("/etc/supervisor/conf.d/supervisor-vllm.conf")
    text = config_file.edited(
        None,
        path,
        program="vllm",
        override_name=OVERRIDE,
        state_dir=Path("/var/lib/supervisor-vllm"),
        supervisord_conf=Path("/etc/supervisor/supervisord.conf"),
        settings={},
    )
    assert example("supervisor-vllm.conf") == text.replace(sys.executable, "/opt/supervisor-vllm/bin/python")


def test_the_override_is_what_a_change_writes(tmp_path: Path) -> None:
    text = override.render_override(section_of(tmp_path), (CHANGE,))
    assert example(OVERRIDE) == text.replace(str(EXAMPLES), "/etc/supervisor/conf.d")


def test_supervisord_runs_them(supervisord: Supervisord, gpus: Gpus, model_dir) -> None:
    gpus.provide(total_bytes=24 * GIB)
    model, port = model_dir(), free_port()
    state = supervisord.directory / "state"
    state.mkdir(mode=0o700)
    places = {
        "/srv/models/Qwen2.5-7B-Instruct": str(model),
        "--port 8000": f"--port {port}",
        "/var/log/supervisor": str(supervisord.log_dir),
        "/opt/supervisor-vllm/bin/python": sys.executable,
        "/etc/supervisor/conf.d": str(supervisord.conf_dir),
        "/etc/supervisor/supervisord.conf": str(supervisord.conf_file),
        "/var/lib/supervisor-vllm": str(state),
    }
    for file in EXAMPLES.iterdir():
        text = file.read_text()
        for place, here in places.items():
            text = text.replace(place, here)
        supervisord.write(file.name, text)
    # the digest in the override's header is of the user's command, which has other paths here
    section = program(read_conf(supervisord.conf_file, skip=(supervisord.conf_dir / OVERRIDE,)), "vllm")
    supervisord.write(OVERRIDE, override.render_override(section, (CHANGE,)))
    supervisord.start()

    def healthy() -> bool:
        done = run_cli("status", "vllm", "--conf-dir", str(supervisord.conf_dir), environment=supervisord.environment)
        return done.returncode == 0 and bool(re.search(r"HEALTHY", done.stdout))

    wait_until(healthy, 40, "the example to be HEALTHY", step_sec=0.5)
    assert "--max-model-len 20480" in " ".join(Path(f"/proc/{supervisord.pid('vllm')}/cmdline").read_text().split("\0"))
