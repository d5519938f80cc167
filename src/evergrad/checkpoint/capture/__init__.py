"""The trainer's part of a save: today's tensors, checked against a plan and copied into an arena."""

__all__: list[str] = []
