"""Makes tests/data/mlx.safetensors: what MLX saves, with a `__metadata__` that is null.

pip install 'mlx[cpu]==0.32.4'
python tests/data/make/mlx_safetensors.py
"""

from pathlib import Path

import mlx.core as mx

DATA = Path(__file__).resolve().parent.parent


def main() -> None:
    weight = mx.arange(6, dtype=mx.float32).reshape(2, 3)
    mx.save_safetensors(str(DATA / "mlx.safetensors"), {"weight": weight, "bias": mx.array([1, 2], dtype=mx.bfloat16)})


if __name__ == "__main__":
    main()
