"""Stop strings over a text that arrives in pieces, whatever the borders of tokens.

Each stop string is followed by its own automaton (Knuth, Morris and Pratt): its state is how many of its characters the
text ends with. The longest state of all is what must be held back, because it may yet become a stop string.

    stop "END"    pieces  "the E" | "N"  | "D of"
                  given   "the "  | ""   | "", stopped      (held: "E", then "EN")
"""

from collections.abc import Sequence


class StopStrings:
    """Lets text through up to the first stop string to be completed; the result is the same for any cut into pieces."""

    __slots__ = ("_held", "_states", "_steps", "stopped")

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops` are non-empty; none at all lets everything through."""
        self._steps = [(stop, _fallbacks(stop)) for stop in stops]
        self._states = [0] * len(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """The text that can be given out now; after a stop string is complete (`stopped`), nothing more."""
        if not self._steps:
            return text
        if self.stopped:
            return ""
        held = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = self._advance(character)
            if complete:
                self.stopped = True
                self._held = ""
                return held[: end - complete]
        keep = max(self._states)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """What was held back, once it is known that nothing follows."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> int:
        """Move every automaton one character on; the length of the longest stop string that is now complete, or 0."""
        complete, states = 0, self._states
        for i, (stop, fallbacks) in enumerate(self._steps):
            state = states[i]
            while state and stop[state] != character:
                state = fallbacks[state]
            if stop[state] == character:
                state += 1
            if state == len(stop):
                complete = max(complete, state)
                state = 0
            states[i] = state
        return complete


def _fallbacks(stop: str) -> list[int]:
    """For each number of matched characters, how many still match after the next one does not."""
    table = [0] * len(stop)
    state = 0
    for i in range(1, len(stop)):
        table[i] = state
        while state and stop[state] != stop[i]:
            state = table[state]
        if stop[state] == stop[i]:
            state += 1
    return table
