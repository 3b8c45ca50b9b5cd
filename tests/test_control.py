"""XML-RPC with a real supervisord, on a unix socket and on inet with a password."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from world import Supervisord, wait_until

from supervisor_vllm import control


def test_start_stop_and_state_on_inet_with_a_password(make_supervisord: Callable[..., Supervisord]) -> None:
    supervisord = make_supervisord(http="inet", password="s3cret")
    supervisord.write_program("v", "sleep 100", autostart="false", startsecs=0)
    supervisord.start()
    server = control.connect(supervisord.server_url, "test", "s3cret")
    control.start(server, "v:v")
    control.start(server, "v:v")  # started already: no error
    info = control.process_info(server, "v:v")
    assert info and info.state == "RUNNING" and info.pid > 0
    control.stop(server, "v:v")
    wait_until(lambda: control.running(server, "v", ("v:v",)) == (), 10, "v to stop")
    control.stop(server, "v:v")  # stopped already: no error
    assert control.process_info(server, "nobody") is None
    with pytest.raises(control.ControlError, match="wants a password"):
        control.poke(control.connect(supervisord.server_url, None, None))


def test_a_changed_command_is_taken_over_and_an_unchanged_one_is_left(supervisord: Supervisord) -> None:
    supervisord.write_program("v", "sleep 100", autostart="false")
    supervisord.start()
    server = control.connect(supervisord.server_url, None, None)
    assert control.apply_config(server, "v") == control.Applied(False)
    supervisord.write_program("v", "sleep 200", autostart="false")
    assert control.apply_config(server, "v") == control.Applied(True)
    assert control.configured_command(server, "v:v") == "sleep 200"


def test_a_broken_file_is_said_and_changes_nothing(supervisord: Supervisord) -> None:
    supervisord.write_program("v", "sleep 100", autostart="false")
    supervisord.start()
    server = control.connect(supervisord.server_url, None, None)
    supervisord.write("x.conf", "[program:x]\nautostart=false\n")
    applied = control.apply_config(server, "v")
    assert not applied.changed and "can't read its configuration" in (applied.problem or "")
    assert control.configured_command(server, "v:v") == "sleep 100"


def test_no_supervisord_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(control.ControlError, match="can't be reached"):
        control.poke(control.connect(f"unix://{tmp_path}/none.sock", None, None))
