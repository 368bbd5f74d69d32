"""The paper, as pure functions on tensors: no groups, devices, ranks or in-place writes.

Letters are the paper's: ``x`` parameter, ``g`` gradient, ``h`` last gradient, ``c`` corrected
gradient, ``m`` and ``v`` first and second moment, ``u`` direction, ``t`` step. `update` is one
whole step of one tensor; every engine is tested against it.
"""

from mars.rule.update import KINDS, MATRIX, Hyper, Kind, matrix_shape, update

__all__ = ["KINDS", "MATRIX", "Hyper", "Kind", "matrix_shape", "update"]
