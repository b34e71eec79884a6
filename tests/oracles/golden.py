"""Golden numbers, worked out on paper: F = B = W = 1 second a rank, transfers free."""

from __future__ import annotations

MAKESPANS = {
    ("gpipe", 1, 4, 8): 33.0,
    ("1f1b", 1, 4, 8): 33.0,
    ("1f1b", 1, 4, 16): 57.0,
    ("1f1b", 1, 8, 16): 69.0,
    ("1f1b", 1, 8, 32): 117.0,
    ("interleaved", 2, 4, 8): 28.5,
    ("interleaved", 2, 4, 16): 52.5,
    ("interleaved", 2, 8, 32): 106.5,
    ("interleaved", 4, 4, 8): 26.25,
    ("zb-v", 2, 4, 8): 25.5,
    ("zb-v", 2, 4, 16): 49.5,
    ("zb-v", 2, 8, 32): 99.5,
}
"""By schedule, stages on each rank, ranks and microbatches, in seconds."""

PEAKS = {
    ("gpipe", 1, 4, 8): 8.0,
    ("1f1b", 1, 4, 8): 4.0,
    ("interleaved", 2, 4, 8): 5.5,
    ("interleaved", 4, 4, 8): 4.75,
    ("zb-v", 2, 4, 8): 4.0,
}
"""Held on the worst rank until the whole backward is done, in microbatches of a whole rank."""
