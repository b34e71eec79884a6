"""Hypothesis on machines of any speed: slow examples are no failures; ``--hypothesis-profile=thorough`` tries more."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("quick", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", parent=settings.get_profile("quick"), max_examples=1000)
settings.load_profile("quick")

torch.set_num_threads(1)
