"""Studies: a question, a prediction, runs that are worth their time, and a verdict."""

from mars.lab.study.definition import Arm, Claim, Comparison, Study

__all__ = ["Arm", "Claim", "Comparison", "Study"]
