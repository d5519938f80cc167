"""A checkpoint file as named, addressable tensors; one file a format.

contract.py      what a format is, and what an opened checkpoint offers
region.py        where a tensor's bytes are: the only code that reads and alters them
addressed.py     checkpoints whose tensors lie at known places
archive.py       zip files, with crc.py keeping their checksums right
opcodes.py       pickles, read and never run; torch_objects.py says what their names mean
torch_zip.py · torch_legacy.py · safetensors.py · numpy_files.py · folders.py    the formats
registry.py      which format a file is of
compare.py · convert.py    what is done with two of them
"""

from evergrad.formats.addressed import AddressedCheckpoint, describe
from evergrad.formats.compare import compare
from evergrad.formats.contract import Checkpoint, Format, Probe
from evergrad.formats.convert import convert, losses
from evergrad.formats.folders import CompositeCheckpoint
from evergrad.formats.match import Match, Matching, match
from evergrad.formats.region import DataFile, Region
from evergrad.formats.registry import formats, open_checkpoint

__all__ = [
    "AddressedCheckpoint",
    "Checkpoint",
    "CompositeCheckpoint",
    "DataFile",
    "Format",
    "Match",
    "Matching",
    "Probe",
    "Region",
    "compare",
    "convert",
    "describe",
    "formats",
    "losses",
    "match",
    "open_checkpoint",
]
