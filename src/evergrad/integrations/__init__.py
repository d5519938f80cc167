"""Evergrad under the APIs that other libraries define. Each needs only what it integrates with."""

__all__: list[str] = []
