"""Verdict → Plan: the launch command, vLLM's memory arithmetic and the choice of the next arguments. Pure."""
