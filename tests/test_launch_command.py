"""A launch command is found, read and changed where it stands, and nothing else in it is touched."""

from __future__ import annotations

import argparse
import shlex
import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from supervisor_vllm.policy.arguments import ALL, BARE, MANY
from supervisor_vllm.policy.launch_command import parse_launch, with_flag

LEN = "--max-model-len"
#: command → the same with --max-model-len at 2048
SPELLINGS = {
    "vllm serve M --max-model-len 4096 --port 8000": "vllm serve M --max-model-len 2048 --port 8000",
    "vllm serve M --max_model_len 4096": "vllm serve M --max_model_len 2048",
    "vllm serve M --max-model-len=4096": "vllm serve M --max-model-len=2048",
    "vllm serve M --max_model_len='4096'": "vllm serve M --max_model_len='2048'",
    'vllm serve M "--max-model-len=4096" -tp 2': 'vllm serve M "--max-model-len=2048" -tp 2',
    "vllm serve M --max-model-len '4096'": "vllm serve M --max-model-len '2048'",
    'vllm serve M --max-model-len 40"96" --port 1': "vllm serve M --max-model-len 2048 --port 1",
    "vllm serve M --max-model-len 1k --max-model-len 4k": "vllm serve M --max-model-len 1k --max-model-len 2048",
    "vllm serve M --max-model 4096": "vllm serve M --max-model 2048",
    "vllm serve M\n  --max-model-len\n  4096\n  --port 1": "vllm serve M\n  --max-model-len\n  2048\n  --port 1",
    "vllm serve M": "vllm serve M --max-model-len 2048",
    "vllm serve --enforce-eager M": "vllm serve --enforce-eager M --max-model-len 2048",
    "vllm serve M --served-model-name a b": "vllm serve M --served-model-name a b --max-model-len 2048",
    "vllm serve M --max-model-len %(ENV_LEN)s --host %%": "vllm serve M --max-model-len 2048 --host %%",
    "vllm serve M -- x": "vllm serve M --max-model-len 2048 -- x",
    "/opt/v/bin/vllm serve M --max-model-len 4096": "/opt/v/bin/vllm serve M --max-model-len 2048",
    "python -m vllm.entrypoints.openai.api_server --model M --max-model-len 4096": (
        "python -m vllm.entrypoints.openai.api_server --model M --max-model-len 2048"
    ),
    "/usr/bin/python3.11 -u -m vllm.entrypoints.cli.main serve M": (
        "/usr/bin/python3.11 -u -m vllm.entrypoints.cli.main serve M --max-model-len 2048"
    ),
    "env A=b C='d e' vllm serve M --max-model-len 4096": "env A=b C='d e' vllm serve M --max-model-len 2048",
    "/usr/bin/env -u Z X=Y vllm serve M": "/usr/bin/env -u Z X=Y vllm serve M --max-model-len 2048",
    "numactl -N 0 -m 0 taskset -c 0-3 nice -n 5 vllm serve M": (
        "numactl -N 0 -m 0 taskset -c 0-3 nice -n 5 vllm serve M --max-model-len 2048"
    ),
    "conda run -n vllm vllm serve M": "conda run -n vllm vllm serve M --max-model-len 2048",
    "uv run vllm serve M": "uv run vllm serve M --max-model-len 2048",
    "/bin/sh -c 'vllm serve M --max-model-len 4096'": "/bin/sh -c 'vllm serve M --max-model-len 2048'",
    'bash -lc "exec vllm serve M --port 1"': 'bash -lc "exec vllm serve M --port 1 --max-model-len 2048"',
    "bash -o pipefail -c 'cd /x && . v/bin/activate && exec vllm serve M --max-model-len 4096 2>&1 | tee f'": (
        "bash -o pipefail -c 'cd /x && . v/bin/activate && exec vllm serve M --max-model-len 2048 2>&1 | tee f'"
    ),
    "sh -c 'LEN=4096; vllm serve M --max-model-len $LEN > log; echo done'": (
        "sh -c 'LEN=4096; vllm serve M --max-model-len 2048 > log; echo done'"
    ),
    'sh -c "vllm serve M --max-model-len \\"4096\\" # why"': 'sh -c "vllm serve M --max-model-len \\"2048\\" # why"',
    "bash -c 'vllm serve M \"$@\"' x": "bash -c 'vllm serve M \"$@\" --max-model-len 2048' x",
    "sh -c 'exec env A=b vllm serve \"M x\" &'": "sh -c 'exec env A=b vllm serve \"M x\" --max-model-len 2048 &'",
}


@pytest.mark.parametrize("command", SPELLINGS)
def test_a_value_is_changed_where_it_stands(command: str) -> None:
    assert with_flag(command, LEN, "2048") == SPELLINGS[command]


@pytest.mark.parametrize("command", SPELLINGS)
def test_and_back(command: str) -> None:
    before = parse_launch(command).get(LEN)
    plain = before is None or (before.isalnum() and '40"96"' not in command)
    if plain:
        assert with_flag(with_flag(command, LEN, "2048"), LEN, before) == command


@pytest.mark.parametrize(
    "command",
    ["./start.sh --port 1", "vllm bench serve", "vllm chat", "vllm run-batch -i x", "echo vllm serve M", "sleep 5", "",
     "pgrep -f 'vllm serve'", "bash -c './vllm.sh'", "%(ENV_CMD)s", "python -m http.server",
     "sh -c 'echo vllm serve M'"],
)  # fmt: skip
def test_what_is_not_a_vllm_server(command: str) -> None:
    assert not parse_launch(command).is_vllm
    assert with_flag(command, LEN, "2048") == command


