"""From tokens to an answer: where it ends, and which text may be shown already. Pure, no I/O.

Tokens are taken one by one, so an answer is the same however many a round brings.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from elsi_edge.runtime.result import FinishReason


class TokenStream(Protocol):
    """Incremental detokeniser: text of a token as far as its characters are complete."""

    def push(self, token_id: int) -> str:
        """Text that became complete with this token."""
        ...

    def finish(self) -> str:
        """What was held back."""
        ...


class Answer:
    """Ends at an end token (which gives no text), at a stop text, or at `limit` tokens, whichever comes first.

    Of several stop texts the one that starts earliest counts; of those that start together the longest. Text that may
    still turn into a stop text is held back.
    """

    def __init__(self, stream: TokenStream, *, eos_ids: Collection[int], stop: Sequence[str], limit: int) -> None:
        self._stream, self._eos, self._stop, self._limit = stream, eos_ids, tuple(stop), limit
        self.token_ids: list[int] = []
        self.text = ""  # shown so far
        self._held = ""  # complete characters that could be the start of a stop text
        self.finish_reason: FinishReason | None = None

    def push(self, token_id: int) -> str:
        """Take one token; the text that may be shown now. Tokens after the end are an error of the caller."""
        if self.finish_reason is not None:
            raise ValueError("the answer has ended")
        self.token_ids.append(token_id)
        if token_id in self._eos:
            return self._end("stop", self._stream.finish())
        shown = self._release(self._stream.push(token_id))
        if self.finish_reason is None and len(self.token_ids) >= self._limit:
            return shown + self._end("length", self._stream.finish())
        return shown

    def cancel(self) -> str:
        """End here because the user asked to."""
        return self._end("cancelled", self._stream.finish()) if self.finish_reason is None else ""

    def _release(self, text: str) -> str:
        """Show what can no longer be part of a stop text; end at a stop text."""
        if not self._stop:
            return self._show(text)
        self._held += text
        found = [(self._held.find(stop), -len(stop)) for stop in self._stop if stop in self._held]
        if found:
            place, _ = min(found)
            self.finish_reason = "stop"
            return self._show(self._held[:place])
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return self._show(shown)

    def _end(self, reason: FinishReason, tail: str) -> str:
        shown = self._release(tail)
        if self.finish_reason is None:
            self.finish_reason = reason
            shown += self._show(self._held)
        return shown

    def _show(self, text: str) -> str:
        self.text += text
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if stop.startswith(text[-size:]):
            return size
    return 0
