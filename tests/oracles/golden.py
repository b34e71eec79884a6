"""Golden numbers, worked out on paper: F = B = W = 1 second a rank, transfers free."""

from __future__ import annotations

MAKESPANS = {
    ("gpipe", 4, 8): 33.0,
    ("1f1b", 4, 8): 33.0,
    ("1f1b", 4, 16): 57.0,
    ("1f1b", 8, 16): 69.0,
    ("1f1b", 8, 32): 117.0,
}
"""By schedule, ranks and microbatches, in seconds."""

PEAKS = {("gpipe", 4, 8): 8, ("1f1b", 4, 8): 4}
"""Activations held on the worst rank until their whole backward is done."""
