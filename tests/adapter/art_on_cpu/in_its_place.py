"""A pytest plugin: ART's own tests find our class where theirs was."""

from __future__ import annotations

from . import install

install()

import art.trainer_rank  # noqa: E402

from art_adapter.trainer import pipelined  # noqa: E402

art.trainer_rank.TrainerRank = pipelined(art.trainer_rank.TrainerRank)
