"""Incident → Verdict. Pure; the signatures are one table."""

from .verdict import classify

__all__ = ["classify"]
