"""A stand-in for vLLM 0.32 on a GPU: its processes, messages, exit codes and memory equation, without its weight."""
