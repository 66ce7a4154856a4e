"""One calibration or training over several processes that `accelerate launch` started: what they tell each other."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from torch import Tensor


class Processes(Protocol):
    """Who else works on the same."""

    rank: int
    count: int
    device: str  # torch's name of this process's own

    def sums(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Every array summed over all processes."""
        ...

    def sum_(self, tensor: "Tensor") -> "Tensor":
        """A tensor, in place, summed over all processes."""
        ...

    def gathered(self, value: Any) -> list[Any]:
        """The value of every process, by rank."""
        ...

    def from_first(self, value: Any) -> Any:
        """The first process's value, on all of them."""
        ...

    def wait(self) -> None:
        """Until all have come here."""
        ...

    def end(self) -> None:
        """Part from the others; the last call. A process that leaves without it may be torn down as a crash."""
        ...


class Alone:
    """A single process."""

    rank = 0
    count = 1
    device = "cpu"

    def sums(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """The arrays themselves."""
        return dict(arrays)

    def sum_(self, tensor: "Tensor") -> "Tensor":
        """The tensor itself."""
        return tensor

    def gathered(self, value: Any) -> list[Any]:
        """The one value."""
        return [value]

    def from_first(self, value: Any) -> Any:
        """The value itself."""
        return value

    def wait(self) -> None:
        """Nobody to wait for."""

    def end(self) -> None:
        """Nothing to part from."""


class Launched:
    """Processes that `accelerate launch` started."""

    def __init__(self) -> None:
        import torch

        # Imported once a group exists, as torch._dynamo does, this module's default arguments keep that group and its
        # threads past `end`, and a thread that then frees a tensor while the interpreter closes aborts the process.
        import torch.distributed.nn.functional
        from accelerate import PartialState

        self._state = PartialState(cpu=not torch.cuda.is_available())
        self.device = str(self._state.device)
        self.rank: int = self._state.process_index
        self.count: int = self._state.num_processes

    def sums(self, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        """Every array summed over all processes; a copy."""
        import torch
        from torch import distributed

        found = {}
        for name in sorted(arrays):
            total = torch.from_numpy(np.array(arrays[name])).to(self._state.device)
            distributed.all_reduce(total)
            found[name] = total.cpu().numpy()
        return found

    def gathered(self, value: Any) -> list[Any]:
        """The value of every process, by rank."""
        from accelerate.utils import gather_object

        return list(gather_object([value]))

    def from_first(self, value: Any) -> Any:
        """The first process's value, on all of them."""
        from accelerate.utils import broadcast_object_list

        box = [value]
        broadcast_object_list(box)
        return box[0]

    def sum_(self, tensor: "Tensor") -> "Tensor":
        """A tensor, in place, summed over all processes."""
        from torch import distributed

        distributed.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Until all have come here."""
        self._state.wait_for_everyone()

    def end(self) -> None:
        """Take down the process group."""
        self._state.destroy_process_group()


def launched() -> bool:
    """Whether this process is one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def processes() -> Processes:
    """The processes of this run: alone, or those that `accelerate launch` started."""
    return Launched() if launched() else Alone()
