"""The reference engine: a small continuous-batching engine that drives the two halves as a serving engine does."""

from tiering.connectors.reference.connect import Connection, connect
from tiering.connectors.reference.content import ContentRunner, WrongBlock
from tiering.connectors.reference.engine import ReferenceEngine, StepResult
from tiering.connectors.reference.groups import CacheGroup
from tiering.connectors.reference.model import ModelRunner
from tiering.connectors.reference.pages import PagedMemory
from tiering.connectors.reference.request import Request, RequestRecord, RequestState
from tiering.connectors.reference.runner import Runner, Sample

__all__ = [
    "CacheGroup",
    "Connection",
    "ContentRunner",
    "ModelRunner",
    "PagedMemory",
    "ReferenceEngine",
    "Request",
    "RequestRecord",
    "RequestState",
    "Runner",
    "Sample",
    "StepResult",
    "WrongBlock",
    "connect",
]
