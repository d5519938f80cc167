"""Models, data and metrics, and the names that plans have for them.

contract.py    what a workload is
layers.py      widths, initial values, plain stacks; alexnet.py, vgg.py, resnet.py, gpt.py, edsr.py: the models
images.py      grey images as tensors; digits.py, mnist.py (files read by idx.py), text.py, photos.py: the data
own.py         workloads of users, found by `file.py:function`
registry.py    what plans can name, without torch, and the workload of a training
"""

__all__: list[str] = []
