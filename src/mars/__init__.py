"""MARS: variance-reduced optimizers for training large models, drop-in for torch.optim."""

from importlib.metadata import PackageNotFoundError, version

from mars import schedules
from mars.diagnostics import diagnose
from mars.explain import explain
from mars.groups import param_groups
from mars.optimizer import MARS
from mars.schedules import GammaScheduler

try:
    __version__ = version("mars-optim")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+unknown"

__all__ = ["MARS", "GammaScheduler", "diagnose", "explain", "param_groups", "schedules"]
