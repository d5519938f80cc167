"""HDF5 files: Keras', Chainer's, our own, and any other (needs h5py).

file.py         an open file, its element types, and a listing of its data sets
storage.py      where the bytes of a data set are: contiguous, chunked, filtered
checkpoint.py   the format: the file as named tensors; notes of our own files
save_load.py        save_hdf5, load_hdf5
"""

__all__: list[str] = []
