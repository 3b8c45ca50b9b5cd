"""`python -m vllm.entrypoints.openai.api_server --model DIR`, with this folder's `site` in PYTHONPATH."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[5]))

from standin.server import main

sys.exit(main())
