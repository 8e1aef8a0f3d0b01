"""Coefficients of the planner's time model, fitted to measured steps.

Start at :func:`osdp.cluster.calibration.calibrate.calibrate`.

- ``calibrate``: the coefficients that fit best
- ``measured_step``: measured steps as rows of a CSV file
- ``step_model``: seconds that the model gives to these steps
"""
