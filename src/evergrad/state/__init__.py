"""Training state as named, addressable tensors: paths, skeletons, roles, sharing, selecting."""

from evergrad.state.paths import ROOT, escape, join, split
from evergrad.state.selection import Where, role_of, select
from evergrad.state.sharing import Placement, Sharing, find_sharing
from evergrad.state.skeleton import Skeleton
from evergrad.state.tree import EncodedNode, FlatState, InlineArray, Opaque, Outline, flatten, outline, unflatten

__all__ = [
    "ROOT",
    "EncodedNode",
    "FlatState",
    "InlineArray",
    "Opaque",
    "Outline",
    "Placement",
    "Sharing",
    "Skeleton",
    "Where",
    "escape",
    "find_sharing",
    "flatten",
    "join",
    "outline",
    "role_of",
    "select",
    "split",
    "unflatten",
]
