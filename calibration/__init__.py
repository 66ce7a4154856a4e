"""Hidden states to statistics to a choice of taps."""

from elsi_edge.calibration.pipeline import analyse, calibrate
from elsi_edge.calibration.settings import CalibrationSettings

__all__ = ["CalibrationSettings", "analyse", "calibrate"]
