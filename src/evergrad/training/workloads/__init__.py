"""Models, data and metrics, and the names that plans have for them.

workload.py    what a workload is; workloads of users, found by `file.py:function`
models.py      AlexNet, VGG, ResNet, EDSR, GPT, small enough for a CPU
datasets.py        digits, MNIST files, text, photos
registry.py    what plans can name, without torch
"""

__all__: list[str] = []
