"""Incident → Verdict. Pure; the signatures are one table."""
