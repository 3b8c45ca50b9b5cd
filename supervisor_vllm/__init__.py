"""supervisor-vllm keeps vLLM alive under supervisord.

The way of the data, one direction (a folder or a module each):

    event → Incident → Verdict → Plan → override file → restart → verification
    listener  evidence   classify  policy   override      control    health
              └────────── journal: every step, before it is taken ──────────┘

`recovery` is the one place that calls all the others.
"""

__version__ = "0.1.0"
