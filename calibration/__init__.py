"""Hidden states to statistics to a choice of taps."""

from elsi_edge.calibration.pipeline import CalibrationSettings, calibrate

__all__ = ["CalibrationSettings", "calibrate"]
