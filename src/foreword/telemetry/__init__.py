"""What happened, in numbers: counters fed by the engine's outcomes, gauges read when somebody asks.

Knows outcomes and states, never the parts that made them. Nothing here decides anything.
"""

from foreword.telemetry.metrics import Metrics, hit_class

__all__ = ["Metrics", "hit_class"]
