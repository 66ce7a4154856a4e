"""In which order prompts are measured, and which run together.

All of it is planned once, so that a resumed run makes the same batches and the same sums.
"""

from collections.abc import Sequence

import numpy as np

from elsi_edge.calibration import stability
from elsi_edge.calibration.rendering import Rendered
from elsi_edge.calibration.settings import CalibrationSettings

STABLE_STEP = 32  # prompts between two looks at the pick, when it is to become stable


def stages_of(order: Sequence[int], settings: CalibrationSettings) -> list[list[int]]:
    """Prompts by stage: a quarter, a half and all of them; or STABLE_STEP at a time."""
    count = len(order)
    if settings.until_stable:
        ends = [*range(STABLE_STEP, count, STABLE_STEP), count]
    else:
        ends = sorted({count, *(count // part for part in (2, 4) if count // part >= stability.LEAST_PROMPTS)})
    return [list(order[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def batches_of(rendered: Rendered, settings: CalibrationSettings) -> list[list[int]]:
    """All batches of a pass on one process, in order; prompts by index."""
    stages = stages_of(order_of(rendered, settings), settings)
    return [batch for stage in stages for batch in planned(stage, rendered, settings)]


def order_of(rendered: Rendered, settings: CalibrationSettings) -> list[int]:
    """Prompts by index, in the seeded order in which they are measured."""
    order: list[int] = np.random.default_rng([settings.seed, 0]).permutation(len(rendered.ids)).tolist()
    return order


def planned(stage: Sequence[int], rendered: Rendered, settings: CalibrationSettings) -> list[list[int]]:
    """The batches of a stage, prompts by index."""
    from elsi_edge.calibration.capture import plan_batches

    batches = plan_batches([len(rendered.ids[i]) for i in stage], tokens=settings.batch_tokens)
    return [[stage[i] for i in batch] for batch in batches]