def test_bare_flags() -> None:
    assert with_flag("vllm serve M", "--enforce-eager", "true") == "vllm serve M --enforce-eager"
    assert with_flag("vllm serve M --enforce_eager -tp 2", "--enforce-eager", None) == "vllm serve M -tp 2"
    assert with_flag("vllm serve M --no-enforce-eager", "--enforce-eager", "true") == "vllm serve M --enforce-eager"
    assert parse_launch("vllm serve --no-enable-prefix-caching M").get("--enable-prefix-caching") == "false"


def test_what_others_ask_for() -> None:
    launch = parse_launch(
        "env VLLM_API_KEY=k vllm serve M --port 81 --host 0.0.0.0 --served-model-name a b -tp=2 --max-model-len 32K "
        "--api-key x y --uds /s --root-path /r"
    )
    assert (launch.model, launch.port, launch.host, launch.uds, launch.root_path) == ("M", 81, "0.0.0.0", "/s", "/r")
    assert launch.served_model_names == ("a", "b")
    assert launch.get("--tensor-parallel-size") == "2"
    assert launch.max_model_len == 32768
    assert launch.api_key == "x"
    assert launch.environment == {"VLLM_API_KEY": "k"}
    assert parse_launch("vllm serve M --max-model-len 32k").max_model_len == 32000
    assert parse_launch("vllm serve M --max-model-len auto").max_model_len is None
    assert parse_launch("vllm serve M").port == 8000


# -- against real shlex, a real shell and argparse ---------------------------------------------------------------------


def effective(arguments: list[str]) -> dict[str, object]:
    """What vLLM's own parser would make of them."""
    parser = argparse.ArgumentParser(allow_abbrev=True, add_help=False)
    parser.add_argument("model_tag", nargs="?")
    for name in sorted(ALL):
        if name in BARE:
            parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=None)
        else:
            parser.add_argument(f"--{name}", nargs="+" if name in MANY else None)
    return vars(parser.parse_args([dashed(word) for word in arguments]))


def dashed(word: str) -> str:
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


FLAGS = st.sampled_from(["max-model-len", "gpu-memory-utilization", "max-num-seqs", "port", "dtype", "seed"])
VALUES = st.sampled_from(["1", "4096", "0.9", "auto", "a b", "x'y", 'q"r'])


@st.composite
def arguments(draw: st.DrawFn) -> list[str]:
    words: list[str] = []
    for name in draw(st.lists(FLAGS, max_size=5)):
        spelled = name.replace("-", "_") if draw(st.booleans()) else name
        value = draw(VALUES)
        words += [f"--{spelled}={value}"] if draw(st.booleans()) else [f"--{spelled}", value]
        if draw(st.booleans()):
            words.append(draw(st.sampled_from(["--enforce-eager", "--trust-remote-code"])))
    return ["M", *words]


@settings(max_examples=150, deadline=None)
@given(arguments(), FLAGS, st.sampled_from(["7", "0.55", "2048"]), st.booleans())
def test_only_that_flag_differs(words: list[str], name: str, value: str, in_shell: bool) -> None:
    plain = shlex.join(["vllm", "serve", *words])
    command = shlex.join(["bash", "-c", f"exec {plain} 2>&1 | cat"]) if in_shell else plain
    changed = with_flag(command, f"--{name}", value)
    split = shlex.split(changed)
    if in_shell:
        assert split[:2] == ["bash", "-c"]
        assert split[2].endswith(" 2>&1 | cat")
        split = shlex.split(split[2].removeprefix("exec ").removesuffix(" 2>&1 | cat"))
    expected = effective(words) | {name.replace("-", "_"): value}
    assert effective(split[2:]) == expected
    before = parse_launch(command).get(f"--{name}")
    if before is None or before.replace(".", "").isalnum():
        assert with_flag(changed, f"--{name}", before) == command


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="vlmsere -='\"\\$&|;>#%()\nbash", max_size=60))
def test_nothing_makes_it_raise(text: str) -> None:
    for command in (text, f"vllm serve {text}", f"bash -c 'vllm serve {text}'"):
        parse_launch(command)
        with_flag(command, LEN, "2048")


def test_a_real_shell_agrees(tmp_path) -> None:
    """The changed script, run by a real shell with a `vllm` that prints its arguments."""
    vllm = tmp_path / "vllm"
    vllm.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    vllm.chmod(0o755)
    for command in [key for key in SPELLINGS if "-c " in key and "serve" in key and ("sh " in key or "bash" in key)]:
        changed = with_flag(command.replace("cd /x && . v/bin/activate && ", ""), LEN, "2048")
        done = subprocess.run(
            shlex.split(changed), capture_output=True, text=True, timeout=10, cwd=tmp_path,
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=False,
        )  # fmt: skip
        log = tmp_path / "log"
        seen = done.stdout + (log.read_text() if log.exists() else "")
        assert "2048" in seen.splitlines(), (changed, done)


def test_long_commands_take_linear_time() -> None:
    command = "vllm serve M " + "--lora-modules " + "a=/srv/x " * 20_000
    assert parse_launch(command).is_vllm
    assert with_flag(command, LEN, "5").rstrip().endswith("--max-model-len 5")
