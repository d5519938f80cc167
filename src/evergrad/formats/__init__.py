"""A checkpoint file as named, addressable tensors; one file a format.

checkpoint.py          what a format is, and what an opened checkpoint offers
region.py              where a tensor's bytes are: the only code that reads and alters them
byte_source.py           files as bytes at offsets, and dry runs of an alteration
offset_checkpoint.py   checkpoints whose tensors lie at known places; tiled.py: tensors in several places
zip_archive.py · crc.py         zip members at offsets, checksums that follow a change
pickle_reader.py · torch_objects.py   pickles, read and never run
torch_file.py · safetensors.py · numpy_file.py · folders.py · tensorflow.py · dcp.py · deepspeed.py · orbax.py
hdf5/ · keras_zip.py                  HDF5 files, and Keras 3 files, which hold one
version_folder.py · version_records.py    a version of the checkpointer, and its JSON records
registry.py            which format a file is of; unsupported_files.py: files of none, by their signature
compare.py · convert.py · match.py · verify.py    operations on opened checkpoints; bitcast.py: bits as numbers
"""

from evergrad.formats.byte_source import DataFile
from evergrad.formats.checkpoint import Checkpoint, Format, OtherTensor, Probe
from evergrad.formats.compare import compare
from evergrad.formats.convert import convert, left_out, losses, parts_of_unread, unread_tensors, unwritable_tensors
from evergrad.formats.folders import CompositeCheckpoint
from evergrad.formats.hdf5.save_load import load_hdf5, save_hdf5
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
