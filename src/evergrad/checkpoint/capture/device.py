"""One GPU as a capture sees it: the stream that training uses now, one beside it, and marks on both."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from evergrad.errors import SaveRefused


class Device:
    """A CUDA device. For any thread: each one's own current device is left as it was."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side: torch.cuda.Stream | None = None

    def current(self) -> torch.cuda.Stream:
        """The stream on which whatever training starts next will run."""
        return torch.cuda.current_stream(self.device)

    def side(self) -> torch.cuda.Stream:
        """A stream that training does not use; always the same, so that copies into one arena keep their order."""
        if self._side is None:
            self._side = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        return self._side

    def mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """Where a stream is now."""
        # Who waits for it sleeps, and leaves the core to others.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def follow(self, stream: torch.cuda.Stream, mark: torch.cuda.Event) -> None:
        """What is put on the stream from here on runs after the mark; nobody waits on the host."""
        stream.wait_event(mark)

    def copy(
        self,
        stream: torch.cuda.Stream,
        places: Sequence[torch.Tensor],
        sources: Sequence[torch.Tensor],
        *,
        wait: bool = False,
    ) -> None:
        """Put copies on a stream; with `wait`, return when they have ended."""
        if places:
            with torch.cuda.stream(stream):
                torch._foreach_copy_(list(places), list(sources), non_blocking=not wait)

    def keep_for(self, stream: torch.cuda.Stream, buffers: Sequence[torch.Tensor]) -> None:
        """The memory of these is not used for anything else before the stream has passed what is on it now."""
        for buffer in buffers:
            buffer.record_stream(stream)

    def wait(self, mark: torch.cuda.Event) -> None:
        """Return when the mark was passed; other threads run meanwhile."""
        # Without its device a new thread would set up the first one, and take memory there.
        with torch.cuda.device(self.device):
            mark.synchronize()

    def drain(self) -> None:
        """Return when everything that was ever put on the device has ended."""
        torch.cuda.synchronize(self.device)

    def is_recording(self) -> bool:
        """Whether the current stream is being recorded as a CUDA graph."""
        with torch.cuda.device(self.device):
            return bool(torch.cuda.is_current_stream_capturing())


def refuse_while_recording(devices: Sequence[Device]) -> None:
    """`SaveRefused` if what is put on a current stream would become a part of a CUDA graph instead of running."""
    for device in devices:
        if device.is_recording():
            raise SaveRefused(
                f"{device.device}: the current stream is being captured as a CUDA graph, and a save would become a "
                "part of it. Save before or after the capture."
            )
