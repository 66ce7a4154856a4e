"""Peak memory is this program's, not its parent's."""

import subprocess
import sys

import numpy as np

from elsi_edge.runtime.memory import peak_resident_bytes


def test_a_child_does_not_inherit_the_peak_of_its_parent() -> None:
    held = np.ones(40_000_000)  # 320 MB, resident
    code = "from elsi_edge.runtime.memory import peak_resident_bytes as peak; print(peak())"
    child = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
    assert peak_resident_bytes() > held.nbytes > child > 5_000_000
