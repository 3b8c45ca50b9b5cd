"""The settings: every row reads its own default back, and a mistake ends in one clear line."""

import pytest

from supervisor_vllm.errors import UserError
from supervisor_vllm.settings import TABLE, Settings, parse_settings


@pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.name)
def test_the_default_reads_back(setting):
    assert parse_settings({setting.name: setting.default_text}) == Settings()
    assert setting.help


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("restart_sec", "5min", 300.0),
        ("restart_sec", "250ms", 0.25),
        ("load_timeout_sec", "2h", 7200.0),
        ("pin", "max_model_len --max-num-seqs", ("--max-model-len", "--max-num-seqs")),
        ("allow", "cpu-offload, enforce_eager", ("cpu_offload", "enforce_eager")),
        ("prefer", "context", "context"),
        ("health_prompt", "100% ; # 你好", "100% ; # 你好"),
    ],
)
def test_values(name, text, value):
    assert getattr(parse_settings({name: text}), name) == value


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("restart_sec", "soon"),
        ("restart_sec", "-1"),
        ("restart_sec", "nan"),
        ("restart_sec", "inf"),
        ("start_limit_burst", "2.5"),
        ("gpu_memory_utilization_min", "0"),
        ("gpu_memory_utilization_max", "1.2"),
        ("prefer", "speed"),
        ("allow", "everything"),
        ("mode", "dry"),
        ("api_key_env", "sk-abc def"),
        ("health_prompt", " "),
    ],
)
def test_a_bad_value_is_one_clear_line(name, text):
    with pytest.raises(UserError) as raised:
        parse_settings({name: text}, where="supervisor-vllm.conf [supervisor-vllm:vllm]")
    line = str(raised.value)
    assert name in line
    assert "supervisor-vllm.conf" in line
    assert "\n" not in line


def test_a_wrong_name_gets_a_hint():
    with pytest.raises(UserError, match="did you mean restart_sec"):
        parse_settings({"restart_secs": "3"})


def test_floor_above_ceiling():
    with pytest.raises(UserError, match=r"gpu_memory_utilization_min 0\.9 is above"):
        parse_settings({"gpu_memory_utilization_min": "0.9", "gpu_memory_utilization_max": "0.8"})
