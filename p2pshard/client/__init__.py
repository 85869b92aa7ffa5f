"""`AsyncClient` and `Client`: talk to a cluster through any of its nodes.

A client knows several addresses and tries them in order. Calls that can be repeated move on to the next
address by themselves; an answer that has begun does not (its error says which node was lost).
"""

from __future__ import annotations

from p2pshard.client.aio import AsyncClient
from p2pshard.client.options import GenerateOptions, Message, PlanOptions
from p2pshard.client.stream import AsyncStream
from p2pshard.client.sync import Client, Stream

__all__ = ["AsyncClient", "AsyncStream", "Client", "GenerateOptions", "Message", "PlanOptions", "Stream"]
