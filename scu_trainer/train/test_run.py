"""A rehearsal: a few steps of everything on the real settings, then what the full run would take."""

from __future__ import annotations
