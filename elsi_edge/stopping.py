"""A clean stop for long loops."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def stop_requests(said: Callable[[], None] | None = None) -> Iterator[threading.Event]:
    """Set an event on the first SIGINT or SIGTERM, so that the step is finished; a second one interrupts at once.

    `said` is called at the first, to tell the user that it was heard.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return

    def request(number: int, frame: Any) -> None:
        if event.is_set():
            raise KeyboardInterrupt
        event.set()
        if said is not None:
            said()

    before = {number: signal.signal(number, request) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
