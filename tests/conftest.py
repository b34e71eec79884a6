"""Hypothesis on machines of any speed: slow examples are no failures, and every run tries the same ones.

``--hypothesis-profile=thorough`` tries more, and others each time.
"""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("quick", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("quick"), derandomize=False, max_examples=1000)
settings.load_profile("quick")

torch.set_num_threads(1)
