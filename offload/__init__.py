"""Memory tiers: attention over split KV, caches, host store, transfer ring, memory plan. Knows nothing of models or ranks."""

from offload.attention import merge, partial_attention
from offload.cache import Cache
from offload.errors import DocumentError, FitError, TierForceError, is_out_of_memory, one_line
from offload.layout import KVLayout
from offload.link import EmulatedLink, Link, ViewLink, host_available, make_link
from offload.plan import MemoryPlan, Needs, device_tiers, plan_memory, tail_tokens
from offload.policy import POLICIES, SelectionPolicy
from offload.retrieval import RetrievalCache, RetrievalShape
from offload.rotary import Rotary
from offload.slots import FixedPass, SlotCache
from offload.store import HostArena
from offload.streaming import StreamingCache
from offload.tiered import LAST_ROWS, TieredCache
from offload.traffic import Traffic

__all__ = [
    "LAST_ROWS",
    "POLICIES",
    "Cache",
    "DocumentError",
    "EmulatedLink",
    "FitError",
    "FixedPass",
    "HostArena",
    "KVLayout",
    "Link",
    "MemoryPlan",
    "Needs",
    "RetrievalCache",
    "RetrievalShape",
    "Rotary",
    "SelectionPolicy",
    "SlotCache",
    "StreamingCache",
    "TierForceError",
    "TieredCache",
    "Traffic",
    "ViewLink",
    "device_tiers",
    "host_available",
    "is_out_of_memory",
    "make_link",
    "merge",
    "one_line",
    "partial_attention",
    "plan_memory",
    "tail_tokens",
]
