"""HTTP in, tokens out: the wire forms, the routes and the socket they listen on.

Everything behind it comes in one explicit `Service`. Knows no tensor and no block; pydantic models live on the wire
and nowhere else.
"""

from foreword.server.app import create_app
from foreword.server.auth import KeyFile
from foreword.server.heads import mark_heads, read_heads
from foreword.server.listen import Listener, check_address
from foreword.server.service import Answer, Front, Service, serving
from foreword.server.warmup import Warmup, read_warm

__all__ = [
    "Answer",
    "Front",
    "KeyFile",
    "Listener",
    "Service",
    "Warmup",
    "check_address",
    "create_app",
    "mark_heads",
    "read_heads",
    "read_warm",
    "serving",
]
