"""One training over several processes: `accelerate launch` splits every batch, gradients are summed."""

import os
from typing import Any, Protocol

import torch
from torch import Tensor


class Processes(Protocol):
    """Who else works on the same training."""

    rank: int
    count: int
    device: torch.device  # this process's own, when none is asked for

    def sum_(self, tensor: Tensor) -> Tensor:
        """A tensor, in place, summed over all processes."""
        ...

    def from_first(self, value: Any) -> Any:
        """The first process's value, on all of them."""
        ...

    def wait(self) -> None:
        """Until all have come here."""
        ...


class Alone:
    """A single process."""

    rank = 0
    count = 1

    def __init__(self) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def sum_(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def from_first(self, value: Any) -> Any:
        """The value itself."""
        return value

    def wait(self) -> None:
        """Nobody to wait for."""


class Launched:
    """Processes that `accelerate launch` started."""

    def __init__(self) -> None:
        from accelerate import PartialState

        self._state = PartialState(cpu=not torch.cuda.is_available())
        self.device: torch.device = self._state.device
        self.rank: int = self._state.process_index
        self.count: int = self._state.num_processes

    def sum_(self, tensor: Tensor) -> Tensor:
        """A tensor, in place, summed over all processes."""
        from torch import distributed

        distributed.all_reduce(tensor)
        return tensor

    def from_first(self, value: Any) -> Any:
        """The first process's value, on all of them."""
        from accelerate.utils import broadcast_object_list

        box = [value]
        broadcast_object_list(box)
        return box[0]

    def wait(self) -> None:
        """Until all have come here."""
        self._state.wait_for_everyone()


def processes() -> Processes:
    """The processes of this run: alone, or those that `accelerate launch` started."""
    return Launched() if int(os.environ.get("WORLD_SIZE", "1")) > 1 else Alone()
