"""After a change of the signatures: writes tests/corpus/signatures.json and the table of docs/signatures.md anew.

python tests/bench/pin_signatures.py        then look at `git diff`: each changed line is a changed verdict
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from test_classify_mutation import verdicts_on  # noqa: E402

from supervisor_vllm.classify.signatures import SIGNATURES  # noqa: E402
from supervisor_vllm.report import signatures_markdown  # noqa: E402


def main() -> None:
    pins = {row.name: verdicts_on(row.name, SIGNATURES) for row in SIGNATURES}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(pins[name], ensure_ascii=False)}" for name in pins)
    (ROOT / "tests/corpus/signatures.json").write_text(f"{{\n{lines}\n}}\n")
    document = ROOT / "docs/signatures.md"
    prose = document.read_text().split("| name |", 1)[0]
    document.write_text(prose + signatures_markdown(SIGNATURES).rstrip() + "\n")


if __name__ == "__main__":
    main()
