"""A checkpoint file as named, addressable tensors; one file a format.

contract.py      what a format is, and what an opened checkpoint offers
region.py        where a tensor's bytes are: the only code that reads and alters them; data_file.py files as bytes
addressed.py     checkpoints whose tensors lie at known places
archive.py       zip files, with zip_directory.py listing them and crc.py keeping their checksums right
opcodes.py       pickles, read and never run; torch_objects.py says what their names mean
torch_zip.py · torch_legacy.py · safetensors.py · numpy_files.py · folders.py    the formats
hdf5.py · keras_zip.py    hdf5_{file,listing,types,storage,chunks,attributes}.py read, hdf5_{notes,state}.py write
tensorflow.py    with sstable.py and tensorflow_index.py for its index, castagnoli.py for its checksums
dcp.py · deepspeed.py · orbax.py    with pieces.py for tensors that lie in several places
version_folder.py    a version of the checkpointer; version_{shard,records,following}.py keep its digests true
registry.py      which format a file is of; signatures.py names files that are of none
compare.py · convert.py · match.py    what is done with two of them
verify.py · outliers.py    whether one is sound: checksums, and values that no training makes
"""

from evergrad.formats.checkpoint import Checkpoint, Format, OtherTensor, Probe
from evergrad.formats.compare import compare
from evergrad.formats.convert import convert, left_out, losses, parts_of_unread, unread_tensors, unwritable_tensors
from evergrad.formats.data_file import DataFile
from evergrad.formats.folders import CompositeCheckpoint
from evergrad.formats.hdf5.state import load_hdf5, save_hdf5
from evergrad.formats.match import Match, Matching, match
from evergrad.formats.offset_checkpoint import AddressedCheckpoint, describe
from evergrad.formats.region import Region
from evergrad.formats.registry import formats, open_checkpoint
from evergrad.formats.verify import TensorVerdict, Verification, verify

__all__ = [
    "AddressedCheckpoint",
    "Checkpoint",
    "CompositeCheckpoint",
    "DataFile",
    "Format",
    "Match",
    "Matching",
    "OtherTensor",
    "Probe",
    "Region",
    "TensorVerdict",
    "Verification",
    "compare",
    "convert",
    "describe",
    "formats",
    "left_out",
    "load_hdf5",
    "losses",
    "match",
    "open_checkpoint",
    "parts_of_unread",
    "save_hdf5",
    "unread_tensors",
    "unwritable_tensors",
    "verify",
]
