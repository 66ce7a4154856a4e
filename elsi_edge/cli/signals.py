"""How a command ends when it is told to: through its `finally` blocks, so that nothing half-made stays."""

import _thread
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

_AGAIN_S = 0.05  # seconds
_ENDING = ("SIGTERM", "SIGHUP")  # the second is not there on every system


@contextlib.contextmanager
def orderly_end() -> Iterator[list[int]]:
    """SIGTERM and SIGHUP become SystemExit with 128 + their number; gives a list in which each Ctrl-C is noted.

    A handler that somebody else has set stays, as under nohup.
    """
    interrupts: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return

    def unraisable(lost: "sys.UnraisableHookArgs") -> None:
        # An interrupt that falls into a finaliser is dropped by the interpreter: it comes again a moment later.
        if isinstance(lost.exc_value, KeyboardInterrupt):
            again = threading.Timer(_AGAIN_S, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            hook(lost)

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    def interrupt(number: int, frame: FrameType | None) -> None:
        interrupts.append(number)
        raise KeyboardInterrupt

    handlers = {signal.SIGINT: interrupt, **{getattr(signal, n): end for n in _ENDING if hasattr(signal, n)}}
    before = {number: signal.getsignal(number) for number in handlers}
    ours = [number for number, call in before.items() if call in (signal.SIG_DFL, signal.default_int_handler)]
    for number in ours:
        signal.signal(number, handlers[number])
    hook, sys.unraisablehook = sys.unraisablehook, unraisable
    try:
        yield interrupts
    finally:
        sys.unraisablehook = hook
        for number in ours:
            signal.signal(number, before[number])
