"""Makes tests/data/numpy_state.pt: NumPy arrays, NumPy scalars and generator states in a torch.save file.

    pip install torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
    python tests/data/make/numpy_state.py

The expectations list the torch tensor and the arrays.
"""

import random

import numpy as np
import torch
from expect import DATA, tensors_of_pickle, write_expected


def main() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    grid = np.arange(12, dtype=np.float32).reshape(3, 4) / 8
    state = {
        "weight": torch.randn(3, 5),
        "arrays": {
            "c_order": grid,
            "fortran_order": np.asfortranarray(grid),
            "int64": np.arange(-3, 4, dtype=np.int64),
            "bool": np.array([True, False, True]),
        },
        "scalars": {"float32": np.float32(0.75), "int64": np.int64(-5), "bool": np.bool_(True)},
        "numpy_rng": np.random.get_state(),
        "python_rng": random.getstate(),
    }
    torch.save(state, DATA / "numpy_state.pt")
    write_expected("numpy_state", tensors_of_pickle(DATA / "numpy_state.pt"))


if __name__ == "__main__":
    main()
