"""How many seconds one more token in a step costs, learned from the engine's own steps."""

from threading import Lock


class Pace:
    """A straight line through steps, `seconds = base + slope * tokens`, by least squares over all steps so far.

    The slope, not a mean: a warm request's step computes a handful of tokens and costs almost as much as an empty one,
    so a mean over tokens would grow with every hit and call the next hit a larger saving than it is.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    def add(self, num_tokens: int, step_s: float) -> None:
        """Learn from one step."""
        with self._lock:
            self._n += 1
            self._x += num_tokens
            self._y += step_s
            self._xx += num_tokens * num_tokens
            self._xy += num_tokens * step_s

    @property
    def token_s(self) -> float:
        """Seconds for one more token; 0 until a step has been seen."""
        with self._lock:
            n, x, y, xx, xy = self._n, self._x, self._y, self._xx, self._xy
        spread = n * xx - x * x
        if spread <= 1e-6 * n * xx:  # all steps were of one size: all of their time is their tokens'
            return y / x if x else 0.0
        return max(0.0, (n * xy - x * y) / spread)
