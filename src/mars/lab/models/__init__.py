"""Models, their loss, and what they cost."""

from mars.lab.models.flops import flops_per_token, peak_flops
from mars.lab.models.gpt import GPT
from mars.lab.models.loss import linear_cross_entropy

__all__ = ["GPT", "flops_per_token", "linear_cross_entropy", "peak_flops"]
