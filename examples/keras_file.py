"""A Keras file, without Keras and TensorFlow: list, flip, verify, undo, and the same fault in PyTorch's twin of it.

python examples/keras_file.py [FOLDER]                     (needs pip install -e '.[hdf5]')

data/digits.keras was written by Keras 3 on TensorFlow. On the command line: evergrad inspect data/digits.keras
"""

import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import evergrad as eg

folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
file = Path(shutil.copy(Path(__file__).parent / "data" / "digits.keras", folder))
before = file.read_bytes()

with eg.open_checkpoint(file) as checkpoint:
    print(f"{checkpoint.format}: {len(checkpoint.tensors)} tensors")
    kernel = checkpoint.read("layers/conv2d/vars/0")
    print("the convolution's kernel:", tuple(kernel.shape))  # Keras: height, width, from, to

log = eg.inject(file, eg.BitFlip(bits="exponent-msb"), count=1, where="layers/conv2d/vars/0", seed=5, in_place=True)
print(next(log.faults()))
print("verify:", eg.verify(file).verdict)  # the archive's checksums follow: it loads as if nothing had happened

# The same architecture in PyTorch: which tensor is which, and in which order of axes?
twin = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 5))
torch.save(twin.state_dict(), folder / "twin.pt")
matching = eg.match(folder / "twin.pt", file)
print("0.weight is", matching["0.weight"].b, "with axes", matching["0.weight"].axes)

again = eg.replay(log, folder / "twin.pt", rename="auto", out=folder / "bad_twin.pt")
print(next(again.faults()).tensor, "of the twin has the same bit of the same weight flipped")

eg.undo(log)
print("undone:", "the same bytes as before" if file.read_bytes() == before else "other bytes")
