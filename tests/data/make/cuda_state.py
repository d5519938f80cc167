"""Makes cuda.pt: a state saved from a GPU, to be read where there is none.

Needs torch with CUDA and a device: `python tests/data/make/cuda_state.py`.
"""

from pathlib import Path

import torch
from expect import DATA, tensors_of_pickle, write_expected


def main(path: Path = DATA / "cuda.pt") -> None:
    """A small network with its optimizer, half of it in bfloat16, tied and viewed, all on the GPU."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4)).cuda()
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.randn(8, 4, device="cuda")).sum().backward()
    optimizer.step()
    half = torch.arange(6.0, device="cuda").bfloat16()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "half": half, "part": half[2:4]}
    torch.save(state, path)
    write_expected("cuda", tensors_of_pickle(path))


if __name__ == "__main__":
    main()
