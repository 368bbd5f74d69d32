"""`mars plan`: memory, traffic and time of a step on GPUs you do not have, from a stated model.

`docs/planning.md` has the equations and how far they were off where something was measured.
Names end in their unit: ``_bytes``, ``_seconds``, ``_flops``, ``_flops_per_second``.
"""
