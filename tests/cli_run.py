"""What a run of the command line gave, and how bad input must look."""

import json
from collections.abc import Callable
from typing import Any


class Done:
    """What a run gave."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def json(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self.out.splitlines()[-1])
        return value


Run = Callable[..., Done]


def one_line(done: Done, code: int, *parts: str) -> None:
    """Exactly one line on stderr that holds all of `parts`, and nothing on stdout."""
    assert (done.code, done.out) == (code, ""), done.err
    assert done.err.count("\n") == 1 and done.err.startswith("error: "), done.err
    for part in parts:
        assert part in done.err
