"""Measures a live deployment: what `p2pshard bench` runs."""

from p2pshard.bench.figures import Figures, Round, Timeline
from p2pshard.bench.live import Measured, measure

__all__ = ["Figures", "Measured", "Round", "Timeline", "measure"]
