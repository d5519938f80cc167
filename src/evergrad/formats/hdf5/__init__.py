"""hdf5."""

__all__: list[str] = []
